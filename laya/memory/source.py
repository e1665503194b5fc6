"""Owns: what a plan reads of a model wherever it lies: bytes at an offset, and which files there are.

A file on this disk is a `LocalFile`; one on a server is the models room's, which fits these protocols without being
known here. Knows no format.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
            with opened(self.path) as file:
                self._file_bytes = file.file_bytes
        return self._file_bytes

    def read(self, offset: int, n_bytes: int) -> bytes:
        """The bytes at `offset`, fewer where the file ends."""
        with opened(self.path) as file:
            return file.read(offset, max(0, min(n_bytes, self.file_bytes - offset)))


@contextmanager
def opened(path: Path) -> Iterator[ByteSource]:
    """A file on this disk that stays open, so that all reads are of one file. Raises BadModelFile naming it."""
    try:
        # Without O_NONBLOCK the open of a named pipe would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise BadModelFile(f"{path}: there is no such file.", param="model") from None
    except OSError as error:
        raise BadModelFile(f"{path}: cannot be read ({error.strerror}).", param="model") from None
    try:
        yield _OpenFile(path, fd)
    except OSError as error:
        raise BadModelFile(f"{path}: cannot be read ({error.strerror}).", param="model") from None
    finally:
        os.close(fd)


class _OpenFile:
    """A descriptor as a `ByteSource`."""

    def __init__(self, path: Path, fd: int) -> None:
        self.name = str(path)
        self.fd = fd
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise BadModelFile(f"{path} is a folder, not a .gguf file.", param="model")
        if not stat.S_ISREG(status.st_mode):
            raise BadModelFile(f"{path} is not a regular file.", param="model")
        self.file_bytes = status.st_size

    def read(self, offset: int, n_bytes: int) -> bytes:
        return os.pread(self.fd, n_bytes, offset)


def whole(path: Path, most_bytes: int) -> bytes:
    """All of a small file. Raises BadModelFile where it is missing, unreadable or larger than it can be."""
    file = LocalFile(path)
    if file.file_bytes > most_bytes:
        raise BadModelFile(
            f"{path} has {file.file_bytes} bytes; at most {most_bytes >> 20} MiB can be right.", param="model"
        )
    return file.read(0, file.file_bytes)
