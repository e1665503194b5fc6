"""The user's own llama-server: started by flags, its address read from its log, held as firmly as the built-in one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from laya.engines import process as process_module
from laya.engines.log import EngineLog
from laya.engines.process import CHILD_NICE, EngineProcess
from laya.engines.settings import EngineSettings
from laya.errors import EngineFailed

MakeSettings = Callable[..., EngineSettings]


async def started(process: EngineProcess) -> dict[str, Any]:
    """What the stand-in says of its own start."""
    address = await process.start()
    async with httpx.AsyncClient(base_url=f"http://{address.host}:{address.port}", trust_env=False) as http:
        answer: dict[str, Any] = (await http.get("/started")).json()
        answer["chat"] = (
            await http.post("/v1/chat/completions", headers={"authorization": f"Bearer {address.api_key}"}, json={})
        ).json()
    return answer


def test_own_server_gets_the_plan_as_flags(
    make_settings: MakeSettings, some_gguf: Path, llama_server: Path, log: EngineLog
) -> None:
    async def scenario() -> None:
        settings = make_settings(some_gguf, engine_path=llama_server, max_num_seqs=2, args={"top_k": 3})
        process = EngineProcess(settings, log)
        answer = await started(process)
        argv = answer["argv"]
        given = {flag: argv[argv.index(flag) + 1] for flag in ("--ctx-size", "--parallel", "--threads", "--top-k")}
        assert given == {"--ctx-size": "1024", "--parallel": "2", "--threads": "1", "--top-k": "3"}
        assert answer["chat"]["model"] == "small"
        assert process.address is not None
        assert answer["environment"]["LLAMA_API_KEY"] == process.address.api_key
        assert str(process.address.api_key) not in Path(f"/proc/{process.pid}/cmdline").read_text()
        assert process.pid is not None
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == CHILD_NICE
        await process.stop()
        assert process.exit_reason == "killed by signal 15 (asked to stop)"

    uvloop.run(scenario())


def test_own_server_that_knows_a_flag_not_fails_in_its_words(
    make_settings: MakeSettings, some_gguf: Path, llama_server: Path, log: EngineLog
) -> None:
    settings = make_settings(some_gguf, engine_path=llama_server, args={"nonsense": 1})
    with pytest.raises(EngineFailed, match=r"invalid argument: .*--nonsense"):
        uvloop.run(EngineProcess(settings, log).start())


def test_own_server_that_cannot_be_executed_is_named(
    make_settings: MakeSettings, some_gguf: Path, llama_server: Path, log: EngineLog
) -> None:
    llama_server.write_text("#!/nowhere/python\n")
    with pytest.raises(EngineFailed, match=r"llama-server names an interpreter in its first line that is not there"):
        uvloop.run(EngineProcess(make_settings(some_gguf, engine_path=llama_server), log).start())


def test_address_of_the_process_before_is_not_taken(
    make_settings: MakeSettings, some_gguf: Path, llama_server: Path, log: EngineLog
) -> None:
    async def scenario() -> None:
        ports = set()
        for _ in range(2):
            process = EngineProcess(make_settings(some_gguf, engine_path=llama_server), log)
            ports.add((await process.start()).port)
            listening = [line for line in log.run_lines() if "listening" in line]
            assert listening[0].endswith(f":{process.address.port if process.address else None}")
            await process.stop()

    uvloop.run(scenario())


def test_flood_on_stderr_does_not_stop_the_engine(
    make_settings: MakeSettings, some_gguf: Path, llama_server: Path, log: EngineLog
) -> None:
    async def scenario() -> None:
        settings = make_settings(some_gguf, engine_path=llama_server, args={"flood-bytes": 20_000_000})
        process = EngineProcess(settings, log)
        await process.start()
        await process.stop()
        assert log.path is not None
        assert log.path.stat().st_size <= 8 * 1024 * 1024

    uvloop.run(scenario())


def test_server_that_ignores_sigterm_is_killed(
    make_settings: MakeSettings, some_gguf: Path, llama_server: Path, log: EngineLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "TERM_WAIT_S", 0.1)

    async def scenario() -> None:
        process = EngineProcess(make_settings(some_gguf, engine_path=llama_server, args={"stubborn": True}), log)
        await process.start()
        assert await process.stop() is True
        assert process.exit_reason == "killed by Laya: it did not end within 0.1 s of SIGTERM"

    uvloop.run(scenario())


@pytest.mark.parametrize("is_stopped", [True, False])
def test_load_that_does_nothing_any_more_is_given_up(
    make_settings: MakeSettings,
    some_gguf: Path,
    llama_server: Path,
    log: EngineLog,
    monkeypatch: pytest.MonkeyPatch,
    is_stopped: bool,
) -> None:
    """One that computes for longer than that is not."""
    monkeypatch.setattr("laya.engines.progress.STILL_S", 0.8)
    burn = "while time.process_time() < 1.6: pass\n"
    llama_server.write_text(llama_server.read_text().replace("import sys\n", f"import sys\nimport time\n{burn}", 1))

    async def scenario() -> None:
        process = EngineProcess(make_settings(some_gguf, engine_path=llama_server), log)
        starting = asyncio.create_task(process.start())
        while process.pid is None:
            await asyncio.sleep(0)
        if not is_stopped:
            await starting
            await process.stop()
            return
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(EngineFailed, match=r"has neither read nor computed anything for 0\.8 s"):
            await starting
        assert process.exit_reason == "killed by Laya: it has neither read nor computed anything for 0.8 s"
        assert not Path(f"/proc/{process.pid}").exists()

    uvloop.run(scenario())


def test_what_the_server_started_ends_with_it(
    make_settings: MakeSettings, some_gguf: Path, llama_server: Path, log: EngineLog
) -> None:
    async def scenario() -> None:
        process = EngineProcess(make_settings(some_gguf, engine_path=llama_server, args={"spawn-sleeper": True}), log)
        sleeper = os.pidfd_open((await started(process))["sleeper"])
        await process.stop()
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[None] = loop.create_future()
        loop.add_reader(sleeper, lambda: (loop.remove_reader(sleeper), gone.set_result(None)))
        await gone
        os.close(sleeper)

    uvloop.run(scenario())


def test_abort_while_loading_tells_the_assertion(
    make_settings: MakeSettings, some_gguf: Path, llama_server: Path, log: EngineLog
) -> None:
    settings = make_settings(some_gguf, engine_path=llama_server, args={"abort": True})
    with pytest.raises(EngineFailed, match=r"killed by signal 6 .*GGML_ASSERT\(true == false\)"):
        uvloop.run(EngineProcess(settings, log).start())
