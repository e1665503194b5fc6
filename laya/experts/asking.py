"""Owns: the process that counts, as its parent sees it: started, listened to, and its fault made one sentence."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Literal

import msgspec

from laya.errors import EngineFailed, InvalidRequest
from laya.experts.counting import Counted, Job

_MODULES = {"llama.cpp": "laya.experts.of_gguf", "torch": "laya.experts.of_hf"}
Engine = Literal["llama.cpp", "torch"]


class _Line(msgspec.Struct):
    """Any of the lines that it prints."""

    done: int | None = None
    of: int = 0
    error: str | None = None
    is_asked: bool = False
    """The fault is of what was asked for, not of the engine."""
    n_experts: int | None = None


def ask(engine: Engine, job: Job, on_progress: Callable[[int, int], object]) -> Counted:
    """Raises InvalidRequest or EngineFailed with what the process said, EngineFailed with how it ended."""
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(
            [sys.executable, "-m", _MODULES[engine]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said
        ) as child,
    ):
        assert child.stdin is not None and child.stdout is not None
        try:
            _tell(child, msgspec.json.encode(job))
            for raw in child.stdout:
                line = msgspec.json.decode(raw, type=_Line)
                if line.error is not None:
                    raise InvalidRequest(line.error) if line.is_asked else EngineFailed(line.error)
                if line.n_experts is not None:
                    return msgspec.json.decode(raw, type=Counted)
                on_progress(line.done or 0, line.of)
            code = child.wait()
        finally:
            child.kill()
        said.seek(0)
        last = said.read().decode(errors="replace").strip().rpartition("\n")[2]
    how = f"by signal {-code}" if code < 0 else f"with code {code}"
    raise EngineFailed(f"{engine} ended {how} while it computed {job.path}: {last or 'it said nothing'}")


def _tell(child: subprocess.Popen[bytes], words: bytes) -> None:
    assert child.stdin is not None
    try:
        child.stdin.write(words)
        child.stdin.close()
    except BrokenPipeError:  # it ended before it read: its exit code and stderr say why
        return
