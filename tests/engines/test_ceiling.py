"""The hard limit on an engine: its group, what a death at the limit says, where groups may be made, and watching."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import uvloop

from laya.engines import ceiling_place
from laya.engines.ceiling import Ceiling, Ceilings, is_makers_alive, make_group, start_ticks
from laya.engines.ceiling_place import claim, look
from laya.engines.log import EngineLog
from laya.engines.process import EngineProcess
from laya.engines.settings import EngineSettings
from laya.errors import EngineFailed, EngineOutOfMemory
from laya.memory.cgroup import mounts
from laya.types import MIB, EngineAddress

MakeSettings = Callable[..., EngineSettings]
OWN_GROUPS = [(mount.kind, mount.group) for mount in mounts(Path("/"), "memory")]
SUPPORT = look(OWN_GROUPS)
needs_groups = pytest.mark.skipif(SUPPORT.kind != "v1", reason=f"needs root and cgroup v1: {SUPPORT.words}")
LIMIT_BYTES = 96 * MIB


@pytest.fixture
def ceilings() -> Iterator[Ceilings]:
    """Groups below our own; none is left."""
    assert SUPPORT.folder is not None
    ceilings = Ceilings("v1", SUPPORT.folder)
    yield ceilings
    ceilings.remove_leftovers()
    assert not list(SUPPORT.folder.glob(f"laya-{os.getpid()}-*"))


async def ask(address: EngineAddress) -> int:
    headers = {"authorization": f"Bearer {address.api_key}"}
    async with httpx.AsyncClient(base_url=f"http://{address.host}:{address.port}", trust_env=False) as http:
        return (await http.post("/v1/chat/completions", headers=headers, json={}, timeout=60)).status_code


def group_of(pid: int | None) -> str:
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return next(line.split(":")[2] for line in lines if line.split(":")[1] == "memory")


@needs_groups
def test_child_runs_under_its_limit_and_the_group_goes_with_it(
    make_settings: MakeSettings, some_gguf: Path, llama_server: Path, log: EngineLog, ceilings: Ceilings
) -> None:
    async def scenario() -> None:
        settings = make_settings(some_gguf, engine_path=llama_server, ceiling_bytes=LIMIT_BYTES)
        process = EngineProcess(settings, log, ceilings=ceilings)
        assert await ask(await process.start()) == 200
        folder = Path("/sys/fs/cgroup/memory" + group_of(process.pid))
        assert folder.parent == SUPPORT.folder and folder.name.startswith(f"laya-{os.getpid()}-")
        assert int((folder / "memory.limit_in_bytes").read_text()) == LIMIT_BYTES
        assert int((folder / "memory.usage_in_bytes").read_text()) > MIB
        assert ceilings.words("small") == "ceiling 96 MiB held by cgroup v1"
        await process.stop()
        assert process.limit_hit is None
        assert process.exit_reason == "killed by signal 15 (asked to stop)"
        assert not folder.exists()

    uvloop.run(scenario())


@needs_groups
def test_child_that_asks_for_more_dies_alone_and_the_bytes_are_named(
    make_settings: MakeSettings, some_gguf: Path, llama_server: Path, log: EngineLog, ceilings: Ceilings
) -> None:
    async def scenario() -> None:
        args = {"greed_later_mib": 2 * LIMIT_BYTES // MIB}
        settings = make_settings(some_gguf, engine_path=llama_server, ceiling_bytes=LIMIT_BYTES, args=args)
        process = EngineProcess(settings, log, ceilings=ceilings)
        address = await process.start()
        with pytest.raises(httpx.TransportError):
            await ask(address)
        hit = ceilings.hit("small")
        assert hit is not None and hit.by_kernel, "known as soon as the connection broke"
        reason = await process.wait_exit()
        assert process.limit_hit == hit and hit.limit_bytes == LIMIT_BYTES
        assert hit.peak_bytes >= LIMIT_BYTES - 2 * MIB
        assert f"{LIMIT_BYTES} bytes" in reason and "96.0 MiB" in reason

    uvloop.run(scenario())


@needs_groups
def test_child_that_outgrows_its_limit_while_loading_is_an_error_with_both_figures(
    make_settings: MakeSettings, some_gguf: Path, llama_server: Path, log: EngineLog, ceilings: Ceilings
) -> None:
    settings = make_settings(
        some_gguf, engine_path=llama_server, ceiling_bytes=LIMIT_BYTES, args={"greed_mib": 2 * LIMIT_BYTES // MIB}
    )
    with pytest.raises(EngineOutOfMemory) as caught:
        uvloop.run(EngineProcess(settings, log, ceilings=ceilings).start())
    assert caught.value.details["limit_bytes"] == LIMIT_BYTES
    assert LIMIT_BYTES - 2 * MIB <= caught.value.details["peak_bytes"] <= LIMIT_BYTES
    assert isinstance(caught.value, EngineFailed) and caught.value.http_status == 422


@needs_groups
def test_child_killed_by_somebody_else_did_not_hit_its_limit(
    make_settings: MakeSettings, some_gguf: Path, llama_server: Path, log: EngineLog, ceilings: Ceilings
) -> None:
    async def scenario() -> None:
        settings = make_settings(some_gguf, engine_path=llama_server, ceiling_bytes=LIMIT_BYTES)
        process = EngineProcess(settings, log, ceilings=ceilings)
        await process.start()
        process.kill()
        assert await process.wait_exit() == "killed by signal 9 (out of memory or kill)"
        assert process.limit_hit is None

    uvloop.run(scenario())


@needs_groups
@pytest.mark.engine
def test_built_in_engine_is_inside_before_it_allocates(
    make_settings: MakeSettings, smollm2_path: Path, log: EngineLog, ceilings: Ceilings
) -> None:
    """What it holds is charged to its group: all but what Python held before it stepped in."""

    async def scenario() -> None:
        process = EngineProcess(make_settings(smollm2_path, ceiling_bytes=1024 * MIB), log, ceilings=ceilings)
        await process.start()
        folder = Path("/sys/fs/cgroup/memory" + group_of(process.pid))
        reading = process.measure()
        assert reading is not None
        charged = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        assert reading.anonymous_bytes - int(charged["rss"]) < 16 * MIB
        await process.stop()

    uvloop.run(scenario())


@needs_groups
def test_engine_that_cannot_enter_its_group_does_not_run(
    make_settings: MakeSettings, some_gguf: Path, llama_server: Path, log: EngineLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ceiling, "entrance", property(lambda self: "/proc/version"))
    settings = make_settings(some_gguf, engine_path=llama_server, ceiling_bytes=LIMIT_BYTES)
    with pytest.raises(EngineFailed, match="/proc/version"):
        uvloop.run(EngineProcess(settings, log, ceilings=Ceilings()).start())


def test_child_without_a_group_is_watched_and_killed(
    make_settings: MakeSettings, some_gguf: Path, llama_server: Path, log: EngineLog
) -> None:
    async def scenario() -> None:
        ceilings = Ceilings()
        args = {"greed_later_mib": 2 * LIMIT_BYTES // MIB}
        settings = make_settings(some_gguf, engine_path=llama_server, ceiling_bytes=LIMIT_BYTES, args=args)
        process = EngineProcess(settings, log, ceilings=ceilings)
        address = await process.start()
        assert ceilings.check_watched() == []
        assert await ask(address) == 200
        assert ceilings.check_watched() == ["small"]
        reason = await process.wait_exit()
        assert "stopped at its memory limit of 96.0 MiB" in reason
        assert process.limit_hit is not None and process.limit_hit.peak_bytes > LIMIT_BYTES
        assert not process.limit_hit.by_kernel

    uvloop.run(scenario())


def test_model_without_a_limit_has_no_group(
    make_settings: MakeSettings, some_gguf: Path, llama_server: Path, log: EngineLog
) -> None:
    async def scenario() -> None:
        ceilings = Ceilings()
        process = EngineProcess(make_settings(some_gguf, engine_path=llama_server), log, ceilings=ceilings)
        await process.start()
        assert ceilings.hit("small") is None and ceilings.words("small") == ""
        await process.stop()

    uvloop.run(scenario())


@needs_groups
def test_groups_of_gateways_that_are_gone_are_removed(ceilings: Ceilings) -> None:
    assert ceilings.folder is not None
    dead = subprocess.Popen(["true"])
    ticks = start_ticks(dead.pid)
    dead.wait()
    left, other = ceilings.folder / f"laya-{dead.pid}-{ticks}-1-x", ceilings.folder / f"laya-{os.getppid()}-1-1-x"
    alive = ceilings.folder / f"laya-{os.getppid()}-{start_ticks(os.getppid())}-1-x"
    for folder in (left, other, alive):
        make_group("v1", folder, LIMIT_BYTES)
    try:
        assert ceilings.remove_leftovers() == 2
        assert alive.exists() and not left.exists() and not other.exists()
    finally:
        alive.rmdir()


def test_name_that_is_not_of_this_kind_is_left_alone() -> None:
    assert is_makers_alive("laya-probe")
    assert not is_makers_alive(f"laya-{os.getpid()}-1-1-x")


@needs_groups
def test_group_that_cannot_be_made_ends_in_watching() -> None:
    assert SUPPORT.folder is not None
    ceiling = Ceilings("v1", SUPPORT.folder / "nowhere").make("m", LIMIT_BYTES)
    assert (ceiling.kind, ceiling.entrance) == ("watched", None)


# version 2, on recorded trees


def v2_group(root: Path, *, procs: str = "", controllers: str = "cpu memory", subtree: str = "") -> Path:
    """The files of a delegated group of version 2 that places and limits read."""
    folder = root / "sys/fs/cgroup/user.slice/laya.scope"
    folder.mkdir(parents=True)
    for name, text in (
        ("cgroup.controllers", controllers),
        ("cgroup.procs", procs),
        ("cgroup.subtree_control", subtree),
        ("cgroup.type", "domain"),
    ):
        (folder / name).write_text(text + "\n")
    return folder


def recorded(folder: Path, limit_bytes: int = LIMIT_BYTES, **files: str) -> Ceiling:
    """A child's group as the kernel shows it."""
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return Ceiling(limit_bytes, "v2", folder)


