"""Fixtures of the chaos suite: groups with a limit, servers inside them, engines that lie, models made on the spot."""

from __future__ import annotations

import itertools
import os
import shlex
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from laya.bench.generated_models import GeneratedShape, generate
from laya.engines.ceiling import first_number, key_value, make_group, remove_group
from laya.engines.ceiling_place import CeilingSupport
from laya.gateway.guarding import ceiling_support
from laya.types import MIB
from tests.conftest import PROGRAM, ROOT, RunningServer

ENTER = 'echo 0 > "$0/cgroup.procs" && exec "$@"'  # sh -c ENTER folder command...
GONE_WAIT_S = 5.0
SHAPE = GeneratedShape(n_layer=4, n_embd=256, n_head=4, n_head_kv=4, n_ff=512)


class Group:
    """A control group with a limit, made for one test."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes

    @property
    def peak_bytes(self) -> int:
        return first_number(self.folder / "memory.max_usage_in_bytes")

    def kills(self) -> int:
        """Processes the kernel killed for memory, here and in the groups inside that are still there."""
        files = [self.folder / "memory.oom_control", *self.folder.glob("*/memory.oom_control")]
        return sum(key_value(file, "oom_kill") for file in files)

    def program(self, *words: str) -> tuple[str, ...]:
        """The command that runs these words inside."""
        return ("sh", "-c", ENTER, str(self.folder), *words)


@pytest.fixture(scope="session")
def support() -> CeilingSupport:
    """Version 1, which this suite's groups are made with; anything else skips, saying why."""
    support = ceiling_support()
    if support.kind != "v1":
        pytest.skip(f"NOT RUN, this needs control groups of version 1 and root: {support.words}")
    return support


@pytest.fixture
def make_limited(support: CeilingSupport) -> Iterator[Callable[[int], Group]]:
    """`make_limited(bytes)`: a group below our own. Named before `serve`, so that what runs inside ends first."""
    assert support.folder is not None
    made: list[Path] = []

    def make(limit_bytes: int) -> Group:
        assert support.folder is not None
        folder = support.folder / f"chaos-{os.getpid()}-{len(made)}"
        make_group("v1", folder, limit_bytes)
        made.append(folder)
        return Group(folder, limit_bytes)

    yield make
    for folder in made:
        end_s = time.monotonic() + GONE_WAIT_S
        while not all(map(remove_group, (*folder.glob("*/"), folder))):
            assert time.monotonic() < end_s, f"{folder} is still in use"
            time.sleep(0.05)


@pytest.fixture
def serve(laya_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RunningServer]]:
    """`serve("smollm2", config=..., group=...)`: a server of this test, ready; stopped at its end."""
    with ExitStack() as stack:

        def start(
            *args: str, config: str | None = None, group: Group | None = None, program: tuple[str, ...] = PROGRAM
        ) -> RunningServer:
            cwd = tmp_path_factory.mktemp("chaos")
            if config is not None:
                (cwd / "config.yaml").write_text(config)
            server = RunningServer(laya_home, args, cwd, group.program(*program) if group is not None else program)
            stack.callback(server.stop)
            server.wait_ready()
            return server

        yield start


@pytest.fixture
def stub_llama_server(tmp_path: Path) -> Path:
    """An executable that takes llama-server's flags and computes nothing."""
    program = tmp_path / "llama-server"
    source = Path(__file__).with_name("stub_llama_server.py")
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {source} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


@pytest.fixture(scope="session")
def make_models(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Path]]:
    """`make_models(20, n_layer=6)`: so many files of one shape with different weights."""
    numbers = itertools.count()

    def make(n_models: int, **shape: Any) -> list[Path]:
        folder = tmp_path_factory.mktemp("models")
        form = GeneratedShape(**{name: getattr(SHAPE, name) for name in SHAPE.__struct_fields__} | shape)
        return [
            generate(folder / f"model{number}.gguf", form, vocabulary=smollm2_path, seed=number)
            for number in itertools.islice(numbers, n_models)
        ]

    return make


def chat(server: RunningServer, model: str, *, timeout_s: float = 120.0, **fields: Any) -> httpx.Response:
    """One short question, its answer whole."""
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4} | fields
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, trust_env=False, timeout=timeout_s)


def measured_answers(
    serve: Callable[..., RunningServer], model: str, model_id: str, lines: Iterable[Sequence[str]], **where: Any
) -> None:
    """Each line of words after `laya serve` answers a chat; what its engine was measured to hold is printed."""
    for words in lines:
        server = serve(*words, **where)
        answer = chat(server, model)
        measured = f"{measured_mib(server, model_id):.0f} MiB measured"
        print(f"  {shlex.join(words)}: {answer.status_code}, {measured}")
        assert answer.status_code == 200, answer.text
        server.stop()


def assert_nothing_killed(group: Group) -> None:
    peak, limit = group.peak_bytes / MIB, group.limit_bytes / MIB
    print(f"  the group held {peak:.0f} of {limit:.0f} MiB at most, {group.kills()} killed")
    assert group.kills() == 0


def events(server: RunningServer) -> list[dict[str, Any]]:
    """What the server's events tell, but for how far loads have come."""
    answer: list[dict[str, Any]] = httpx.get(f"{server.url}/admin/events", trust_env=False).json()["events"]
    return [event for event in answer if event["kind"] not in ("loading", "ready")]


def measured_mib(server: RunningServer, model_id: str) -> float:
    """The most that the model's engine was measured to hold."""
    models: list[dict[str, Any]] = server.state()["models"]  # type: ignore[assignment]
    peak_bytes: int = next(model["measured_bytes"] for model in models if model["id"] == model_id)
    return peak_bytes / MIB


# What others on the same cores may add to a delay where nobody can send them away, as in CI. The figures are printed.
SLACK = float(os.environ.get("LAYA_CHAOS_SLACK", "1"))
P99_S = 0.050 * SLACK


def share(values: list[float], percent: float) -> float:
    """The value below which so many percent lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def results_of(futures: list[Future[Any]]) -> list[Any]:
    return [future.result() for future in futures]
