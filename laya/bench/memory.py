"""Owns: the memory bench: plans against the peak resident size of real engines, cell by cell.

Each cell loads a model with exactly the planned settings, fills one sequence to the last token, puts all sequences to
work at once, then holds all answers to a JSON schema, and compares the whole plan with the child's peak: llama.cpp's
VmHWM, or the most that vLLM's processes were seen to hold (memory_vllm.py). Layer: the engine's process; load: stated
in each cell. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from laya.bench.generated_models import generated
from laya.bench.hardware import hardware
from laya.bench.help import description
from laya.bench.memory_drive import drive
from laya.bench.memory_speed import counts, judge, words
from laya.bench.memory_vllm import VllmCell, measure_vllm, vllm_cells
from laya.errors import ConfigError, EngineFailed
from laya.memory import Machine, plan_file
from laya.memory.rates import MachineRates
from laya.models import resolve
from laya.types import MIB, AskedSettings

SMALL_TOTAL_BYTES = 160 * MIB  # below this a share says little, and the band is in bytes
BAND_BYTES, BAND_SHARE = 16 * MIB, 1.10
SMOLLM2 = "smollm2"


class Cell(NamedTuple):
    """One measurement: a model by name (smollm2, or one of generated_models.SHAPES) and what is asked of it."""

    model: str
    asked: AskedSettings

    @property
    def words(self) -> str:
        asked = self.asked
        parts = [f"{self.model} {asked.max_num_seqs} x {asked.max_seq_len} {asked.kv_cache_dtype}"]
        parts += [f"pool {asked.kv_pool_tokens}"] * (asked.kv_pool_tokens is not None)
        if asked.prompt_cache_bytes:
            parts += [f"prompt cache {asked.prompt_cache_bytes // MIB} MiB"]
        parts += ["not mapped"] * (not asked.mmap) + [asked.task] * (asked.task != "chat")
        return ", ".join(parts)


def asked_cell(model: str, seqs: int, length: int, kv: str = "f16", **others: Any) -> Cell:
    return Cell(model, AskedSettings(max_num_seqs=seqs, max_seq_len=length, kv_cache_dtype=kv, **others))


# Context 512 to 32768, 1 to 8 sequences, f16 and q8_0, mapped and not. Long cells go to models of few active
# parameters: a prompt of 32768 tokens would take smollm2 a quarter of an hour.
CELLS: tuple[Cell, ...] = (
    asked_cell(SMOLLM2, 1, 512),
    asked_cell(SMOLLM2, 1, 2048, mmap=False),
    asked_cell(SMOLLM2, 2, 2048, "q8_0"),
    asked_cell(SMOLLM2, 4, 1024, kv_pool_tokens=2048),
    asked_cell(SMOLLM2, 8, 512, "q8_0", mmap=False),
    asked_cell(SMOLLM2, 8, 4096),
    asked_cell(SMOLLM2, 2, 1024, prompt_cache_bytes=48 * MIB),
    asked_cell(SMOLLM2, 2, 512, task="embed"),
    asked_cell("dense", 1, 2048),
    asked_cell("dense", 1, 4096, "q8_0", mmap=False),
    asked_cell("dense", 4, 2048, mmap=False),
    asked_cell("dense", 8, 4096),
    asked_cell("dense", 2, 2048, prompt_cache_bytes=64 * MIB),
    asked_cell("moe", 1, 512, mmap=False),
    asked_cell("moe", 1, 8192),
    asked_cell("moe", 2, 4096, "q8_0"),
    asked_cell("moe", 4, 4096, "q8_0", mmap=False),
    asked_cell("moe", 8, 2048),
    asked_cell("moe", 4, 4096, kv_pool_tokens=8192),
    asked_cell("window", 1, 512),
    asked_cell("window", 1, 8192, "q8_0"),
    asked_cell("window", 2, 8192, mmap=False),
    asked_cell("window", 8, 2048, "q8_0", mmap=False),
    asked_cell("window", 4, 16384),
    asked_cell("window", 2, 2048, "q8_0", prompt_cache_bytes=32 * MIB),
    asked_cell("oss", 2, 4096),
    asked_cell("latent", 2, 4096),
    asked_cell("latent", 4, 1024, "q8_0", mmap=False),
    asked_cell("delta", 1, 2048),
    asked_cell("delta", 4, 2048, mmap=False),
    asked_cell("delta", 2, 2048, prompt_cache_bytes=32 * MIB),
    asked_cell("long", 1, 32768),
    asked_cell("long", 1, 16384, "q8_0", mmap=False),
    asked_cell("long", 2, 32768, mmap=False),
    asked_cell("long", 4, 8192, "q8_0"),
    asked_cell("long", 8, 32768),
)


def main(argv: list[str] | None = None) -> int:
    """`laya bench memory [--engine vllm --model FOLDER] [--json]`: 0 when every cell is in its band, else 1."""
    parser = argparse.ArgumentParser(prog="laya bench memory", description=description(__doc__.partition("\n")[0]))
    parser.add_argument("--engine", choices=("llamacpp", "vllm"), default="llamacpp")
    parser.add_argument("--model", action="append", type=Path, help="vllm: a Hugging Face folder; may be repeated")
    parser.add_argument("--engine-path", type=Path, help="vllm: its environment, where it is not found by itself")
    parser.add_argument("--only", default="", help="only cells whose words hold this text, e.g. 'moe' or 'q8_0'")
    parser.add_argument("--n-threads", type=int, default=1, help="of each engine; 1 does not care who else computes")
    parser.add_argument("--json", action="store_true", help="only the JSON line on stdout, the rest on stderr")
    options = parser.parse_args(argv)
    console = Console(stderr=options.json, highlight=False)
    is_vllm = options.engine == "vllm"
    if is_vllm != bool(options.model):
        raise ConfigError("--engine vllm and --model FOLDER go together: llama.cpp's cells name theirs", param="model")
    known = vllm_cells(options.model) if is_vllm else CELLS
    cells = [cell for cell in known if options.only in cell.words]
    if not cells:
        raise ConfigError(f"No cell's words hold {options.only!r}; they read like {known[0].words!r}.", param="only")
    started = time.monotonic()
    rates, rows = None if is_vllm else _machine_rates(), []
    for cell in cells:
        if isinstance(cell, VllmCell):
            rows.append(measure_vllm(cell, options.n_threads, options.engine_path))
            rows[-1]["in_band"] = in_band(rows[-1]["plan_bytes"], rows[-1]["peak_bytes"])
        else:
            rows.append(measure_cell(cell, model_path(cell.model), options.n_threads, rates))
        console.print(_line(rows[-1]), soft_wrap=True)
    report = {
        "bench": "memory",
        "engine": options.engine,
        "hardware": hardware(),
        "rates": rates,
        **summary(rows),
        "cells": rows,
    }
    if report["speeds"]:
        console.print(f"{report['speeds_within']} of {report['speeds']} speeds lie in their range")
    report["seconds"] = round(time.monotonic() - started, 1)
    print(msgspec.json.encode(report).decode())
    return 0 if report["in_band"] else 1


def _machine_rates() -> MachineRates:
    """What this machine computes in a second, timed in a process of its own: the kernels' library is not quiet."""
    command = [sys.executable, "-m", "laya.bench.rates"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise EngineFailed(f"{' '.join(command)} ended with {done.returncode}: this machine could not be timed.")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=MachineRates)


