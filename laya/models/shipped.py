"""Owns: models that come with Laya itself: `shipped://FILE`, in the folder `shipped` beside this module.

They are served by name as they lie there, with no download; a pull copies one into the store, like any other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from laya.errors import DownloadError
from laya.models import catalogue
from laya.models.files import gguf_model
from laya.models.sources import FetchedFile, Probe, Progress, RemoteFile
from laya.types import ModelFile

SCHEME = "shipped"
SHIPPED_DIR = Path(__file__).with_name("shipped")
_CHUNK_BYTES = 1 << 20


class ShippedSource:
    """One file of the folder. Raises DownloadError where it has none of that name."""

    keeps_partial = False

    def __init__(self, text: str) -> None:
        self.path = shipped_path(text)
        if not self.path.is_file() or self.path.parent != SHIPPED_DIR:
            known = ", ".join(f"{SCHEME}://{path.name}" for path in sorted(SHIPPED_DIR.glob("*.gguf")))
            raise DownloadError(f"Laya does not come with '{text}'. It comes with: {known or 'no model'}.")

    def probe(self) -> Probe:
        file = RemoteFile(name=self.path.name, file_bytes=self.path.stat().st_size)
        return Probe(files=(file,), suggested_id=self.path.stem)

    def disk_need_bytes(self, probe: Probe, folder: Path) -> int | None:
        return probe.file_bytes

    def fetch(self, probe: Probe, folder: Path, progress: Progress) -> list[FetchedFile]:
        digest, done, target = hashlib.sha256(), 0, folder / self.path.name
        with self.path.open("rb") as shipped, target.open("wb") as file:
            while chunk := shipped.read(_CHUNK_BYTES):
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress(done, probe.file_bytes)
        return [FetchedFile(path=target, sha256=digest.hexdigest())]


def shipped_path(source: str) -> Path:
    """Where the file of a `shipped://` source is to be."""
    return SHIPPED_DIR / source.removeprefix(f"{SCHEME}://")


def shipped_models() -> Iterator[ModelFile]:
    """The models of the catalogue that are here without a pull."""
    for entry in catalogue.entries():
        if entry.source.startswith(f"{SCHEME}://") and (path := shipped_path(entry.source)).is_file():
            yield gguf_model(path, origin=SCHEME, id=entry.id, aliases=entry.aliases)
