"""The guard at work: what it reads, what it has the fleet do, what is told of it."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from laya.engines.ceiling import Ceilings, LimitHit
from laya.engines.supervisor import Supervisor
from laya.gateway.events import KEPT, Events
from laya.gateway.guarding import Guarding, ceiling_support, shared_groups
from laya.metrics import GatewayStats
from laya.types import GIB, MIB

from .front import front, request

HIT = LimitHit(limit_bytes=96 * MIB, peak_bytes=96 * MIB, by_kernel=True)


class Fleet:
    """Keeps what it was asked, and has two idle models."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.idle = ["a", "b"]

    def set_admitting(self, admitting: bool, reason: str = "") -> None:
        self.asked.append(("admit", admitting))

    async def drop_caches(self) -> int:
        self.asked.append("caches")
        return 5 * MIB

    async def unload_idle(self) -> list[str]:
        self.asked.append("idle")
        idle, self.idle = self.idle, []
        return idle

    async def stop_youngest(self, reason: str) -> str | None:
        self.asked.append("youngest")
        return "c"


class Machine:
    available_bytes = 10 * GIB

    def read(self) -> int:
        return self.available_bytes


@pytest.fixture
def at_work() -> SimpleNamespace:
    fleet, machine, events, stats, ceilings = Fleet(), Machine(), Events(), GatewayStats(), Ceilings()
    supervisor = Supervisor(None)
    guarding = Guarding(fleet, supervisor, ceilings, events=events, stats=stats, available_bytes=machine.read)
    return SimpleNamespace(
        fleet=fleet, machine=machine, events=events, stats=stats, ceilings=ceilings, guarding=guarding
    )


def test_ladder_is_climbed_on_the_fleet_and_each_step_is_an_event_and_a_count(at_work: SimpleNamespace) -> None:
    async def scenario() -> None:
        await at_work.guarding.look(0.0)
        assert at_work.fleet.asked == []
        tight = SimpleNamespace(anonymous_bytes=10 * GIB, resident_bytes=10 * GIB)
        at_work.machine.available_bytes = 100 * MIB
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("laya.gateway.guarding.read_family", lambda pid: tight)
            patch.setattr(at_work.guarding, "_pids", lambda: [1])
            for now_s in (1.0, 1.1, 2.0, 4.0, 10.0):
                await at_work.guarding.look(now_s)
        at_work.machine.available_bytes = 10 * GIB
        for now_s in (11.0, 17.0):
            await at_work.guarding.look(now_s)

    uvloop.run(scenario())
    assert at_work.fleet.asked == [("admit", False), "caches", "idle", "youngest", "youngest", ("admit", True)]
    kinds = [(event.kind, event.model) for event in at_work.events.after()]
    assert kinds == [
        ("stop_admitting", None),
        ("drop_caches", None),
        ("unload_idle", "a"),
        ("unload_idle", "b"),
        ("stop_youngest", "c"),
        ("stop_youngest", "c"),
        ("admit_again", None),
    ]
    assert at_work.stats.guard_steps["unload_idle"] == 2
    assert at_work.stats.unloads == {("a", "pressure"): 1, ("b", "pressure"): 1, ("c", "pressure"): 2}
    assert "100 MiB of 10.1 GiB left" in at_work.events.after()[0].text


