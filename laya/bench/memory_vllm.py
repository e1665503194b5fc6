"""Owns: the cells of `laya bench memory --engine vllm`, and driving a real vLLM to what its plan allows.

Each cell is planned and started as `laya serve` does it. One sequence is filled to its last token, then all at once
are, with the alternatives of each token asked for, and then all answers are held to a JSON schema. vLLM is several
processes, and no kernel keeps the peak of their sum: it is looked at all the while. Layer: the engine's processes,
asked directly.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

from laya.bench.driving import client_of, peak_of, same, token_ids
from laya.bench.memory_drive import SCHEMA
from laya.config import data_dir, load_config, parse_settings
from laya.config.places import DATABASE
from laya.engines.log import EngineLog
from laya.engines.process import EngineProcess
from laya.engines.vllm import VllmEngineSettings
from laya.errors import ConfigError, EngineFailed
from laya.gateway.corrections import Corrections
from laya.gateway.kind_vllm import VllmKind
from laya.memory import Machine
from laya.types import Plan

SIZES = ((1, 512), (4, 1024), (2, 4096))  # sequences of so many tokens
ANSWER_TOKENS = 32
ALTERNATIVES = 5
LOOK_EVERY_S = 0.05
LOAD_TIMEOUT_S = 900.0


class VllmCell(NamedTuple):
    """One measurement."""

    folder: Path
    n_seqs: int
    n_tokens: int  # of each

    @property
    def words(self) -> str:
        return f"{self.folder.name} {self.n_seqs} x {self.n_tokens}"


def vllm_cells(folders: Iterable[Path]) -> list[VllmCell]:
    """All sizes that each model was trained for. Raises ConfigError for what is no Hugging Face folder."""
    return [
        VllmCell(folder, n_seqs, n_tokens)
        for folder in folders
        for n_seqs, n_tokens in SIZES
        if n_tokens <= _said(folder).get("max_position_embeddings", n_tokens)
    ]


def measure_vllm(cell: VllmCell, n_threads: int, engine_path: Path | None) -> dict[str, Any]:
    """Plan, load, drive, compare: a row of the report, but for its band. Raises what plan and engine raise."""
    started = time.monotonic()
    settings, plan = planned(cell, n_threads, engine_path)
    seen = asyncio.run(drive_vllm(settings, _said(cell.folder)["vocab_size"]))
    return {
        "cell": cell.words,
        "settings": plan.settings,
        "plan_bytes": plan.need_bytes,
        "peak_bytes": seen["peak_bytes"],
        "ratio": round(plan.need_bytes / seen["peak_bytes"], 4),
        "exact": plan.exact,
        "terms": plan.devices[0].terms,
        "compute_ratio": None,  # vLLM does not tell it of a CPU
        "driven": seen,
        "speed": None,
        "seconds": round(time.monotonic() - started, 1),
    }


def planned(cell: VllmCell, n_threads: int, engine_path: Path | None) -> tuple[VllmEngineSettings, Plan]:
    """What its engine is started with, without what was learned of others on this machine."""
    home, name = data_dir(os.environ), cell.folder.name
    said: dict[str, Any] = {"engine": "vllm", "source": str(cell.folder), "enforce_eager": True}
    said |= {"max_num_seqs": cell.n_seqs, "max_seq_len": cell.n_tokens, "n_threads": n_threads}
    said |= {"load_timeout_s": LOAD_TIMEOUT_S} | ({"engine_path": str(engine_path)} if engine_path else {})
    config = load_config(None, {})
    config = msgspec.structs.replace(config, models={name: parse_settings(said)})
    kind, model = VllmKind(), config.for_model(name)
    file = kind.find(model, models_dir=Path(config.models_dir), home=home)
    kind.check(model, file)
    budget = Machine().budget()
    plan = kind.plan(model, file, model.asked(), budget, Corrections(home / f"no-{DATABASE}"))
    if len(plan.devices) > 1:
        raise ConfigError("This bench measures RAM: what vLLM takes of GPUs is in its log.", param="engine_path")
    if not plan.fits:
        raise EngineFailed(f"{cell.words} does not fit: it needs {plan.need_bytes} of {budget.bytes} bytes.")
    return msgspec.structs.replace(kind.start(model, file, plan, None), ceiling_bytes=None), plan


async def drive_vllm(settings: VllmEngineSettings, n_vocab: int) -> dict[str, Any]:
    """Bytes held when it was ready, with one sequence full, with all full, and at most."""
    engine = EngineProcess(settings, EngineLog())
    looking = asyncio.ensure_future(_look(engine))
    try:
        start_s = time.monotonic()
        address = await engine.start()
        seen: dict[str, Any] = {"load_s": round(time.monotonic() - start_s, 1), "loaded_bytes": peak_of(engine)}
        async with client_of(address) as client:
            drive = _Drive(client, settings, n_vocab)
            await drive.check()
            await drive.fill([0])
            seen["deep_bytes"] = peak_of(engine)
            seen["most_running"] = await drive.fill_all()
            seen["all_bytes"] = peak_of(engine)
            await drive.hold_to_schema()
        if looking.done():  # what nobody looked at has no peak
            looking.result()
        return seen | {"peak_bytes": peak_of(engine)}
    finally:
        looking.cancel()
        await engine.stop()


async def _look(engine: EngineProcess) -> None:
    while True:
        await asyncio.to_thread(engine.measure)
        await asyncio.sleep(LOOK_EVERY_S)


class _Drive:
    """The requests to one engine."""

    def __init__(self, client: httpx.AsyncClient, settings: VllmEngineSettings, n_vocab: int) -> None:
        self._client = client
        self._name = settings.model_id
        self._planned = settings.planned
        self._n_vocab = n_vocab

    async def check(self) -> None:
        told = (await self._client.get("/v1/models")).raise_for_status().json()["data"][0]
        same("max_model_len", told["max_model_len"], self._planned.max_seq_len)

    async def fill(self, numbers: Sequence[int]) -> None:
        """A sequence each to its last token, no two with a beginning in common."""
        await asyncio.gather(*map(self._complete, numbers))

    async def fill_all(self) -> int:
        """As many as are planned at once; how many the engine itself was seen to run."""
        n_seqs = self._planned.max_num_seqs
        filling = asyncio.ensure_future(self.fill(range(1, n_seqs + 1)))
        most = 0
        while not filling.done():
            lines = (await self._client.get("/metrics")).text.splitlines()
            told = [line for line in lines if line.startswith("vllm:num_requests_running")]
            most = max(most, *(int(float(line.rpartition(" ")[2])) for line in told), 0)
            await asyncio.sleep(LOOK_EVERY_S)
        await filling
        same("sequences at work at once", most, n_seqs)
        return most

    async def _complete(self, number: int) -> None:
        n_prompt = self._planned.max_seq_len - ANSWER_TOKENS
        body = {
            "model": self._name,
            "prompt": token_ids(number, n_prompt, self._n_vocab),
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "logprobs": ALTERNATIVES,
        }
        usage = (await self._client.post("/v1/completions", json=body)).raise_for_status().json()["usage"]
        same("tokens", (usage["prompt_tokens"], usage["completion_tokens"]), (n_prompt, ANSWER_TOKENS))

    async def hold_to_schema(self) -> None:
        """All sequences at once; what they say is up to the model."""
        body = {
            "model": self._name,
            "prompt": token_ids(0, ANSWER_TOKENS, self._n_vocab),
            "max_tokens": ANSWER_TOKENS,
            "structured_outputs": {"json": SCHEMA},
        }
        asked = (self._client.post("/v1/completions", json=body) for _ in range(self._planned.max_num_seqs))
        for answer in await asyncio.gather(*asked):
            text = answer.raise_for_status().json()["choices"][0]["text"]
            same("an answer that begins as its schema does", text.lstrip()[:1] in ("{", ""), True)


def _said(folder: Path) -> dict[str, Any]:
    try:
        said = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is no Hugging Face folder: {error}", param="model") from None
    return said if isinstance(said, dict) else {}
