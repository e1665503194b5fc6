"""Owns: what a plan reads of a model wherever it lies: bytes at an offset, and which files there are.

A file on this disk is a `LocalFile`; one on a server is the models room's, which fits these protocols without being
known here. Knows no format.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from laya.errors import BadModelFile


class ByteSource(Protocol):
    """A file that can be read at an offset."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""

    def read(self, offset: int, n_bytes: int) -> bytes:
        """The bytes at `offset`, fewer where the file ends. Raises a LayaError where it can't be read."""


class ModelSource(Protocol):
    """The files of one model that say what it needs."""

    @property
    def name(self) -> str:
        """What the plan calls it."""

    @property
    def format(self) -> Literal["gguf", "hf"]:
        """What the files are."""

    @property
    def files(self) -> Mapping[str, ByteSource]:
        """By file name: the shards of a GGUF in order, or every safetensors file there is; none: a bare config."""

    @property
    def config(self) -> bytes | None:
        """config.json of a Hugging Face model."""

    @property
    def index(self) -> bytes | None:
        """model.safetensors.index.json, where there is one."""


class LocalModel(msgspec.Struct, frozen=True, kw_only=True):
    """A `ModelSource` of files on this disk."""

    name: str
    format: Literal["gguf", "hf"]
    files: dict[str, LocalFile]
    config: bytes | None = None
    index: bytes | None = None


class LocalFile:
    """A file on this disk. It is opened for each read, so that a hundred shards hold no descriptors.

    A mapping would turn a file that shrinks meanwhile into a SIGBUS. Raises BadModelFile naming the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        self._file_bytes: int | None = None

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file, as they were at the first look."""
        if self._file_bytes is None:
            try:
                status = self.path.stat()
            except FileNotFoundError:
                raise BadModelFile(f"{self.path}: there is no such file.", param="model") from None
            except OSError as error:
                raise self._unreadable(error) from None
            if not stat.S_ISREG(status.st_mode):  # before any open: a named pipe would wait for a writer
                raise BadModelFile(f"{self.path} is not a regular file.", param="model")
            self._file_bytes = status.st_size
        return self._file_bytes

    def read(self, offset: int, n_bytes: int) -> bytes:
        """The bytes at `offset`, fewer where the file ends."""
        wanted = max(0, min(n_bytes, self.file_bytes - offset))
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                return os.pread(fd, wanted, offset)
            finally:
                os.close(fd)
        except OSError as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: OSError) -> BadModelFile:
        return BadModelFile(f"{self.path}: cannot be read ({error.strerror}).", param="model")


def whole(path: Path, most_bytes: int) -> bytes:
    """All of a small file. Raises BadModelFile where it is missing, unreadable or larger than it can be."""
    file = LocalFile(path)
    if file.file_bytes > most_bytes:
        raise BadModelFile(
            f"{path} has {file.file_bytes} bytes; at most {most_bytes >> 20} MiB can be right.", param="model"
        )
    return file.read(0, file.file_bytes)
