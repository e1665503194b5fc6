"""Owns: the table of ggml tensor types, their block sizes in elements and bytes, and the names users write.

Knows no file and no plan. Source: the block structs of ggml-common.h; the `gguf` package is the oracle in the tests.
"""

from __future__ import annotations

from typing import NamedTuple

from laya.errors import ConfigError, nearest


class GgmlType(NamedTuple):
    """A tensor type: `block_bytes` bytes hold `block` elements of one row."""

    id: int
    name: str
    block: int
    block_bytes: int

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row; `elements` divides by `block`."""
        return elements // self.block * self.block_bytes


_TABLE = (
    (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 36), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8), (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56), (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18), (42, "Q2_0", 64, 18),
)  # fmt: skip
GGML_TYPES = {row[0]: GgmlType(*row) for row in _TABLE}

# What `general.file_type` means; files made by other tools may lack it or say nothing useful.
FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4", 39: "NVFP4", 40: "Q1_0",
}  # fmt: skip

_KV_NAMES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
_BY_NAME = {ggml_type.name.lower(): ggml_type for ggml_type in GGML_TYPES.values()}
TYPE_NAMES = tuple(ggml_type.name for ggml_type in GGML_TYPES.values())
KV_CACHE_TYPES = {name: _BY_NAME[name] for name in _KV_NAMES}


def type_named(name: str) -> GgmlType | None:
    """The type with this name in any case, or None."""
    return _BY_NAME.get(name.lower())


def kv_cache_type(name: str) -> GgmlType:
    """The type of the KV cache a user named. Raises ConfigError naming the nearest one."""
    found = KV_CACHE_TYPES.get(name.lower())
    if found is None:
        close = nearest(name.lower(), KV_CACHE_TYPES)
        hint = f"did you mean {close}?" if close else "known are " + ", ".join(KV_CACHE_TYPES) + "."
        raise ConfigError(f"kv_cache_dtype {name!r} is not a type of KV cache; {hint}", param="kv_cache_dtype")
    return found
