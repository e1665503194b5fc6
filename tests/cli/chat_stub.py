"""A small OpenAI server on a real socket that answers from a script and notices when its client leaves."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = [
    {"id": "embedder", "task": "embed", "loaded": True, "context_length": 512},
    {"id": "sleeping", "task": "chat", "loaded": False, "context_length": 4096},
    {"id": "awake", "task": "chat", "loaded": True, "context_length": 1000, "max_model_len": 1000},
]


class StubServer(ThreadingHTTPServer):
    """`with StubServer() as stub:`; what is asked decides what is answered, see `_Handler.answer`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.bodies: list[dict[str, Any]] = []  # of every chat request
        self.authorizations: list[str | None] = []
        self.client_left = threading.Event()
        self.models = MODELS
        self.state: dict[str, Any] = {}

    def __enter__(self) -> StubServer:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StubServer

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        self.server.authorizations.append(self.headers.get("authorization"))
        if self.path == "/v1/models":
            self.reply({"object": "list", "data": self.server.models})
        elif self.path.startswith("/v1/models/"):
            found = [model for model in self.server.models if model["id"] == self.path.removeprefix("/v1/models/")]
            self.reply(
                found[0] if found else error("The model does not exist.", "model_not_found"), 200 if found else 404
            )
        elif self.path == "/admin/state":
            self.reply(self.server.state)
        elif self.path == "/null":
            self.reply(None)
        elif self.path == "/html":
            self.reply("<html>", content_type="text/html")
        elif self.path == "/key":
            self.reply(error("The API key is wrong.", "invalid_api_key"), 401)
        elif self.path == "/big":
            self.reply(error("It does not fit.", "insufficient_memory") | {}, 422)
        elif self.path.startswith("/text"):
            self.reply(self.path, content_type="text/plain")
        else:
            self.reply(None, 500)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"null")
        if self.path != "/v1/chat/completions":
            self.reply({"path": self.path, "body": body})
            return
        self.server.bodies.append(body)
        self.answer(body["messages"][-1]["content"])

    def do_DELETE(self) -> None:
        self.reply({"path": self.path})

    def answer(self, asked: str) -> None:
        """`forever`, `refuse`, `break`, `cut`, `odd`, or an echo."""
        if asked == "refuse":
            self.reply(error("Too long.", "context_length_exceeded"), 400)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        self.comment("prefill 50 %")
        self.delta({"role": "assistant", "content": ""})
        if asked == "forever":
            self.until_client_leaves()
        elif asked == "break":
            self.delta({"content": "half"})
            self.event(error("The engine crashed.", "engine_crashed"))
        elif asked == "cut":
            self.delta({"content": "half"})
        else:
            self.delta({"reasoning_content": "Hm."})
            self.delta({"content": "a\u2028b\x1b[2J\x07 \u00e9" if asked == "odd" else f"You said: {asked}"})
            self.end_answer()

    def until_client_leaves(self) -> None:
        with contextlib.suppress(ConnectionError):
            for n in range(1_000_000):
                self.delta({"content": f"word{n} "})
                readable, _, _ = select.select([self.connection], [], [], 0.01)
                if readable and self.connection.recv(1, socket.MSG_PEEK) == b"":
                    break
        self.server.client_left.set()

    def end_answer(self) -> None:
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
        self.event({"choices": [], "usage": usage, "timings": {"predicted_per_second": 55.5}})
        self.wfile.write(b"data: [DONE]\n\n")

    def delta(self, delta: dict[str, Any]) -> None:
        self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})

    def event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode())

    def comment(self, text: str) -> None:
        self.wfile.write(f": {text}\n\n".encode())

    def reply(self, body: Any, status: int = 200, content_type: str = "application/json") -> None:
        content = json.dumps(body).encode() if content_type == "application/json" else body.encode()
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def error(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "t", "param": None, "code": code, "need_bytes": 5}}
