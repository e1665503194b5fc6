"""Owns: the words for how weights are quantized, best first: those of the setting, and those names of models end in.

Knows no file: what one really holds its header says.
"""

from __future__ import annotations

import re

AUTO, NONE = "auto", "none"
# By what is lost in llama.cpp's own table of perplexities (Llama 3 8B), not by size: q4_k_m loses less than q4_1.
GGUF_KINDS = (
    "f32", "bf16", "f16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "mxfp4", "nvfp4", "q4_k_s",
    "iq4_nl", "iq4_xs", "q4_1", "q4_0", "q3_k_l", "iq3_m", "q3_k_m", "iq3_s", "iq3_xs", "q3_k_s", "iq3_xxs", "iq2_m",
    "q2_k", "q2_k_s", "iq2_s", "tq2_0", "iq2_xs", "iq2_xxs", "tq1_0", "iq1_m", "q1_0", "iq1_s",
)  # fmt: skip
WHOLE_KINDS = frozenset({"f32", "bf16", "f16"})  # what `none` means
_ENDING = re.compile(r"[-.:_](?:ud-)?(i?q\d\w*|tq\d\w*|[bf]?f(?:16|32)|(?:mx|nv)fp4\w*|fp8|awq|gptq)$")


def split_kind(model_name: str) -> tuple[str, str | None]:
    """`Qwen3-8B-Q4_K_M`, `qwen3-8b:q4_k_m` -> `qwen3-8b` and `q4_k_m`; None where a name does not end in one."""
    name = model_name.rpartition("/")[2].casefold().removesuffix(".gguf")
    found = _ENDING.search(name)
    return (name[: found.start()], found[1]) if found else (name, None)
