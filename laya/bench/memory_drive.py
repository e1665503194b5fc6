"""Owns: driving one real engine to what its plan allows, and what was seen: peak memory, its own buffers, its speed.

Every figure is of the path it names: the child's settings are read back and compared with the plan, the depth is the
number of tokens the engine itself counted, and sequences were at work at the same time or the drive fails.
Layer: the engine's process, asked directly. Knows no cell, no band and no formula.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from laya.bench.driving import client_of, peak_of, same, token_ids
from laya.bench.engine_clock import EngineClock, OtherPrograms
from laya.bench.memory_fill import fill_prompt_cache
from laya.engines.log import EngineLog
from laya.engines.process import EngineProcess
from laya.engines.settings import EngineSettings
from laya.errors import EngineFailed
from laya.types import MIB, Plan, PlannedSettings

# Of each answer after its first token: until caches hold what a step reads, one to see what a request takes by itself,
# and those that are timed. Together no more than the shortest context has left.
WARM_TOKENS, LONE_TOKENS, TIMED_TOKENS = 16, 1, 64
GENERATED_TOKENS = 1 + WARM_TOKENS + LONE_TOKENS + TIMED_TOKENS
SHORT_PROMPT_TOKENS = 96  # of each sequence when all are at work
ATTEMPTS = 5
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
    decode_tokens_per_s: float  # one sequence, its last tokens; without what a request takes by itself
    short_tokens: int  # kept by each of all sequences, on average, while all were at work
    decode_all_tokens_per_s: float  # all sequences together
    wall_first_token_s: float
    other_cpu_share: float  # of all cores, what other programs took meanwhile


class Driven(msgspec.Struct, kw_only=True):
    """What one engine came to hold, in bytes, and how fast it was."""

    load_s: float  # from the start of the child until it was ready
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
    start_s = time.monotonic()
    address = await engine.start()
    load_s = time.monotonic() - start_s
    try:
        lines = log.run_lines()
        async with client_of(address) as client:
            await _check_settings(client, settings, lines, _maps(engine, model))
            loaded = peak_of(engine)
            load = _Load(client, settings, engine, log, await _n_vocab(client))
            if settings.task == "embed":
                await load.embed()
            else:
                await load.chat()
        return Driven(
            load_s=round(load_s, 3),
            peak_bytes=peak_of(engine),
            loaded_bytes=loaded,
            deep_bytes=load.deep_bytes,
            all_bytes=load.all_bytes,
            engine_bytes=_buffers(lines),
            speed=load.speed,
        )
    finally:
        await engine.stop()


async def _n_vocab(client: httpx.AsyncClient) -> int:
    models = (await client.get("/v1/models")).raise_for_status().json()
    return int(models["data"][0]["meta"]["n_vocab"])


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
    same("sequences", len(slots), planned.max_num_seqs)
    same("tokens a slot", {slot["n_ctx"] for slot in slots}, {planned.slot_tokens})
    for name in ("n_batch", "n_ubatch", "n_threads"):
        same(name, int(facts.get(name, -1)), getattr(planned, name))
    same("mmap", maps, planned.mmap)
    if caches:  # an encoder has none
        same("cells", max(int(cells) for cells, *_ in caches), planned.slot_tokens)
        same("streams", {int(streams) for *_, streams, _, _ in caches}, {1 if planned.kv_unified else len(slots)})
        same("KV types", {kind for *_, k, v in caches for kind in (k, v)}, {planned.kv_cache_dtype})


class _Load:
    """The requests of one drive."""

    def __init__(
        self, client: httpx.AsyncClient, settings: PlannedSettings, engine: EngineProcess, log: EngineLog, n_vocab: int
    ) -> None:
        self.n_vocab = n_vocab
        self.client, self.settings, self.engine, self.log = client, settings, engine, log
        self.clock = EngineClock(engine, settings.n_threads)
        self.deep_bytes = self.all_bytes = 0
        self.speed: Speed | None = None

    async def chat(self) -> None:
        settings, others = self.settings, OtherPrograms(self.engine)
        n_deep = settings.max_seq_len - GENERATED_TOKENS
        deep = await self._generate([0], n_deep)
        self.deep_bytes = peak_of(self.engine)
        n_short = min(SHORT_PROMPT_TOKENS, n_deep)
        short = await self._generate_together(n_short)
        self.all_bytes = peak_of(self.engine)
        other_share = others.share()
        if settings.prompt_cache_bytes:  # before the answers to a schema, whose tables it could take the place of
            await fill_prompt_cache(self.client, settings, self.log.run_lines)
        numbers = range(settings.max_num_seqs)
        await asyncio.gather(*(self._answer_to_schema(number) for number in numbers))
        self.speed = Speed(
            prompt_tokens=n_deep,
            first_token_s=round(deep.first_s, 4),
            prefill_tokens_per_s=round(n_deep / deep.first_s, 1),
            decode_tokens_per_s=round(1 / deep.step_s, 2),
            short_tokens=n_short + GENERATED_TOKENS - TIMED_TOKENS // 2,
            decode_all_tokens_per_s=round(settings.max_num_seqs / short.step_s, 2),
            wall_first_token_s=round(deep.wall_first_s, 4),
            other_cpu_share=other_share,
        )

    async def embed(self) -> None:
        """The longest input, then one for every sequence at once."""
        n_tokens = self.settings.max_seq_len
        for numbers in ([0], range(1, self.settings.max_num_seqs + 1)):
            asked = (
                self.client.post("/v1/embeddings", json={"input": [token_ids(each, n_tokens, self.n_vocab)]})
                for each in numbers
            )
            for response in await asyncio.gather(*asked):
                same("tokens", response.raise_for_status().json()["usage"]["prompt_tokens"], n_tokens)
            self.deep_bytes = self.deep_bytes or peak_of(self.engine)
        self.all_bytes = peak_of(self.engine)

    async def _generate_together(self, n_tokens: int) -> _Generated:
        """All sequences at work at once, seen in the engine's own list; a client that got no CPU may miss it."""
        n_seqs = self.settings.max_num_seqs
        for attempt in range(1, ATTEMPTS + 1):
            done = await self._generate([attempt * n_seqs + number for number in range(n_seqs)], n_tokens)
            if done.all_at_work:
                return done
        raise EngineFailed(f"{n_seqs} sequences were not seen at work at once in {ATTEMPTS} attempts.")

    async def _generate(self, numbers: Sequence[int], n_tokens: int) -> _Generated:
        """A prompt in each slot to its first token, then its continuations: between them the engine idles.

        So the clock is read when nothing runs, whenever this process gets to it. What a request takes by itself, such
        as reading its prompt or computing it again where a model's window is longer, is in both continuations that are
        compared.
        """
        prompts = [token_ids(number, n_tokens, self.n_vocab) for number in numbers]
        wall_s = time.perf_counter()
        first_s, prompts = await self._ask(prompts, 1, goes_on=False)
        wall_first_s = time.perf_counter() - wall_s
        _, prompts = await self._ask(prompts, WARM_TOKENS)
        lone_s, prompts = await self._ask(prompts, LONE_TOKENS)
        watch = asyncio.create_task(self._until_at_work(len(prompts)))
        timed_s, prompts = await self._ask(prompts, TIMED_TOKENS)
        all_at_work = watch.done() or len(prompts) == 1  # its answer says so, however quick it was
        watch.cancel()
        same("depth", {len(prompt) for prompt in prompts}, {n_tokens + GENERATED_TOKENS})
        step_s = (timed_s - lone_s) / (TIMED_TOKENS - LONE_TOKENS)
        return _Generated(wall_first_s=wall_first_s, first_s=first_s, step_s=step_s, all_at_work=all_at_work)

    async def _ask(
        self, prompts: list[list[int]], n_predict: int, *, goes_on: bool = True
    ) -> tuple[float, list[list[int]]]:
        """The seconds in which every slot generates so many tokens, and what each holds then."""
        start_s = self.clock.now_s()
        asked = (self._complete(slot, each, n_predict, goes_on=goes_on) for slot, each in enumerate(prompts))
        answers = await asyncio.gather(*asked)
        seconds = self.clock.now_s() - start_s
        for prompt, answer in zip(prompts, answers, strict=True):
            same("tokens of the prompt", answer["tokens_evaluated"], len(prompt))
            same("tokens of the answer", answer["tokens_predicted"], n_predict)
        return seconds, [prompt + answer["tokens"] for prompt, answer in zip(prompts, answers, strict=True)]

    async def _until_at_work(self, n_seqs: int) -> None:
        """Until the engine's own list has so many sequences at work at the same time."""
        while True:
            slots = (await self.client.get("/slots")).raise_for_status().json()
            if sum(slot["is_processing"] for slot in slots) >= n_seqs:
                return

    async def _complete(self, slot: int, prompt: list[int], n_predict: int, *, goes_on: bool) -> dict[str, Any]:
        body = {
            "prompt": prompt,
            "n_predict": n_predict,
            "ignore_eos": True,
            "cache_prompt": goes_on,  # from what its slot holds
            "id_slot": slot,
            "return_tokens": True,
        }
        answer: dict[str, Any] = (await self.client.post("/completion", json=body)).raise_for_status().json()
        return answer

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
        same("an answer that begins as its schema does", text.lstrip().startswith("{"), True)


class _Generated(msgspec.Struct):
    """Answers of equal length, one a slot. Seconds of the engine's clock, except `wall_first_s`."""

    wall_first_s: float
    first_s: float  # from the requests to the first token of all
    step_s: float  # in which each gets one more token
    all_at_work: bool  # whether all were seen at work at the same time
