"""Owns: how fast a plan answers: tokens a second and time to first token, each as a range. Pure.

A step of the engine reads every active weight once and computes with it for each token of the step; then attention
over the tokens kept, an operation's cost for each node of the graph, and a pass over the vocabulary for each sequence.
The range is what that estimate was off by on the engines measured. Sources: docs/plan.md.
"""

from __future__ import annotations

import msgspec

from laya.memory.facts import ModelFacts
from laya.memory.ggml import kv_cache_type
from laya.memory.layers import LayerShape
from laya.memory.rates import TILE_TOKENS, MachineRates
from laya.memory.work import Matrices, work_of
from laya.types import PlannedSettings

SESSIONS = (1, 2, 4, 8)
TYPICAL_TOKENS = 1024  # of context and of a prompt, where nobody says otherwise
# Of the built-in engine, as measured (docs/plan.md): graph nodes, sampling and the answer's way to the gateway.
OPS_PER_LAYER, OPS_PER_EXPERT_LAYER = 28, 44
ENTRY_S = (4e-9, 12e-9)  # per vocabulary entry and sequence: the sampler's pass
STEP_S = (10e-6, 200e-6)  # per step and sequence: slot, text, event
PROMPT_S = (0.3e-3, 10e-3)  # per request: parsing, template, tokens
ALONE = 0.75  # of the seconds of a lone token: a kernel that takes more for each of many shares nothing between them
# What no formula sees: other programs, the clock of the processor, pages of 4 KiB.
BEST, WORST = 0.75, 1.4