def test_v2_group_where_we_are_alone_can_be_divided(tmp_path: Path) -> None:
    folder = v2_group(tmp_path, procs=str(os.getpid()))
    support = look([("v2", folder)], tmp_path)
    assert (support.kind, support.folder, support.has_hard_limit) == ("v2", folder, True)
    assert "cgroup v2 /user.slice/laya.scope" in support.words
    (folder / ceiling_place.GATEWAY_GROUP).mkdir()
    ceilings, claimed = claim(lambda: [("v2", folder)], tmp_path)
    assert (ceilings.kind, ceilings.folder, claimed.kind) == ("v2", folder, "v2")
    assert (folder / "cgroup.subtree_control").read_text() == "+memory"
    assert (folder / ceiling_place.GATEWAY_GROUP / "cgroup.procs").read_text() == str(os.getpid())


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"procs": "1\n2\n3"}, "shared with 3 other processes"),
        ({"controllers": "hugetlb"}, "does not control memory"),
    ],
)
def test_v2_group_that_is_not_ours_to_divide_says_why(tmp_path: Path, files: dict[str, str], reason: str) -> None:
    support = look([("v2", v2_group(tmp_path, **files))], tmp_path)
    assert (support.kind, support.has_hard_limit) == ("watched", False)
    assert reason in support.words and "systemd does not run here" in support.words


