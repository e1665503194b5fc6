"""Owns: where this process may make groups for its engines: looking, which changes nothing, and claiming, which does.

Version 1 is written by root only, below our own group. Version 2 allows no process beside groups with limits, so the
gateway first steps into a group of its own; it may do so where it is alone: in a service with Delegate=yes, in a
container of its own, or in a scope that systemd gives it on request. Which groups we are in is told by the caller.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from laya.engines.ceiling import Ceilings, make_group, remove_group

OwnGroup = tuple[Literal["v1", "v2"], Path]  # a hierarchy that controls memory, and the folder of our group in it
Run = Callable[[list[str]], "subprocess.CompletedProcess[str]"]

PROBE_LIMIT_BYTES = 64 * 1024 * 1024
GATEWAY_GROUP = "laya-gateway"
SCOPE_CPU_WEIGHT = 20  # of 100: the desktop beside us comes first
SCOPE_WAIT_S = 5.0
MOVED_LOOK_EVERY_S = 0.02


class CeilingSupport(msgspec.Struct, frozen=True, kw_only=True):
    """What can hold engines to their bytes here. `laya doctor` prints `words`."""

    kind: Literal["v2", "v1", "systemd", "watched"]
    folder: Path | None  # our own group, where its engines' groups would be made
    words: str
    has_hard_limit: bool  # False: Laya only watches and kills


def look(groups: Sequence[OwnGroup], root: Path = Path("/"), pid: int | None = None) -> CeilingSupport:
    """What is possible, tried out where that leaves nothing behind."""
    reasons = []
    for kind, folder in groups:
        reason = _try_v1(folder) if kind == "v1" else _try_v2(folder, pid or os.getpid())
        if reason is None:
            return CeilingSupport(
                kind=kind,
                folder=folder,
                words=f"cgroup {kind} {_shown(folder, root)}: hard limit, no swap for engines",
                has_hard_limit=True,
            )
        reasons.append(reason)
    if any(kind == "v2" for kind, _ in groups):
        reason = _no_systemd(root)
        if reason is None:
            words = "systemd scope with cgroup v2: hard limit, no swap for engines"
            return CeilingSupport(kind="systemd", folder=None, words=words, has_hard_limit=True)
        reasons.append(reason)
    why = "; ".join(reasons) or "no control group controls memory here"
    return CeilingSupport(kind="watched", folder=None, words=f"engines are only watched: {why}", has_hard_limit=False)


def claim(
    groups: Callable[[], Sequence[OwnGroup]], root: Path = Path("/"), run: Run | None = None
) -> tuple[Ceilings, CeilingSupport]:
    """Take what `look` found, for the life of this process; `groups` is asked again once systemd has moved us.

    What cannot be had after all ends in watching, and `words` says why.
    """
    support = look(groups(), root)
    if support.kind == "systemd":
        refused = _ask_for_scope(run or _run)
        support = _wait_until_moved(groups, root, 0.0 if refused else SCOPE_WAIT_S)
        if support.kind == "systemd":  # still not in a group of our own
            words = f"engines are only watched: systemd gave no scope ({refused or 'it did not move this process'})"
            return Ceilings(), CeilingSupport(kind="watched", folder=None, words=words, has_hard_limit=False)
    if support.kind == "v2":
        assert support.folder is not None
        try:
            _step_aside(support.folder)
        except OSError as error:
            words = f"engines are only watched: {_shown(support.folder, root)} cannot be divided ({error.strerror})"
            return Ceilings(), CeilingSupport(kind="watched", folder=None, words=words, has_hard_limit=False)
    if support.kind in ("v1", "v2"):
        return Ceilings(support.kind, support.folder), support
    return Ceilings(), support


def _try_v1(folder: Path) -> str | None:
    """None where a limit can be set below our group, else the reason."""
    probe = folder / f"laya-probe-{os.getpid()}"
    try:
        make_group("v1", probe, PROBE_LIMIT_BYTES)
    except OSError as error:
        return f"cgroup v1 gives no group of our own ({error.strerror})"
    remove_group(probe)
    return None


def _try_v2(folder: Path, pid: int) -> str | None:
    """None where our group could be divided, else the reason. Changes nothing: moving ourselves is for a server."""
    name = "cgroup v2"
    if "memory" not in _words(folder / "cgroup.controllers"):
        return f"{name} does not control memory here"
    for needed in (folder, folder / "cgroup.procs", folder / "cgroup.subtree_control"):
        if not os.access(needed, os.W_OK):
            return f"{name} group is not ours to divide"
    others = [word for word in _words(folder / "cgroup.procs") if word not in (str(pid), "0")]
    if others and not _is_divided(folder):
        return f"{name} group is shared with {len(others)} other process{'es' if len(others) > 1 else ''}"
    return None


def _step_aside(folder: Path) -> None:
    """Make groups with limits possible below `folder`: nothing may run in it then, the gateway neither."""
    if not _is_divided(folder):
        own = folder / GATEWAY_GROUP
        own.mkdir(exist_ok=True)
        (own / "cgroup.procs").write_text(str(os.getpid()))
    (folder / "cgroup.subtree_control").write_text("+memory")


def _is_divided(folder: Path) -> bool:
    """Whether groups with limits may be made here beside processes; the hierarchy's root is free to."""
    is_root = not (folder / "cgroup.type").exists()
    return is_root or "memory" in _words(folder / "cgroup.subtree_control")


def _wait_until_moved(groups: Callable[[], Sequence[OwnGroup]], root: Path, wait_s: float) -> CeilingSupport:
    """systemd answers before it has moved us."""
    end_s = time.monotonic() + wait_s
    while (support := look(groups(), root)).kind == "systemd" and time.monotonic() < end_s:
        time.sleep(MOVED_LOOK_EVERY_S)
    return support


def _no_systemd(root: Path) -> str | None:
    """None where systemd can be asked for a scope, else the reason."""
    if not (root / "run/systemd/system").is_dir():
        return "systemd does not run here"
    if shutil.which("busctl") is None:
        return "busctl, which asks systemd for a scope, is not installed"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if os.geteuid() != 0 and not (runtime and (root / runtime.lstrip("/") / "systemd").is_dir()):
        return "no systemd of this user runs (loginctl enable-linger starts one)"
    return None


def _ask_for_scope(run: Run) -> str | None:
    """Have systemd move this process into a scope whose inside is ours. None, or why not."""
    properties = [
        *("PIDs", "au", "1", str(os.getpid())),
        *("Delegate", "b", "true"),
        *("CPUWeight", "t", str(SCOPE_CPU_WEIGHT)),
        *("Description", "s", "Laya and its engines"),
    ]
    command = [
        "busctl",
        "--system" if os.geteuid() == 0 else "--user",
        *("--timeout", str(SCOPE_WAIT_S), "call", "org.freedesktop.systemd1", "/org/freedesktop/systemd1"),
        *("org.freedesktop.systemd1.Manager", "StartTransientUnit", "ssa(sv)a(sa(sv))"),
        *(f"laya-{os.getpid()}.scope", "fail", "4", *properties, "0"),
    ]
    try:
        done = run(command)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * SCOPE_WAIT_S, check=False)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _shown(folder: Path, root: Path) -> str:
    """The group's path below the mounted hierarchies, for a message."""
    for top in ("sys/fs/cgroup/memory", "sys/fs/cgroup/unified", "sys/fs/cgroup"):
        if folder.is_relative_to(root / top):
            return f"/{folder.relative_to(root / top)}".replace("/.", "/")
    return str(folder)
