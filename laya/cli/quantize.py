"""Owns: `laya quantize`: what is asked, how far it is, and what was made. The work is laya.quantization's."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from laya.cli.client import ServerClient
from laya.cli.lab import interruptible
from laya.cli.output import shown
from laya.config import Config, load_config
from laya.errors import ConfigError, LayaError, NoServer
from laya.lab_progress import Progressing
from laya.memory import Budget, Machine
from laya.models import Library, resolve, size_text
from laya.quantization.calibration import CALIBRATION_TOKENS
from laya.quantization.card import kept_lines
from laya.quantization.folder_card import kept_groups, quality_text
from laya.quantization.job import Job
from laya.quantization.kinds import FILE_KINDS, FOLDER_KINDS, file_kind, tensor_type
from laya.quantization.make import Asked, Made, make
from laya.quantization.make_folder import FolderAsked, FolderMade, check_installed, make_folder

_CALIBRATION_NEEDS = ("numpy", "gguf")
_EXPORT_NEEDS = ("torch", "transformers", "safetensors", "gguf")
Flag = typer.Option


def quantize(
    model: Annotated[str, typer.Argument(help="A GGUF model, best in F16 or F32, or a Laya model's folder.")],
    to: Annotated[str, Flag("--to", help=f"{' '.join((*FILE_KINDS, *FOLDER_KINDS))}.")],
    out: Annotated[Path | None, Flag("--out", help="A file in place of the store of models.")] = None,
    name: Annotated[str | None, Flag("--name", help="The id in the store; default MODEL:TYPE.")] = None,
    calibration: Annotated[
        str | None, Flag("--calibration", help="A text, or `python`: weigh what the model uses on it.")
    ] = None,
    calibration_tokens: Annotated[
        int, Flag("--calibration-tokens", min=512, help="The most tokens of it.")
    ] = CALIBRATION_TOKENS,
    imatrix: Annotated[Path | None, Flag("--imatrix", help="An importance matrix of llama.cpp's.")] = None,
    embeddings: Annotated[str | None, Flag("--embeddings", help="The type of the token embeddings.")] = None,
    head: Annotated[str | None, Flag("--head", help="The type of the output matrix.")] = None,
    requantize: Annotated[bool, Flag("--requantize", help="Also a model that is quantized already.")] = False,
    group_size: Annotated[
        int | None, Flag("--group-size", help="Of awq and gptq: weights that share a scale; default the largest.")
    ] = None,
    threads: Annotated[int | None, Flag("--threads", min=1, help="Default: all that engines may use.")] = None,
    as_json: Annotated[bool, Flag("--json", help="Print JSON.")] = False,
    config_file: Annotated[Path | None, Flag("--config", help="Default: ./config.yaml if there is one.")] = None,
) -> None:
    """Make a smaller variant of a model: llama.cpp's own types, or AWQ and GPTQ; routers untouched, planned first."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if to.lower() in FOLDER_KINDS:
        given = {"--name": name, "--imatrix": imatrix, "--embeddings": embeddings, "--head": head}
        _check_only_folder(to, [flag for flag, value in given.items() if value is not None])
        config = load_config(config_file, os.environ)
        check_installed()
        found = resolve(model, models_dir=Path(config.models_dir))
        folder = FolderAsked(
            model=found,
            kind=to.lower(),
            out=out.expanduser() if out else Path(config.models_dir) / f"{found.id}-{to.lower()}",
            group_size=group_size,
            calibration=calibration,
            calibration_tokens=calibration_tokens,
            n_threads=threads or Machine().cores(),
        )
        budget = _budget(config, console)
        with _watcher(console, budget, as_json=as_json) as watcher:
            folder_made = make_folder(folder, Library(), budget, watcher)
        if as_json:
            print(json.dumps(msgspec.to_builtins(folder_made)))
        else:
            _show_folder(Console(highlight=False, soft_wrap=True), folder_made)
        return
    kind, _ = file_kind(to)
    if group_size is not None:
        raise ConfigError(f"--group-size is of {' and '.join(FOLDER_KINDS)}; {kind} has its own.", param="group_size")
    types = tensor_type("--embeddings", embeddings), tensor_type("--head", head)
    if out is not None and name is not None:
        raise ConfigError("--name is of the store; with --out the file's name is its name.", param="name")
    if calibration is not None and imatrix is not None:
        raise ConfigError("--imatrix is what --calibration computes: give one of them.", param="imatrix")
    config = load_config(config_file, os.environ)
    found = resolve(model, models_dir=Path(config.models_dir))
    if calibration is not None:
        _check_python("--calibration", _CALIBRATION_NEEDS)
    if found.format != "gguf":
        _check_python("A Hugging Face folder", _EXPORT_NEEDS)
    budget = _budget(config, console)
    asked = Asked(
        model=found,
        kind=kind,
        embeddings=types[0],
        head=types[1],
        requantizes=requantize,
        imatrix=imatrix,
        calibration=calibration,
        calibration_tokens=calibration_tokens,
        out=out.expanduser() if out else None,
        name=name,
        n_threads=threads or Machine().cores(),
    )
    with _watcher(console, budget, as_json=as_json) as watcher:
        made = make(asked, Library(), budget, watcher)
    for warning in made.card.warnings:
        console.print(f"[yellow]note:[/] {shown(warning)}")
    if as_json:
        print(json.dumps(msgspec.to_builtins(made)))
    else:
        _show(Console(highlight=False, soft_wrap=True), made)


