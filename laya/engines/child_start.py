"""Owns: what every child program does first: it is told what to do, and steps back behind the gateway. Knows no engine.

The document comes on stdin (never argv: a key must not show in `ps`). Stdout is the report pipe (one JSON line: the
address, or what was wrong); whatever is written to stdout or stderr from here on goes to the log pipe. It imports
little, because the resident size of a child is in its plan.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1


def begin() -> tuple[dict[str, Any], int]:
    """The document, and where to report. OSError: it may not run under the limit that it should have."""
    die_with_parent()
    report_fd = os.dup(1)  # not inheritable: a program that the child becomes does not get it
    os.dup2(2, 1)
    document: dict[str, Any] = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if os.getppid() != document["parent_pid"]:
        sys.exit(1)  # the parent died before die_with_parent() could take effect
    step_back(document["nice"], document["oom_score_adj"])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        enter_group(document["group"])
    except OSError as error:
        give_up(report_fd, error)
    return document, report_fd


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the thread that spawned us ends; survives exec."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def step_back(nice: int, oom_score_adj: int) -> None:
    """Make this process the first to be slowed down and to be killed, and keep its memory out of core files."""
    os.nice(max(0, nice - os.nice(0)))  # a parent may have stepped back already
    for path, value in (
        ("/proc/self/oom_score_adj", oom_score_adj),
        # Where the kernel groups tasks by session, nice counts only inside the group; the group has its own.
        ("/proc/self/autogroup", nice),
        # A core file with the weights and the KV cache in it would stall the machine for minutes.
        ("/proc/self/coredump_filter", 0),
    ):
        # A kernel without the file, or a sandbox that forbids it: the engine still runs, only less politely.
        with contextlib.suppress(OSError), open(path, "w") as file:
            file.write(str(value))


def enter_group(entrance: str | None) -> None:
    """Step under our memory limit, before anything is allocated. OSError: an engine without its limit must not run."""
    if entrance is not None:
        try:
            with open(entrance, "w") as file:
                file.write("0")
        except OSError as error:
            raise OSError(f"its memory group {entrance} cannot be entered ({error.strerror})") from None


def report(fd: int, message: dict[str, str]) -> None:
    os.write(fd, json.dumps(message).encode() + b"\n")


def give_up(fd: int, error: Exception) -> None:
    """Say why, and end."""
    report(fd, {"error": str(error)})
    sys.exit(1)
