"""Owns: the hard limit on one engine's memory: a control group for each child, what it tells after a death, its end.

The group is made before the child is spawned and entered by the child before it allocates. Where no group can be made
the limit is watched instead (`check_watched`), which is slower than a greedy child may be, but better than nothing.
Knows no plan: the bytes come from outside. Where groups may be made is ceiling_place.py's.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from laya.engines.held_memory import read_family
from laya.engines.remains import groups_of
from laya.types import MIB

logger = logging.getLogger(__name__)

Kind = Literal["v2", "v1", "watched"]
GROUP_NAME = re.compile(r"laya-(\d+)-(\d+)-")  # of a group: pid and start time of the gateway that made it
# The kernel charges in batches of pages, so a group that was stopped at its limit may have peaked a little below it.
NEAR_LIMIT_BYTES = 2 * MIB


class LimitHit(msgspec.Struct, frozen=True, kw_only=True):
    """Why an engine was killed: it wanted more than it was allowed."""

    limit_bytes: int
    peak_bytes: int  # the most it held
    by_kernel: bool  # False: Laya watched it and killed it
    on_gpu: bool = False  # the memory of a GPU ran out, which the engine said itself; how much it wanted is not known

    def words(self) -> str:
        """`stopped at its memory limit of 591.0 MiB (it held 591.0 MiB and asked for more)`."""
        if self.on_gpu:
            return "a GPU had not enough memory for it"
        return (
            f"stopped at its memory limit of {self.limit_bytes / MIB:.1f} MiB ({self.limit_bytes} bytes; "
            f"it held {self.peak_bytes / MIB:.1f} MiB and asked for more)"
        )


GPU_FULL = LimitHit(limit_bytes=0, peak_bytes=0, by_kernel=False, on_gpu=True)


class Ceiling:
    """The limit of one child. `folder` is its group, or None where it is watched."""

    def __init__(self, limit_bytes: int, kind: Kind, folder: Path | None) -> None:
        self.limit_bytes = limit_bytes
        self.kind = kind
        self.folder = folder
        self._pid: int | None = None
        self._kill: Callable[[], None] = lambda: None
        self._hit: LimitHit | None = None

    @property
    def entrance(self) -> str | None:
        """The file the child writes 0 to before it allocates; None where there is no group.

        v1: `tasks` moves the one thread that writes, which is all the child has then. A write to `cgroup.procs` locks
        out every fork and exit of the machine until it is done: 10 ms and more (docs/log.md).
        """
        if self.folder is None:
            return None
        return str(self.folder / ("tasks" if self.kind == "v1" else "cgroup.procs"))

    @property
    def is_watched(self) -> bool:
        return self.kind == "watched" and self._pid is not None

    def attend(self, pid: int, kill: Callable[[], None]) -> None:
        """The child is there; `kill` ends it."""
        self._pid, self._kill = pid, kill

    def hit(self) -> LimitHit | None:
        """Whether the limit ended the child. Right from the moment its sockets close, before it is reaped."""
        if self._hit is None and self.folder is not None:
            self._hit = self._kernels_hit(self.folder)
        return self._hit

    def check_watched(self) -> LimitHit | None:
        """Kill a child that is over its limit and was not killed for it: one without a group, or one of several
        processes where the kernel took another of them (v1 knows no `oom.group`)."""
        if self.kind == "v1" and self._pid is not None and self._hit is None and self.hit() is not None:
            self._kill()
            return self._hit
        if not self.is_watched or self._pid is None or self._hit is not None:
            return None
        reading = read_family(self._pid)
        # as the kernel would: files that are mapped, such as a checkpoint while it is read, are dropped first
        held_bytes = reading.anonymous_bytes + reading.shared_bytes if reading is not None else 0
        if held_bytes <= self.limit_bytes:
            return None
        self._hit = LimitHit(limit_bytes=self.limit_bytes, peak_bytes=held_bytes, by_kernel=False)
        self._kill()
        return self._hit

    def remove(self) -> bool:
        """The child is reaped: its group goes. What it had to tell is kept. False: the kernel still holds it."""
        self.hit()
        self._pid = None
        if self.folder is not None:
            folder, self.folder = self.folder, None
            return remove_group(folder)
        return True

    def _kernels_hit(self, folder: Path) -> LimitHit | None:
        """A kill for want of memory counts only if it was for this limit, not for one above it or the machine's."""
        if self.kind == "v2":
            events = folder / "memory.events"
            is_hit = key_value(events, "oom_kill") > 0 and key_value(events, "oom") > 0
            peak_bytes = first_number(folder / "memory.peak") or self.limit_bytes  # the file came with Linux 5.19
        else:
            peak_bytes = first_number(folder / "memory.max_usage_in_bytes")
            is_near = peak_bytes >= self.limit_bytes - NEAR_LIMIT_BYTES
            is_hit = key_value(folder / "memory.oom_control", "oom_kill") > 0 and is_near
        return LimitHit(limit_bytes=self.limit_bytes, peak_bytes=peak_bytes, by_kernel=True) if is_hit else None


