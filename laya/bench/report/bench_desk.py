"""Owns: the programs that rows are measured by: each a child of its own, run once however many rows read it.

A child that does not end in its time is killed with all it started. Knows nothing of what figures mean.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from laya.bench.report.finding import NotRun

ROOT = Path(__file__).resolve().parents[3]
CHILD_S = 240.0
STOP_S = 15.0
REFUSED = 3  # exit code of `laya plan` for what does not fit: the plan is printed all the same
_REASON_CHARS = 160
_SKIP = re.compile(r"^SKIPPED \[\d+\] \S+ (.*)$", re.MULTILINE)


class Said(NamedTuple):
    """What a child printed, and how it ended."""

    code: int
    out: str
    err: str


class Desk:
    """See the module."""

    def __init__(self, *, deadline_s: float = float("inf")) -> None:
        self.reports: dict[str, Any] = {}  # by command, of the benches that ran
        self._said: dict[str, Said | NotRun] = {}
        self._end_s = time.monotonic() + deadline_s

    def laya(self, *words: str) -> Any:
        """The JSON that ends a verb's output. Raises NotRun with the verb's own sentence."""
        said = self._once((sys.executable, "-m", "laya.cli", *words), f"laya {shlex.join(words)}")
        try:
            found = json.loads(said.out if words[0] in ("plan", "experts") else said.out.splitlines()[-1])
        except (ValueError, IndexError):
            raise NotRun(f"`laya {words[0]}` ended with {said.code}: {_last(said)}") from None
        if words[0] == "bench":
            self.reports[f"laya {shlex.join(words)}"] = found
        return found

    def plan(self, *words: str) -> Any:
        """A plan, also one that is refused; of `examples/plans` where a description is named."""
        return self.laya("plan", *(str(word) for word in words), "--json")

    def described(self, name: str, *words: str) -> Any:
        """The plan of a model that is only described."""
        return self.plan(*described_words(name), *words)

    def tool(self, *words: str) -> Any:
        """The JSON that ends a program's output that lies in the repository."""
        self.need(words[0])
        said = self._once((sys.executable, *words), f"python {shlex.join(words)}")
        if said.code != 0:
            raise NotRun(f"{words[0]} ended with {said.code}: {_last(said)}")
        found = json.loads(said.out.splitlines()[-1])
        self.reports[f"python {shlex.join(words)}"] = found
        return found

    def tests(self, *nodes: str) -> str:
        """How many of these tests passed, and were left out and why. Raises NotRun where none passed or one failed."""
        for node in nodes:
            self.need(node.partition("::")[0])
        words = ("-m", "pytest", "-rs", "-p", "no:cacheprovider", *nodes)
        said = self._once((sys.executable, *words), f"python {shlex.join(words)}")
        passed = re.search(r"(\d+) passed", said.out)
        skipped = _SKIP.search(said.out)
        if said.code == 0 and passed:
            left_out = re.search(r"(\d+) skipped", said.out)
            more = f", {left_out[1]} left out here: {skipped[1]}" if left_out and skipped else ""
            return f"{passed[1]} passed{more}"
        if said.code == 0 and skipped:
            raise NotRun(f"its test is left out here: {skipped[1]}")
        raise NotRun(f"its test did not pass here: {_last(said)}")

    def need(self, path: str) -> None:
        """Raises NotRun where the repository is not at hand."""
        if not (ROOT / path).exists():
            raise NotRun(f"it needs {path} of the repository, and this is an installed Laya")

    def _once(self, argv: tuple[str, ...], command: str) -> Said:
        if command not in self._said:
            try:
                self._said[command] = self._run(argv, command)
            except NotRun as reason:
                self._said[command] = reason
        found = self._said[command]
        if isinstance(found, NotRun):
            raise found
        return found

    def _run(self, argv: tuple[str, ...], command: str) -> Said:
        left_s = min(CHILD_S, self._end_s - time.monotonic())
        if left_s <= 0:
            raise NotRun("the time of the whole report was over before it; `--only` runs it alone")
        child = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True, start_new_session=True
        )
        try:
            out, err = child.communicate(timeout=left_s)
        except subprocess.TimeoutExpired:
            _stop(child)
            raise NotRun(f"`{command}` did not end in {left_s:.0f} s beside what else ran") from None
        except BaseException:  # Ctrl-C too: nothing that was started goes on
            _stop(child)
            raise
        return Said(child.returncode, out, err)


def described_words(name: str) -> tuple[str, ...]:
    return "--params", f"examples/plans/{name}.json"


def _stop(child: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.killpg(child.pid, number)
        try:
            child.communicate(timeout=STOP_S)
            return
        except subprocess.TimeoutExpired:
            continue


def _last(said: Said) -> str:
    lines = [line for line in (said.err + "\n" + said.out).splitlines() if line.strip()]
    named = [line for line in lines if line.startswith(("FAILED", "ERROR", "laya:", "laya failed:"))]
    return (named or lines or ["no output"])[-1].strip()[:_REASON_CHARS]
