"""How many threads an engine computes with can be changed while it runs, and a file that goes takes nothing with it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from laya.engines.llamacpp import environment
from laya.engines.log import EngineLog
from laya.engines.process import EngineProcess
from laya.engines.thread_share import CELL, ThreadShare, can_follow

native = pytest.mark.skipif(not can_follow(), reason="no compiler was here when Laya was installed")


def test_share_is_read_where_its_path_says() -> None:
    share = ThreadShare()
    share.set(3)
    with open(share.path, "rb") as file:
        assert CELL.unpack(file.read()) == (3,)
    share.close()
    assert not Path(share.path).exists()


def test_engine_sleeps_early_at_barriers_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert environment()["GOMP_SPINCOUNT"] == "1000"
    assert environment()["MALLOC_ARENA_MAX"] == "1"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert environment()["GOMP_SPINCOUNT"] == "7"


def busy_ticks(pid: int) -> dict[str, int]:
    """Thread id -> CPU time it has had."""
    ticks = {}
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        fields = stat.read_text().rpartition(")")[2].split()
        ticks[stat.parent.name] = int(fields[11]) + int(fields[12])
    return ticks


@native
@pytest.mark.engine
def test_engine_follows_its_share_while_it_runs(smollm2_path: Path, make_settings: Any, log: EngineLog) -> None:
    """A thread that is taken from it does nothing from the next graph on, and works again when it is given back."""

    async def threads_at_work(engine: EngineProcess) -> int:
        assert engine.address is not None and engine.pid is not None
        before = busy_ticks(engine.pid)
        body = json.dumps({"prompt": "word " * 60, "max_tokens": 4, "temperature": 0, "cache_prompt": False})
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=120) as client:
            answer = await client.post(
                f"http://{engine.address.host}:{engine.address.port}/v1/completions",
                content=body,
                headers={"authorization": f"Bearer {engine.address.api_key}", "content-type": "application/json"},
            )
        assert answer.status_code == 200
        gained = {task: ticks - before.get(task, 0) for task, ticks in busy_ticks(engine.pid).items()}
        most = max(gained.values())
        return sum(ticks > most / 4 for ticks in gained.values())

    async def scenario() -> None:
        share = ThreadShare()
        share.set(2)
        engine = EngineProcess(make_settings(smollm2_path, n_threads=2, threads_file=share.path), log)
        await engine.start()
        try:
            assert await threads_at_work(engine) == 2
            share.set(1)
            assert await threads_at_work(engine) == 1
            share.set(2)
            assert await threads_at_work(engine) == 2
        finally:
            await engine.stop()
            share.close()

    uvloop.run(asyncio.wait_for(scenario(), 180))