def test_mapped_weights_of_running_engines_are_not_free(at_work: SimpleNamespace) -> None:
    memory = SimpleNamespace(anonymous_bytes=GIB, resident_bytes=4 * GIB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("laya.gateway.guarding.read_family", lambda pid: memory)
        patch.setattr(at_work.guarding, "_pids", lambda: [1])
        reading = at_work.guarding.reading(time.monotonic())
    assert reading.available_bytes == 7 * GIB
    assert reading.usable_bytes == 11 * GIB


def test_fault_in_one_look_does_not_end_the_guard(at_work: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    looks = []

    def read() -> int:
        looks.append(time.monotonic())
        if len(looks) == 1:
            raise OSError("a file of the kernel was away")
        return 10 * GIB

    at_work.guarding._available_bytes = read

    async def scenario() -> None:
        running = asyncio.create_task(at_work.guarding.run())
        while len(looks) < 2:
            await asyncio.sleep(0.01)
        running.cancel()

    uvloop.run(scenario())
    assert "the guard's look at the machine failed" in caplog.text


def test_death_at_the_limit_is_told_with_its_bytes(at_work: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    error = at_work.guarding.crash_error("m", "it closed the connection")
    assert error.message == "The engine of 'm' broke off: it closed the connection."
    monkeypatch.setattr(at_work.ceilings, "hit", lambda model_id: HIT)
    error = at_work.guarding.crash_error("m", "it closed the connection")
    assert (error.code, error.details["cause"], error.details["limit_bytes"]) == (
        "engine_crashed",
        "memory_limit",
        96 * MIB,
    )
    assert "memory limit of 96.0 MiB (100663296 bytes" in error.message
    at_work.guarding._engine_changed("m", "failed", None)
    assert at_work.stats.unloads == {("m", "oom"): 1}
    (event,) = at_work.events.after()
    assert (event.kind, event.model, event.figures["limit_bytes"]) == ("memory_limit", "m", 96 * MIB)


def test_other_deaths_are_events_too(at_work: SimpleNamespace) -> None:
    at_work.guarding._engine_changed("m", "ready", None)
    at_work.guarding._engine_changed("m", "failed", None)
    assert at_work.stats.unloads == {("m", "crashed"): 1}
    for state in ("loading", "failed", "loading", "ready", "failed"):
        at_work.guarding._engine_changed("slow", state, None)
    assert at_work.stats.unloads == {("m", "crashed"): 1, ("slow", "start_failed"): 1, ("slow", "crashed"): 1}
    ended, not_started = "the engine of '{}' ended by itself", "the engine of '{}' did not start"
    told = [(event.kind, event.text) for event in at_work.events.after()]
    words = [ended.format("m"), not_started.format("slow"), ended.format("slow")]
    assert told == [("engine_failed", text) for text in words]


def test_events_are_kept_to_a_number_and_read_from_an_id() -> None:
    events = Events()
    for index in range(KEPT + 5):
        events.add("k", f"event {index}", level="info", n=index)
    kept = events.after()
    assert (len(kept), kept[0].id, kept[-1].text) == (KEPT, 6, f"event {KEPT + 4}")
    assert [event.id for event in events.after(KEPT + 3)] == [KEPT + 4, KEPT + 5]


def test_events_are_read_over_http(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with front(tmp_path) as gate:
            gate.gateway.events.add("unload_idle", "'a' was idle", model="a", available_bytes=7)
            gate.gateway.events.add("admit_again", "memory is easy again", level="info")
            answer = await gate.ask(request(path="/admin/events", method="GET"))
            first, second = answer.json["events"]
            assert (first["kind"], first["model"], first["figures"]) == ("unload_idle", "a", {"available_bytes": 7})
            answer = await gate.ask(request(path=f"/admin/events?after={first['id']}", method="GET"))
            assert answer.json["events"] == [second]
            answer = await gate.ask(request(path="/admin/events?after=yesterday", method="GET"))
            assert (answer.status, answer.error["param"]) == (400, "after")

    uvloop.run(scenario())


def test_support_of_this_machine_is_said_in_words() -> None:
    support = ceiling_support()
    assert support.words.startswith(("cgroup v", "systemd scope", "engines are only watched: "))
    assert support.has_hard_limit == (support.kind != "watched")


def test_machine_without_groups_is_said_so(tmp_path: Path) -> None:
    assert ceiling_support(tmp_path).words == "engines are only watched: no control group controls memory here"


def test_group_whose_pressure_counts_holds_the_engines_too(tmp_path: Path) -> None:
    """On a recorded tree: the group that was claimed where it is divided, else the one this process is in."""
    proc, group = tmp_path / "proc/self", tmp_path / "sys/fs/cgroup/system.slice/laya.service"
    for folder in (proc, group / "laya-gateway"):
        folder.mkdir(parents=True)
    (proc / "mountinfo").write_text("30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    (proc / "cgroup").write_text("0::/system.slice/laya.service/laya-gateway\n")
    assert shared_groups(Ceilings("v2", group), tmp_path) == [group]
    assert shared_groups(Ceilings(), tmp_path) == [group / "laya-gateway"]
    (proc / "cgroup").write_text("9:memory:/a\n")
    assert shared_groups(Ceilings(), tmp_path) == []


def test_pressure_of_the_group_wakes_the_guard_at_once(
    at_work: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    monkeypatch.setattr("laya.gateway.guarding.LOOK_EVERY_S", 3600.0)
    monkeypatch.setattr("laya.gateway.guarding.pressure_files", lambda groups: [Path("machine"), Path("group")])
    readers: dict[Path, int] = {}

    class Trigger:
        def __init__(self, path: Path) -> None:
            if path == Path("machine"):
                raise PermissionError(13, "Permission denied")
            self.read_end, self.write_end = os.pipe()
            readers[path] = self.write_end

        def fileno(self) -> int:
            return self.read_end

        def take(self) -> bool:
            return bool(os.read(self.read_end, 1))

        def close(self) -> None:
            os.close(self.read_end)
            os.close(self.write_end)

    monkeypatch.setattr("laya.gateway.guarding.PressureTrigger", Trigger)

    async def look(now_s: float) -> None:
        looks.append(now_s)

    monkeypatch.setattr(at_work.guarding, "look", look)

    async def scenario() -> None:
        running = asyncio.create_task(at_work.guarding.run())
        for n_looks in (1, 2):
            while len(looks) < n_looks:
                await asyncio.sleep(0.001)
            os.write(readers[Path("group")], b"!")
        while len(looks) < 3:
            await asyncio.sleep(0.001)
        running.cancel()

    uvloop.run(scenario())
    assert len(looks) == 3
