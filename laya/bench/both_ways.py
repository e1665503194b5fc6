"""Owns: one engine that is asked both ways, directly and through Laya, and the proof of which way a request went.

The engine and its settings are the same, so a ratio is Laya's share alone. Machines are shared and noisy: ways take
turns, the order changes from pair to pair, and what counts is the median over pairs. After each turn the counters must
say what the bench says: Laya's requests rose by those that were sent through it and by none that were not, and the
engine's own tokens by those that were read. Otherwise nothing was measured: EngineFailed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from laya.bench.prefix import WORDS
from laya.bench.token_streams import Answer, Side, ask, together
from laya.engines.process import CHILD_NICE
from laya.errors import EngineFailed

WAYS = ("bare", "laya")
STOP_S = 60.0
BOOTSTRAP_DRAWS, CONFIDENCE = 2000, 0.95
COUNTED_S, LOOK_EVERY_S = 5.0, 0.02  # counters follow the end of an answer
ENGINE_TOKENS = ("llamacpp:tokens_predicted_total", "vllm:generation_tokens_total")
_LEAST_NICE = 19  # no priority is lower
TOKENS_COUNTED = 0.95  # of those read: an engine does not count a token that ends an answer


class Turn(NamedTuple):
    """Chats that were asked at once, one way."""

    seconds: float
    answers: list[Answer]

    @property
    def n_tokens(self) -> int:
        return sum(answer.n_tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.seconds


class Counters(NamedTuple):
    """laya: requests that it served. engine: tokens that it generated, None where it does not say."""

    laya: float
    engine: float | None


class BothWays:
    """See the module."""

    def __init__(self, said: dict[str, Any], *, ignores_eos: bool) -> None:
        self.engine: str = said["engine"]
        self.model: str = said["model"]
        self.settings: dict[str, Any] = said["settings"]
        bare = {name: value for name, value in said["bare"].items() if name != "headers"}
        headers = tuple((name, value) for name, value in said["bare"]["headers"])
        laya = Side(name="laya", host="127.0.0.1", port=said["port"], key=said["key"], model=self.model)
        self.sides = {"bare": Side(name="bare", headers=headers, **bare), "laya": laya}
        self.engine_counter: str | None = None
        self.pid: int | None = None  # of its Laya
        self._more = {"ignore_eos": True} if ignores_eos else {}
        self._dice = random.Random(1)
        self._first = ""  # word of the chat before: another one, so that the engine has nothing of this chat's own

    def chat(self, n_words: int, max_tokens: int, *, is_kept: bool = False) -> dict[str, Any]:
        """A chat that no cache holds beyond its first words; all of one length have as many tokens. is_kept: always the
        same one."""
        words = (WORDS * (n_words // len(WORDS) + 1))[:n_words]
        if not is_kept:
            self._first = self._dice.choice([word for word in words if word != self._first])
            words.remove(self._first)
            self._dice.shuffle(words)
            words.insert(0, self._first)
        content = " ".join(["Words:", *words])
        likeliest = {"temperature": 0} if is_kept else {}  # or an answer might begin with a token that has no text
        messages = [{"role": "user", "content": content}]
        return {"messages": messages, "max_tokens": max_tokens} | likeliest | self._more

    async def turn(self, way: str, chats: Sequence[dict[str, Any]]) -> Turn:
        """These chats at once. Raises EngineFailed where the counters say that they went another way."""
        before = await self.counters()
        turn = Turn(*await together(self.sides[way], chats))
        await self._prove(way, turn, before)
        return turn

    async def metrics(self, way: str) -> str:
        status, body, _ = await ask(self.sides[way], "/metrics")
        return body.decode() if status == 200 else ""

    async def counters(self) -> Counters:
        served = samples(await self.metrics("laya"), "laya_requests_total")
        label, generated = f'model="{self.model}"', await self.metrics("bare")
        n_served = sum(value for labels, value in served if label in labels and 'outcome="served"' in labels)
        for name in ENGINE_TOKENS:
            if found := samples(generated, name):
                self.engine_counter = name
                return Counters(n_served, sum(value for _, value in found))
        return Counters(n_served, None)

    async def _prove(self, way: str, turn: Turn, before: Counters) -> None:
        expected = len(turn.answers) if way == "laya" else 0
        for answer in turn.answers:
            if (answer.engine is not None) != (way == "laya"):
                raise EngineFailed(f"An answer of the way '{way}' has x-laya-engine {answer.engine!r}.")
        for _ in range(int(COUNTED_S / LOOK_EVERY_S)):
            now = await self.counters()
            rose = now.laya - before.laya
            is_engine = now.engine is None or now.engine - (before.engine or 0) >= TOKENS_COUNTED * turn.n_tokens
            if rose == expected and is_engine:
                return
            await asyncio.sleep(LOOK_EVERY_S)
        generated = None if now.engine is None else now.engine - (before.engine or 0)
        raise EngineFailed(
            f"{len(turn.answers)} chats of {turn.n_tokens} tokens were sent by the way '{way}': Laya counted {rose:g} "
            f"requests instead of {expected}, and the engine {generated} tokens."
        )


class Paired(NamedTuple):
    """A figure of both ways: the medians, and the median and quartiles of what Laya is to the bare engine by pairs."""

    bare: float
    laya: float
    pairs: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.pairs)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.pairs) < 2:
            return self.pairs[0], self.pairs[0]
        low, _, high = statistics.quantiles(self.pairs, n=4, method="inclusive")
        return low, high

    @property
    def interval(self) -> tuple[float, float]:
        """In which the median lies with 95 % confidence: percentiles of medians of pairs drawn again (bootstrap)."""
        dice = random.Random(len(self.pairs))
        again = sorted(statistics.median(dice.choices(self.pairs, k=len(self.pairs))) for _ in range(BOOTSTRAP_DRAWS))
        cut = int(BOOTSTRAP_DRAWS * (1 - CONFIDENCE) / 2)
        return again[cut], again[-1 - cut]


def paired(of: dict[str, list[float]], *, is_ratio: bool) -> Paired:
    pairs = [there / bare if is_ratio else there - bare for bare, there in zip(of["bare"], of["laya"], strict=True)]
    return Paired(statistics.median(of["bare"]), statistics.median(of["laya"]), pairs)


def order(pair: int) -> tuple[str, ...]:
    """Which way goes first changes: what drifts, drifts against both."""
    return WAYS if pair % 2 == 0 else WAYS[::-1]


def samples(text: str, name: str) -> list[tuple[str, float]]:
    """(labels, value) of a metric in Prometheus' text."""
    pattern = re.compile(rf"^{re.escape(name)}(\{{[^\n]*\}})? (\S+)", re.MULTILINE)
    return [(found[1] or "", float(found[2])) for found in pattern.finditer(text)]


