"""Replicas that die and come back under the gateway: the others keep their sessions, nothing is lost, books balance."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from .front import Front, chat, front, until
from .scripted_engine import STREAM_HEAD, Call, chunk, delta, hello, progress, whole

pytestmark = pytest.mark.anyio
N_SESSIONS = 200
N_REQUESTS = int(os.environ.get("LAYA_GATEWAY_REQUESTS", "1500"))


def die(gate: Front, number: int) -> None:
    """Its process is gone: every connection breaks, and the supervisor says so."""
    gate.supervisor.dead.add(gate.endpoints[number].name)
    for call in list(gate.engines[number].open):
        call.abort()
    gate.gateway.fleet.engine_changed(gate.endpoints[number].name, "failed", None)


def come_back(gate: Front, number: int) -> None:
    address = gate.addresses[number]
    gate.supervisor.dead.discard(gate.endpoints[number].name)
    gate.gateway.fleet.engine_changed(gate.endpoints[number].name, "ready", address)


async def homes(gate: Front) -> dict[str, int]:
    """Session -> the engine that has it, all sessions at once."""
    release = asyncio.Event()
    found: dict[str, int] = {}

    def script_of(number: int) -> Any:
        async def script(call: Call) -> None:
            found[call.json["user"]] = number
            await release.wait()
            await hello(call)

        return script

    for number, engine in enumerate(gate.engines):
        engine.script = script_of(number)
    asked = [asyncio.ensure_future(gate.ask(session_of(number))) for number in range(N_SESSIONS)]
    await until(lambda: len(found) == N_SESSIONS)
    release.set()
    assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
    return found


def session_of(number: int) -> bytes:
    return chat(user=f"s{number}", messages=[{"role": "user", "content": f"I am {number}"}])


def is_even(found: dict[str, int], n_engines: int) -> bool:
    counts = Counter(found.values())
    even = len(found) / n_engines
    return len(counts) == n_engines and all(abs(count - even) <= 0.1 * even for count in counts.values())


async def test_death_of_one_of_three_moves_its_sessions_and_no_other(tmp_path: Path) -> None:
    async with front(tmp_path, max_num_seqs=N_SESSIONS, model={"replicas": 3, "queue_size": N_SESSIONS}) as gate:
        first = await homes(gate)
        assert is_even(first, 3), Counter(first.values())
        assert await homes(gate) == first
        die(gate, 1)
        without = await homes(gate)
        assert is_even(without, 2), Counter(without.values())
        assert {session: home for session, home in without.items() if first[session] != 1} == {
            session: home for session, home in first.items() if home != 1
        }
        come_back(gate, 1)
        again = await homes(gate)
        assert {session: home for session, home in again.items() if first[session] != 1} == {
            session: home for session, home in first.items() if home != 1
        }
        assert is_even(again, 3), Counter(again.values())
        assert await gate.settled() == {"served": 4 * N_SESSIONS}


def any_script(dice: random.Random, dead: set[int], number: int, wrong: list[int]) -> Any:
    async def script(call: Call) -> None:
        if number in dead:
            wrong.append(number)
        await asyncio.sleep(dice.random() * 0.004)
        chance = dice.random()
        if chance < 0.06:
            call.abort()
        elif chance < 0.10:
            call.write(whole({"error": {"message": "compute error", "code": 500}}, status=500))
        elif chance < 0.14 and call.json.get("stream"):
            call.write(STREAM_HEAD + chunk(progress(9, 9)) + chunk(delta(content="Hel")))
            await asyncio.sleep(0.001)
            call.abort()
        else:
            await hello(call)

    return script


async def one_client(gate: Front, numbers: Any, dice: random.Random) -> None:
    for number in numbers:
        client = await gate.client()
        client.send(chat(user=f"s{number % 50}", stream=dice.random() < 0.5))
        if dice.random() < 0.05:
            await asyncio.sleep(dice.random() * 0.004)
            client.abort()
        else:
            await client.rest_of_answer()
            client.close()


async def test_random_deaths_lose_nothing_and_no_dead_engine_is_asked(tmp_path: Path) -> None:
    dice, dead, wrong = random.Random(7), set[int](), list[int]()
    async with front(tmp_path, max_num_seqs=2, model={"replicas": 3}) as gate:
        for number, engine in enumerate(gate.engines):
            engine.script = any_script(dice, dead, number, wrong)
        numbers = iter(range(N_REQUESTS))
        clients = [asyncio.ensure_future(one_client(gate, numbers, dice)) for _ in range(8)]
        for turn in itertools.count():
            if all(client.done() for client in clients):
                break
            await asyncio.sleep(0.002)
            gate.sweep(turn * 0.05)
            victim = dice.randrange(3)
            if victim in dead and dice.random() < 0.3:
                dead.discard(victim)
                come_back(gate, victim)
            elif victim not in dead and len(dead) < 2 and dice.random() < 0.1:
                die(gate, victim)
                dead.add(victim)
        await asyncio.gather(*clients)
        outcomes = await gate.settled()
        assert sum(outcomes.values()) == gate.stats.arrivals
        assert not wrong
        assert outcomes["served"] > 0.6 * gate.stats.arrivals
        assert sum(gate.stats.retries.values()) <= max(1, 0.1 * gate.stats.arrivals)
