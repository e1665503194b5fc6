"""Owns: which files a table is about: variants at hand by name or path, others made of the model for this run.

A file that is made here lies in the run's own folder and goes with it; `laya quantize` makes those that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from laya.errors import BadModelFile, ConfigError, ModelNotFound
from laya.models import resolve
from laya.quantization.inspection import FileFacts, Flag, file_facts
from laya.quantization.job import Wish, job_of
from laya.quantization.kinds import FILE_KINDS, file_kind
from laya.quantization.quantize import check_result, write
from laya.types import ModelFile


class File(msgspec.Struct, kw_only=True):
    """One file of the table, by the name its row has, and what is known of it beforehand."""

    name: str
    facts: FileFacts
    flags: list[Flag] = []


def model_named(name: str) -> ModelFile:
    """Raises what `resolve` raises, and BadModelFile for a folder, whose weights llama.cpp does not read."""
    model = resolve(name)
    if model.format != "gguf":
        raise BadModelFile(f"{model.path}: a Hugging Face folder; what is evaluated are GGUF files (`laya export`).")
    return model


def variants(
    model: ModelFile, wanted: Sequence[str], folder: Path, n_threads: int, tell: Callable[[str], None]
) -> list[File]:
    """Files of the words of `--quant`, or the model's own where there are none.

    A word is a path, the name of a model that is here, a variant of this model that is here (`q8_0` finds
    `MODEL:q8_0`), or a kind of file, which is made in `folder`. Raises ConfigError for a word that is none of them.
    """
    own = file_facts(model.path)
    if not wanted:
        return [File(name=model.id, facts=own)]
    found: list[File] = []
    for word in wanted:
        name = Path(word).stem if word.endswith(".gguf") else word
        if any(each.name == name for each in found):
            raise ConfigError(f"--quant: {name} is there twice", param="quant")
        found.append(_variant(model, own, word, name, folder, n_threads, tell))
    return found


def best(files: Sequence[File]) -> File:
    """The one with the most bits a weight: what the others are held to."""
    return max(files, key=lambda each: each.facts.bits)


def _variant(
    model: ModelFile, own: FileFacts, word: str, name: str, folder: Path, n_threads: int, tell: Callable[[str], None]
) -> File:
    at_hand = _at_hand(model, word)
    if at_hand is not None:
        return File(name=name, facts=file_facts(at_hand), flags=_requantized(file_facts(at_hand)))
    if word.lower() not in FILE_KINDS:
        file_kind(word)  # raises, naming the nearest
    kind, file = file_kind(word)
    if not own.is_quantized and own.main_type == file.base_type:
        return File(name=name, facts=own)  # the model itself is that
    tell(f"making {kind} of {model.id}")
    path = folder / f"{kind}.gguf"
    job = job_of(model.path, model.id, Wish(kind, requantizes=True))
    write(job, path, n_threads=n_threads, progress=lambda _done, _all: None)
    check_result(path, job)
    flags = []
    if own.is_quantized:
        what = (
            f"made of a file that was {own.main_type} already: what that lost is in the reference too, and not counted"
        )
        flags.append(Flag(what=what, is_broken=False))
    return File(name=name, facts=file_facts(path), flags=flags)


def _at_hand(model: ModelFile, word: str) -> Path | None:
    for name in (f"{model.id}:{word}", word):
        try:
            found = resolve(name, allow_path=word.endswith(".gguf") or "/" in word)
        except ModelNotFound:
            continue
        if found.format == "gguf":
            return found.path
    return None


def _requantized(facts: FileFacts) -> list[Flag]:
    source = facts.quantized_from
    if source is None or source in ("F32", "F16", "BF16"):
        return []
    what = f"was made of a file that was {source} already: the losses of both are in it"
    return [Flag(what=what, is_broken=False)]
