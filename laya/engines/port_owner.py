"""Owns: whether a port that was picked for an engine belongs to another program, which took it in between.

Who listens need not be the engine or its child: a container's proxy belongs to a service. But whoever was there before
the engine was started is a stranger, and so is an engine of another start, which carries that one's mark: what is sent
to the port, a key and the words of users, would be theirs.
"""

from __future__ import annotations

import contextlib

import psutil

from laya.engines.held_memory import family

ANY_HOST = ("0.0.0.0", "::")
MARK = "LAYA_ENGINE"  # in the environment of an engine and of all that it starts: which start they belong to
_MAPPED = "::ffff:"


def stranger_on(host: str, port: int, engine_pid: int, mark: str) -> str | None:
    """`nginx (pid 812)`: a program that listens there and does not belong to the engine; None: none that can be seen.

    Looks at every process, so not on the event loop.
    """
    try:
        listening = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        started_s = psutil.Process(engine_pid).create_time()
    except (psutil.Error, OSError):  # the engine is gone, or this system does not tell
        return None
    own = set(family(engine_pid))
    for each in listening:
        if not each.laddr or each.laddr.port != port or each.laddr.ip.removeprefix(_MAPPED) not in (host, *ANY_HOST):
            continue
        if each.pid is None or each.pid in own:
            continue
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(each.pid)
            its_mark = _mark_of(process)
            if its_mark != mark and (its_mark is not None or process.create_time() < started_s):
                return f"{process.name()} (pid {each.pid})"
    return None


def _mark_of(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.Error, OSError):  # another user's
        return process.environ().get(MARK)
    return None
