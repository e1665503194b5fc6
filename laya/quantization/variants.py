"""Owns: which files a table is about: variants at hand by name or path, others made of the model for this run.

A file that is made here lies in the run's own folder and goes with it; `laya quantize` makes those that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from laya.errors import BadModelFile, ConfigError, ModelNotFound
from laya.memory import Machine, size_text
from laya.models import Library, resolve
from laya.quantization.card import Card
from laya.quantization.inspection import FileFacts, Flag, file_facts
from laya.quantization.job import Job
from laya.quantization.kinds import FILE_KINDS, FULL_TYPES, FileKind, file_kind
from laya.quantization.make import CARD_JSON, Asked, card_paths, make, variant_id
from laya.types import ModelFile

Tell = Callable[[str], None]


class File(msgspec.Struct, kw_only=True):
    """One file of the table, by the name its row has, and what is known of it beforehand."""

    name: str
    facts: FileFacts
    flags: list[Flag] = []


class _Told:
    """Who is told how far the making of a variant is."""

    def __init__(self, tell: Tell, name: str) -> None:
        self._tell, self._name = tell, name

    def stage(self, text: str) -> None:
        self._tell(f"{self._name}: {text}")

    def progress(self, done: int, total: int) -> None:
        self._tell(f"{self._name}: quantizing, {done / max(1, total):.0%}")

    def planned(self, job: Job, peak_bytes: int) -> None:
        self._tell(f"{self._name}: {size_text(job.file_bytes)}, {size_text(peak_bytes)} of memory meanwhile")


def gguf_model(name: str) -> ModelFile:
    """Raises what `resolve` raises, and BadModelFile for a folder, whose weights llama.cpp does not read."""
    model = resolve(name)
    if model.format != "gguf":
        raise BadModelFile(f"{model.path}: a Hugging Face folder; --quant f16,q8_0 makes files of it that can be run.")
    return model


def variants(name: str, wanted: Sequence[str], folder: Path, n_threads: int, tell: Tell) -> tuple[str, list[File]]:
    """The model's id, and files of the words of `--quant`, or its own file where there are none.

    A word is a path, the name of a model that is here, a variant of this model that is here (`q8_0` finds
    `MODEL:q8_0`), or a kind of file, which is made in `folder`. Raises ConfigError for a word that is none of them, and
    what making one raises where there is no room for it.
    """
    if not wanted:
        model = gguf_model(name)
        return model.id, [_file(model.id, model.path)]
    model = resolve(name)
    found: list[File] = []
    for word in wanted:
        row = Path(word).stem if word.endswith(".gguf") else word
        if any(each.name == row for each in found):
            raise ConfigError(f"--quant: {row} is there twice", param="quant")
        found.append(_variant(model, word, row, folder, n_threads, tell))
    return model.id, found


def best(files: Sequence[File]) -> File:
    """The one with the most bits a weight: what the others are held to."""
    return max(files, key=lambda each: each.facts.bits)


def _variant(model: ModelFile, word: str, row: str, folder: Path, n_threads: int, tell: Tell) -> File:
    if (path := _at_hand(model, word)) is not None:
        return _file(row, path)
    kind, file = _kind(word)
    if model.format == "gguf":
        own = file_facts(model.path)
        if own.main_type == file.base_type and own.main_type in FULL_TYPES:
            return _file(row, model.path)  # the model itself is that
    path = folder / f"{kind}.gguf"
    asked = Asked(model=model, kind=kind, requantizes=True, out=path, n_threads=n_threads)
    make(asked, Library(), Machine().budget(), _Told(tell, row))
    return _file(row, path)


def _kind(word: str) -> tuple[str, FileKind]:
    try:
        return file_kind(word)
    except ConfigError as error:
        said = error.message.replace("--to ", "--quant ", 1)
        raise ConfigError(f"{said} Nor is there a model or a file of that name.", param="quant") from None


def _at_hand(model: ModelFile, word: str) -> Path | None:
    is_path = word.endswith(".gguf") or "/" in word
    variant = variant_id(model, file_kind(word)[0]) if word.lower() in FILE_KINDS else f"{model.id}:{word}"
    for name in (word,) if is_path else (variant, word):
        try:
            found = resolve(name, allow_path=is_path)
        except ModelNotFound:
            continue
        if found.format == "gguf":
            return found.path
    return None


def _file(name: str, path: Path) -> File:
    return File(name=name, facts=file_facts(path), flags=_from_its_card(path))


def _from_its_card(path: Path) -> list[Flag]:
    """What the card beside a file says that its figures cannot."""
    for card in (path.with_name(CARD_JSON), card_paths(path)[0]):
        if card.is_file():
            try:
                said = msgspec.json.decode(card.read_bytes(), type=Card)
            except msgspec.DecodeError:
                continue  # another program's card
            if not said.requantized:
                return []
            what = f"made of a file that was {said.source_type} already: "
            what += "what that lost is in it too, and in every variant made of the same file"
            return [Flag(what=what, is_broken=False)]
    return []
