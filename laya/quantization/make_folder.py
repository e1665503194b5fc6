"""Owns: the steps of `laya quantize --to awq|gptq`: refuse, plan, have it made by a process with torch, name it.

The folder gets its name by one rename when it is whole and held to its source; of what failed nothing is left. Knows
no command line and no torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from laya.engines.child_start import die_with_parent
from laya.errors import BadModelFile, ConfigError, EngineFailed
from laya.memory import Budget
from laya.memory.hf import HfFacts, facts_of_hf
from laya.models.library import Library, now_utc
from laya.quantization.calibration import Text, calibration_text
from laya.quantization.folder_card import FolderCard, Made, as_json, as_markdown
from laya.quantization.kinds import FOLDER_KINDS
from laya.quantization.limits import check_disk, check_memory
from laya.quantization.make import CARD_JSON, CARD_TEXT, check_free, made_in
from laya.quantization.published import read_settings, widths_of
from laya.quantization.quantize import sha256_of
from laya.types import MIB, ModelFile

GROUP_SIZES = (128, 64, 32)
NEEDS = ("auto_round", "torch", "transformers", "safetensors", "gguf")
_PROGRAM_BYTES = 900 * MIB  # Python with torch, transformers and AutoRound, before a weight
_LOGITS_BYTES = 4 * 512 * 4  # of four windows, for each token of the vocabulary


class FolderAsked(NamedTuple):
    """group_size: None = the largest that divides the widths of all linear layers."""

    model: ModelFile
    kind: str
    out: Path
    group_size: int | None = None
    calibration: str | None = None
    calibration_tokens: int = 0
    n_threads: int = 1


class FolderMade(msgspec.Struct, frozen=True, kw_only=True):
    """What there is now, and what it took."""

    path: str
    card: FolderCard
    seconds: float
    planned_file_bytes: int
    planned_peak_bytes: int


class FolderWatcher(Protocol):
    """Who is told how far it is."""

    def stage(self, text: str) -> None: ...
    def planned_folder(self, file_bytes: int, peak_bytes: int) -> None: ...


def make_folder(asked: FolderAsked, library: Library, budget: Budget, watcher: FolderWatcher) -> FolderMade:
    """Raises InsufficientDisk and InsufficientMemory with the numbers, Conflict for what is there already, ConfigError
    and BadModelFile for what cannot be quantized so, EngineFailed for a result that is not whole."""
    started_s = time.monotonic()
    source = asked.model.path
    group = _checked(asked)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    check_free(library, None, asked.out)
    text = calibration_text(asked.calibration) if asked.calibration else None
    facts = facts_of_hf(source)
    file_bytes, disk_bytes, peak_bytes = _planned(asked, facts, group, is_laya=_is_laya(source))
    with made_in(library, None, asked.out) as folder:
        check_disk(folder, disk_bytes)
        check_memory(peak_bytes, budget, f"Quantizing '{asked.model.id}'")
        watcher.planned_folder(file_bytes, peak_bytes)
        staged = folder / "model"
        made = _made(asked, folder, staged, group, text, watcher)
        card = _card(asked, staged, group, text, made)
        (staged / CARD_JSON).write_bytes(as_json(card))
        (staged / CARD_TEXT).write_text(as_markdown(card), encoding="utf-8")
        os.replace(staged, asked.out)
    return FolderMade(
        path=str(asked.out),
        card=card,
        seconds=round(time.monotonic() - started_s, 2),
        planned_file_bytes=file_bytes,
        planned_peak_bytes=peak_bytes,
    )


def check_installed() -> None:
    """Raises ConfigError naming what this Python lacks."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--to {' or '.join(FOLDER_KINDS)} needs {', '.join(missing)}, which this Python does not have: "
            "pip install 'laya-llm[quantize]'",
            param="to",
        )


def _checked(asked: FolderAsked) -> int:
    """The group size, of a model that can be quantized so."""
    source = asked.model.path
    if asked.model.format != "hf":
        raise BadModelFile(
            f"--to {asked.kind} takes the folder of a Hugging Face model; {asked.model.id} is a {asked.model.format} "
            "file, of which `--to q4_k_m` makes one of that size.",
            param="model",
        )
    read_settings(source)
    if not (source / "tokenizer.json").is_file():
        raise BadModelFile(f"{source} has no tokenizer.json: what it reads could not be compared.", param="model")
    if _is_laya(source):
        widths: frozenset[int] = frozenset(_laya_widths(source))
    else:
        widths = widths_of(source)
    fitting = [size for size in GROUP_SIZES if all(width % size == 0 for width in widths)]
    if not fitting or (asked.group_size and asked.group_size not in fitting):
        told = f"--group-size {asked.group_size}" if asked.group_size else f"--to {asked.kind}"
        raise ConfigError(
            f"{told}: the linear layers have {', '.join(map(str, sorted(widths)))} inputs; a group must divide them "
            f"all. {'Those that do: ' + ', '.join(map(str, fitting)) if fitting else 'None of 128, 64, 32 does'}.",
            param="group_size",
        )
    return asked.group_size or fitting[0]


