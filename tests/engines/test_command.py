"""A program of the user's own as an engine: its command line, its environment, its start, its end, its failures."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import uvloop

from laya.engines import command as command_module
from laya.engines import process as process_module
from laya.engines import progress as progress_module
from laya.engines.ceiling import Ceilings
from laya.engines.log import EngineLog
from laya.engines.process import CHILD_NICE, EngineProcess
from laya.engines.settings import CommandSettings
from laya.engines.supervisor import Supervisor
from laya.errors import EngineFailed, EngineOutOfMemory, LayaError
from laya.gateway.guarding import claim_ceilings
from laya.types import ANY_LENGTH, MIB, PlannedSettings

PROGRAM = Path(__file__).with_name("openai_program.py")
Make = Callable[..., CommandSettings]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make("--fail", "500", health=None)`: the program with these words more."""

    def settings(*words: str, task: str = "chat", **fields: Any) -> CommandSettings:
        planned = PlannedSettings(
            max_seq_len=ANY_LENGTH, slot_tokens=ANY_LENGTH, max_num_seqs=2, kv_cache_dtype="-", kv_unified=False,
            kv_pool_tokens=0, n_batch=ANY_LENGTH, n_ubatch=ANY_LENGTH, n_threads=1, task=task, mmap=False,
        )  # type: ignore[arg-type]  # fmt: skip
        command = ("python", str(PROGRAM), "--port", "${PORT}", "--model", "${MODEL}", *words)
        common: dict[str, Any] = {"health": "/health", "folder": tmp_path, "load_timeout_s": 60.0}
        return CommandSettings(
            model_id="own", program=Path(sys.executable), words=command, planned=planned, **common | fields
        )

    return settings


async def told(process: EngineProcess) -> dict[str, Any]:
    """What the program says of its own start."""
    address = process.address
    assert address is not None
    async with httpx.AsyncClient(base_url=f"http://{address.host}:{address.port}", trust_env=False) as http:
        answer: dict[str, Any] = (await http.get("/started")).json()
    return answer