def model_path(name: str) -> Path:
    """The file of a cell's model; a generated one is made when it is not there. Raises ModelNotPulled for smollm2."""
    smollm2 = resolve(SMOLLM2).path
    return smollm2 if name == SMOLLM2 else generated(name, vocabulary=smollm2)


def measure_cell(cell: Cell, model: Path, n_threads: int, rates: MachineRates | None = None) -> dict[str, Any]:
    """Plan, load, drive, compare: one row of the report. Raises what the planner or the engine raises.

    rates: what this machine computes in a second; None = its speed is not predicted.
    """
    started = time.monotonic()
    asked = msgspec.structs.replace(cell.asked, n_threads=n_threads)
    plan = plan_file(model, asked, Machine().budget(), model_id=cell.model)
    driven, terms = asyncio.run(drive(model, plan)), plan.devices[0].terms
    return {
        "cell": cell.words,
        "settings": plan.settings,
        "plan_bytes": plan.need_bytes,
        "peak_bytes": driven.peak_bytes,
        "ratio": round(plan.need_bytes / driven.peak_bytes, 4),
        "in_band": in_band(plan.need_bytes, driven.peak_bytes),
        "exact": plan.exact,
        "terms": terms,
        "compute_ratio": round(terms["compute"] / driven.engine_bytes["compute"], 3),  # to the engine's own figure
        "driven": driven,
        "speed": judge(model, plan.settings, rates, driven.speed) if rates and driven.speed else None,
        "seconds": round(time.monotonic() - started, 1),
    }


def in_band(plan_bytes: int, peak_bytes: int) -> bool:
    """Never under, and at most 10 % over, or 16 MiB where all is small."""
    most = peak_bytes + BAND_BYTES if peak_bytes < SMALL_TOTAL_BYTES else peak_bytes * BAND_SHARE
    return peak_bytes <= plan_bytes <= most


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The worst of all cells, those under 160 MiB apart, and which are out of their band."""
    large = [row["ratio"] for row in rows if row["peak_bytes"] >= SMALL_TOTAL_BYTES]
    small = [row["plan_bytes"] - row["peak_bytes"] for row in rows if row["peak_bytes"] < SMALL_TOTAL_BYTES]
    compute = [row["compute_ratio"] for row in rows if row["compute_ratio"] is not None]
    return {
        "n_cells": len(rows),
        "in_band": all(row["in_band"] for row in rows),
        "out_of_band": [row["cell"] for row in rows if not row["in_band"]],
        "lowest_ratio": min(large, default=None),
        "highest_ratio": max(large, default=None),
        "small_least_over_bytes": min(small, default=None),
        "small_most_over_bytes": max(small, default=None),
        "least_compute_ratio": min(compute, default=None),
        "most_compute_ratio": max(compute, default=None),
        **counts(rows),
    }


def _line(row: dict[str, Any]) -> str:
    figures = f"plan {row['plan_bytes'] / MIB:7.1f}  peak {row['peak_bytes'] / MIB:7.1f} MiB  {row['ratio']:.3f}"
    band = "in band" if row["in_band"] else "NOT IN BAND"
    speed = f"\n    {words(row['speed'])}" if row["speed"] else ""
    return f"{figures}  {band}  {row['cell']}  ({row['seconds']:.0f} s){speed}"


if __name__ == "__main__":
    sys.exit(main())
