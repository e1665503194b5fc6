"""Owns: which models at hand are one model in other bits, by what they are called: NAME, NAME:q8_0, NAME-Q4_K_M.gguf.

Looks at the store, models_dir, and beside a file that lies elsewhere. What is inside a file is others' to read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from laya.config.quantization import split_kind
from laya.models.files import gguf_model, hf_model, is_hf_folder, is_sound, is_weights_file, model_stem
from laya.models.library import available
from laya.types import ModelFile


def variants_of(file: ModelFile, *, models_dir: Path | None, home: Path | None = None) -> list[ModelFile]:
    """The file itself, and what is called as it is but for the quantization, in the same format. Reads folders."""
    bases = _bases(file)
    found = {_place(file): file}
    for other in (*available(models_dir=models_dir, home=home), *_beside(file)):
        if other.format == file.format and bases & _bases(other):
            found.setdefault(_place(other), other)
    return list(found.values())


def variants_named(name: str, *, models_dir: Path | None, home: Path | None = None) -> list[ModelFile]:
    """What is called as this name but for the quantization, of any format, the largest file first."""
    wanted = name.casefold()
    here = available(models_dir=models_dir, home=home)
    return sorted((file for file in here if wanted in _bases(file)), key=lambda file: -file.file_bytes)


def _bases(file: ModelFile) -> set[str]:
    """What it is called without a quantization: as it is named here, and as its file is."""
    return {split_kind(name)[0] for name in (file.id, model_stem(file.path.name))}


def _place(file: ModelFile) -> Path:
    return file.path.absolute()


def _beside(file: ModelFile) -> Iterator[ModelFile]:
    """Models in the folder of one that a path names, as its variants are published side by side."""
    if file.origin != "path":
        return
    try:
        there = sorted(file.path.absolute().parent.iterdir())
    except OSError:
        return
    for path in there:
        other = None
        if file.format == "gguf" and is_weights_file(path):
            other = gguf_model(path, origin="path")
        elif file.format == "hf" and path.is_dir() and is_hf_folder(path):
            other = hf_model(path, origin="path")
        if other is not None and is_sound(other):
            yield other