def _is_laya(folder: Path) -> bool:
    return bool(read_settings(folder).get("model_type") == "laya")


def _laya_widths(folder: Path) -> tuple[int, ...]:
    """As its Mixtral form will have: its own file has all experts of a layer in one tensor."""
    config = read_settings(folder)
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return config["hidden_size"], config["intermediate_size"], config["num_attention_heads"] * head


def _planned(asked: FolderAsked, facts: HfFacts, group: int, *, is_laya: bool) -> tuple[int, int, int]:
    """Bytes of the result's weights, of the disk and of memory meanwhile, these two from above."""
    n_parameters = facts.weights.n_parameters
    share = sum(facts.weights.layer_bytes) / max(1, facts.weights.total_bytes)
    in_layers = round(n_parameters * share)
    others = n_parameters - in_layers
    linear_bytes = round(in_layers * (4 + 20 / group) / 8)
    logits_bytes = _LOGITS_BYTES * facts.shape.n_vocab
    file_bytes = linear_bytes + 2 * others
    mixtral_bytes = 4 * n_parameters if is_laya else 0
    disk_bytes = mixtral_bytes + file_bytes + linear_bytes + 4 * others + logits_bytes
    # Three times in float32: a Laya model, its Mixtral form and that as saved; a model, its experts one by one; ...
    peak_bytes = 12 * n_parameters + logits_bytes + _PROGRAM_BYTES
    if asked.calibration:  # what goes into and comes out of a layer, before and after, for all tokens
        peak_bytes += 16 * asked.calibration_tokens * facts.shape.n_embd
    return file_bytes, disk_bytes, peak_bytes


def _made(
    asked: FolderAsked, folder: Path, staged: Path, group: int, text: Text | None, watcher: FolderWatcher
) -> Made:
    work, faults = folder / "work", folder / "quantize.log"
    work.mkdir()
    words = [sys.executable, "-m", "laya.quantization.autoround", str(asked.model.path), str(staged), str(work)]
    words += ["--to", asked.kind, "--group-size", str(group), "--threads", str(asked.n_threads)]
    if text is not None:
        own = folder / "calibration.txt"
        own.write_bytes(text.raw)
        words += ["--calibration", str(own), "--calibration-tokens", str(asked.calibration_tokens)]
    told = None
    with (
        faults.open("wb") as log,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, preexec_fn=die_with_parent) as child,
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                said = json.loads(line)
                told = said.get("made")
                if "stage" in said:
                    watcher.stage(said["stage"])
        except BaseException:
            child.kill()
            raise
    if child.returncode or told is None:
        last = faults.read_text(errors="replace").strip().rpartition("\n")[2]
        raise EngineFailed(f"Quantizing '{asked.model.id}' failed: {last or f'it ended with {child.returncode}'}")
    return msgspec.convert(told, Made)


def _card(asked: FolderAsked, staged: Path, group: int, text: Text | None, made: Made) -> FolderCard:
    files = sorted(staged.glob("*.safetensors"))
    sources = sorted(asked.model.path.glob("*.safetensors"))
    recipe = f"AutoRound's rounding, tuned on {made.tuned_on_tokens} tokens" if text else "each weight to the nearest"
    return FolderCard(
        folder=asked.out.name,
        kind=asked.kind,
        group_size=group,
        is_symmetric=asked.kind == "gptq",
        file_bytes=sum(file.stat().st_size for file in files),
        sha256=sha256_of(files),
        quantized_share_of_f16=round(made.quantized_bytes / (2 * made.quantized_weights), 4),
        source=asked.model.id,
        source_bytes=asked.model.file_bytes,
        source_sha256=sha256_of(sources),
        recipe=recipe,
        calibration=text.name if text else None,
        calibration_sha256=text.sha256 if text else None,
        made=made,
        made_at=now_utc(),
    )
