"""Owns: bringing one file over HTTP: streamed, resumed where the server allows it, checked as it arrives.

Knows nothing of models but that each begins with GGUF. A file grows as `NAME.part` beside a note of the server's
validator; the next call goes on from it only if the server says, by If-Range, that the file is still the same one.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx
import msgspec

from laya.errors import DownloadError
from laya.models.files import GGUF_MAGIC, model_stem
from laya.models.sources import FetchedFile, Probe, Progress, RemoteFile, safe_file_name

TRIES = 4
RETRY_WAIT_S = 1.0  # times the number of the try; none after a try that brought bytes
TIMEOUT = httpx.Timeout(30.0, connect=10.0)
CHUNK_BYTES = 1 << 20


class _Note(msgspec.Struct):
    """What is remembered of a half-fetched file."""

    url: str
    validator: str | None = None  # a strong ETag or a Last-Modified: what If-Range takes


class _Interrupted(Exception):
    """The connection broke after some bytes; asking again may bring the rest."""


class PartFile:
    """A file that is being fetched: `NAME.part` and its note."""

    def __init__(self, target: Path, url: str) -> None:
        self.target = target
        self.url = url
        self.path = target.with_name(target.name + ".part")
        self.note_path = target.with_name(target.name + ".part.json")

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else 0

    def range_headers(self) -> dict[str, str]:
        """The headers that ask for the rest, if there is a rest and a way to know it is the same file."""
        try:
            note = msgspec.json.decode(self.note_path.read_bytes(), type=_Note)
        except (OSError, msgspec.DecodeError):
            return {}
        if not self.size or note.url != self.url or note.validator is None:
            return {}
        return {"range": f"bytes={self.size}-", "if-range": note.validator}

    def start(self, response: httpx.Response) -> int:
        """Settle where this response goes on from: the bytes kept, or 0 after starting over."""
        expected = re.match(rf"bytes {self.size}-", response.headers.get("content-range", ""))
        if response.status_code == 206 and expected:
            return self.size
        etag = response.headers.get("etag", "")
        strong = etag if etag.startswith('"') else None
        note = _Note(url=self.url, validator=strong or response.headers.get("last-modified"))
        self.path.unlink(missing_ok=True)
        self.note_path.write_bytes(msgspec.json.encode(note))
        return 0

    def discard(self) -> None:
        """Leave nothing of this fetch."""
        self.path.unlink(missing_ok=True)
        self.note_path.unlink(missing_ok=True)

    def finish(self) -> Path:
        """The whole file gets its name."""
        self.path.replace(self.target)
        self.note_path.unlink(missing_ok=True)
        return self.target


class UrlSource:
    """A model at an http(s):// address."""

    keeps_partial = True

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = safe_file_name(unquote(urlsplit(url).path).rpartition("/")[2])

    def probe(self) -> Probe:
        size = content_bytes(self.url, {})
        file = RemoteFile(name=self.name, file_bytes=size)
        return Probe(files=(file,), suggested_id=model_stem(self.name))

    def disk_need_bytes(self, probe: Probe, folder: Path) -> int | None:
        return remaining_bytes(probe, folder)

    def fetch(self, probe: Probe, folder: Path, progress: Progress) -> list[FetchedFile]:
        file = probe.files[0]
        return [fetch_file(self.url, folder / file.name, progress=progress)]


def remaining_bytes(probe: Probe, folder: Path) -> int | None:
    """What a folder still has to take of the probed files: whole files and parts in it are counted as there."""
    if probe.file_bytes is None:
        return None
    kept = 0
    for file in probe.files:
        for path in (folder / file.name, folder / f"{file.name}.part"):
            kept += path.stat().st_size if path.is_file() else 0
    return max(0, probe.file_bytes - kept)


