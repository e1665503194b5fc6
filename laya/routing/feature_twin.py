"""Owns: the 32-byte request feature, the hash of names and the hashes of prompts, in plain Python. Knows no table.

Bit for bit what `csrc/request_feature.hpp` and `csrc/prefix_blocks.hpp` do, which also say why they are as they are.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator

FEATURE_VERSION = 1
FLAG_STREAMING = 1
MASK_64 = (1 << 64) - 1

_WORD = struct.Struct("<Q")
_FEATURE = struct.Struct("<BBHIQQQ")  # version, kind, flags, tokens, model hash, session hash, prefix hash
_HASH_STEP = 0xFF51AFD7ED558CCD
_HASH_SEED = 0x9E3779B97F4A7C15
_BLOCK_BYTES = 32
MOST_PREFIX_BYTES = 64 * 1024


def _block_ends() -> Iterator[int]:
    end = _BLOCK_BYTES
    while end <= MOST_PREFIX_BYTES:
        yield end
        end += max(_BLOCK_BYTES, end // 16 // _BLOCK_BYTES * _BLOCK_BYTES)


_BLOCK_ENDS = tuple(_block_ends())  # where blocks of a prompt end whatever is in them, in bytes
_MAX_MESSAGES = 160
MAX_BLOCKS = len(_BLOCK_ENDS) + _MAX_MESSAGES


def require_range(name: str, value: int, least: int, most: int) -> int:
    """The value itself. Raises ValueError naming it when it is outside least..most."""
    if not least <= value <= most:
        raise ValueError(f"{name} must be {least} to {most}, not {value}")
    return value


def mix64(value: int) -> int:
    """The splitmix64 finaliser."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def name_bytes(name: str | bytes) -> bytes:
    """UTF-8 of a name; a lone surrogate, which JSON can carry, keeps bytes of its own."""
    if isinstance(name, str):
        return name.encode("utf-8", "surrogatepass")
    if isinstance(name, bytes):
        return name
    raise TypeError("a name must be str or bytes")


@functools.lru_cache(maxsize=4096)
def hash_bytes(data: bytes) -> int:
    """64-bit hash, never 0."""
    value = _HASH_SEED ^ (len(data) * 0xD6E8FEB86659FD93 & MASK_64)
    for at in range(0, len(data), 8):
        value = (value ^ int.from_bytes(data[at : at + 8], "little")) * _HASH_STEP & MASK_64
        value ^= value >> 32
    return mix64(value) or 1


def hash_name(name: str | bytes) -> int:
    """64-bit hash of a model name or session id, never 0. Raises TypeError for what is neither str nor bytes."""
    return hash_bytes(name_bytes(name))


def prefix_blocks(text: str | bytes) -> bytes:
    """The chained hashes of a prompt's blocks, 8 bytes each: prompts that begin alike begin with equal hashes.

    text must be what the conversation's next turn begins with: of a chat the messages array without its closing
    bracket. Of a prompt longer than 64 KiB only the beginning counts. Raises TypeError for neither str nor bytes.
    """
    data = name_bytes(text)
    value, at, hashes = _HASH_SEED, 0, []
    for stop in sorted({*_message_ends(data), *(end for end in _BLOCK_ENDS if end <= len(data))}):
        whole = stop - stop % 8
        for (word,) in _WORD.iter_unpack(data[at:whole]):
            value = _add(value, word)
        at = whole
        tail = _add(value, int.from_bytes(data[at:stop], "little")) if stop > at else value
        hashes.append(mix64(tail ^ stop) or 1)
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def _add(value: int, word: int) -> int:
    value = (value ^ word) * _HASH_STEP & MASK_64
    return value ^ value >> 32


def _message_ends(data: bytes) -> list[int]:
    """Where messages of a chat in JSON may end: after a closing brace, before a comma or at the very end."""
    ends: list[int] = []
    end = data.find(b"}", 0, MOST_PREFIX_BYTES) + 1
    while end and len(ends) < _MAX_MESSAGES:
        if end == len(data) or data[end] == 0x2C:
            ends.append(end)
        end = data.find(b"}", end, MOST_PREFIX_BYTES) + 1
    return ends


def unpack_blocks(packed: bytes) -> tuple[int, ...]:
    """The hashes in what `prefix_blocks` made. Raises ValueError for anything else."""
    if len(packed) % 8 or len(packed) > 8 * MAX_BLOCKS:
        raise ValueError(f"prefix_blocks must be what prefix_blocks() made: at most {MAX_BLOCKS} hashes of 8 bytes")
    return struct.unpack(f"<{len(packed) // 8}Q", packed)


def pack_feature(
    *, kind: int, flags: int, tokens: int, model_hash: int, session_hash: int = 0, prefix_hash: int = 0
) -> bytes:
    """The 32 bytes of a request. Raises ValueError when a field does not fit its width."""
    return _FEATURE.pack(
        FEATURE_VERSION,
        require_range("kind", kind, 0, 0xFF),
        require_range("flags", flags, 0, 0xFFFF),
        require_range("tokens", tokens, 0, 0xFFFF_FFFF),
        model_hash,
        session_hash,
        prefix_hash,
    )


def unpack_feature(feature: bytes) -> tuple[int, int, int, int, int, int, int]:
    """(version, kind, flags, tokens, model hash, session hash, prefix hash). Raises ValueError unless 32 bytes."""
    if len(feature) != _FEATURE.size:
        raise ValueError("a request feature is 32 bytes")
    return _FEATURE.unpack(feature)
