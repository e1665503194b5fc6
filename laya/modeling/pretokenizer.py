"""Owns: how byte-level BPEs split a text before they merge: llama.cpp's names, and the same as tokenizer.json has it.

A file of another name would be split otherwise by llama.cpp, and its tokens differ: such a one is refused.
"""

from __future__ import annotations

from typing import Any

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _after(first: dict[str, Any], use_regex: bool) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [first, _byte_level(use_regex)]}


STEPS: dict[str, dict[str, Any]] = {
    "gpt-2": _byte_level(use_regex=True),
    "smollm": _after({"type": "Digits", "individual_digits": True}, use_regex=True),
    "llama-bpe": _after(
        {"type": "Split", "pattern": {"Regex": _LLAMA3}, "behavior": "Isolated", "invert": False}, use_regex=False
    ),
}
IGNORES_MERGES = {"llama-bpe"}
"""A word that is a token is taken whole, whatever its merges."""


def name_of(steps: dict[str, Any] | None) -> str | None:
    """llama.cpp's name of a tokenizer.json's `pre_tokenizer`; None where it has none that is known here."""
    return next((name for name, known in STEPS.items() if _plain(known) == _plain(steps or {})), None)


def _plain(steps: dict[str, Any]) -> dict[str, Any]:
    """Without what changes offsets alone, and with what is left out where it has its usual value."""
    if steps.get("type") == "ByteLevel":
        return {"use_regex": True, "add_prefix_space": True} | {k: v for k, v in steps.items() if k != "trim_offsets"}
    return {k: [_plain(step) for step in v] if k == "pretokenizers" else v for k, v in steps.items()}
