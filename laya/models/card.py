"""Owns: all that is known of one model without opening it: the file, what was written at its pull, the catalogue.

Knows nothing of what is inside a file: shape and tensors of a model on disk are the memory room's to read.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from laya.errors import ModelNotPulled
from laya.models import catalogue
from laya.models.catalogue import CatalogueEntry
from laya.models.library import MODELS_DIR, Library, resolve
from laya.models.manifest import Manifest
from laya.models.shipped import SCHEME
from laya.types import ModelFile


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """`file` is None for a model of the catalogue that is not here; `manifest` is there for pulled models only."""

    id: str
    file: ModelFile | None
    manifest: Manifest | None
    entry: CatalogueEntry | None


def show(name: str, *, models_dir: Path | None = MODELS_DIR, home: Path | None = None) -> ModelCard:
    """What is known of the model of this name. Raises as `resolve`, but a catalogue name need not be pulled."""
    try:
        file = resolve(name, models_dir=models_dir, home=home)
    except ModelNotPulled:
        entry = catalogue.find(name) or catalogue.of_source(name)
        if entry is None:
            raise
        return ModelCard(id=entry.id, file=None, manifest=None, entry=entry)
    pulled = file.origin == "pulled"
    return ModelCard(
        id=file.id,
        file=file,
        manifest=Library(home).manifest(file.id) if pulled else None,
        entry=catalogue.find(file.id) if pulled or file.origin == SCHEME else None,
    )
