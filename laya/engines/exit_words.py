"""Owns: the end of a process in words. Knows no engine."""

from __future__ import annotations

import signal

SIGNAL_WORDS: dict[int, str] = {
    signal.SIGKILL: "out of memory or kill",
    signal.SIGSEGV: "a fault in the engine",
    signal.SIGABRT: "the engine gave up",
    signal.SIGBUS: "the model file changed or could not be read",
    signal.SIGILL: "an instruction that this CPU does not have",
    signal.SIGTERM: "asked to stop",
}


def exit_words(returncode: int, said: str | None) -> str:
    """`-9` -> "killed by signal 9 (out of memory or kill)"; `1` -> "exited with 1: <what it said>"."""
    if returncode >= 0:
        return f"exited with {returncode}" + (f": {said}" if said else "")
    signum = -returncode
    meaning = SIGNAL_WORDS.get(signum) or signal.strsignal(signum) or "unknown"
    return f"killed by signal {signum} ({meaning})" + (f": {said}" if said and signum == signal.SIGABRT else "")
