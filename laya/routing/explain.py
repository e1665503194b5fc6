"""Owns: what a choice would be now, among which candidates, with which scores and why, in words. Changes nothing.

Asks a table, native or twin, for its state and decides with `choice_twin`, which the tests hold equal to both.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from laya.routing.affinity_twin import NO_HOME
from laya.routing.choice_twin import NO_ENDPOINT, POLICIES, Asked, Choice, choose, score
from laya.routing.endpoint_twin import BREAKER_NAMES, CLOSED, Endpoint
from laya.routing.feature_twin import hash_name, unpack_blocks
from laya.routing.table import RouteTable
from laya.routing.table_twin import RouteTable as RouteTableTwin
from laya.types import RoutePolicy

_WHY = {
    "session": "its session was here last, and it is not ahead of the others by more than its window",
    "prefix": "this conversation was here last, and it is not ahead of the others by more than its window",
    "hash": "it is the one that this session hashes to, and it carries no more than the average",
    "newcomer": "the conversation is new, and it is its turn among those that carry no more than the average",
    "least": "it has the fewest reserved tokens, then sequences, of those with room",
    "two": "it has the fewer reserved tokens of two that were picked",
    "weight": "it was drawn by weight",
    "turn": "it is its turn",
}
_HASHED = "it is the one with room that this session or prompt hashes to"


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint of the model as a choice sees it."""

    endpoint: int
    name: str
    is_eligible: bool
    why_not: str  # empty where it is eligible
    has_room: bool
    n_seqs: int
    tokens: int
    window_tokens: int
    weight: int
    score: int | None  # rendezvous score of the request's session or prompt; None where it has neither
    errors: int
    ttft_us: int  # moving average; 0 = not known yet
    is_session_home: bool
    is_conversation_home: bool  # the turn before of this conversation was here
    is_chosen: bool
    cost: str | None = None  # of a million tokens, in words, where its model has one


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What `RequestRouter.choose` would answer now, and why."""

    model: str
    policy: RoutePolicy
    endpoint: int  # or NO_ENDPOINT
    why: str
    candidates: tuple[Candidate, ...]


class _Request(msgspec.Struct, frozen=True):
    model: str
    session: str | None
    prefix_blocks: bytes
    tokens: int
    n_seqs: int


def explain(
    table: RouteTable | RouteTableTwin,
    names: dict[int, str],
    policy: RoutePolicy,
    *,
    model: str,
    session: str | None,
    prefix_blocks: bytes,
    tokens: int,
    n_seqs: int,
) -> Explanation:
    """The choice for a request of the model whose endpoints are the keys of `names`; nothing is reserved or drawn."""
    request = _Request(model, session, prefix_blocks, tokens, n_seqs)
    states = {endpoint: Endpoint(*table.inspect(endpoint)) for endpoint in sorted(names)}
    asked = _asked(table, states, policy, request)
    choice = choose(asked)
    prefix_home, _ = asked.find_prefix()
    candidates = tuple(
        _candidate(endpoint, names[endpoint], state, asked, choice, prefix_home) for endpoint, state in states.items()
    )
    return Explanation(
        model=model, policy=policy, endpoint=choice.endpoint, why=_why(choice, policy, asked), candidates=candidates
    )


def _asked(
    table: RouteTable | RouteTableTwin, states: dict[int, Endpoint], policy: RoutePolicy, request: _Request
) -> Asked:
    affinity_key = hash_name(request.model)
    blocks: Sequence[int] = unpack_blocks(request.prefix_blocks)
    session_home, prefix_home, n_known = table.homes(request.model, request.session, request.prefix_blocks)
    key = 0
    if request.session:
        key = hash_name(request.session) ^ affinity_key
    elif blocks:
        key = blocks[-1] ^ affinity_key
    return Asked(
        endpoints=list(states),
        states=states.__getitem__,
        policy=POLICIES.index(policy),
        affinity_key=affinity_key,
        key=key,
        has_session=bool(request.session),
        blocks=blocks,
        n_seqs=request.n_seqs,
        tokens=request.tokens,
        session_home=session_home if policy in ("auto", "session") else NO_HOME,
        find_prefix=lambda: (prefix_home, n_known),
        next_draw=lambda: table.n_draws,
        next_turn=lambda endpoint: states[endpoint].turn,
    )


def _candidate(endpoint: int, name: str, state: Endpoint, asked: Asked, choice: Choice, prefix_home: int) -> Candidate:
    return Candidate(
        endpoint=endpoint,
        name=name,
        is_eligible=state.is_eligible(),
        why_not=_why_not(state),
        has_room=state.has_room(asked.n_seqs, asked.tokens),
        n_seqs=state.n_seqs,
        tokens=state.tokens,
        window_tokens=state.window_tokens,
        weight=state.weight,
        score=score(asked.key, state) if asked.key else None,
        errors=state.errors,
        ttft_us=state.ttft_us,
        is_session_home=endpoint == asked.session_home,
        is_conversation_home=endpoint == prefix_home,
        is_chosen=endpoint == choice.endpoint,
    )


def _why_not(state: Endpoint) -> str:
    if not state.ready:
        return "not ready"
    return "" if state.is_eligible() else f"its circuit breaker is {BREAKER_NAMES[state.breaker]}"


def _why(choice: Choice, policy: RoutePolicy, asked: Asked) -> str:
    if choice.endpoint == NO_ENDPOINT:
        return "none may be chosen" if asked.endpoints else "the model has no endpoint"
    if len(asked.endpoints) == 1:
        return "it is the only one"
    why = _HASHED if policy == "hash" and choice.why == "hash" else _WHY[choice.why]
    if not choice.is_home_kept:
        why += "; the session's own endpoint may not be chosen now and gets it back when it may"
    if asked.states(choice.endpoint).breaker != CLOSED:
        why += "; the request is the one trial of its half-open circuit breaker"
    return why
