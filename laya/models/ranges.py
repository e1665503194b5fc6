"""Owns: reading pieces of a file that lies on a server, without fetching the file.

A piece is one range request; what was read from the start is kept, so that a reader whose header grows asks for the
rest only. What a server may make us hold is bounded by `ByteAllowance`, shared by all files of a model. Knows no
format.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx

from laya.errors import DownloadError

FIRST_BYTES = 1 << 18  # holds most safetensors headers whole; a GGUF reader asks for more at once
TRIES = 3
RETRY_WAIT_S = 0.5  # times the number of the try
TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_HINTS = {
    401: ": it wants a login, which Laya has for hf:// only (HF_TOKEN).",
    403: ": it does not give this file to everybody.",
    404: ": there is nothing at this address.",
}
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


class ByteAllowance:
    """Bytes that may still be fetched of one model: headers are small, so that more is never asked for."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self._left = n_bytes
        self._lock = threading.Lock()

    def take(self, n_bytes: int, url: str) -> None:
        """Raises: DownloadError once all is taken."""
        with self._lock:
            self._left -= n_bytes
            if self._left < 0:
                raise DownloadError(
                    f"{url}: its headers go on past {self.n_bytes >> 20} MiB, more than any known model has; "
                    f"nothing more is read of it."
                )


class RangeFile:
    """A file on a server, read piece by piece.

    name: what messages call it. denied: what to say where the server wants another login. The first piece brings the
    size; nothing is asked before.
    Raises DownloadError from every method: no such file, no access, no ranges, a file that changed meanwhile.
    """

    def __init__(
        self,
        url: str,
        *,
        client: httpx.Client,
        allowance: ByteAllowance,
        name: str | None = None,
        headers: Mapping[str, str] | None = None,
        denied: DownloadError | None = None,
    ) -> None:
        self.url = url
        self.name = name or url.partition("://")[2].partition("?")[0]
        self._client = client
        self._allowance = allowance
        self._headers = dict(headers or {})
        self._denied = denied
        self._start = b""  # what was read from the beginning of the file
        self._file_bytes: int | None = None
        self._etag = ""  # compared where it is a strong one

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        if self._file_bytes is None:
            self._start = self._piece(0, FIRST_BYTES)
        assert self._file_bytes is not None, "the first piece brings the size"
        return self._file_bytes

    def read(self, offset: int, n_bytes: int) -> bytes:
        """The bytes at `offset`, fewer where the file ends."""
        end = min(offset + n_bytes, self.file_bytes)
        if end <= len(self._start):
            return self._start[offset:end]
        if offset > len(self._start):
            return self._piece(offset, end - offset)
        self._start += self._piece(len(self._start), end - len(self._start))
        return self._start[offset:end]

    def _piece(self, offset: int, n_bytes: int) -> bytes:
        """One range from the server, asked for again where asking again can help."""
        self._allowance.take(n_bytes, self.url)
        for attempt in range(1, TRIES + 1):
            try:
                return self._ask(offset, n_bytes)
            except (httpx.TransportError, _TryAgain) as error:
                if attempt == TRIES:
                    raise DownloadError(f"{self.url}: {_reason(error)}.") from None
                time.sleep(RETRY_WAIT_S * attempt)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise DownloadError(f"{self.url}: {_reason(error)}.") from None
        raise AssertionError("the last attempt returns or raises")

    def _ask(self, offset: int, n_bytes: int) -> bytes:
        # A compressed transfer has no ranges and no honest length.
        wanted = {"range": f"bytes={offset}-{offset + n_bytes - 1}", "accept-encoding": "identity"}
        with self._client.stream("GET", self.url, headers=self._headers | wanted) as response:
            if response.status_code == 416 and offset == 0:
                self._file_bytes = 0  # no byte of an empty file can be asked for
                return b""
            self._check_status(response)
            if response.status_code == 206:
                self._check_range(response, offset)
            elif not self._is_whole(response, offset, n_bytes):
                raise DownloadError(
                    f"{self.url}: this server sends whole files only (it answered a range request with "
                    f"{response.status_code}), so the model can't be planned before it is here: `laya pull` it first."
                )
            return self._body(response, offset, n_bytes)

    def _check_status(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        status = f"the server answered {response.status_code} {response.reason_phrase}"
        if response.status_code in (408, 429) or response.status_code >= 500:
            raise _TryAgain(status)
        if response.status_code in (401, 403) and self._denied is not None:
            raise self._denied
        hint = _HINTS.get(response.status_code, ".")
        raise DownloadError(f"{self.url}: {status}{hint}", upstream_status=response.status_code)

    def _check_range(self, response: httpx.Response, offset: int) -> None:
        """The answer must be the piece that was asked for, of a file whose size is told and does not change."""
        told = response.headers.get("content-range", "")
        match = _CONTENT_RANGE.fullmatch(told.strip())
        if match is None or match[1] is None or int(match[1]) != offset or match[3] == "*":
            raise DownloadError(
                f"{self.url}: the server answered a range request without saying what it sent (Content-Range {told!r})."
            )
        etag = response.headers.get("etag", "")
        is_other = self._etag.startswith('"') and etag.startswith('"') and etag != self._etag
        if self._file_bytes is not None and (int(match[3]) != self._file_bytes or is_other):
            raise DownloadError(f"{self.url}: the file changed on the server while its header was read; ask again.")
        self._file_bytes, self._etag = int(match[3]), etag

    def _is_whole(self, response: httpx.Response, offset: int, n_bytes: int) -> bool:
        """Whether an answer without a range is a file so small that it is the piece that was asked for."""
        length = response.headers.get("content-length", "")
        if offset or not length.isdigit() or int(length) > n_bytes:
            return False
        self._file_bytes = int(length)
        return True

    def _body(self, response: httpx.Response, offset: int, n_bytes: int) -> bytes:
        """What was asked for and not a byte more, whatever the server sends."""
        assert self._file_bytes is not None, "set from the headers"
        wanted = min(n_bytes, self._file_bytes - offset)
        body = bytearray()
        for chunk in response.iter_raw():
            body += chunk
            if len(body) >= wanted:
                return bytes(body[:wanted])
        if len(body) < wanted:
            raise _TryAgain(f"the connection ended after {len(body)} of {wanted} bytes")
        return bytes(body)


class _TryAgain(Exception):
    """A fault of the moment."""


def _reason(error: Exception) -> str:
    return str(error).rstrip(". ") or type(error).__name__


@contextmanager
def range_client() -> Iterator[httpx.Client]:
    """A client for range requests: follows redirects (tokens stay with the host they were for), honours proxies."""
    with httpx.Client(follow_redirects=True, timeout=TIMEOUT) as client:
        yield client
