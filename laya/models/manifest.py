"""Owns: what the library writes down of a pulled model (manifest.json) and the atomic writing of it.

Knows the format of one file. A model is there when its folder is: the manifest is written and synced before the
folder gets its name, so a crash at any point leaves either the whole model or none.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from laya.errors import BadModelFile

MANIFEST_NAME = "manifest.json"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a pulled model; `sha256` is None for a linked file, which Laya never read in full."""

    name: str
    file_bytes: int
    sha256: str | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A pulled model. `linked` is the path of a model that stays where the user keeps it."""

    id: str
    source: str
    format: Literal["gguf", "hf"]
    files: tuple[StoredFile, ...]
    pulled_at: str  # ISO 8601, UTC
    aliases: tuple[str, ...] = ()
    licence: str | None = None
    linked: str | None = None
    version: Literal[1] = 1

    @property
    def file_bytes(self) -> int:
        return sum(file.file_bytes for file in self.files)


def read_manifest(folder: Path) -> Manifest:
    """Raises: BadModelFile when the manifest is missing or not one."""
    path = folder / MANIFEST_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise BadModelFile(f"{path}: missing; remove {folder} and pull the model again.") from None
    except (msgspec.DecodeError, OSError) as error:
        raise BadModelFile(f"{path}: {error}; remove {folder} and pull the model again.") from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write atomically: a reader sees the old manifest or the new one, after a power cut too."""
    path = folder / MANIFEST_NAME
    partial = path.with_suffix(".tmp")
    with partial.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
