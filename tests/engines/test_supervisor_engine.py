"""The supervisor with real engines: one process for many callers, crashes, restarts, unloads."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import uvloop

from laya.engines.settings import EngineSettings
from laya.engines.supervisor import Supervisor
from laya.errors import EngineFailed
from laya.types import EngineAddress, ModelState

pytestmark = pytest.mark.engine
MakeSettings = Callable[..., EngineSettings]


class Served:
    """A supervisor with one small model and a count of what is reserved."""

    def __init__(self, settings: EngineSettings, logs_dir: Path) -> None:
        self.reserved = 0
        self.states: asyncio.Queue[ModelState] = asyncio.Queue()
        self.supervisor = Supervisor(logs_dir)
        self.supervisor.register("small", self._reserve, self._release)
        self.supervisor.on_state(self._on_state)
        self._settings = settings

    async def _reserve(self) -> EngineSettings:
        self.reserved += 1
        return self._settings

    def _release(self) -> None:
        self.reserved -= 1

    def _on_state(self, _model_id: str, state: ModelState, _address: EngineAddress | None) -> None:
        self.states.put_nowait(state)

    async def until(self, state: ModelState) -> None:
        while await self.states.get() != state:
            pass

    def pid(self) -> int:
        pid = self.supervisor.status()[0].pid
        assert pid is not None
        return pid


def test_ten_callers_share_one_process(make_settings: MakeSettings, smollm2_path: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        served = Served(make_settings(smollm2_path), tmp_path)
        supervisor, told = served.supervisor, []
        loads = asyncio.gather(*(supervisor.ensure_ready("small") for _ in range(10)))
        while not loads.done():
            told.append(supervisor.load_percent("small"))
            await asyncio.sleep(0.01)
        assert len(set(loads.result())) == 1
        percents = [percent for percent in told if percent is not None]
        assert percents == sorted(percents) and all(percent <= 99 for percent in percents), "before its first token"
        assert supervisor.load_percent("small") is None
        assert served.reserved == 1
        log = served.supervisor.logs("small")
        assert len([line for line in log.tail() if "started, pid" in line]) == 1
        status = served.supervisor.status()[0]
        assert status.state == "ready"
        assert status.measured_bytes is not None
        assert status.measured_bytes > smollm2_path.stat().st_size
        await served.supervisor.shutdown()
        assert served.reserved == 0
        assert not Path(f"/proc/{status.pid}").exists()
        assert "engine ended" in (tmp_path / "small.log").read_text()

    uvloop.run(scenario())


def test_killed_engine_is_told_and_restarts_on_demand(
    make_settings: MakeSettings, smollm2_path: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        served = Served(make_settings(smollm2_path), tmp_path)
        first = await served.supervisor.ensure_ready("small")
        pid = served.pid()
        os.kill(pid, signal.SIGKILL)
        await served.until("failed")
        assert served.reserved == 0
        assert served.supervisor.address("small") is None
        status = served.supervisor.status()[0]
        assert status.error is not None
        assert "killed by signal 9 (out of memory or kill)" in status.error
        second = await served.supervisor.ensure_ready("small")
        assert second.port != first.port or second.api_key != first.api_key
        assert served.pid() != pid
        assert served.supervisor.status()[0].restarts == 1
        await served.supervisor.shutdown()

    uvloop.run(scenario())


def test_unload_while_loading_leaves_no_process(
    make_settings: MakeSettings, smollm2_path: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        served = Served(make_settings(smollm2_path), tmp_path)
        call = asyncio.create_task(served.supervisor.ensure_ready("small"))
        async for line in served.supervisor.logs("small").follow():
            if "loading model" in line:
                break
        pid = served.pid()
        await served.supervisor.unload("small")
        with pytest.raises(EngineFailed, match="unloaded while it was loading"):
            await call
        assert not Path(f"/proc/{pid}").exists()
        assert served.reserved == 0
        await served.supervisor.shutdown()

    uvloop.run(scenario())


def test_corrupt_model_fails_and_frees_its_reservation(make_settings: MakeSettings, tmp_path: Path) -> None:
    async def scenario() -> None:
        bad = tmp_path / "bad.gguf"
        bad.write_bytes(b"GGUF" + bytes(1000))
        served = Served(make_settings(bad), tmp_path)
        with pytest.raises(EngineFailed, match=r"bad\.gguf"):
            await served.supervisor.ensure_ready("small")
        assert (served.reserved, served.supervisor.status()[0].state) == (0, "failed")
        await served.supervisor.shutdown()

    uvloop.run(scenario())


async def counted(address: EngineAddress, *roles: str) -> int:
    body = {"messages": [{"role": role, "content": "Hello"} for role in roles]}
    headers = {"authorization": f"Bearer {address.api_key}"}
    url = f"http://{address.host}:{address.port}/v1/chat/completions/input_tokens"
    async with httpx.AsyncClient(headers=headers, trust_env=False, timeout=60) as client:
        answer = await client.post(url, json=body)
    return int(answer.raise_for_status().json()["input_tokens"])


def test_what_the_template_adds_is_measured_once_it_answers(
    make_settings: MakeSettings, smollm2_path: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        served = Served(make_settings(smollm2_path), tmp_path)
        address = await served.supervisor.ensure_ready("small")
        assert address.template_tokens is not None
        chats = [("user",), ("system", "user"), ("user", "assistant") * 8 + ("user",), ("user",) * 12]
        for roles in chats:  # with the few tokens of each message that every bound has
            assert await counted(address, *roles) <= address.template_tokens + 16 * len(roles)
        assert address.template_tokens < 256
        await served.supervisor.shutdown()

    uvloop.run(scenario())