class Range(msgspec.Struct, frozen=True):
    """The least and the most."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """What `sessions` answers at once get; `kept_tokens` is the context of each, `prompt_tokens` its new prompt."""

    sessions: int
    kept_tokens: int
    prompt_tokens: int
    tokens_per_s: Range  # all sessions together
    first_token_s: Range  # from the request to its first token, when all ask at once

    @property
    def each_per_s(self) -> Range:
        """Tokens a second of one session."""
        return Range(self.tokens_per_s.low / self.sessions, self.tokens_per_s.high / self.sessions)


class _Seconds(msgspec.Struct):
    """The parts of one step."""

    compute: float = 0.0
    waiting: float = 0.0  # for weights that are not in cache
    reading: float = 0.0  # what memory takes to give all that is read, however many threads ask
    fixed: tuple[float, float] = (0.0, 0.0)

    def bounds(self) -> tuple[float, float]:
        busy = max(self.compute + self.waiting, self.reading)
        return BEST * (busy + self.fixed[0]), WORST * (busy + self.fixed[1])


def predict_speed(
    facts: ModelFacts,
    settings: PlannedSettings,
    rates: MachineRates,
    *,
    sessions: int = 1,
    kept_tokens: int = TYPICAL_TOKENS,
    prompt_tokens: int = TYPICAL_TOKENS,
) -> Speed:
    """The speed of a model on the CPU, loaded with these settings and asked by `sessions` clients at once.

    kept_tokens: prompt and answer of each session so far, at which tokens are generated. Sessions beyond max_num_seqs
    wait, so no more than that are computed at once.
    """
    at_once = min(sessions, settings.max_num_seqs)
    kept = min(kept_tokens, settings.max_seq_len)
    prompt = min(prompt_tokens, settings.max_seq_len)
    least, most = _decode_step(facts, settings, rates, at_once, kept).bounds()
    first_least, first_most = _prefill(facts, settings, rates, sessions, prompt).bounds()
    return Speed(
        sessions=sessions,
        kept_tokens=kept,
        prompt_tokens=prompt,
        tokens_per_s=Range(at_once / most, at_once / least),
        first_token_s=Range(first_least, first_most),
    )


def _decode_step(
    facts: ModelFacts, settings: PlannedSettings, rates: MachineRates, sessions: int, kept: int
) -> _Seconds:
    """One token for each session."""
    step, work = _Seconds(), work_of(facts)
    kv_bytes = sessions * _kept_elements(facts, kept) * kv_element_bytes(settings)
    read = kv_bytes + sum(_bytes_read(facts, part, sessions) for part in work)
    gain = rates.threads_gain(settings.n_threads)
    for part in work:
        step.compute += _compute_s(facts, part, rates, sessions) / gain
        step.waiting += _waiting_s(facts, part, rates, sessions, read, settings.n_threads)
    step.compute += sessions * _attention_s(facts, settings, rates, kept, read) / gain
    step.reading = read / rates.read_bytes_per_s(read, settings.n_threads)
    _add_fixed(step, facts, settings, rates, n_steps=1, n_rows=sessions)
    return step


def _prefill(facts: ModelFacts, settings: PlannedSettings, rates: MachineRates, sessions: int, prompt: int) -> _Seconds:
    """The prompts of all sessions, in batches, to the first token of the last."""
    step, work = _Seconds(), work_of(facts)
    tokens, gain = sessions * prompt, rates.threads_gain(settings.n_threads)
    n_steps = -(-tokens // settings.n_ubatch)
    per_step = tokens / n_steps
    for part in work:
        if part.part == "output":
            step.compute += sessions * _compute_s(facts, part, rates, 1) / gain
        else:
            step.compute += n_steps * _compute_s(facts, part, rates, per_step) / gain
    kv_bytes = _kept_elements(facts, prompt / 2) * kv_element_bytes(settings)
    read = sum(_bytes_read(facts, part, per_step) for part in work if part.part != "output")
    step.compute += tokens * _batch_attention_s(facts, settings, rates, prompt / 2, per_step, kv_bytes + read) / gain
    step.reading = n_steps * read / rates.read_bytes_per_s(read, settings.n_threads)
    _add_fixed(step, facts, settings, rates, n_steps=n_steps, n_rows=sessions)
    step.fixed = (step.fixed[0] + PROMPT_S[0], step.fixed[1] + sessions * PROMPT_S[1])
    return step


def _compute_s(facts: ModelFacts, part: Matrices, rates: MachineRates, n_tokens: float) -> float:
    """Seconds one thread computes with these matrices for so many tokens at once."""
    if part.part != "experts":
        return part.elements * rates.weight_s(part.type_name, n_tokens)
    # The engine computes the rows of an expert one by one.
    used = n_tokens * facts.shape.n_expert_used / max(1, facts.shape.n_expert)
    return part.elements * used * rates.weight_s(part.type_name, 1)


def _waiting_s(
    facts: ModelFacts, part: Matrices, rates: MachineRates, n_tokens: float, working_set: float, n_threads: int
) -> float:
    """Seconds a pass over these matrices waits for memory; threads wait at once, as far as memory serves them all."""
    share = _bytes_read(facts, part, n_tokens) / max(1.0, part.n_bytes)
    missed = rates.missed(working_set, n_threads)
    at_once = n_tokens if part.part != "experts" else 1
    return part.elements * share * missed * rates.waiting_s(part.type_name, at_once, n_threads)


def _bytes_read(facts: ModelFacts, part: Matrices, n_tokens: float) -> float:
    if part.part != "experts":
        return part.n_bytes
    return part.n_bytes * _experts_touched(facts, n_tokens) / max(1, facts.shape.n_expert)


def _experts_touched(facts: ModelFacts, n_tokens: float) -> float:
    """Experts of a layer that some token of the step is sent to, where tokens choose independently."""
    n_expert, used = max(1, facts.shape.n_expert), max(1, facts.shape.n_expert_used)
    return float(n_expert * (1 - (1 - min(1.0, used / n_expert)) ** n_tokens))


def _attention_s(
    facts: ModelFacts, settings: PlannedSettings, rates: MachineRates, kept: float, working_set: float
) -> float:
    """Seconds one thread attends with one new token over the tokens kept, in all layers.

    Heads that share keys and values come one after the other: the first of them finds what the last step left in
    cache, the others what the layer did.
    """
    total, element_bytes = 0.0, kv_element_bytes(settings)
    for layer, n_head in zip(facts.shape.layers, facts.shape.n_head, strict=False):
        shared, seen = min(1.0, layer.n_head_kv / max(1, n_head)), tokens_seen(layer, kept)
        cache_bytes = seen * layer.n_head_kv * (layer.head_k + layer.head_v) * element_bytes
        first, others = (_rows_wait_s(layer, rates, element_bytes, n_bytes) for n_bytes in (working_set, cache_bytes))
        wait_s = shared * first + (1 - shared) * others
        total += n_head * seen * (rates.attended_s(settings.kv_cache_dtype, _width(layer)) + wait_s)
    return total


def _rows_wait_s(
    layer: LayerShape, rates: MachineRates, element_bytes: float, n_bytes: float, *, tile: bool = False
) -> float:
    """Seconds waited for what a head keeps of one token."""
    rows = [head * element_bytes for head in (layer.head_k, layer.head_v) if head]
    return sum(rates.kept_wait_of_row_s(layer.n_head_kv, row_bytes, n_bytes, tile=tile) for row_bytes in rows)


def _batch_attention_s(
    facts: ModelFacts,
    settings: PlannedSettings,
    rates: MachineRates,
    kept: float,
    n_tokens: float,
    working_set: float,
) -> float:
    """Seconds one thread attends with each token of a prompt, so many at once, over the tokens kept, in all layers.

    A kernel that computes less for each of many goes over the cache once for a tile of them; another waits for each.
    """
    total, element_bytes = 0.0, kv_element_bytes(settings)
    for layer, n_head in zip(facts.shape.layers, facts.shape.n_head, strict=False):
        seen = tokens_seen(layer, kept)
        cache_bytes = seen * layer.n_head_kv * (layer.head_k + layer.head_v) * element_bytes
        one, each = (rates.attended_s(settings.kv_cache_dtype, _width(layer), n) for n in (1, n_tokens))
        tile = each <= ALONE * one
        wait_s = _rows_wait_s(layer, rates, element_bytes, working_set if tile else cache_bytes, tile=tile)
        total += n_head * seen * (each + wait_s / (min(n_tokens, TILE_TOKENS) if tile else 1))
    return total


def _width(layer: LayerShape) -> float:
    """Elements of a head's row: the mean of keys and values."""
    return (layer.head_k + (layer.head_v or layer.head_k)) / 2


def tokens_seen(layer: LayerShape, kept: float) -> float:
    """Tokens this layer looks back at."""
    return min(kept, layer.window) if layer.window else kept


def _kept_elements(facts: ModelFacts, kept: float) -> float:
    return sum((layer.k + layer.v) * tokens_seen(layer, kept) + layer.state for layer in facts.shape.layers)


def kv_element_bytes(settings: PlannedSettings) -> float:
    kind = kv_cache_type(settings.kv_cache_dtype)
    return kind.block_bytes / kind.block


def _add_fixed(
    step: _Seconds, facts: ModelFacts, settings: PlannedSettings, rates: MachineRates, *, n_steps: int, n_rows: int
) -> None:
    """Graph nodes of each step, and the sampler for each row of logits."""
    per_layer = OPS_PER_EXPERT_LAYER if facts.shape.n_expert else OPS_PER_LAYER
    op_s = rates.op_s if settings.n_threads == 1 else rates.op_all_s
    graph = n_steps * facts.shape.n_layer * per_layer * op_s
    low, high = (n_rows * (facts.shape.n_vocab * entry + row) for entry, row in zip(ENTRY_S, STEP_S, strict=True))
    step.fixed = (step.fixed[0] + graph + low, step.fixed[1] + graph + high)
