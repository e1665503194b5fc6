"""Owns: where an importance matrix comes from: a file of one, or a text that a process of its own reads with the model.

Built in are `varied`, a set of `laya.texts`, and `python`, which is longer and lies wherever Laya runs: the language's
manual and its library's sources in turn. Neither has anything of the set that models are measured on: a matrix tuned to
that flatters.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple

import msgspec

from laya.engines.child_start import die_with_parent
from laya.errors import ConfigError, EngineFailed, nearest
from laya.memory import Budget, plan_file, read_facts
from laya.memory.engine_facts import built_in_engine
from laya.quantization.card import ImatrixCard
from laya.quantization.given import given_text
from laya.quantization.imatrix import WINDOW_TOKENS, ImportanceMatrix, unseen_experts
from laya.quantization.limits import check_memory
from laya.quantization.quantize import sha256_of
from laya.texts import DEFAULT_SET, load_set, set_names, sources_of
from laya.types import MIB, AskedSettings

BUILT_IN = "python"
CALIBRATION_TOKENS = 16384
IMATRIX_FILE = "imatrix.gguf"
_CALIBRATOR_BYTES = 96 * MIB  # of Python with numpy and gguf, beside the engine
_PIECE_CHARACTERS = 2000
_MOST_CHARACTERS = 4_000_000


class Text(NamedTuple):
    """To calibrate on."""

    name: str
    raw: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()


class Calibrated(NamedTuple):
    """What the process told at its end, and what was planned for it."""

    n_tokens: int
    peak_bytes: int
    planned_bytes: int


def calibrate(
    source: Path,
    text: Text,
    folder: Path,
    budget: Budget,
    *,
    name: str,
    most_tokens: int,
    n_threads: int,
    progress: Callable[[int, int], None],
) -> Calibrated:
    """Write `IMATRIX_FILE` into the folder.

    Raises InsufficientMemory before it begins, EngineFailed with what the process said.
    """
    settings = AskedSettings(max_seq_len=WINDOW_TOKENS, max_num_seqs=1, n_threads=n_threads, gpu_layers=0)
    engine = msgspec.structs.replace(built_in_engine(), n_batch=WINDOW_TOKENS)
    plan = plan_file(source, settings, budget, model_id=name, engine=engine)
    logits_bytes = 2 * 4 * WINDOW_TOKENS * read_facts(source).shape.n_vocab  # computed, and kept
    planned_bytes = plan.ram.total_bytes + logits_bytes + _CALIBRATOR_BYTES
    check_memory(planned_bytes, budget, f"Calibrating '{name}'")
    own, faults = folder / "calibration.txt", folder / "calibration.log"
    own.write_bytes(text.raw)
    words = [sys.executable, "-m", "laya.quantization.calibrate", str(source), str(own), str(folder / IMATRIX_FILE)]
    words += ["--text-name", text.name, "--tokens", str(most_tokens), "--threads", str(n_threads)]
    told: dict[str, int] = {}
    with (
        faults.open("wb") as log,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, preexec_fn=die_with_parent) as child,
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                told = json.loads(line)
                if "total" in told:
                    progress(told["done"], told["total"])
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        last = faults.read_text(errors="replace").strip().rpartition("\n")[2]
        raise EngineFailed(f"Calibrating '{name}' failed: {last or f'it ended with {child.returncode}'}")
    own.unlink()
    faults.unlink()
    return Calibrated(told["n_tokens"], told["peak_bytes"], planned_bytes)


def imatrix_card(path: Path, matrix: ImportanceMatrix, text: Text | None, seen: Calibrated | None) -> ImatrixCard:
    """text, seen: where it was computed here."""
    return ImatrixCard(
        name=path.name,
        sha256=sha256_of([path]),
        n_tensors=len(matrix.tensors),
        n_chunks=matrix.n_chunks,
        text_name=text.name if text else None,
        text_sha256=text.sha256 if text else None,
        text_tokens=seen.n_tokens if seen else None,
        unseen_experts=dict(unseen_experts(matrix)),
    )


def calibration_text(name: str) -> Text:
    """Its name, and it. Raises ConfigError for a file that is none, and for a text that models are measured on."""
    if name == BUILT_IN:
        return Text(BUILT_IN, _of_python().encode())
    if name in set_names() and name != DEFAULT_SET:
        return Text(name, "\n\n".join(document.text for document in load_set(name)).encode())
    if name == DEFAULT_SET:
        raise ConfigError(
            f"--calibration {name}: models are measured on that set, and would look better than they are. "
            f"`varied` and `{BUILT_IN}` are built in; or give a file.",
            param="calibration",
        )
    built_in = [each for each in (BUILT_IN, *set_names()) if each != DEFAULT_SET]
    close = nearest(name, built_in)
    hint = f" Did you mean '{close}'?" if close else f" Built in: {', '.join(built_in)}."
    return Text(Path(name).name, given_text("--calibration", name, _MOST_CHARACTERS, hint).encode())


def _of_python() -> str:
    measured = {Path(str(s["origin"]["file"])).name for name in set_names() for s in sources_of(name) if "origin" in s}
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    sources = "\n".join(file.read_text("utf-8", "ignore") for file in library if file.name not in measured)
    manual = "\n\n".join(topics.topics[key] for key in sorted(topics.topics))
    step = _PIECE_CHARACTERS
    pieces = (text[at : at + step] for at in range(0, len(manual), step) for text in (manual, sources))
    return "\n\n".join(pieces)[:_MOST_CHARACTERS]
