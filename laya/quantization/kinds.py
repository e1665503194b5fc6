"""Owns: the kinds of GGUF file that can be made, and the names users write for them and for a tensor's type."""

from __future__ import annotations

from typing import NamedTuple

from laya.errors import ConfigError, nearest
from laya.memory.ggml import GgmlType, type_named


class FileKind(NamedTuple):
    """What `--to` names. `file_type` is general.file_type's number."""

    base_type: str
    file_type: int


FILE_KINDS = {
    "f32": FileKind("F32", 0), "f16": FileKind("F16", 1), "bf16": FileKind("BF16", 32), "q8_0": FileKind("Q8_0", 7),
    "q6_k": FileKind("Q6_K", 18), "q5_k_m": FileKind("Q5_K", 17), "q5_k_s": FileKind("Q5_K", 16),
    "q5_1": FileKind("Q5_1", 9), "q5_0": FileKind("Q5_0", 8), "q4_k_m": FileKind("Q4_K", 15),
    "q4_k_s": FileKind("Q4_K", 14), "q4_1": FileKind("Q4_1", 3), "q4_0": FileKind("Q4_0", 2),
    "iq4_nl": FileKind("IQ4_NL", 25), "iq4_xs": FileKind("IQ4_XS", 30), "q3_k_l": FileKind("Q3_K", 13),
    "q3_k_m": FileKind("Q3_K", 12), "q3_k_s": FileKind("Q3_K", 11), "q2_k": FileKind("Q2_K", 10),
}  # fmt: skip
FOLDER_KINDS = ("awq", "gptq")  # of 4-bit weights, for engines that read Hugging Face's form
_SHORT = {"q5_k": "q5_k_m", "q4_k": "q4_k_m", "q3_k": "q3_k_m"}
_MEANT = {"q8": "q8_0", "q6": "q6_k", "q5": "q5_k_m", "q4": "q4_k_m", "q3": "q3_k_m", "q2": "q2_k"}
FULL_TYPES = frozenset({"F32", "F16", "BF16"})
_TENSOR_KINDS = tuple(dict.fromkeys(kind.base_type.lower() for kind in FILE_KINDS.values()))


def file_kind(name: str) -> tuple[str, FileKind]:
    """The full name of a kind of file, and it. Raises ConfigError naming the nearest one."""
    full = _SHORT.get(name.lower(), name.lower())
    if full in FILE_KINDS:
        return full, FILE_KINDS[full]
    if full in FOLDER_KINDS:
        raise ConfigError(f"--to {name}: no kind of GGUF file; of its size: q4_k_m.", param="to")
    known = (*FILE_KINDS, *FOLDER_KINDS)
    close = _MEANT.get(full) or nearest(full, known)
    hint = f" Did you mean '{close}'?" if close else ""
    raise ConfigError(f"--to {name}: no kind of GGUF file or folder.{hint} There are: {', '.join(known)}.", param="to")


def tensor_type(flag: str, name: str | None) -> GgmlType | None:
    """The type that `--embeddings` or `--head` names. Raises ConfigError naming the nearest one."""
    if name is None:
        return None
    if name.lower() in _TENSOR_KINDS:
        return type_named(name)
    close = nearest(name.lower(), _TENSOR_KINDS)
    hint = f" Did you mean '{close}'?" if close else ""
    raise ConfigError(f"{flag} {name}: no type of a tensor.{hint} There are: {', '.join(_TENSOR_KINDS)}.")
