"""Another server of OpenAI's API, in a thread of the tests: it answers, fails, hangs, breaks off, as `mode` says."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

MODEL, KEY = "their-model", "their-key"
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}


class OtherServer:
    """`mode`: "", 500, 429, 401, redirect, hang, drip (of its head), drop (mid-body), gate (each waits for `gate`),
    raw: `raw` as it is, `raw_again` until the client has left. Requests that came are in `heads` and `bodies`."""

    def __init__(self, cert: Path | None = None, base: str = "/v1") -> None:
        self.mode = ""
        self.raw = self.raw_again = b""
        self.base = base
        self.forward_to: str | None = None  # a base URL that gets what comes, as by a proxy
        self.state: dict[str, Any] | None = None  # of another Laya, which it then passes for
        self.heads: list[dict[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.ended = threading.Event()
        self.gate = threading.Event()
        self.n_at_gate = self.most_at_gate = 0
        self.counting = threading.Lock()
        server = self
        self._httpd = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"server_of": server}))
        self._httpd.daemon_threads = True
        scheme = "http"
        if cert is not None:
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.context.load_cert_chain(cert)  # another one may follow
            self._httpd.socket = self.context.wrap_socket(self._httpd.socket, server_side=True)
            scheme = "https"
        self.url = f"{scheme}://localhost:{self._httpd.server_address[1]}{base}"
        self._thread = threading.Thread(target=self._httpd.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.ended.set()
        self.gate.set()
        self._httpd.shutdown()
        self._httpd.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: OtherServer

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""

    def do_GET(self) -> None:
        if self.path.startswith(("/endless", "/slow")):  # a list of models, or its head, that has no end
            head = b"HTTP/1.1 200 OK\r\n" + (b"\r\n" if "endless" in self.path else b"x: ")
            piece, pause_s = (b"x" * 65536, 0.0) if "endless" in self.path else (b"y", 0.1)
            with contextlib.suppress(ConnectionError):
                self.wfile.write(head)
                while not self.server_of.ended.wait(pause_s):
                    self.wfile.write(piece)
            self.close_connection = True
            return
        if self.server_of.state is not None and self.path == "/admin/state":
            self._reply(self.server_of.state, 200)
            return
        right = self.path == self.server_of.base + "/models" and self.headers["authorization"] == f"Bearer {KEY}"
        self._reply({"object": "list", "data": []}, 200 if right else 401)

    def _wait_at_gate(self) -> None:
        other = self.server_of
        with other.counting:
            other.n_at_gate += 1
            other.most_at_gate = max(other.most_at_gate, other.n_at_gate)
        other.gate.wait()
        with other.counting:
            other.n_at_gate -= 1

    def do_POST(self) -> None:
        other = self.server_of
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        other.heads.append({name.lower(): value for name, value in self.headers.items()})
        other.bodies.append(body)
        if other.mode == "gate":
            self._wait_at_gate()
        if other.forward_to is not None:
            passed = {"x-request-id": self.headers["x-request-id"]}
            answer = httpx.post(other.forward_to + "/chat/completions", json=body, headers=passed, trust_env=False)
            self._reply(answer.json(), answer.status_code)
        elif other.mode in ("500", "401", "400"):
            self._reply({"error": {"message": "its own trouble"}}, int(other.mode))
        elif other.mode == "429":
            self._reply({"error": {"message": "too many"}}, 429, {"retry-after": "17"})
        elif other.mode == "redirect":
            self._reply({}, 302, {"location": "https://elsewhere/v1"})
        elif other.mode == "hang":
            other.ended.wait()
        elif other.mode == "drip":
            self.close_connection = True
            with contextlib.suppress(ConnectionError):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nx: ")
                while not other.ended.wait(0.1):
                    self.wfile.write(b"y")
        elif other.mode == "raw":
            self.close_connection = True
            with contextlib.suppress(ConnectionError):
                self.wfile.write(other.raw)
                while other.raw_again and not other.ended.is_set():
                    self.wfile.write(other.raw_again)
        elif body.get("stream"):
            self._stream()
        else:
            message = {"role": "assistant", "content": "from afar"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            answer = {"id": "x", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [choice]}
            data = json.dumps(answer | {"usage": USAGE}).encode()
            self._head(len(data))
            if other.mode == "drop":
                self.wfile.write(data[:40])
                self._cut()
            else:
                self.wfile.write(data)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for index, word in enumerate(["from", " afar"]):
            self._event([{"index": 0, "delta": {"content": word}, "finish_reason": None}])
            if self.server_of.mode == "drop" and index == 0:
                self._cut()
                return
            if self.server_of.mode == "stall" and index == 0:
                self.server_of.ended.wait()
        self._event([{"index": 0, "delta": {}, "finish_reason": "stop"}])
        self._event([], usage=USAGE)
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, choices: list[Any], **more: Any) -> None:
        event = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": choices} | more
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _cut(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _reply(self, body: Any, status: int, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self._head(len(data), status, headers)
        self.wfile.write(data)

    def _head(self, n_bytes: int, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {
            "content-type": "application/json",
            "content-length": str(n_bytes),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
