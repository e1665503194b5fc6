"""Owns: the llama.cpp fields that a request may carry beyond OpenAI's: their ranges and which of them are Laya's alone.

What costs memory by its value (probabilities, windows of past tokens) is bounded, as the plan of memory does not know
it. Fields that are not listed here pass as they are. Knows nothing of messages, prompts or endpoints.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from laya.errors import InvalidRequest

Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Whole = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Window = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0.0)]
Probabilities = Annotated[int, msgspec.Meta(ge=0, le=20)]  # as OpenAI's top_logprobs
SamplerNames = Annotated[list[str], msgspec.Meta(max_length=32)]
Breakers = Annotated[list[str], msgspec.Meta(max_length=64)]  # for each, the engine reads its whole vocabulary

# fields that decide what is Laya's to decide, and what to do instead
_OURS = {
    "lora": "adapters are set in the config, with 'lora'",
    "n_cmpl": "use 'n'",
    "grammar_lazy": "use 'tools'",
    "grammar_triggers": "use 'tools'",
}


class EngineFields(msgspec.Struct):
    """Fields of llama.cpp that are typed, since a wrong value does harm or is answered by nonsense."""

    n_predict: Whole | None = None
    n_probs: Probabilities | None = None
    min_keep: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    top_k: Annotated[float, msgspec.Meta(ge=-1.0, le=2.0**31 - 1)] | None = None  # 40.0 is a whole number, too
    min_p: Share | None = None
    typical_p: Share | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Share | None = None
    repeat_last_n: Window | None = None
    repeat_penalty: Annotated[float, msgspec.Meta(gt=0.0)] | None = None
    dry_penalty_last_n: Window | None = None
    dry_allowed_length: Whole | None = None
    dry_base: NotNegative | None = None
    dry_multiplier: NotNegative | None = None
    dry_sequence_breakers: Breakers | None = None
    mirostat: Annotated[int, msgspec.Meta(ge=0, le=2)] | None = None
    samplers: SamplerNames | Annotated[str, msgspec.Meta(max_length=32)] | None = None
    n_keep: Window | None = None
    n_discard: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    n_indent: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    t_max_predict_ms: Window | None = None
    cache_prompt: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    json_schema: dict[str, msgspec.Raw] | None = None
    grammar: str | None = None
    id_slot: int | None = None
    lora: Any = None
    n_cmpl: Any = None
    grammar_lazy: bool | None = None
    grammar_triggers: list[msgspec.Raw] | None = None

    @property
    def most_tokens(self) -> int | None:
        """`n_predict`, llama.cpp's max_tokens; -1 = no limit."""
        return None if self.n_predict == -1 else self.n_predict


def check_engine_fields(head: EngineFields) -> None:
    """Refuse what no type tells. Raises InvalidRequest that names the field and the value."""
    if head.n_predict is not None and head.n_predict < 1 and head.n_predict != -1:
        raise InvalidRequest(
            f"'n_predict' is {head.n_predict}: it is 1 or more, or -1 for no limit.", param="n_predict"
        )
    if head.top_k is not None and not float(head.top_k).is_integer():
        raise InvalidRequest(f"'top_k' is {head.top_k}: it is a whole number.", param="top_k")
    if head.id_slot is not None and head.id_slot != -1:
        raise InvalidRequest(
            f"'id_slot' is {head.id_slot}: requests can't choose a slot, leave it out.", param="id_slot"
        )
    for name, instead in _OURS.items():
        if getattr(head, name) is not None:
            raise InvalidRequest(f"'{name}' can't be set by a request: {instead}.", param=name)


def look_back(head: EngineFields, defaults: dict[str, Any], max_seq_len: int) -> dict[str, int]:
    """The windows of past tokens in the engine's terms, where they differ from what is said.

    -1 is the whole context, which the engine wants as a number; above that, it would only take memory.
    """
    windows = {}
    for name, said in (("repeat_last_n", head.repeat_last_n), ("dry_penalty_last_n", head.dry_penalty_last_n)):
        asked = defaults.get(name) if said is None else said
        if asked is not None and (asked == -1 or asked > max_seq_len):
            windows[name] = max_seq_len
    return windows
