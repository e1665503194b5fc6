"""Owns: the memory bench: plans against the peak resident size (VmHWM) of real llama.cpp children, in one table.

Each row loads the model with exactly the planned settings, drives one sequence with a long prompt, then all sequences
at once, and compares. No answer is held to a grammar, so the ratio leaves that term of the plan out; the row has it.
Layer: the engine's process; load: stated in each row. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from laya.bench.hardware import hardware
from laya.engines.log import EngineLog
from laya.engines.process import EngineProcess, MemoryReading
from laya.engines.settings import EngineSettings
from laya.memory import Machine, plan_file
from laya.types import MIB, AskedSettings, Plan

PROMPT_TOKENS = 2000
SHORT_PROMPT_TOKENS = 256
GENERATED_TOKENS = 16
SMALL_TOTAL_BYTES = 160 * MIB  # below this a share says little, and the band is in bytes
BAND_BYTES, BAND_SHARE = 16 * MIB, 1.10

ROWS: tuple[dict[str, Any], ...] = (
    {"max_num_seqs": 1, "max_seq_len": 512},
    {"max_num_seqs": 1, "max_seq_len": 2048},
    {"max_num_seqs": 1, "max_seq_len": 2048, "mmap": False},
    {"max_num_seqs": 1, "max_seq_len": 8192},
    {"max_num_seqs": 1, "max_seq_len": 8192, "kv_cache_dtype": "q8_0"},
    {"max_num_seqs": 2, "max_seq_len": 8192},
    {"max_num_seqs": 2, "max_seq_len": 2048, "kv_cache_dtype": "q8_0"},
    {"max_num_seqs": 4, "max_seq_len": 2048, "kv_pool_tokens": 4096},
    {"max_num_seqs": 4, "max_seq_len": 8192},
    {"max_num_seqs": 4, "max_seq_len": 8192, "kv_pool_tokens": 16384, "kv_cache_dtype": "q8_0"},
    {"max_num_seqs": 8, "max_seq_len": 512},
    {"max_num_seqs": 8, "max_seq_len": 2048, "kv_cache_dtype": "q4_0"},
    {"max_num_seqs": 8, "max_seq_len": 4096},
    {"max_num_seqs": 2, "max_seq_len": 512, "task": "embed"},
)


def main(argv: list[str] | None = None) -> None:
    """`python -m laya.bench.memory MODEL.gguf [--rows 3]`."""
    parser = argparse.ArgumentParser(description="Compare memory plans with what real engines come to hold.")
    parser.add_argument("model", type=Path, help="a .gguf file of about a hundred million parameters or fewer")
    parser.add_argument("--rows", type=int, default=len(ROWS), help="only the first rows")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    options = parser.parse_args(argv)
    console = Console(stderr=options.json, highlight=False)
    rows = []
    for asked in ROWS[: options.rows]:
        row = measure_row(options.model, asked)
        rows.append(row)
        words = " ".join(f"{name} {value}" for name, value in asked.items())
        figures = f"plan {row['driven_bytes'] / MIB:7.1f}  peak {row['peak_bytes'] / MIB:7.1f} MiB  {row['ratio']:.3f}"
        console.print(f"{figures}  {'in band' if row['in_band'] else 'NOT IN BAND'}  {words}", soft_wrap=True)
    print(json.dumps({"bench": "memory", "hardware": hardware(), "model": options.model.name, "rows": rows}))


def measure_row(model: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """One row: plan, load, drive, compare. Raises what the planner or the engine raises."""
    plan = plan_file(model, AskedSettings(**asked), Machine().budget(), model_id=model.stem)
    peak_bytes = asyncio.run(peak_of(model, plan)).peak_bytes
    terms = plan.devices[0].terms
    driven_bytes = plan.need_bytes - terms.get("grammar", 0)
    return {
        "asked": asked,
        "terms": terms,
        "plan_bytes": plan.need_bytes,
        "driven_bytes": driven_bytes,  # the plan without what was not driven
        "peak_bytes": peak_bytes,
        "ratio": round(driven_bytes / peak_bytes, 4),
        "in_band": in_band(driven_bytes, peak_bytes),
    }


def in_band(plan_bytes: int, peak_bytes: int) -> bool:
    """Never under, and at most 10 % over, or 16 MiB where all is small."""
    if peak_bytes < SMALL_TOTAL_BYTES:
        return peak_bytes <= plan_bytes <= peak_bytes + BAND_BYTES
    return peak_bytes <= plan_bytes <= peak_bytes * BAND_SHARE


async def peak_of(model: Path, plan: Plan) -> MemoryReading:
    """Load as planned, drive one sequence with a long prompt and then all at once; the child's memory after that."""
    args = {"pooling_type": "mean"} if plan.settings.task == "embed" else {}
    settings = EngineSettings(model_id="bench", path=model, planned=plan.settings, args=args)
    engine = EngineProcess(settings, EngineLog())
    address = await engine.start()
    try:
        base_url = f"http://{address.host}:{address.port}"
        headers = {"authorization": f"Bearer {address.api_key}"}
        async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=None, trust_env=False) as client:
            await _ask(client, plan, 0, PROMPT_TOKENS)
            numbers = range(1, plan.settings.max_num_seqs + 1)
            await asyncio.gather(*(_ask(client, plan, number, SHORT_PROMPT_TOKENS) for number in numbers))
        reading = engine.measure()
        assert reading is not None, "the engine ended while it was measured"
        return reading
    finally:
        await engine.stop()


async def _ask(client: httpx.AsyncClient, plan: Plan, number: int, n_tokens: int) -> None:
    """One request of token ids, so that its length is exact; `number` makes it share no prefix with another."""
    is_embed = plan.settings.task == "embed"
    n_tokens = min(n_tokens, plan.settings.max_seq_len - GENERATED_TOKENS)
    ids = [100 + (index * 7919 + number * 104729) % 3000 for index in range(n_tokens)]
    if is_embed:
        response = await client.post("/v1/embeddings", json={"input": [ids]})
    else:
        body = {"prompt": ids, "n_predict": GENERATED_TOKENS, "ignore_eos": True, "cache_prompt": False}
        response = await client.post("/completion", json=body)
    response.raise_for_status()


if __name__ == "__main__":
    main()
