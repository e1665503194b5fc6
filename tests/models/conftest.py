"""A real HTTP server whose every answer a test decides, small files with GGUF's magic, and a store of its own."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from laya.models import resolve
from laya.types import ModelFile


def gguf_bytes(size: int = 300_000, seed: int = 7) -> bytes:
    """A file that begins as GGUF does; no more than that is this room's to judge."""
    body = bytes((seed * n * n + n) % 251 for n in range(1009))
    return (b"GGUF\x03\x00\x00\x00" + body * (size // len(body) + 1))[:size]


@dataclass
class ServedFile:
    """A file of the test server and how it misbehaves."""

    body: bytes
    etag: str | None = '"v1"'
    status: int = 200
    content_type: str = "application/octet-stream"
    chunked: bool = False  # no content-length
    stop_after: list[int] = field(default_factory=list)  # one entry a GET: bytes sent before the connection breaks
    stall_after: int | None = None  # bytes sent before the server waits for `FileServer.go_on`
    redirect: str | None = None
    ranges: bool = True  # False: a server that answers a range request with the whole file


class FileServer:
    """Serves `files` and remembers the headers of each GET."""

    def __init__(self) -> None:
        self.files: dict[str, ServedFile] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.stalled = threading.Event()
        self.go_on = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                owner.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                owner._answer(self, owner.files.get(self.path.partition("?")[0]))

            def log_message(self, format: str, *args: object) -> None:
                """Tests look at `requests` instead."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def serve(self, path: str, body: bytes, **how: object) -> str:
        self.files[path] = ServedFile(body, **how)  # type: ignore[arg-type]
        return self.url + path

    def ranges(self) -> list[str | None]:
        return [headers.get("range") for _, headers in self.requests]

    def close(self) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, handler: BaseHTTPRequestHandler, file: ServedFile | None) -> None:
        handler.close_connection = True
        if file is None or file.status != 200:
            status = 404 if file is None else file.status
            handler.send_response(status)
            handler.send_header("connection", "close")
            handler.send_header("content-length", "0")
            handler.end_headers()
            return
        if file.redirect:
            handler.send_response(302)
            handler.send_header("location", file.redirect)
            handler.send_header("connection", "close")
            handler.send_header("content-length", "0")
            handler.end_headers()
            return
        start, stop, is_piece = self._piece(handler, file)
        if is_piece and start >= stop:
            handler.send_response(416)
            handler.send_header("content-range", f"bytes */{len(file.body)}")
            handler.send_header("connection", "close")
            handler.send_header("content-length", "0")
            handler.end_headers()
            return
        rest = file.body[start:stop]
        handler.send_response(206 if is_piece else 200)
        handler.send_header("connection", "close")
        handler.send_header("content-type", file.content_type)
        if file.etag:
            handler.send_header("etag", file.etag)
        if is_piece:
            handler.send_header("content-range", f"bytes {start}-{stop - 1}/{len(file.body)}")
        if not file.chunked:
            handler.send_header("content-length", str(len(rest)))
        handler.end_headers()
        self._send(handler, file, rest)

    def _piece(self, handler: BaseHTTPRequestHandler, file: ServedFile) -> tuple[int, int, bool]:
        """Where the answer begins and ends, and whether it is a piece of the file."""
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("range", ""))
        same = handler.headers.get("if-range") in (None, file.etag)
        if not (wanted and same and file.ranges):
            return 0, len(file.body), False
        stop = min(int(wanted[2]) + 1, len(file.body)) if wanted[2] else len(file.body)
        return int(wanted[1]), stop, True

    def _send(self, handler: BaseHTTPRequestHandler, file: ServedFile, rest: bytes) -> None:
        try:
            if file.stall_after is not None:
                handler.wfile.write(rest[: file.stall_after])
                handler.wfile.flush()
                self.stalled.set()
                self.go_on.wait()
                rest = rest[file.stall_after :]
            handler.wfile.write(rest[: file.stop_after.pop(0)] if file.stop_after else rest)
            handler.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            return  # the client left, which is what some tests do


@pytest.fixture
def server() -> Iterator[FileServer]:
    server = FileServer()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laya.models.download.RETRY_WAIT_S", 0)
    monkeypatch.setattr("laya.models.ranges.RETRY_WAIT_S", 0)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of its own, and a user's home without other programs' stores."""
    for variable in ("OLLAMA_MODELS", "LLAMA_CACHE", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "HF_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("LAYA_HOME", str(tmp_path / "laya"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "laya"


@pytest.fixture
def hub(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a repository on a hub of our own: `hub("org/repo", {"file.gguf": bytes})`."""
    monkeypatch.setenv("HF_ENDPOINT", server.url)

    def publish(repo: str, files: dict[str, bytes], *, sha256: dict[str, str] | None = None, **how: object) -> None:
        siblings = [
            {
                "rfilename": name,
                "size": len(body),
                "lfs": {"size": len(body), "sha256": (sha256 or {}).get(name) or _sha256(body), "pointerSize": 134},
            }
            for name, body in files.items()
        ]
        info = {"id": repo, "modelId": repo, "sha": "c0ffee", "siblings": siblings, "tags": [], "private": False}
        server.serve(f"/api/models/{repo}", json.dumps(info).encode())
        for name, body in files.items():
            server.serve(f"/{repo}/resolve/c0ffee/{name}", body, **how)

    return publish


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


@pytest.fixture(scope="session")
def default_model(laya_home: Path) -> ModelFile:
    """The default model in the suite's store, which `laya pull` filled once."""
    return resolve("smollm2", home=laya_home)