async def gone(pid: int) -> None:
    """Wait until the process with this id has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    loop.add_reader(pidfd, lambda: (loop.remove_reader(pidfd), ended.set_result(None)))
    await ended
    os.close(pidfd)


def test_program_is_told_port_model_key_and_threads(
    make: Make, log: EngineLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")

    async def scenario() -> None:
        env = {"THEIR_KEY": "${API_KEY}", "PLAIN": "$HOME ${HOST}"}
        process = EngineProcess(make("--api-key", "${API_KEY}", env=env, served_model_name="theirs"), log)
        address = await process.start()
        said = await told(process)
        assert said["argv"][1:5] == ["--port", str(address.port), "--model", "theirs"]
        assert said["environment"]["THEIR_KEY"] == address.api_key == said["argv"][6]
        assert said["environment"]["PLAIN"] == "$HOME 127.0.0.1"
        assert said["environment"]["OMP_NUM_THREADS"] == "1"
        assert "HF_TOKEN" not in said["environment"]
        assert said["cwd"] == str(tmp_path)
        assert process.pid is not None
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == CHILD_NICE
        assert (address.model, address.dialect) == ("theirs", "openai")
        assert address.connect_timeout_s  # its backlog may be full
        await process.stop()
        assert process.exit_reason == "killed by signal 15 (asked to stop)"

    uvloop.run(scenario())


def test_program_that_does_not_name_the_key_is_asked_without_one(make: Make, log: EngineLog) -> None:
    async def scenario() -> None:
        process = EngineProcess(make(task="embed"), log)
        assert (await process.start()).api_key is None
        await process.stop()

    uvloop.run(scenario())


def test_what_the_program_started_is_measured_with_it_and_ends_with_it(
    make: Make, log: EngineLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "TERM_WAIT_S", 0.2)

    async def scenario() -> None:
        process = EngineProcess(make("--child", "--fail", "stubborn"), log)
        await process.start()
        child = (await told(process))["child"]
        reading = process.measure()
        while reading is not None and reading.anonymous_bytes < 32 * MIB:  # its child is still starting
            await asyncio.sleep(0.02)
            reading = process.measure()
        assert reading is not None and reading.peak_bytes >= reading.anonymous_bytes
        assert await process.stop()
        await gone(child)
        assert process.exit_reason == "killed by Laya: it did not end within 0.2 s of SIGTERM"

    uvloop.run(scenario())


def is_there(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("end", ["stops", "crashes", "is killed"])
@pytest.mark.parametrize("has_group", [True, False])
def test_what_left_its_session_ends_with_the_program(make: Make, log: EngineLog, has_group: bool, end: str) -> None:
    ceilings, support = claim_ceilings()
    if has_group and not support.has_hard_limit:
        pytest.skip(f"no memory groups here: {support.words}")

    async def scenario() -> None:
        words = ["--leaves", *(["--detached"] if has_group else [])]  # without a group a parent that is gone hides it
        settings = make(*words, ceiling_bytes=256 * MIB if has_group else None)
        process = EngineProcess(settings, log, ceilings=ceilings if has_group else None)
        await process.start()
        left = (await told(process))["left"]
        assert os.getsid(left) != process.pid
        process.measure()  # as the gateway does now and then
        if end == "stops":
            assert await process.stop()
        elif end == "is killed":
            process.kill()
        else:
            os.kill(process.pid or 0, signal.SIGSEGV)
        await process.wait_exit()
        assert not is_there(left), "gone before its memory is given back"
        if has_group:
            assert ceilings.folder is not None
            assert not list(ceilings.folder.glob(f"laya-{os.getpid()}-*"))

    uvloop.run(scenario())


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            "exits",
            r"loading the weights \| no such tensor: blk\.0 \(program .*python.*; `laya logs own` has the rest\)",
        ),
        ("500", "its first answer was an error: the kernel is missing"),
        ("shape", r"its first answer has no token: \{\"answer\": 42\}"),
        (
            "deaf",
            r"not ready after 2 s \(load_timeout_s\): nothing answers on 127\.0\.0\.1:\d+, which is its \$\{PORT\}",
        ),
        ("sick", r"not ready after 2 s \(load_timeout_s\): /health answers 503"),
    ],
)
def test_start_that_fails_says_why_and_leaves_nothing(make: Make, log: EngineLog, fault: str, words: str) -> None:
    async def scenario() -> None:
        waits_in_vain = fault in ("deaf", "sick")
        process = EngineProcess(make("--fail", fault, load_timeout_s=2.0 if waits_in_vain else 60.0), log)
        with pytest.raises(EngineFailed, match=words):
            await process.start()
        assert process.state == "exited"
        if waits_in_vain:
            assert (process.exit_reason or "").startswith("killed by Laya: not ready after 2 s (load_timeout_s)")

    uvloop.run(scenario())


def test_health_path_that_is_not_there_is_told(make: Make, log: EngineLog) -> None:
    with pytest.raises(EngineFailed, match=r"it has no /healthz \(404\): set health to a path that it has"):
        uvloop.run(EngineProcess(make(health="/healthz"), log).start())


def test_port_that_was_taken_meanwhile_is_another_one_the_next_time(make: Make, log: EngineLog, tmp_path: Path) -> None:
    async def scenario() -> None:
        process = EngineProcess(make("--fail", "taken", "--once", str(tmp_path / "seen")), log)
        address = await process.start()
        taken = next(line for line in log.tail() if line.startswith("OSError")).rsplit(": ", 1)[1]
        assert taken != str(address.port)
        assert sum("started, pid" in line for line in log.tail()) == 2
        await process.stop()

    uvloop.run(scenario())


def test_program_that_does_nothing_holds_up_no_other_load(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "STILL_S", 0.4)

    async def scenario() -> None:
        supervisor = Supervisor(tmp_path)
        deaf, well = make("--fail", "deaf", load_timeout_s=100.0), make()

        async def settings_of(which: CommandSettings) -> CommandSettings:
            return which

        for name, which in (("deaf", deaf), ("well", well)):
            supervisor.register(name, partial(settings_of, which), lambda: None)
        first = asyncio.ensure_future(supervisor.ensure_ready("deaf"))
        await supervisor.ensure_ready("well")
        assert not first.done()
        await supervisor.shutdown()
        with pytest.raises(LayaError):
            await first

    uvloop.run(scenario())


@pytest.fixture
def stranger() -> Iterator[tuple[int, list[str]]]:
    """Another program that is there already and answers all that an engine is asked; its port, what it was asked."""
    asked: list[str] = []

    class Answers(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            asked.append(self.requestline)

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as httpd:
        Thread(target=httpd.serve_forever, daemon=True).start()
        yield httpd.server_address[1], asked
        httpd.shutdown()


def test_stranger_on_its_port_is_not_taken_for_the_program(
    make: Make, log: EngineLog, monkeypatch: pytest.MonkeyPatch, stranger: tuple[int, list[str]]
) -> None:
    taken, asked = stranger
    ports = iter([taken, command_module.free_port()])
    monkeypatch.setattr(command_module, "free_port", lambda: next(ports))

    async def scenario() -> None:
        process = EngineProcess(make(), log)
        address = await process.start()
        assert address.port != taken and not asked
        await process.stop()

    uvloop.run(scenario())
    monkeypatch.setattr(command_module, "free_port", lambda: taken)
    with pytest.raises(
        EngineFailed, match=rf"another program, \S+ \(pid {os.getpid()}\), has taken 127\.0\.0\.1:{taken}"
    ):
        uvloop.run(EngineProcess(make(), log).start())
    assert not asked


def test_engines_that_got_one_port_tell_each_other_apart(
    make: Make, log: EngineLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both were told that it was free, the younger one is quicker, and answers the other's key with a 401."""
    shared = command_module.free_port()
    ports = iter([shared, shared, command_module.free_port()])
    monkeypatch.setattr(command_module, "free_port", lambda: next(ports))
    quick = make("--api-key", "${API_KEY}")
    shell = 'while ! [ -e go ]; do sleep 0.05; done; exec "$0" "$@"'
    words = ("sh", "-c", shell, sys.executable, *quick.words[1:])
    slow = msgspec.structs.replace(quick, model_id="slow", program=Path("/bin/sh"), words=words)

    async def scenario() -> None:
        slow_one, quick_one = EngineProcess(slow, log), EngineProcess(quick, EngineLog())
        starting = asyncio.create_task(slow_one.start())
        while slow_one.pid is None:
            await asyncio.sleep(0)
        assert (await quick_one.start()).port == shared
        (slow.folder / "go").touch()
        assert (await starting).port != shared
        for process in (slow_one, quick_one):
            await process.stop()

    uvloop.run(scenario())
    assert any(f"has taken 127.0.0.1:{shared}" in line for line in log.tail(200))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#!/no/such/interpreter\n", "names an interpreter in its first line that is not there"),
        ("exit 1\n", "is no program of this machine, and has no #! line"),
        ("#!/bin/sh\nexit 0\n", "it ended without a fault: have it stay in the foreground"),
    ],
)
def test_file_that_cannot_become_a_server_is_told(
    make: Make, log: EngineLog, tmp_path: Path, text: str, words: str
) -> None:
    script = tmp_path / "script"
    script.write_text(text)
    script.chmod(0o755)
    with pytest.raises(EngineFailed, match=words):
        uvloop.run(EngineProcess(msgspec.structs.replace(make(), program=script), log).start())


