"""Owns: what engines print: the last lines in memory, a file of bounded size, followers, and the engine's own words.

One log belongs to one model and outlives its processes, so that a restart does not hide why it was needed. Lines come
in as bytes from a pipe, in any pieces; nothing here may block or fail, because a full pipe would stop the engine.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

RING_LINES = 2000
LINE_BYTES = 8192  # a longer line is cut into lines of this size
FILE_BYTES = 8 * 1024 * 1024  # then the file becomes <name>.log.1 and a new one starts
# "0.00.016.265 E srv    load_model: text" of llama.cpp: time, level, who; only the text is for a user.
ERROR_LINE = re.compile(r"^[\d.:]+ E (?:\w+ +)?[\w()~]+: (.*)$")
CALM_LINE = re.compile(r"^[\d.:]+ [DIW] ")
OTHER_ERROR = re.compile(r"^[\d.:]+ E |error|GGML_ASSERT|what\(\):|failed|invalid argument", re.IGNORECASE)


def log_path(logs_dir: Path, model_id: str) -> Path:
    """`<model>.log`; characters that mean something to a file system become underscores."""
    return logs_dir / (re.sub(r"[^\w.+:-]", "_", model_id).lstrip(".") + ".log")


class EngineLog:
    """The log of one model. Used on one event loop."""

    def __init__(self, path: Path | None = None, *, ring_lines: int = RING_LINES, file_bytes: int = FILE_BYTES) -> None:
        self.path = path
        self._file_bytes = file_bytes
        self._lines: deque[str] = deque(maxlen=ring_lines)
        self._count = 0  # lines ever seen; the ring holds the last of them
        self._run_start = 0  # value of _count when the present process began
        self._partial = b""
        self._file: BinaryIO | None = None
        self._written_bytes = 0
        self._changed = asyncio.Event()
        self._closed = False

    def begin(self, title: str) -> None:
        """A new process starts: the file is rotated, and `error_words` forgets the one before."""
        self._flush_partial()
        self._rotate()
        self._run_start = self._count
        self._append([f"laya: {title}".encode()])

    def feed(self, data: bytes) -> None:
        """Bytes as they came from the pipe."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        while len(self._partial) > LINE_BYTES:
            lines.append(self._partial[:LINE_BYTES])
            self._partial = self._partial[LINE_BYTES:]
        if lines:
            self._append(lines)

    def note(self, text: str) -> None:
        """A line of Laya's own, after whatever the engine left unfinished."""
        self._flush_partial()
        self._append([f"laya: {text}".encode()])

    def tail(self, n_lines: int = RING_LINES) -> list[str]:
        """The last lines, oldest first."""
        return list(self._lines)[-n_lines:] if n_lines > 0 else []

    async def follow(self, n_lines: int = 0) -> AsyncIterator[str]:
        """The last `n_lines` lines, then each new one until `close`. A slow reader skips what the ring dropped."""
        position = self._count - min(n_lines, len(self._lines))
        while True:
            position = max(position, self._count - len(self._lines))
            if position < self._count:
                yield self._lines[position - self._count + len(self._lines)]
                position += 1
            elif self._closed:
                return
            else:
                await self._changed.wait()

    def run_lines(self) -> list[str]:
        """What the present process printed, as far as the ring holds it."""
        return [line for line in self.tail(self._count - self._run_start) if not line.startswith("laya: ")]

    def error_words(self, *, first: bool) -> str | None:
        """The engine's own words for what went wrong in the present process.

        first: its first error, which is the cause when a load fails; otherwise the last, nearest to a crash.
        """
        lines = self.run_lines()
        leveled = [match[1] for line in lines if (match := ERROR_LINE.match(line))]
        if first and leveled:
            return leveled[0]
        errors = [line.strip() for line in lines if OTHER_ERROR.search(line) and not CALM_LINE.match(line)]
        if not errors:
            return None
        line = errors[0 if first else -1]
        match = ERROR_LINE.match(line)
        return match[1] if match else line

    def close(self) -> None:
        """Followers end after the last line; the file is closed."""
        self._flush_partial()
        self._closed = True
        self._wake()
        self._close_file()

    def _flush_partial(self) -> None:
        if self._partial:
            line, self._partial = self._partial, b""
            self._append([line])

    def _append(self, lines: list[bytes]) -> None:
        for line in lines:
            for start in range(0, max(len(line), 1), LINE_BYTES):
                self._lines.append(line[start : start + LINE_BYTES].decode(errors="replace").rstrip("\r"))
                self._count += 1
        self._write(b"\n".join(lines) + b"\n")
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _write(self, data: bytes) -> None:
        if self._file is None:
            return
        if self._written_bytes + len(data) > self._file_bytes:
            self._rotate()
        try:
            self._file.write(data)
            self._written_bytes += len(data)
        except OSError as error:
            self._give_up(error)

    def _rotate(self) -> None:
        self._close_file()
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self.path.replace(self.path.with_name(self.path.name + ".1"))
            self._file = self.path.open("wb", buffering=0)
            self._written_bytes = 0
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """A full disk or a read-only folder ends the file, not the engine; the next process tries again."""
        logger.warning("no log file %s: %s", self.path, error)
        self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
