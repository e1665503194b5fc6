"""Owns: which files a table is about: variants at hand by name or path, others made of the model for this run.

A file that is made here lies in the run's own folder and goes with it; `laya quantize` makes those that stay.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from laya.engines.child_start import die_with_parent
from laya.errors import BadModelFile, ConfigError, EngineFailed, ModelNotFound
from laya.memory import Machine, size_text
from laya.models import Library, resolve
from laya.models.files import check_utf8
from laya.quantization.card import Card
from laya.quantization.inspection import FileFacts, Flag, file_facts
from laya.quantization.job import Job
from laya.quantization.kinds import FILE_KINDS, FOLDER_KINDS, FULL_TYPES, FileKind, file_kind
from laya.quantization.make import CARD_JSON, Asked, card_paths, make, variant_id
from laya.quantization.make_folder import FolderAsked, check_installed, make_folder
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
        self.planned_folder(job.file_bytes, peak_bytes)

    def planned_folder(self, file_bytes: int, peak_bytes: int) -> None:
        self._tell(f"{self._name}: {size_text(file_bytes)}, {size_text(peak_bytes)} of memory meanwhile")


def gguf_model(name: str) -> ModelFile:
    """Raises what `resolve` raises, and BadModelFile for a folder, whose weights llama.cpp does not read."""
    model = resolve(name)
    if model.format != "gguf":
        raise BadModelFile(f"{model.path}: a Hugging Face folder; --quant f16,q8_0 makes files of it that can be run.")
    return model


def variants(name: str, wanted: Sequence[str], folder: Path, n_threads: int, tell: Tell) -> tuple[str, list[File]]:
    """The model's id, and files of the words of `--quant`, or its own file where there are none.

    A word is a path, the name of a model that is here, a variant of this model that is here (`q8_0` finds
    `MODEL:q8_0`), or a kind of file or of folder (awq, gptq), which is made in `folder`. Raises ConfigError for a word
    that is none of them, and what making one raises where there is no room for it.
    """
    if not wanted:
        model = gguf_model(name)
        return model.id, [_file(model.id, model.path)]
    model = resolve(name)
    found: list[File] = []
    for word in wanted:
        row = Path(word).stem if word.endswith(".gguf") else Path(word).name if "/" in word else word
        if any(each.name == row for each in found):
            raise ConfigError(f"--quant: {row} is there twice", param="quant")
        found.append(_variant(model, word, row, folder, n_threads, tell))
    return model.id, found


def best(files: Sequence[File]) -> File:
    """The one with the most bits a weight: what the others are held to."""
    return max(files, key=lambda each: each.facts.bits)


def _variant(model: ModelFile, word: str, row: str, folder: Path, n_threads: int, tell: Tell) -> File:
    if (packed := _packed(model, word, row, folder, n_threads, tell)) is not None:
        return packed
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


def _packed(model: ModelFile, word: str, row: str, folder: Path, n_threads: int, tell: Tell) -> File | None:
    """A folder of AWQ's or GPTQ's 4-bit weights, at hand or made: scored by the numbers that it stands for."""
    packed = Path(word).expanduser()
    if word.lower() in FOLDER_KINDS:
        check_installed()
        packed = folder / word.lower()
        asked = FolderAsked(model=model, kind=word.lower(), out=packed, n_threads=n_threads)
        make_folder(asked, Library(), Machine().budget(), _Told(tell, row))
    elif not ("/" in word and (packed / "config.json").is_file()):
        return None
    layout = _layout(packed)
    if layout not in FOLDER_KINDS:
        raise ConfigError(
            f"--quant {word}: a folder of {layout or 'whole'} weights; {', '.join(FOLDER_KINDS)} are scored"
        )
    out = folder / f"{packed.name}-unpacked.gguf"
    tell(f"{row}: unpacking")
    done = subprocess.run(
        [sys.executable, "-m", "laya.quantization.unpacked", str(packed), str(out)],
        capture_output=True, text=True, check=False, preexec_fn=die_with_parent,
    )  # fmt: skip
    if done.returncode:
        raise EngineFailed(f"{packed} could not be unpacked: {done.stderr.strip().rpartition(chr(10))[2]}")
    told = json.loads(done.stdout.splitlines()[-1])
    n_bytes = sum(file.stat().st_size for file in packed.glob("*.safetensors"))
    facts = msgspec.structs.replace(
        file_facts(out), file_bytes=n_bytes, bits=8 * n_bytes / told["matrices"], packed_as=layout.upper()
    )
    what = (
        f"{layout.upper()}: {told['packed'] / told['matrices']:.0%} of the weights are in 4 bits; scored unpacked, by "
    )
    what += "llama.cpp; no engine here runs the folder, so it has no speed and no memory"
    return File(name=row, facts=facts, flags=[Flag(what=what, is_broken=False)])


def _layout(folder: Path) -> str | None:
    """What its config.json says that its weights are packed as."""
    try:
        found = json.loads((folder / "config.json").read_bytes())
        layout: str | None = (found.get("quantization_config") or {}).get("quant_method")
    except (ValueError, AttributeError):
        raise BadModelFile(f"{folder / 'config.json'} is no configuration of a model") from None
    return layout


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
    check_utf8(path)
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
