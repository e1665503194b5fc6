"""Owns: the child program `python -m laya.engines.llamacpp_child`: llama.cpp's server in a process of its own.

Reads one JSON document on stdin (never argv: the key must not show in `ps`), steps back behind the gateway, then
either serves with the `xllamacpp` wheel or becomes the user's own llama-server by exec. It decides nothing: every
value comes from the parent. Stdout is the report pipe (one JSON line: the address, or what was wrong); whatever
C++ writes to stdout or stderr goes to the log pipe. It imports little, because its resident size is in the plan.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from typing import Any

from laya.engines.thread_share import follow

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run until killed; exit code 1 after an error line on the report pipe."""
    die_with_parent()
    report_fd = os.dup(1)  # not inheritable: an exec'd engine does not get it
    os.dup2(2, 1)
    document = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if os.getppid() != document["parent_pid"]:
        sys.exit(1)  # the parent died before die_with_parent() could take effect
    step_back(document["nice"], document["oom_score_adj"])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        enter_group(document["group"])
        if "command" in document:
            command: list[str] = document["command"]
            os.execve(command[0], command, document["environment"])
        if document["threads_file"] is not None:
            follow(document["threads_file"])
        serve(document["params"], report_fd)
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError, ImportError) as error:
        report(report_fd, {"error": str(error)})
        sys.exit(1)


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the thread that spawned us ends; survives exec."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def step_back(nice: int, oom_score_adj: int) -> None:
    """Make this process the first to be slowed down and to be killed, and keep its memory out of core files."""
    os.nice(nice)
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


def serve(values: dict[str, Any], report_fd: int) -> None:
    """Load the model, report where the server listens, and wait for a signal. RuntimeError: it did not load."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    for name, value in values.items():
        apply(params, name, value, xllamacpp)
    server = xllamacpp.Server(params)
    report(report_fd, {"address": server.listening_address})
    while True:
        signal.pause()


def apply(params: Any, name: str, value: Any, library: Any) -> None:
    """Set the attribute with the dotted name; a word becomes the member of the attribute's enum."""
    *path, leaf = name.split(".")
    target = params
    for part in path:
        target = getattr(target, part)
    kind = type(getattr(target, leaf))
    try:
        if name == "lora_adapters":
            value = [library.CommonAdapterLoraInfo(each, 1.0) for each in value]
        elif name == "speculative.types":
            value = [enum_member(library.common_speculative_type, each) for each in value]
        elif hasattr(kind, "__members__"):
            value = enum_member(kind, value)
        setattr(target, leaf, value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} cannot be {value!r}: {error}") from None


def enum_member(kind: Any, word: str) -> Any:
    """`q8_0` -> GGML_TYPE_Q8_0: the member that is the enum's name and the word."""
    prefix = kind.__name__.upper()
    try:
        return kind.__members__[f"{prefix}_{str(word).upper()}"]
    except KeyError:
        words = ", ".join(member[len(prefix) + 1 :].lower() for member in kind.__members__)
        raise ValueError(f"it is one of {words}") from None


def report(fd: int, message: dict[str, str]) -> None:
    os.write(fd, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
