"""Owns: a JSON line for each request, where the config asks for it: written beside the loop, put aside at a size.

Never a key: only its name. Nothing of what was said, unless `request_log.content` is true; then the beginning of the
request's body, with what looks like a key or a token in it left out. A disk that is full costs lines, never requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
from collections import deque
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from laya.config import RequestLogConfig

if TYPE_CHECKING:
    from laya.gateway.exchange import Exchange

logger = logging.getLogger(__name__)
WRITE_EVERY_S = 0.5
MOST_WAITING = 10_000  # lines; what comes while the disk does not keep up is counted, and told in the log
CONTENT_LIMIT_BYTES = 4096
_SECRET = re.compile(
    r"(?i)\b(sk-[\w-]{6,}|laya-[\w-]{20,}|bearer\s+[\w.~+/=-]{6,}|(?:gh[pousr]|hf|xox[abpr])[_-]\w{10,})"
)
_NAMED = re.compile(r'(?i)("[^"]*(?:api_?key|password|secret|token)"\s*:\s*)"(?:[^"\\]|\\.)*"?')
_encode = msgspec.json.Encoder().encode


class RequestLog:
    """See the module. The settings are read as they stand, so a reload changes where the next line goes."""

    def __init__(self, config: RequestLogConfig) -> None:
        self._config = config
        self._waiting: deque[dict[str, Any]] = deque()
        self._n_lost = 0
        self._writing = threading.Lock()  # the last lines, while a thread still writes those before

    @property
    def keeps_content(self) -> bool:
        return self._config.path is not None and self._config.content

    def note(self, exchange: Exchange) -> None:
        """A request has its outcome."""
        if self._config.path is None:
            return
        if len(self._waiting) >= MOST_WAITING:
            self._n_lost += 1
            return
        self._waiting.append(_line(exchange, with_content=self._config.content))

    async def run(self) -> None:
        """Write for as long as the server runs; the last lines when it ends."""
        try:
            while True:
                await asyncio.sleep(WRITE_EVERY_S)
                if self._waiting:
                    await asyncio.to_thread(self.write)
        finally:
            self.write()

    def write(self) -> None:
        """What waits is in the file when this returns, or is lost and told so."""
        with self._writing:
            self._write()

    def _write(self) -> None:
        lines, path = deque[bytes](), self._config.path
        while self._waiting:
            lines.append(_encode(self._waiting.popleft()) + b"\n")
        if not lines or path is None:
            return
        try:
            self._append(Path(path), lines)
        except OSError as error:
            self._n_lost += len(lines)
            logger.warning("the request log %s cannot be written: %s", path, error.strerror)
        if self._n_lost:
            logger.warning("%d requests are missing in the request log", self._n_lost)
            self._n_lost = 0

    def _append(self, path: Path, lines: deque[bytes]) -> None:
        """Takes from `lines` what is in the file. Raises OSError."""
        file = _open(path)
        try:
            size = os.fstat(file).st_size
            while lines:
                if size and size + len(lines[0]) > self._config.max_bytes:
                    self._put_aside(path)
                    full, file, size = file, _open(path), 0
                    os.close(full)
                size += os.write(file, lines[0])
                lines.popleft()
        finally:
            os.close(file)

    def _put_aside(self, path: Path) -> None:
        """PATH becomes PATH.1, that one PATH.2; what is older than is kept goes."""
        kept = self._config.keep_files
        aside = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, kept + 1))]
        aside[-1].unlink(missing_ok=True)
        for older, newer in zip(reversed(aside[1:]), reversed(aside[:-1]), strict=True):
            if newer.exists():
                newer.rename(older)


def redacted(text: str) -> str:
    """The text without what looks like a key, a token or a password."""
    return _SECRET.sub("[redacted]", _NAMED.sub(r'\1"[redacted]"', text))


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _line(exchange: Exchange, *, with_content: bool) -> dict[str, Any]:
    now_s, parsed, fault = time.monotonic(), exchange.parsed, exchange.fault
    line = {
        "at": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "request_id": exchange.request_id.decode("latin-1"),
        "key": exchange.key_name,
        "endpoint": exchange.kind.name.lower(),
        "model": exchange.endpoint.model_id if exchange.endpoint is not None else None,
        "engine": exchange.endpoint.name if exchange.endpoint is not None else None,
        "stream": parsed.wants_stream if parsed is not None else None,
        "outcome": exchange.outcome,
        "error": fault.code if fault is not None else None,
        "prompt_tokens": exchange.prompt_tokens,
        "generated_tokens": exchange.n_tokens_out,
        "queue_ms": _ms(exchange.arrived_s, exchange.sent_s),
        "ttft_ms": _ms(exchange.arrived_s, exchange.first_token_s),
        "total_ms": _ms(exchange.arrived_s, now_s),
    }
    if with_content:
        line["body"] = redacted(exchange.said.decode("utf-8", "replace"))
    return line


def _ms(start_s: float, end_s: float) -> float | None:
    return round((end_s - start_s) * 1e3, 3) if end_s else None
