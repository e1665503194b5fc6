"""Fixtures of the whole suite: the default model, pulled once by the project's own means, and a running server."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
import typer

from laya.cli.plan import plan
from laya.models import pull, resolve

ROOT = Path(__file__).parent.parent
READY_S = 120.0
PROGRAM = (sys.executable, "-m", "laya.cli")
SHARE_SERVERS = ("/any_engine", "/cluster")  # folders whose files use the same ones
EMBEDDING = """
version: 1
n_threads: 1
models:
  emb: {source: smollm2, task: embed, max_seq_len: 128, preload: true}
  talk: {source: smollm2, max_seq_len: 256, max_num_seqs: 1}
"""


class RunningServer:
    """`laya serve` in a process of its own, on a free port."""

    def __init__(
        self, home: Path, args: tuple[str, ...], cwd: Path, program: tuple[str, ...] = PROGRAM, port: int = 0
    ) -> None:
        self.home = home
        self.cwd = cwd  # its config.yaml and its ./models are here
        environ = os.environ | {"LAYA_HOME": str(home), "PYTHONPATH": str(ROOT)}
        environ.pop("LAYA_API_KEY", None)
        self._process = subprocess.Popen(
            [*program, "serve", *args, "--port", str(port)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            cwd=cwd,
            env=environ,
        )
        self.said: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        assert self._process.stderr is not None
        threading.Thread(target=self._read, args=(self._process.stderr,), daemon=True).start()

    def _read(self, pipe: IO[str]) -> None:
        for line in pipe:
            self.said.append(line)
            if match := re.search(r"is ready\s+(http://\S+)", line):
                self.url = match[1]
                self._ready.set()
        self._ready.set()

    def wait_ready(self) -> None:
        assert self._ready.wait(READY_S), "".join(self.said)
        assert self.url, f"the server ended: {''.join(self.said)}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def state(self) -> dict[str, object]:
        state: dict[str, object] = httpx.get(f"{self.url}/admin/state", trust_env=False).json()
        return state

    def stop(self, deadline_s: float = 40.0) -> int:
        """SIGTERM and the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
                raise
        return self._process.returncode


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Beside others (`-n`), files with engines, which take longest, begin."""
    if hasattr(config, "workerinput"):
        with_engine = {item.path for item in items if item.get_closest_marker("engine")}
        items.sort(key=lambda item: item.path not in with_engine)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, with files that use the same servers in one process."""
    from xdist.scheduler import LoadFileScheduling

    class ByServers(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            folder = file.rpartition("/")[0]
            return folder if folder.endswith(SHARE_SERVERS) else file

    return ByServers(config, log)


@pytest.fixture(scope="session")
def laya_home() -> Path:
    """A store with the default model in it, kept between runs; `laya pull` fills it once.

    Tests that run beside others (`-n`) have keys, learned rates and usage of their own: only the models are shared.
    """
    shared = Path(os.environ.get("LAYA_TEST_HOME") or ROOT / "build" / "test-home")
    shared.mkdir(parents=True, exist_ok=True)
    with open(shared / ".pulling", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        pull("smollm2", home=shared)
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return shared
    home = shared / worker
    home.mkdir(exist_ok=True)
    with suppress(FileExistsError):
        (home / "models").symlink_to(shared / "models")
    return home


@pytest.fixture(scope="session")
def smollm2_path(laya_home: Path) -> Path:
    """The default model's file."""
    return resolve("smollm2", home=laya_home).path


class PlayedNvml:
    """The stand-in of NVIDIA's library in this process, and the script that it answers from."""

    folder = ROOT / "tests" / "nvml"  # in PYTHONPATH, a server takes it for the real one

    def __init__(self, script: Path) -> None:
        self.script = script
        spec = spec_from_file_location("played_pynvml", self.folder / "pynvml.py")
        assert spec is not None and spec.loader is not None
        self.library = module_from_spec(spec)
        spec.loader.exec_module(self.library)

    def play(self, *cards: dict[str, Any]) -> None:
        """From now on these are there; see the module."""
        self.script.write_text(json.dumps({"cards": cards}))


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlayedNvml:
    """Without a card until one is played."""
    played = PlayedNvml(tmp_path / "nvml.json")
    monkeypatch.setenv("PLAYED_NVML", str(played.script))
    played.play()
    return played


@pytest.fixture
def laya_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    """`laya_plan(*words)` -> (exit code, what it printed), in a folder without a config and with a store of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAYA_HOME", str(tmp_path / "home"))
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(plan)

    def run(*words: object) -> tuple[int, str]:
        code = app(args=[str(word) for word in words], standalone_mode=False)
        return code if isinstance(code, int) else 0, capsys.readouterr().out

    return run


@pytest.fixture(scope="session")
def start_server(laya_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RunningServer]]:
    """`start_server("smollm2", "--max-num-seqs", "2")`: a real server, ready; stopped with the session at the latest.

    config: the text of a config.yaml for it. wait: False gives it back before it is ready.
    """
    with ExitStack() as stack:

        def start(*args: str, config: str | None = None, wait: bool = True, port: int = 0) -> RunningServer:
            cwd = tmp_path_factory.mktemp("serve")
            if config is not None:
                (cwd / "config.yaml").write_text(config)
            server = RunningServer(laya_home, args, cwd, port=port)
            stack.callback(server.stop)
            if wait:
                server.wait_ready()
            return server

        yield start


@pytest.fixture(scope="session")
def server(start_server: Callable[..., RunningServer]) -> RunningServer:
    """The default model, 2 sequences of 4096 tokens. Shared: tests leave it idle.

    One thread: with as many as there are cores, each program beside it (the tests are one) slows it down many times.
    """
    return start_server("smollm2", "--max-num-seqs", "2", "--max-seq-len", "4096", "--n-threads", "1")


@pytest.fixture(scope="session")
def vllm_server(start_server: Callable[..., RunningServer]) -> Iterator[RunningServer]:
    """Models that vLLM runs, each loaded when it is asked for first."""
    from tests.vllm.real import config  # it takes an environment of its own, which most runs have not

    server = start_server(config=config())
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="session")
def embedding(start_server: Callable[..., RunningServer]) -> Iterator[RunningServer]:
    """One model twice: for embeddings, loaded; for chat, known only."""
    server = start_server(config=EMBEDDING)
    yield server
    assert server.stop() == 0
