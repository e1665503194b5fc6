"""Owns: how a verb of the lab ends: a fault is one sentence and an exit code, a signal is obeyed once what is half made
is gone, and says what is left.

Exit codes are the command line's: 2 for what was asked, 3 for what does not fit, 1 for what went wrong, 130 and 128 + N
for signals. Knows no verb. The command line starts one by `python -m laya.lab_verb MODULE WORDS`: reading torch takes
seconds, in which Ctrl-C is not to end in a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

from laya.errors import LayaError

_ENDING = (signal.SIGTERM, signal.SIGHUP)  # asked to end, and a terminal that closes


def run_verb(verb: str, left: str, work: Callable[[], int]) -> int:
    """The exit code of `work`, or of what it raised. left: what an interruption leaves, as its sentence goes on."""
    try:
        with says_what_is_left(verb, left), stopped_by_signals():
            return work()
    except LayaError as error:
        print(f"laya {verb}: {error.message}", file=sys.stderr)
        return error.exit_code
    except (ValueError, OSError) as error:
        print(f"laya {verb}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stopped:
        return stop_code(stopped)


@contextmanager
def says_what_is_left(verb: str, left: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print(f"laya {verb}: interrupted; {left}", file=sys.stderr)
        raise


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that what was half made goes."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = {number: signal.signal(number, _stop) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_code(stopped: KeyboardInterrupt) -> int:
    """As a shell tells it: 128 and the signal's number."""
    return 128 + (stopped.args[0] if stopped.args else signal.SIGINT)


def _stop(number: int, _frame: object) -> None:
    raise KeyboardInterrupt(number)


def _start(module: str, words: list[str]) -> int:
    """What its `main` gives."""
    if (before := signal.getsignal(signal.SIGINT)) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)
    verb: Callable[[list[str]], int] = import_module(module).main
    signal.signal(signal.SIGINT, before)
    return verb(words)


def _leave(number: int, _frame: object) -> None:
    """At once: what is half imported cannot be left otherwise."""
    os.write(2, b"laya: interrupted; nothing was begun\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(_start(sys.argv[1], sys.argv[2:]))
