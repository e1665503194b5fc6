"""Owns: the built-in catalogue of models: what each is for, where it comes from, its shape and its exact bytes.

Knows nothing of disks or networks: it reads one JSON file that ships in the package. File sizes and checksums are
those of the files the sources name; an entry whose file could not be checked would say `bytes_exact: false`.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import msgspec

from laya.types import Task


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What a planner needs of a model that is not on this disk. Counts, not bytes; `n_ctx_train` in tokens."""

    architecture: str  # GGUF's general.architecture
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_expert: int = 0


class CatalogueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the catalogue. `chat_template` is a file in `laya/models/templates`."""

    id: str
    aliases: tuple[str, ...]
    source: str
    licence: str
    parameters: int
    file_bytes: int
    weights_type: str  # what most weights are in, as GGUF names it: "Q4_K"
    shape: Shape
    what_for: str
    bytes_exact: bool = True
    download_bytes: int | None = None  # what the network carries, where it is not the file itself
    sha256: str | None = None
    task: Task = "chat"
    chat_template: str | None = None
    is_suggested: bool = True
    """Whether advice may name it where another model does not fit."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.id, *self.aliases)

    def template_text(self) -> str | None:
        """The chat template that replaces the one in the file, or None."""
        if self.chat_template is None:
            return None
        return (files("laya.models") / "templates" / self.chat_template).read_text(encoding="utf-8")


class _Catalogue(msgspec.Struct, frozen=True):
    default: str
    models: tuple[CatalogueEntry, ...]


@cache
def _catalogue() -> _Catalogue:
    return msgspec.json.decode((files("laya.models") / "catalogue.json").read_bytes(), type=_Catalogue)


def entries() -> tuple[CatalogueEntry, ...]:
    """Every model of the catalogue, smallest first, and then what comes with Laya."""
    return _catalogue().models


def suggested(task: Task) -> list[CatalogueEntry]:
    """Those that advice may name to somebody who asks for this task."""
    return [entry for entry in entries() if entry.is_suggested and entry.task == task]


def default_model() -> str:
    """The id of the model that runs on any machine."""
    return _catalogue().default


@cache
def _by_name() -> dict[str, CatalogueEntry]:
    return {name: entry for entry in entries() for name in entry.names}


def find(name: str) -> CatalogueEntry | None:
    """The entry with this id or alias, whatever its case, or None."""
    return _by_name().get(name.casefold())


def of_source(source: str) -> CatalogueEntry | None:
    """The entry that is pulled from this source, or None."""
    return next((entry for entry in entries() if entry.source == source), None)