def test_program_that_takes_more_than_its_ceiling_is_ended_by_it(make: Make, log: EngineLog) -> None:
    ceilings, support = claim_ceilings()

    async def scenario(ceilings: Ceilings) -> None:
        process = EngineProcess(make("--hold", "200", ceiling_bytes=96 * MIB), log, ceilings=ceilings)
        address = await process.start()
        async with httpx.AsyncClient(trust_env=False) as http:
            body = {"model": "own", "messages": []}
            with pytest.raises(httpx.TransportError):
                await http.post(f"http://{address.host}:{address.port}/v1/chat/completions", json=body)
        assert "stopped at its memory limit of 96.0 MiB" in await process.wait_exit()
        assert process.limit_hit is not None and process.limit_hit.limit_bytes == 96 * MIB
        small = EngineProcess(make(ceiling_bytes=6 * MIB), log, ceilings=ceilings)
        with pytest.raises(EngineOutOfMemory, match="Declare more with memory"):
            await small.start()

    if support.kind == "watched":
        pytest.skip(f"no memory groups here: {support.words}")
    uvloop.run(scenario(ceilings))


def test_program_whose_worker_takes_more_ends_with_it(make: Make, log: EngineLog) -> None:
    ceilings, support = claim_ceilings()

    async def scenario(ceilings: Ceilings) -> None:
        process = EngineProcess(make("--hold", "200", "--by-child", ceiling_bytes=96 * MIB), log, ceilings=ceilings)
        address = await process.start()
        async with httpx.AsyncClient(trust_env=False) as http:
            body = {"model": "own", "messages": []}
            await http.post(f"http://{address.host}:{address.port}/v1/chat/completions", json=body)
        while process.state != "exited":  # as the guard does
            ceilings.check_watched()
            await asyncio.sleep(0.05)
        assert "stopped at its memory limit of 96.0 MiB" in await process.wait_exit()

    if support.kind == "watched":
        pytest.skip(f"no memory groups here: {support.words}")
    uvloop.run(scenario(ceilings))
