"""Owns: what a request may come to hold at an endpoint: sequences, and tokens of the KV pool. Reserves nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laya.errors import InvalidRequest, LayaError
from laya.gateway.length import prompt_bound_tokens

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.exchange import Exchange
    from laya.memory import Admission


def needs_of(exchange: Exchange, endpoint: Endpoint, admission: Admission) -> tuple[int, int]:
    """Sequences, and the tokens of all of them. Raises InvalidRequest where that is more than there is."""
    parsed = exchange.parsed
    assert parsed is not None
    n_seqs, tokens_each = parsed.n_choices, promised_tokens(exchange, endpoint)
    if parsed.n_seqs > n_seqs:  # the choices of a prompt run together, prompts take turns
        n_seqs *= _prompts_now(exchange, endpoint, admission, tokens_each * n_seqs)
    tokens = tokens_each * n_seqs
    if not admission.can_ever_fit(n_seqs, tokens):
        raise _never(endpoint, n_seqs, tokens)
    return n_seqs, tokens


def _prompts_now(exchange: Exchange, endpoint: Endpoint, admission: Admission, tokens_each: int) -> int:
    """How many of its prompts to let in: as many as have a place, but one where others wait; never none."""
    parsed, turns = exchange.parsed, exchange.turns
    assert parsed is not None
    if len(endpoint.queue) > (exchange in endpoint.queue):
        return 1
    n_left = turns.n_left if turns is not None else parsed.n_seqs // parsed.n_choices
    n_free = admission.free_seqs // parsed.n_choices
    if admission.free_tokens is not None:
        n_free = min(n_free, admission.free_tokens // tokens_each)
    return max(1, min(n_left, n_free))


def promised_tokens(exchange: Exchange, endpoint: Endpoint) -> int:
    """Tokens one sequence of this request may come to hold: its prompt's bound and its ceiling."""
    parsed, planned = exchange.parsed, endpoint.planned
    assert parsed is not None and planned is not None
    prompt_tokens = exchange.prompt_tokens or prompt_bound_tokens(parsed, endpoint)
    if parsed.max_tokens is None and not planned.is_pool_short:
        return planned.max_seq_len
    return min(prompt_tokens + (parsed.max_tokens or endpoint.settings.default_max_tokens), planned.max_seq_len)


def _never(endpoint: Endpoint, n_seqs: int, tokens: int) -> LayaError:
    planned = endpoint.planned
    assert planned is not None
    if n_seqs > planned.max_num_seqs:
        return InvalidRequest(
            f"This request asks for {n_seqs} sequences at once; '{endpoint.model_id}' runs {planned.max_num_seqs} "
            f"(max_num_seqs).",
            param="n",
        )
    return InvalidRequest(
        f"This request may come to hold {tokens} tokens; the pool of '{endpoint.model_id}' holds "
        f"{planned.kv_pool_tokens - planned.n_batch} (kv_pool_tokens). Lower max_tokens or shorten the prompt.",
        param="max_tokens",
    )