def test_v2_group_that_is_divided_already_needs_no_step_aside(tmp_path: Path) -> None:
    folder = v2_group(tmp_path, procs="1\n2", subtree="memory")
    ceilings, _ = claim(lambda: [("v2", folder)], tmp_path)
    assert ceilings.kind == "v2"
    assert not (folder / ceiling_place.GATEWAY_GROUP).exists()


def test_v2_limits_are_memory_no_swap_and_the_whole_group(tmp_path: Path) -> None:
    group = tmp_path / "engine"
    real_mkdir = Path.mkdir

    def mkdir_as_the_kernel_does(path: Path) -> None:
        real_mkdir(path)
        for name in ("memory.max", "memory.swap.max", "memory.oom.group"):
            (path / name).write_text("max")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", mkdir_as_the_kernel_does)
        make_group("v2", group, LIMIT_BYTES)
    values = [(group / name).read_text() for name in ("memory.max", "memory.swap.max", "memory.oom.group")]
    assert values == [str(LIMIT_BYTES), "0", "1"]


def test_v2_kill_counts_only_for_this_limit(tmp_path: Path) -> None:
    peak = {"memory__peak": f"{LIMIT_BYTES}\n"}
    own = recorded(tmp_path / "a", memory__events="high 0\nmax 41\noom 1\noom_kill 1\noom_group_kill 1\n", **peak)
    hit = own.hit()
    assert hit is not None and hit.peak_bytes == LIMIT_BYTES
    assert recorded(tmp_path / "b", memory__events="max 0\noom 0\noom_kill 1\n", **peak).hit() is None
    assert recorded(tmp_path / "c", memory__events="max 9\noom 0\noom_kill 0\n", **peak).hit() is None
    older = recorded(tmp_path / "d", memory__events="max 3\noom 1\noom_kill 1\n").hit()
    assert older is not None and older.peak_bytes == LIMIT_BYTES, "kernels before 5.19 have no memory.peak"


