"""Owns: the steps of `laya quantize`, from a name to a file that has its place: refuse, calibrate, plan, write, check.

Everything is made in a locked folder of its own, in the store or beside the file that is asked for, and gets its name
by one rename when it is whole; what a run that was killed left there, the next one clears away. Knows no command line.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from laya.engines.child_start import die_with_parent
from laya.errors import ConfigError, Conflict, EngineFailed, LayaError
from laya.memory import Budget
from laya.memory.ggml import GgmlType
from laya.models.files import check_utf8
from laya.models.library import Library, model_id_of, now_utc
from laya.models.manifest import Manifest, StoredFile
from laya.models.shipped import shipped_models
from laya.models.work_folder import scratch_folder
from laya.quantization.calibration import (
    CALIBRATION_TOKENS,
    IMATRIX_FILE,
    Calibrated,
    Text,
    calibrate,
    calibration_text,
    imatrix_card,
)
from laya.quantization.card import Card, as_json, as_markdown, card_of
from laya.quantization.imatrix import read_imatrix
from laya.quantization.job import Job, Wish, job_of
from laya.quantization.kinds import FILE_KINDS, file_kind
from laya.quantization.limits import check_disk, check_memory, status_bytes
from laya.quantization.quantize import check_result, sha256_of, write
from laya.types import MIB, ModelFile

_PART = ".laya-part"  # of a folder beside --out FILE
CARD_JSON, CARD_TEXT = "card.json", "README.md"
_EXPORTER_BYTES = 1024 * MIB  # of Python with torch and transformers, before a weight


class Asked(NamedTuple):
    """calibration: `python` or a file. out: in place of the store. kind, embeddings and head are right already."""

    model: ModelFile
    kind: str
    embeddings: GgmlType | None = None
    head: GgmlType | None = None
    requantizes: bool = False
    imatrix: Path | None = None
    calibration: str | None = None
    calibration_tokens: int = CALIBRATION_TOKENS
    out: Path | None = None
    name: str | None = None
    n_threads: int = 1


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """What there is now, and what it took."""

    id: str | None
    path: str
    card: Card
    seconds: float
    calibration_seconds: float | None
    planned_peak_bytes: int
    peak_bytes: int
    calibration_planned_bytes: int | None
    calibration_peak_bytes: int | None


class Watcher(Protocol):
    """Who is told how far it is."""

    def stage(self, text: str) -> None: ...
    def progress(self, done: int, total: int) -> None: ...
    def planned(self, job: Job, peak_bytes: int) -> None: ...


def make(asked: Asked, library: Library, budget: Budget, watcher: Watcher) -> Made:
    """Raises InsufficientDisk and InsufficientMemory with the numbers, Conflict for what is there already,
    BadModelFile and ConfigError for what cannot be quantized so. Nothing is left of what failed."""
    kind, _ = file_kind(asked.kind)
    check_utf8(asked.model.path)
    if asked.out is not None and asked.out.suffix.lower() != ".gguf":
        raise ConfigError(f"--out {asked.out}: expected a name that ends in .gguf", param="out")
    model_id = None if asked.out else variant_id(asked.model, kind, asked.name)
    check_free(library, model_id, asked.out)
    text = calibration_text(asked.calibration) if asked.calibration else None
    with made_in(library, model_id, asked.out) as folder:
        started_s = time.monotonic()
        source = _as_gguf(asked, kind, folder, budget, watcher)
        wish = Wish(kind, asked.embeddings, asked.head, asked.requantizes, chat_template=asked.model.chat_template)
        wish = wish._replace(is_exported=asked.model.format == "hf")
        job = job_of(source, asked.model.id, wish)
        check_disk(folder, job.file_bytes)
        seen = _calibrated(asked, source, text, folder, budget, watcher) if text else None
        calibrated_s = time.monotonic()
        imatrix_path = folder / IMATRIX_FILE if text else asked.imatrix
        card_of_matrix = None
        if imatrix_path is not None:
            matrix = read_imatrix(imatrix_path)
            card_of_matrix = imatrix_card(imatrix_path, matrix, text, seen)
            note = card_of_matrix.text_name or card_of_matrix.name
            job = job_of(source, asked.model.id, wish._replace(imatrix=matrix, imatrix_note=note))
        peak_bytes = max(job.peak_bytes(status_bytes("VmRSS"), asked.n_threads), status_bytes("VmHWM"))
        check_memory(peak_bytes - status_bytes("VmRSS"), budget, f"Quantizing '{asked.model.id}'")
        check_disk(folder, job.file_bytes)
        watcher.planned(job, peak_bytes)
        file_name = asked.out.name if asked.out else f"{(model_id or '').replace(':', '-')}.gguf"
        staged = folder / file_name
        watcher.stage("quantizing")
        write(job, staged, n_threads=asked.n_threads, progress=watcher.progress)
        watcher.stage("checking")
        check_result(staged, job)
        card = card_of(
            job,
            staged,
            file_name=file_name,
            sha256=sha256_of([staged]),
            source_sha256=sha256_of(job.sources),
            imatrix=card_of_matrix,
            made_at=now_utc(),
        )
        (folder / CARD_JSON).write_bytes(as_json(card))
        (folder / CARD_TEXT).write_text(as_markdown(card), encoding="utf-8")
        path = _deliver(asked, library, model_id, folder, staged, card)
    return Made(
        id=model_id,
        path=str(path),
        card=card,
        seconds=round(time.monotonic() - (calibrated_s if text else started_s), 2),
        calibration_seconds=round(calibrated_s - started_s, 2) if text else None,
        planned_peak_bytes=peak_bytes,
        peak_bytes=status_bytes("VmHWM"),
        calibration_planned_bytes=seen.planned_bytes if seen else None,
        calibration_peak_bytes=seen.peak_bytes if seen else None,
    )


def variant_id(model: ModelFile, kind: str, name: str | None = None) -> str:
    """`smollm2-135m:q4_k_m`: the model's id, without the kind that it is of."""
    if name is not None:
        return _as_id(name, "--name")
    kinds = "|".join(sorted((*FILE_KINDS, "q5_k", "q4_k", "q3_k"), key=len, reverse=True))
    return f"{_as_id(_without_kind(model.id, kinds), 'the model')}:{kind}"


