"""Owns: what an engine started and did not end itself: found, killed, and seen to be gone.

Where the engine has a control group, all of it is in there, whatever session or parent it has chosen. Where it has
none, it is what was seen below the engine while that lived: the kernel forgets who started a process once its parent is
gone, so one that was detached between two looks is not found.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Protocol

import psutil

from laya.engines.held_memory import family


class Remains(Protocol):
    """Of one engine."""

    def look(self) -> None:
        """Remember what there is, while the engine lives."""

    def kill(self) -> bool:
        """SIGKILL to all of it; True when nothing was left to kill."""


class GroupRemains:
    """What is in the engine's control group, and in groups that it made there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def look(self) -> None:
        """The kernel remembers."""

    def kill(self) -> bool:
        pids = [pid for group in groups_of(self._folder) for pid in _pids(group)]
        if pids and not _kill_at_once(self._folder):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return not pids


class SeenRemains:
    """What was seen below a process, now and before."""

    def __init__(self, pid: int) -> None:
        self._engine = psutil.Process(pid)  # not reaped yet
        self._seen: set[psutil.Process] = set()  # each knows when it began, so a later one with its id is not meant

    def look(self) -> None:
        engine = [self._engine] if self._engine.is_running() else []  # its id may be another's once it is reaped
        for process in (*engine, *self._alive()):
            for each in family(process.pid)[1:]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._seen.add(psutil.Process(each))

    def kill(self) -> bool:
        self.look()
        alive = self._alive()
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return not alive

    def _alive(self) -> list[psutil.Process]:
        alive = []
        for process in self._seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive


def groups_of(folder: Path) -> list[Path]:
    """A control group and those below it, the innermost first."""
    return sorted((file.parent for file in folder.rglob("cgroup.procs")), key=lambda group: -len(group.parts))


def _pids(group: Path) -> list[int]:
    """Of its processes; one that we may not see, because it is in a namespace outside ours, is told as 0."""
    try:
        return [pid for pid in map(int, (group / "cgroup.procs").read_text().split()) if pid]
    except OSError:  # the group is gone, and so is what was in it
        return []


def _kill_at_once(folder: Path) -> bool:
    """Have the kernel do it, so that nothing starts anything meanwhile: version 2 since Linux 5.14."""
    try:
        with open(folder / "cgroup.kill", "r+") as file:
            file.write("1")
    except OSError:
        return False
    return True