class Ceilings:
    """All limits of one server. `kind` and `folder` say where groups are made; "watched": nowhere."""

    def __init__(self, kind: Kind = "watched", folder: Path | None = None) -> None:
        self.kind = kind
        self.folder = folder
        self._of_model: dict[str, Ceiling] = {}
        self._numbers = itertools.count(1)
        self._prefix = f"laya-{os.getpid()}-{start_ticks(os.getpid())}-"

    def make(self, model_id: str, limit_bytes: int) -> Ceiling:
        """The limit of the model's next child. Where a group cannot be made after all, the child is watched."""
        ceiling = Ceiling(limit_bytes, "watched", None)
        if self.kind != "watched" and self.folder is not None:
            name = f"{self._prefix}{next(self._numbers)}-" + re.sub(r"[^\w.+-]", "_", model_id)[:64]
            try:
                make_group(self.kind, self.folder / name, limit_bytes)
                ceiling = Ceiling(limit_bytes, self.kind, self.folder / name)
            except OSError as error:
                logger.warning("no memory group for %s (%s): its size is watched instead", model_id, error)
        self._of_model[model_id] = ceiling
        return ceiling

    def hit(self, model_id: str) -> LimitHit | None:
        """Why the model's last child ended, if its limit did it."""
        ceiling = self._of_model.get(model_id)
        return ceiling.hit() if ceiling is not None else None

    def words(self, model_id: str) -> str:
        """`ceiling 591 MiB held by cgroup v2`; "" for a model whose engine has none."""
        ceiling = self._of_model.get(model_id)
        if ceiling is None:
            return ""
        by = "only watched" if ceiling.kind == "watched" else f"held by cgroup {ceiling.kind}"
        return f"ceiling {ceiling.limit_bytes / MIB:.0f} MiB {by}"

    @property
    def is_watching(self) -> bool:
        """Whether a child runs that no group holds."""
        return any(ceiling.is_watched for ceiling in self._of_model.values())

    def check_watched(self) -> list[str]:
        """Models whose child was over its limit, had no group to stop it, and was killed now."""
        return [model_id for model_id, ceiling in list(self._of_model.items()) if ceiling.check_watched()]

    def remove_leftovers(self) -> int:
        """Remove groups of gateways that are gone, and our own of children that are. How many went."""
        if self.folder is None:
            return 0
        in_use = {ceiling.folder for ceiling in self._of_model.values()}
        removed = 0
        for folder in self.folder.glob("laya-*-*-*"):
            if folder not in in_use and (folder.name.startswith(self._prefix) or not is_makers_alive(folder.name)):
                removed += remove_group(folder)
        return removed


def make_group(kind: Kind, folder: Path, limit_bytes: int) -> None:
    """A group with a hard limit and no swap. Raises OSError; nothing is left then."""
    folder.mkdir()
    try:
        if kind == "v2":
            (folder / "memory.max").write_text(str(limit_bytes))
            # An engine that swaps freezes the machine it shares: it is stopped instead, with all it started.
            write_if_there(folder / "memory.swap.max", "0")
            write_if_there(folder / "memory.oom.group", "1")
            return
        (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
        if not write_if_there(folder / "memory.memsw.limit_in_bytes", str(limit_bytes)):
            write_if_there(folder / "memory.swappiness", "0")
    except OSError:
        remove_group(folder)
        raise


def remove_group(folder: Path) -> bool:
    """True when the group is gone, with those made in it; one that still has a process, or is not ours, stays."""
    try:
        for group in groups_of(folder)[:-1]:
            group.rmdir()
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def is_makers_alive(name: str) -> bool:
    """Whether the gateway that made the group still runs; a name that is none of ours counts as alive."""
    match = GROUP_NAME.match(name)
    return match is None or start_ticks(int(match[1])) == int(match[2])


def start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot: tells it from a later one with its id. 0: there is none."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(after_name[19])


def write_if_there(path: Path, text: str) -> bool:
    """False where the kernel has no such file (no swap accounting, an older kernel)."""
    if not path.exists():
        return False
    path.write_text(text)
    return True


def key_value(path: Path, key: str) -> int:
    """The number behind `key` in a flat keyed file; 0 where there is none."""
    with contextlib.suppress(OSError):
        match = re.search(rf"^{key} (\d+)$", path.read_text(), re.MULTILINE)
        if match is not None:
            return int(match[1])
    return 0


def first_number(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return 0