def _check_only_folder(to: str, flags: list[str]) -> None:
    if flags:
        raise ConfigError(f"{flags[0]} is of GGUF files; --to {to} writes a folder.", param=flags[0].lstrip("-"))


def _check_python(what: str, needed: tuple[str, ...]) -> None:
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{what} needs {', '.join(missing)}, which this Python does not have: pip install 'laya-llm[torch]'"
        )


def _budget(config: Config, console: Console) -> Budget:
    """What is free here now; where a server of Laya's runs here, no more than its ledger has not given away."""
    budget = Machine().budget(config.memory.budget)
    client = None
    try:
        client = ServerClient()
        memory: dict[str, Any] = client.get("/admin/state", timeout_s=5.0)["memory"]
        free = max(0, int(memory["budget_bytes"]) - int(memory["reserved_bytes"]))
    except NoServer:
        return budget
    except (LayaError, KeyError, TypeError, ValueError) as error:
        console.print(f"[dim]{shown(f'The ledger of the server here was not asked: {error}')}[/]")
        return budget
    finally:
        if client is not None:
            client.close()
    if free >= budget.bytes:
        return budget
    return msgspec.structs.replace(budget, bytes=free, limit=f"the ledger of {client.url}")


class _Watcher:
    """What is planned is said before the first byte is written."""

    def __init__(self, console: Console, progress: Progressing, budget: Budget) -> None:
        self._console, self._budget = console, budget
        self.stage = progress.stage
        self.progress = progress.update

    def planned(self, job: Job, peak_bytes: int) -> None:
        self._console.print(
            f"{shown(job.name)}, {job.source_type}: {size_text(job.source_bytes)} -> {job.kind}: "
            f"{size_text(job.file_bytes)} on disk, {job.bits_per_weight:.2f} bits a weight; "
            f"takes {size_text(peak_bytes)} of {size_text(self._budget.bytes)} of memory"
        )

    def planned_folder(self, file_bytes: int, peak_bytes: int) -> None:
        self._console.print(
            f"about {size_text(file_bytes)} on disk; takes up to {size_text(peak_bytes)} of "
            f"{size_text(self._budget.bytes)} of memory"
        )


@contextmanager
def _watcher(console: Console, budget: Budget, *, as_json: bool) -> Iterator[_Watcher]:
    with (
        interruptible("quantize", "models and files are as they were"),
        Progressing(console, is_silent=as_json) as progress,
    ):
        yield _Watcher(console, progress, budget)


def _show(console: Console, made: Made) -> None:
    card = made.card
    console.print(f"[bold]{shown(made.id or card.file)}[/]   {card.kind}, {size_text(card.file_bytes)}")
    types = ",  ".join(f"{kind} {of['count']} ({size_text(of['bytes'])})" for kind, of in card.types.items())
    share = card.quantized_share_of_f16
    of_f16 = f"{share:.3f}, the quantized tensors; {card.bits_per_weight:.2f} bits a weight" if share else None
    memory = f"{size_text(made.peak_bytes)} of memory ({size_text(made.planned_peak_bytes)} planned)"
    lines = {
        "file": made.path,
        "sha256": card.sha256,
        "tensors": types,
        "of F16": of_f16,
        "kept": ",  ".join(kept_lines(card.kept)),
        "took": f"{made.seconds:.1f} s, {memory}",
    }
    for title, text in lines.items():
        if text:
            console.print(f" [dim]{title:9}[/] {shown(text)}")
    if made.id:
        console.print(f" [dim]{'serve':9}[/] laya serve {shown(made.id)}")


def _show_folder(console: Console, found: FolderMade) -> None:
    card, made = found.card, found.card.made
    console.print(f"[bold]{shown(card.folder)}[/]   {card.kind}, {size_text(card.file_bytes)}")
    counts = ", ".join(f"{count} of {name}" for name, count in made.quantized.items())
    memory = f"{size_text(made.peak_bytes)} of memory (up to {size_text(found.planned_peak_bytes)} planned)"
    lines = {
        "folder": found.path,
        "sha256": card.sha256,
        "quantized": f"{counts}, 4 bits in groups of {card.group_size}; {card.recipe}",
        "of F16": f"{card.quantized_share_of_f16:.3f}, the quantized tensors",
        "kept": ",  ".join(kept_groups(made.kept)),
        "cost": quality_text(made),
        "took": f"{found.seconds:.1f} s, {memory}",
        "plan": f"laya plan {found.path} --vllm",
    }
    for title, text in lines.items():
        console.print(f" [dim]{title:9}[/] {shown(text)}")