def content_bytes(url: str, headers: dict[str, str]) -> int | None:
    """The length the server states, from the head of a GET that is closed unread: not every server knows HEAD."""
    try:
        with _client() as client, client.stream("GET", url, headers=_identity(headers)) as response:
            _raise_for_status(response, url)
            length = response.headers.get("content-length")
    except (httpx.HTTPError, httpx.InvalidURL, _Interrupted) as error:
        raise DownloadError(f"{url}: {_reason(error)}.") from None
    return int(length) if length and length.isdigit() else None


def fetch_file(url: str, target: Path, *, progress: Progress, headers: dict[str, str] | None = None) -> FetchedFile:
    """Fetch `url` to `target`, going on from an earlier try, and give its sha256.

    Raises: DownloadError; OSError when the disk refuses. A part that can be gone on from is left, never `target`.
    """
    part = PartFile(target, url)
    for attempt in range(TRIES):
        before = part.size
        try:
            digest = _fetch_rest(part, headers or {}, progress)
        except _Interrupted as broken:
            if attempt == TRIES - 1:
                raise DownloadError(
                    f"{url}: {broken} after {part.size} bytes. The same command goes on from there."
                ) from None
            time.sleep(0 if part.size > before else RETRY_WAIT_S * (attempt + 1))
        else:
            return FetchedFile(path=part.finish(), sha256=digest)
    raise AssertionError("the last attempt returns or raises")


def _fetch_rest(part: PartFile, headers: dict[str, str], progress: Progress) -> str:
    """One request: append what it brings to the part. Returns the sha256 of the whole part."""
    with _transport_errors(part.url), _client() as client:
        wanted = _identity(headers | part.range_headers())
        with client.stream("GET", part.url, headers=wanted) as response:
            if response.status_code == 416:  # the file is shorter now than what we hold of it: another file
                part.discard()
                raise _Interrupted("the file changed on the server")
            _raise_for_status(response, part.url)
            done = part.start(response)
            digest = _sha256_of(part.path) if done else hashlib.sha256()
            length = response.headers.get("content-length")
            total = done + int(length) if length and length.isdigit() else None
            progress(done, total)
            with part.path.open("ab") as file:
                for chunk in response.iter_raw():
                    if done == 0:
                        _check_magic(chunk, part)
                    file.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    progress(done, total)
            if done == 0:
                part.discard()
                raise DownloadError(f"{part.url}: the server sent an empty file.")
    return digest.hexdigest()


def _check_magic(first: bytes, part: PartFile) -> None:
    """Stop at the first bytes of a web page or an archive, not after gigabytes of it."""
    if first[: len(GGUF_MAGIC)] != GGUF_MAGIC[: len(first)]:
        part.discard()
        raise DownloadError(f"{part.url}: what the server sends is not a GGUF file; it begins with {first[:4]!r}.")


def _sha256_of(path: Path) -> hashlib._Hash:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest


def _client() -> httpx.Client:
    return httpx.Client(follow_redirects=True, timeout=TIMEOUT)


def _identity(headers: dict[str, str]) -> dict[str, str]:
    """Ask for the bytes as they are: a compressed transfer has no ranges and no honest length."""
    return headers | {"accept-encoding": "identity"}


def _raise_for_status(response: httpx.Response, url: str) -> None:
    if response.is_success:
        return
    status = f"{response.status_code} {response.reason_phrase}"
    if response.status_code in (408, 429) or response.status_code >= 500:
        raise _Interrupted(f"the server answered {status}")
    raise DownloadError(f"{url}: the server answered {status}.", upstream_status=response.status_code)


@contextmanager
def _transport_errors(url: str) -> Iterator[None]:
    """A broken connection can be tried again; an address that is none cannot."""
    try:
        yield
    except httpx.TransportError as error:
        raise _Interrupted(_reason(error)) from None
    except httpx.HTTPError as error:
        raise DownloadError(f"{url}: {_reason(error)}.") from None


def _reason(error: Exception) -> str:
    return str(error).rstrip(". ") or type(error).__name__
