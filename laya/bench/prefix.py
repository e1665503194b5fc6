"""Owns: `laya bench prefix`: prompt tokens computed in conversations over several engines of one model, by policy.

Layer: the whole server, with real engines. Load: conversations of some turns, as many at a time as there are sequences;
each begins with a text of its own under one system prompt and sends its whole history every turn, answers included. A
round is one turn of each, in an order drawn anew, as many in flight as there are engines. What an engine had to compute
is its own count: the prompt's tokens less those that it had. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
import msgspec
from rich.console import Console

from laya.bench.hardware import hardware
from laya.bench.help import description
from laya.errors import EngineFailed

READY_S = 120.0
STOP_S = 30.0
LOOK_EVERY_S = 0.1
SYSTEM = "You are brief. Answer in one short sentence."
WORDS = (  # noqa: SIM905
    "river stone garden window paper yellow morning winter table music silver corner engine letter market mountain "
    "orange pencil quiet ribbon school travel uncle valley water bridge candle doctor evening farmer glass harbor"
).split()
WORDS_FIRST, WORDS_A_TURN = 100, 8


class Load(NamedTuple):
    """What is asked, the same for every row."""

    n_conversations: int
    n_turns: int
    n_active: int  # conversations at a time
    n_in_flight: int  # requests at a time
    max_tokens: int  # of an answer
    seed: int


class Row(NamedTuple):
    """One way of choosing the engine."""

    words: str
    policy: str
    has_session: bool = False  # requests carry the header x-session-id


ROWS = (
    Row("round robin", "round_robin"),
    Row("the prompt's beginning", "prefix"),
    Row("auto, no session said", "auto"),
    Row("auto, x-session-id", "auto", has_session=True),
)


class Counted(msgspec.Struct):
    """What the engines said of all prompts of a row, in tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    def add(self, answer: dict[str, Any]) -> None:
        """Raises EngineFailed where the engine's two accounts of one prompt differ: then nothing is measured."""
        usage, timings = answer["usage"], answer["timings"]
        cached, n_tokens = usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
        if (cached, n_tokens - cached) != (timings["cache_n"], timings["prompt_n"]):
            raise EngineFailed(f"The engine says {usage} and {timings} of one prompt.")
        self.requests += 1
        self.prompt_tokens += n_tokens
        self.cached_tokens += cached


class Conversation:
    """What is said in one; no two begin with the same text."""

    def __init__(self, number: int, load: Load, row: Row) -> None:
        self._dice = random.Random(f"{load.seed} {number}")
        self._headers = {"x-session-id": f"conversation {number}"} if row.has_session else {}
        self._messages = [{"role": "system", "content": SYSTEM}]
        self._max_tokens = load.max_tokens

    async def turn(self, client: httpx.AsyncClient, model: str, counted: Counted) -> None:
        """One question and its answer. Raises EngineFailed for an answer that is not one."""
        question = " ".join(self._dice.choices(WORDS, k=WORDS_A_TURN if len(self._messages) > 1 else WORDS_FIRST))
        self._messages.append({"role": "user", "content": f"{question}?"})
        body = {"model": model, "messages": self._messages, "max_tokens": self._max_tokens, "temperature": 0}
        answer = await client.post("/v1/chat/completions", json=body, headers=self._headers)
        if answer.status_code != 200:
            raise EngineFailed(f"{answer.status_code} instead of an answer: {answer.text}")
        said = answer.json()
        counted.add(said)
        self._messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})


async def run_load(url: str, model: str, load: Load, row: Row) -> Counted:
    """All conversations, `load.n_active` at a time, round by round."""
    counted, dice = Counted(), random.Random(load.seed)
    in_flight = asyncio.Semaphore(load.n_in_flight)

    async def turn(conversation: Conversation) -> None:
        async with in_flight:
            await conversation.turn(client, model, counted)

    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
        for first in range(0, load.n_conversations, load.n_active):
            numbers = range(first, min(first + load.n_active, load.n_conversations))
            active = [Conversation(number, load, row) for number in numbers]
            for _ in range(load.n_turns):
                dice.shuffle(active)
                await asyncio.gather(*map(turn, active))
    return counted


