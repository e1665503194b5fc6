"""Owns: driving one real engine to what its plan allows, and what was seen: peak memory, its own buffers, its speed.

Every figure is of the path it names: the child's settings are read back and compared with the plan, the depth is the
number of tokens the engine itself counted, and sequences were at work at the same time or the drive fails.
Layer: the engine's process, asked directly. Knows no cell, no band and no formula.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from laya.engines.log import EngineLog
from laya.engines.process import EngineProcess
from laya.engines.settings import EngineSettings
from laya.errors import EngineFailed
from laya.types import MIB, EngineAddress, Plan, PlannedSettings

GENERATED_TOKENS = 32
SHORT_PROMPT_TOKENS = 96  # of each sequence when all are at work: all must start before the first one ends
VERBOSITY = 4  # at which llama.cpp says what it allocated
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
REFUSED_TEXT = "\n"  # no JSON string may hold it
_BUFFER = re.compile(r"\s(\w+) (model|KV|RS|output|compute) buffer size = +([\d.]+) MiB")
_CACHE = re.compile(r"\( *(\d+) cells, +(\d+) layers, +(\d+)/(\d+) seqs\), K \((\w+)\): +[\d.]+ MiB, V \((\w+)\)")
_FACT = re.compile(r"(?:llama_context:|threadpool init,) +(n_ubatch|n_batch|flash_attn|n_threads) += (\w+)")


class Speed(msgspec.Struct, kw_only=True):
    """How fast the engine was. Seconds are those of its own CPU clock where it computes with one thread.

    Then other programs lengthen nothing but by what they push out of the caches; with more threads it is wall time.
    """

    prompt_tokens: int  # of the deep request; what it reached is these and the generated ones
    first_token_s: float  # from the deep request to its first token
    prefill_tokens_per_s: float
    decode_tokens_per_s: float  # one sequence, its last tokens
    short_tokens: int  # kept by each of all sequences, on average, while all were at work
    decode_all_tokens_per_s: float  # all sequences together
    wall_first_token_s: float
    wall_decode_tokens_per_s: float  # as the engine timed it
    other_cpu_share: float  # of all cores, what other programs took meanwhile


class Driven(msgspec.Struct, kw_only=True):
    """What one engine came to hold, in bytes, and how fast it was."""

    peak_bytes: int  # VmHWM at the end
    loaded_bytes: int  # VmHWM when it was ready
    deep_bytes: int  # after one sequence was full
    all_bytes: int  # after all sequences were at work, before answers held to a schema
    engine_bytes: dict[str, int]  # what the engine's log says it allocated, by kind of buffer
    speed: Speed | None  # None: embeddings were computed, nothing was generated


async def drive(model: Path, plan: Plan) -> Driven:
    """Load `model` as planned; fill one sequence, put all to work, then hold all answers to a schema.

    Raises EngineFailed when the child does not start, dies, or runs with other settings than the plan's.
    """
    settings = plan.settings
    args: dict[str, Any] = {"verbosity": VERBOSITY} | ({"pooling_type": "mean"} if settings.task == "embed" else {})
    log = EngineLog()
    engine = EngineProcess(EngineSettings(model_id="bench", path=model, planned=settings, args=args), log)
    address = await engine.start()
    try:
        lines = log.run_lines()
        async with _client(address) as client:
            await _check_settings(client, settings, lines, _maps(engine, model))
            loaded = _peak(engine)
            load = _Load(client, settings, engine)
            if settings.task == "embed":
                await load.embed()
            else:
                await load.chat()
        return Driven(
            peak_bytes=_peak(engine),
            loaded_bytes=loaded,
            deep_bytes=load.deep_bytes,
            all_bytes=load.all_bytes,
            engine_bytes=_buffers(lines),
            speed=load.speed,
        )
    finally:
        await engine.stop()


def _client(address: EngineAddress) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"http://{address.host}:{address.port}",
        headers={"authorization": f"Bearer {address.api_key}"},
        timeout=None,
        trust_env=False,
        limits=httpx.Limits(max_keepalive_connections=0),  # the engine closes them after a stream without saying so
    )


def _peak(engine: EngineProcess) -> int:
    reading = engine.measure()
    if reading is None:
        raise EngineFailed(f"The engine ended while it was measured: {engine.exit_reason}")
    return reading.peak_bytes


def _maps(engine: EngineProcess, model: Path) -> bool:
    """Whether the child has the model file mapped."""
    return str(model) in Path(f"/proc/{engine.pid}/maps").read_text()


def _buffers(lines: list[str]) -> dict[str, int]:
    """Kind of buffer -> bytes, summed; the mapped, the read and the repacked weights apart."""
    found: dict[str, int] = {}
    for line in lines:
        if match := _BUFFER.search(line):
            device, kind, mib = match[1], match[2].lower(), float(match[3])
            name = kind if kind != "model" else "repack" if "REPACK" in device else "weights"
            found[name] = found.get(name, 0) + round(mib * MIB)
    return found


async def _check_settings(client: httpx.AsyncClient, planned: PlannedSettings, lines: list[str], maps: bool) -> None:
    """Compare what the child says of itself with the plan. Raises EngineFailed naming the first difference."""
    slots = (await client.get("/slots")).raise_for_status().json()
    facts = {match[1]: match[2] for line in lines if (match := _FACT.search(line))}
    caches = [match.groups() for line in lines if (match := _CACHE.search(line))]
    _same("sequences", len(slots), planned.max_num_seqs)
    _same("tokens a slot", {slot["n_ctx"] for slot in slots}, {planned.slot_tokens})
    for name in ("n_batch", "n_ubatch", "n_threads"):
        _same(name, int(facts.get(name, -1)), getattr(planned, name))
    _same("mmap", maps, planned.mmap)
    if caches:  # an encoder has none
        _same("cells", max(int(cells) for cells, *_ in caches), planned.slot_tokens)
        _same("streams", {int(streams) for *_, streams, _, _ in caches}, {1 if planned.kv_unified else len(slots)})
        _same("KV types", {kind for *_, k, v in caches for kind in (k, v)}, {planned.kv_cache_dtype})


def _same(what: str, found: Any, planned: Any) -> None:
    if found != planned:
        raise EngineFailed(f"The engine runs with {what} {found}, the plan says {planned}: it measures something else.")


class _Load:
    """The requests of one drive."""

    def __init__(self, client: httpx.AsyncClient, settings: PlannedSettings, engine: EngineProcess) -> None:
        self.client, self.settings, self.engine = client, settings, engine
        self.clock = _Clock(engine, settings.n_threads)
        self.deep_bytes = self.all_bytes = 0
        self.speed: Speed | None = None

    async def chat(self) -> None:
        settings, others = self.settings, _Others(self.engine)
        deep = await self._complete(0, settings.max_seq_len - GENERATED_TOKENS)
        _same("depth", deep.depth, settings.max_seq_len)
        self.deep_bytes = _peak(self.engine)
        numbers = range(1, settings.max_num_seqs + 1)
        n_short = min(SHORT_PROMPT_TOKENS, settings.max_seq_len - GENERATED_TOKENS)
        short = await asyncio.gather(*(self._complete(number, n_short) for number in numbers))
        start_s, end_s = max(each.events_s[0] for each in short), min(each.events_s[-1] for each in short)
        _same("all sequences at work at once", start_s < end_s, True)
        n_events = sum(start_s < event_s <= end_s for each in short for event_s in each.events_s)
        self.all_bytes = _peak(self.engine)
        other_share = others.share()
        await asyncio.gather(*(self._answer_to_schema(number) for number in numbers))
        first_token_s = deep.events_s[0] - deep.start_s
        self.speed = Speed(
            prompt_tokens=deep.prompt_tokens,
            first_token_s=round(first_token_s, 4),
            prefill_tokens_per_s=round(deep.prompt_tokens / first_token_s, 1),
            decode_tokens_per_s=round((len(deep.events_s) - 1) / (deep.events_s[-1] - deep.events_s[0]), 2),
            short_tokens=n_short + GENERATED_TOKENS // 2,
            decode_all_tokens_per_s=round(n_events / (end_s - start_s), 2),
            wall_first_token_s=round(deep.wall_first_s, 4),
            wall_decode_tokens_per_s=round(deep.engine_decode_per_s, 2),
            other_cpu_share=other_share,
        )

    async def embed(self) -> None:
        """The longest input, then one for every sequence at once."""
        n_tokens = self.settings.max_seq_len
        for numbers in ([0], range(1, self.settings.max_num_seqs + 1)):
            asked = (self.client.post("/v1/embeddings", json={"input": [_tokens(each, n_tokens)]}) for each in numbers)
            for response in await asyncio.gather(*asked):
                _same("tokens", response.raise_for_status().json()["usage"]["prompt_tokens"], n_tokens)
            self.deep_bytes = self.deep_bytes or _peak(self.engine)
        self.all_bytes = _peak(self.engine)

    async def _complete(self, number: int, n_tokens: int) -> _Completion:
        body = {
            "prompt": _tokens(number, n_tokens),
            "n_predict": GENERATED_TOKENS,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
        }
        asked_s, done = time.perf_counter(), _Completion(start_s=self.clock.now_s())
        last: dict[str, Any] = {}
        async with self.client.stream("POST", "/completion", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    done.wall_first_s = done.wall_first_s or time.perf_counter() - asked_s
                    last = json.loads(line[6:])
                    if not last.get("stop"):  # the last event only says that it is the last
                        done.events_s.append(self.clock.now_s())
        if "timings" not in last:
            raise EngineFailed(f"The engine broke off an answer: {last}")
        done.engine_decode_per_s = last["timings"]["predicted_per_second"]
        done.prompt_tokens, done.depth = last["tokens_evaluated"], last["tokens_evaluated"] + last["tokens_predicted"]
        _same("tokens of the prompt", done.prompt_tokens, n_tokens)
        return done

    async def _answer_to_schema(self, number: int) -> None:
        """An answer held to a schema that pulls the other way at each token, so that all of the vocabulary is tried.

        An ordinary answer may need it at any token: which ones is up to the model.
        """
        refused = (await self.client.post("/tokenize", json={"content": REFUSED_TEXT})).raise_for_status().json()
        body = {
            "messages": [{"role": "user", "content": f"Describe number {number}."}],
            "max_tokens": GENERATED_TOKENS,
            "temperature": 0,
            "logit_bias": [[token, 100] for token in refused["tokens"]],
            "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}},
        }
        answer = (await self.client.post("/v1/chat/completions", json=body)).raise_for_status().json()
        text = answer["choices"][0]["message"]["content"]
        _same("an answer that begins as its schema does", text.lstrip().startswith("{"), True)


class _Completion(msgspec.Struct):
    """One answer. Seconds of the engine's clock, except `wall_first_s`, from the request to the first token."""

    start_s: float
    wall_first_s: float = 0.0
    events_s: list[float] = []  # when each token came
    engine_decode_per_s: float = 0.0
    prompt_tokens: int = 0
    depth: int = 0  # tokens in the sequence at its end