# systemd


def test_systemd_is_asked_for_a_scope_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = v2_group(tmp_path, procs="1\n2")
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    monkeypatch.setattr(ceiling_place.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(ceiling_place.os, "geteuid", lambda: 0)
    scope = tmp_path / "sys/fs/cgroup/system.slice/laya-1.scope"
    groups = [("v2", shared)]
    asked: list[list[str]] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        v2_group(tmp_path / "moved", procs=str(os.getpid())).rename(tmp_path / "scope")
        (tmp_path / "scope" / ceiling_place.GATEWAY_GROUP).mkdir()
        groups[:] = [("v2", tmp_path / "scope")]
        return subprocess.CompletedProcess(command, 0, "", "")

    assert look(groups, tmp_path).kind == "systemd"
    assert "systemd scope" in look(groups, tmp_path).words
    ceilings, support = claim(lambda: groups, tmp_path, run)
    assert (ceilings.kind, ceilings.folder, support.kind) == ("v2", tmp_path / "scope", "v2")
    (command,) = asked
    assert command[0] == "busctl" and "--system" in command and "StartTransientUnit" in command
    text = " ".join(command)
    assert f"PIDs au 1 {os.getpid()}" in text and "Delegate b true" in text and "CPUWeight t 20" in text
    assert not scope.exists()


def test_systemd_that_refuses_ends_in_watching_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = v2_group(tmp_path, procs="1\n2")
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    monkeypatch.setattr(ceiling_place.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(ceiling_place.os, "geteuid", lambda: 0)

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "Call failed: Access denied\n")

    ceilings, support = claim(lambda: [("v2", folder)], tmp_path, run)
    assert (ceilings.kind, support.has_hard_limit) == ("watched", False)
    assert "Access denied" in support.words


def test_user_without_a_systemd_of_his_own_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = v2_group(tmp_path, procs="1\n2")
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    monkeypatch.setattr(ceiling_place.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(ceiling_place.os, "geteuid", lambda: 1000)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert "enable-linger" in look([("v2", folder)], tmp_path).words


@needs_groups
def test_this_machine_is_claimed_and_leaves_no_probe() -> None:
    ceilings, support = claim(lambda: OWN_GROUPS)
    assert (ceilings.kind, support.kind) == ("v1", "v1")
    assert SUPPORT.folder is not None
    assert not list(SUPPORT.folder.glob("laya-probe-*"))


def test_machine_without_groups_is_watched() -> None:
    assert look([]).words == "engines are only watched: no control group controls memory here"