def mean_ms(before: str, after: str, name: str) -> float | None:
    """The mean of what a histogram of seconds of Laya's counted in between; None where it counted nothing."""

    def rise(part: str) -> float:
        then, now = (sum(value for _, value in samples(text, f"{name}_{part}")) for text in (before, after))
        return now - then

    total, count = rise("sum"), rise("count")
    return 1000 * total / count if count else None


@asynccontextmanager
async def both_ways(
    model: str, serve: Sequence[str], *, ignores_eos: bool = True, nice: int | None = None
) -> AsyncIterator[BothWays]:
    """A Laya of its own with this model loaded. Raises EngineFailed where it does not get ready; it says why.

    nice: priority of Laya, its engine and this process. Engines step back behind every other program, so on a machine
    that others use what is measured is who they leave the cores to.
    """
    command = [sys.executable, "-m", "laya.bench.served_engine", model, *serve]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        line = await asyncio.to_thread(child.stdout.readline)
        if not line:
            raise EngineFailed(f"'{model}' did not get ready; it is said above why.")
        ways = BothWays(json.loads(line), ignores_eos=ignores_eos)
        ways.pid = child.pid
        if nice is not None:
            set_priority(nice, child.pid)
        yield ways
    finally:
        child.terminate()
        await asyncio.to_thread(child.wait, STOP_S)
        child.stdout.close()


def set_priority(nice: int, pid: int) -> None:
    """Of every thread of a Laya and of this process; of their sessions too, where Linux groups processes by those. Its
    engines step back behind it as before: where they were equal, threads of vLLM that spin kept Laya and the client
    from the cores for seconds. May be said again, for engines that were started since."""
    laya = psutil.Process(pid)
    base, group_base = os.getpriority(os.PRIO_PROCESS, pid), _group_of(pid)[1]

    def beside(now: int, of_laya: int) -> int:
        return min(nice + CHILD_NICE, _LEAST_NICE) if now > of_laya else nice

    families = [psutil.Process(), *laya.children(recursive=True), laya]
    groups = {name: (each.pid, now) for each in families for name, now in [_group_of(each.pid)] if name}
    for process in families:
        for thread in process.threads():
            now = os.getpriority(os.PRIO_PROCESS, thread.id)
            os.setpriority(os.PRIO_PROCESS, thread.id, beside(now, base))
    for one_of, now in groups.values():
        Path(f"/proc/{one_of}/autogroup").write_text(str(beside(now, group_base)))


def _group_of(pid: int) -> tuple[str, int]:
    """Name and nice of a process's session; none where the kernel keeps none: "/autogroup-12 nice 5"."""
    try:
        name, _, nice = Path(f"/proc/{pid}/autogroup").read_text().split()
    except (OSError, ValueError):
        return "", 0
    return name, int(nice)
