"""Owns: saying what a file is that is not a GGUF file, from its first bytes. Knows nothing else."""

from __future__ import annotations

import struct

_STARTS = (
    (b"PK\x03\x04", "it looks like a zip archive or a PyTorch checkpoint"),
    (b"version https://git-lfs", "it is a Git LFS pointer: the model itself was not fetched (`git lfs pull`)"),
    (b"\x1f\x8b", "it looks like a gzip archive: unpack it"),
    (b"\x28\xb5\x2f\xfd", "it looks like a zstd archive: unpack it"),
    (b"\x80\x02", "it looks like a PyTorch checkpoint (pickle)"),
    (b"\x89HDF", "it looks like an HDF5 file"),
    (b"\x7fELF", "it looks like a program"),
    (b"lmgg", "it is in ggml's format from before GGUF; fetch the model as GGUF"),
    (b"fmgg", "it is in ggml's format from before GGUF; fetch the model as GGUF"),
    (b"tjgg", "it is in ggml's format from before GGUF; fetch the model as GGUF"),
)


def what_it_looks_like(start: bytes) -> str:
    """A clause such as "it looks like a zip archive", from the first bytes of a file that is not empty."""
    for magic, words in _STARTS:
        if start.startswith(magic):
            return words
    text = start.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it is a web page: the download got an error page or a login instead of the model"
    if _is_safetensors(start):
        return "it is a safetensors file; the built-in engine needs GGUF"
    if text.startswith(b"{"):
        return "it looks like a JSON text"
    if not start.strip(b"\0"):
        return "it begins with zeros: a download that did not finish"
    return f"it begins with {start[:4]!r}"


def _is_safetensors(start: bytes) -> bool:
    """Eight bytes of header length, then a JSON object."""
    return len(start) > 9 and start[8:9] == b"{" and 2 <= struct.unpack("<Q", start[:8])[0] < 1 << 27