@asynccontextmanager
async def serving(*args: str) -> AsyncIterator[str]:
    """The URL of a `laya serve` of its own with these arguments. Raises EngineFailed when it does not get ready."""
    command = [sys.executable, "-m", "laya.cli", "serve", *args, "--port", "0"]
    environ = {name: value for name, value in os.environ.items() if name != "LAYA_API_KEY"}
    child = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE, env=environ)
    said: list[str] = []
    assert child.stderr is not None
    reader = child.stderr

    async def until_ready() -> str:
        while line := (await reader.readline()).decode():
            said.append(line)
            if match := re.search(r"is ready\s+(http://\S+)", line):
                return match[1]
        raise EngineFailed(f"{' '.join(command)} ended: {''.join(said)}")

    async def drain() -> None:
        while await reader.readline():
            pass

    try:
        url = await asyncio.wait_for(until_ready(), READY_S)
        draining = asyncio.create_task(drain())
        yield url
        draining.cancel()
    finally:
        if child.returncode is None:
            child.terminate()
            await asyncio.wait_for(child.wait(), STOP_S)


async def measure(row: Row, load: Load, serve_args: Sequence[str], model: str) -> dict[str, Any]:
    """One row: a fresh server, all conversations, what the engines computed and hold."""
    async with serving(model, "--policy", row.policy, *serve_args) as url:
        await until_all_ready(url)
        started_s = time.monotonic()
        counted = await run_load(url, model, load, row)
        seconds = time.monotonic() - started_s
        engines = await engines_of(url)
    return {
        "row": row.words,
        "policy": row.policy,
        "requests": counted.requests,
        "prompt_tokens": counted.prompt_tokens,
        "computed_tokens": counted.computed_tokens,
        "seconds": round(seconds, 1),
        "engines": [{name: engine[name] for name in ("planned_bytes", "measured_bytes")} for engine in engines],
    }


async def engines_of(url: str) -> list[dict[str, Any]]:
    """What the server says of each engine of its one model: its state, and what it was planned with and holds."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        state = (await client.get("/admin/state")).json()
    engines: list[dict[str, Any]] = next(model for model in state["models"] if model["plan"])["extra"]["replicas"]
    return engines


async def until_all_ready(url: str) -> None:
    """Raises EngineFailed when one of the engines is not there in time: what is measured is all of them."""
    last_s = time.monotonic() + READY_S
    engines = await engines_of(url)
    while any(engine["state"] != "ready" for engine in engines):
        if time.monotonic() > last_s:
            raise EngineFailed(f"Not all engines got ready: {engines}")
        await asyncio.sleep(LOOK_EVERY_S)
        engines = await engines_of(url)


def with_reductions(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with the share of computed tokens that it saves against the first."""
    most = rows[0]["computed_tokens"]
    return [row | {"saved": round(1 - row["computed_tokens"] / most, 3)} for row in rows]


def main(argv: list[str] | None = None) -> int:
    """`laya bench prefix`: 0 when prompts saved at least what `--at-least` says against round robin, else 1."""
    parser = argparse.ArgumentParser(prog="laya bench prefix", description=description(__doc__.partition("\n")[0]))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=5, help="sequences of each engine")
    parser.add_argument("--max-seq-len", type=int, default=1024)
    parser.add_argument("--prompt-cache", default="8MiB")
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--at-least", type=float, default=0.6, help="share of computed tokens that `prefix` must save")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="only the JSON line on stdout, the rest on stderr")
    options = parser.parse_args(argv)
    console = Console(stderr=options.json, highlight=False)
    n_active = options.replicas * options.max_num_seqs
    load = Load(
        n_conversations=options.conversations, n_turns=options.turns, n_active=n_active, n_in_flight=options.replicas,
        max_tokens=options.max_tokens, seed=options.seed,
    )  # fmt: skip
    serve_args = [
        f"--replicas={options.replicas}", f"--max-num-seqs={options.max_num_seqs}", "--n-threads=1",
        f"--max-seq-len={options.max_seq_len}", f"--prompt-cache={options.prompt_cache}",
    ]  # fmt: skip
    rows = with_reductions([asyncio.run(measure(row, load, serve_args, options.model)) for row in ROWS])
    for row in rows:
        figures = f"{row['computed_tokens']:7d} of {row['prompt_tokens']:7d} tokens computed, {row['saved']:6.1%} saved"
        console.print(f"{figures}  {row['row']}  ({row['seconds']:.0f} s)", soft_wrap=True)
    report = {
        "bench": "prefix", "layer": "the whole server, socket to socket, real engines", "load": load._asdict(),
        "serve": serve_args, "model": options.model, "rows": rows, "hardware": hardware(),
    }  # fmt: skip
    print(msgspec.json.encode(report).decode())
    return 0 if all(row["saved"] >= options.at_least for row in rows[1:]) else 1


if __name__ == "__main__":
    sys.exit(main())
