"""Owns: a model that is not here, as far as a plan must read it: its headers, by ranges, before anything is fetched.

`hf://org/repo[@revision][:file]`, the address of a hub's page or file, or the http(s) address of a .gguf file or a
config.json. Knows no header: bytes are handed to whoever plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from laya.models.ranges import RangeFile


class RemoteModel(msgspec.Struct, frozen=True, kw_only=True):
    """What may be read of a model that is not here, without fetching it. Its files open when they are first read."""

    name: str  # what a plan calls it
    source: str  # what to pull
    format: Literal["gguf", "hf"]
    files: dict[str, RangeFile]  # by file name: the shards of a GGUF in order, or every safetensors file
    config: bytes | None = None  # config.json, of a Hugging Face model
    index: bytes | None = None  # model.safetensors.index.json, where its weights are in more than one file


def is_remote(text: str) -> bool:
    """Whether a text names a model on a hub or a server."""
    return text.partition("://")[0].lower() in ("hf", "http", "https") and "://" in text


@contextmanager
def open_remote(text: str) -> Iterator[RemoteModel]:
    """The model at `hf://...` or `http(s)://...`, its files open for reading until the end of the block.

    Raises DownloadError, here or from a read: no such repository or file, no access, a server without ranges.
    """
    from laya.models.ranges import range_client
    from laya.models.remote_files import remote_model

    with range_client() as client:
        yield remote_model(text, client)
