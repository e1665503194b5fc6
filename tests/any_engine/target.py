"""Owns: what the tests of any engine know of the one they run on: its address, a model there, and what it can.

LAYA_TEST_ENGINES names some of ENGINES, else they are DEFAULT. `server` is none of ours: whatever serves OpenAI's API
at LAYA_TEST_URL, with the model LAYA_TEST_MODEL and the abilities LAYA_TEST_CAN. So a bare engine is asked the same.
"""

from __future__ import annotations

import os
from typing import Literal, NamedTuple, cast, get_args

Ability = Literal[
    "laya",  # a Laya answers: headers, other APIs, refusals of what is out of range before an engine sees it
    "counts",  # the tokens of the model are known to Laya or to the Laya behind it
    "tokenizer",  # Laya may ask for the tokens of a text without having it answered
    "llamacpp",  # llama.cpp's fields and limits
    "trained",  # a trained model answers: it repeats what it is shown, and two seeds say different things
    "tools",  # the model is told of tools, and calls are read from what it says
    "forced_tools",  # `tool_choice` is kept to
    "json_schema",
    "logprobs",
    "exact_logprobs",  # as many alternatives as were asked for, none too, and of the text that is told
    "completion_logprobs",  # in the form of completions
    "choices",  # n > 1
    "token_ids",  # prompts of completions as numbers
    "embeddings",
]
ALL: frozenset[Ability] = frozenset(get_args(Ability))
# llama-server asked directly does not do these either: LAYA_TEST_ENGINES=server shows it
LLAMA_SERVER = ALL - {"counts", "tokenizer", "forced_tools", "exact_logprobs", "completion_logprobs"}
# Its models are generated ones that chat: their answers are chance, and end no text that a schema leaves free. It takes
# no `n` without sampling, gives at least one alternative of a token, and says "stop" of a call that was named, as
# OpenAI does; tests/vllm has its own forms of these.
VLLM = ALL - {
    "counts", "tokenizer", "llamacpp", "trained", "embeddings", "choices", "exact_logprobs", "completion_logprobs",
    "forced_tools", "json_schema",
}  # fmt: skip
ENGINES: dict[str, frozenset[Ability]] = {
    "llamacpp": ALL,
    "command": LLAMA_SERVER,
    "remote": ALL - {"tokenizer"},
    "vllm": VLLM,
    "vllm_moe": VLLM,
    "server": cast("frozenset[Ability]", frozenset(os.environ.get("LAYA_TEST_CAN", "").split(","))),
}
DEFAULT = "llamacpp,command,remote"


class Target(NamedTuple):
    """What is asked."""

    url: str
    model: str  # what requests name
    model_id: str  # what answers name


def asked_engines() -> list[str]:
    """The engines that this run is of. Raises ValueError for a name that is none."""
    names = os.environ.get("LAYA_TEST_ENGINES", DEFAULT).split(",")
    for name in names:
        if name not in ENGINES:
            raise ValueError(f"LAYA_TEST_ENGINES: '{name}' is none of {', '.join(ENGINES)}")
    return names