def _tokens(number: int, n_tokens: int) -> list[int]:
    """Token ids, so that the length is exact; `number` makes a prompt share no prefix with another."""
    return [100 + (index * 7919 + number * 104729) % 3000 for index in range(n_tokens)]


class _Clock:
    """The CPU time of an engine with one thread, else the time of the day."""

    def __init__(self, engine: EngineProcess, n_threads: int) -> None:
        assert engine.pid is not None
        # Linux: the clock of another process, to the nanosecond; see clock_getcpuclockid(3).
        self._clock_id = (~engine.pid << 3) | 2 if n_threads == 1 else time.CLOCK_MONOTONIC

    def now_s(self) -> float:
        return time.clock_gettime(self._clock_id)


class _Others:
    """What other programs take of the CPU while an engine is timed."""

    def __init__(self, engine: EngineProcess) -> None:
        self._processes = (psutil.Process(engine.pid), psutil.Process())
        self._start = self._read()

    def _read(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        own = sum(sum(process.cpu_times()[:2]) for process in self._processes)
        return sum(times[:8]), times.idle + times.iowait, own  # the first eight do not contain each other

    def share(self) -> float:
        total, idle, own = (now - then for now, then in zip(self._read(), self._start, strict=True))
        return round(max(0.0, total - idle - own) / max(total, 0.01), 3)