def _as_id(text: str, what: str) -> str:
    try:
        return model_id_of(text)
    except LayaError as error:
        raise ConfigError(f"{what}: {error.message} Say another --name, or --out FILE.", param="name") from None


def _without_kind(name: str, kinds: str) -> str:
    return re.sub(rf"[-._:]({kinds})$", "", name, flags=re.IGNORECASE) or name


def check_free(library: Library, model_id: str | None, out: Path | None) -> None:
    if out is not None:
        check_utf8(out)
        if out.exists():
            raise Conflict(f"{out} is there already; remove it first.", param="out")
        if not out.parent.is_dir():
            raise Conflict(f"--out {out}: there is no folder {out.parent}.", param="out")
    elif model_id is not None:
        if library.folder(model_id).exists():
            raise Conflict(f"'{model_id}' is there already: `laya rm {model_id}` first, or choose another --name.")
        for model in (*library.models(), *shipped_models()):
            if model_id in (model.id, *model.aliases):
                raise Conflict(f"'{model_id}' is a name of '{model.id}' already: choose another --name.", param="name")


def card_paths(out: Path) -> tuple[Path, Path]:
    """Where the cards of a file outside the store lie."""
    return out.with_name(f"{out.stem}.card.json"), out.with_name(f"{out.stem}.card.md")


@contextmanager
def made_in(library: Library, model_id: str | None, out: Path | None) -> Iterator[Path]:
    """An empty folder on the disk of the result, and gone after."""
    path = out.with_name(f".{out.name}{_PART}") if out else library.scratch_path(f"quantize {model_id}")
    others = out.parent.glob(f".*{_PART}") if out else library.scratch_paths()
    with scratch_folder(path, others, str(out or model_id)) as folder:
        check_free(library, model_id, out)  # another process may have been at it until now
        yield folder


def _as_gguf(asked: Asked, kind: str, folder: Path, budget: Budget, watcher: Watcher) -> Path:
    """The model's file; of a Hugging Face folder, one that is exported from it in F32, which loses nothing."""
    model = asked.model
    if model.format == "gguf":
        return model.path
    most_bytes = 2 * model.file_bytes  # bfloat16 becomes F32
    check_disk(folder, 2 * most_bytes)
    check_memory(2 * most_bytes + _EXPORTER_BYTES, budget, f"Exporting '{model.id}'")
    watcher.stage("exporting to GGUF")
    out = folder / f"{model_id_of(model.id)}-f32.gguf"
    words = [sys.executable, "-m", "laya.modeling.export", str(model.path), "--to", "gguf", "--type", "f32"]
    words += ["--out", str(out), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, preexec_fn=die_with_parent)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2].removeprefix("laya export: ")
        raise EngineFailed(f"'{model.id}' cannot be exported to GGUF: {last}")
    return out


def _calibrated(asked: Asked, source: Path, text: Text, folder: Path, budget: Budget, watcher: Watcher) -> Calibrated:
    watcher.stage("calibrating")
    return calibrate(
        source,
        text,
        folder,
        budget,
        name=asked.model.id,
        most_tokens=asked.calibration_tokens,
        n_threads=asked.n_threads,
        progress=watcher.progress,
    )


def _deliver(asked: Asked, library: Library, model_id: str | None, folder: Path, staged: Path, card: Card) -> Path:
    check_free(library, model_id, asked.out)
    if asked.out is not None:
        for name, path in zip((CARD_JSON, CARD_TEXT), card_paths(asked.out), strict=True):
            os.replace(folder / name, path)
        os.replace(staged, asked.out)  # last: it stands for the whole
        return asked.out
    assert model_id is not None
    for path in folder.iterdir():
        if path.name not in (staged.name, CARD_JSON, CARD_TEXT, IMATRIX_FILE):
            path.unlink()  # an exported source
    of_source = library.manifest(asked.model.id) if asked.model.origin == "pulled" else None
    manifest = Manifest(
        id=model_id,
        source=f"laya quantize {asked.model.id} --to {card.kind}",
        format="gguf",
        files=(StoredFile(name=staged.name, file_bytes=card.file_bytes, sha256=card.sha256),),
        pulled_at=card.made_at,
        aliases=() if asked.name else tuple(f"{alias}:{card.kind}" for alias in asked.model.aliases),
        licence=of_source.licence if of_source else None,
    )
    return library.commit(folder, manifest).path
