"""Owns: an engine that thinks nothing, to measure what stands before it. It reads its requests and writes its answers
as an engine must (HTTP, JSON in, JSON out), and does nothing else.

Speaks as much of llama.cpp's HTTP as a gateway needs: whole answers, streams of `--chunks` events with prefill progress
and usage, token counts. Prints its address. Run: `python -m laya.bench.stub_engine --chunks 64`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from functools import partial
from typing import Any

import httptools
import msgspec
import uvloop

_META: dict[str, Any] = {"id": "chatcmpl-stub", "created": 1, "model": "stub", "system_fingerprint": "stub"}
_USAGE = {"prompt_tokens": 9, "completion_tokens": 64, "total_tokens": 73}


def _event(body: dict[str, Any]) -> bytes:
    data = b"data: " + json.dumps(_META | {"object": "chat.completion.chunk"} | body).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def _choice(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


class _Request(msgspec.Struct):
    messages: list[dict[str, Any]] = []
    model: str = "stub"
    stream: bool = False


_DECODER = msgspec.json.Decoder(_Request)
_ENCODER = msgspec.json.Encoder()


def whole_answer(model: str = "stub", name: str = "stub") -> bytes:
    """`name`: of the engine, which is in the answer as its `system_fingerprint`."""
    message = {"role": "assistant", "content": "The stub says hello. " * 4}
    body = _META | {
        "model": model,
        "system_fingerprint": name,
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": _USAGE,
    }
    return _json(_ENCODER.encode(body))


def stream_pieces(n_chunks: int) -> list[bytes]:
    """Head, role, chunks, finish, usage, end: each written on its own, as an engine does."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    progress = _event(
        _choice({"role": "assistant", "content": None}) | {"prompt_progress": {"total": 9, "processed": 9}}
    )
    role = _event(_choice({"role": "assistant", "content": None}))
    chunks = [_event(_choice({"content": f"word{index} "})) for index in range(n_chunks)]
    finish = _event(_choice({}, "stop"))
    usage = _event({"choices": [], "usage": _USAGE})
    done = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    return [head + progress, role, *chunks, finish, usage + done]


def _json(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


COUNT = _json(b'{"input_tokens": 9}')
_MODELS = b'{"object":"list","status":"ok","data":[{"id":"stub","object":"model","created":1,"owned_by":"stub"}]}'
ALIVE = _json(_MODELS)


class StubEngine(asyncio.Protocol):
    """One connection."""

    stream: list[bytes]

    def __init__(self, name: str = "stub") -> None:
        self._name = name
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._body = b""
        self._url = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body = b""

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        if self._url.endswith(b"input_tokens"):
            self._transport.write(COUNT)
            return
        if self._parser.get_method() == b"GET":  # what routers ask of an engine before they send to it
            self._transport.write(ALIVE)
            return
        request = _DECODER.decode(self._body)
        if request.stream:
            self._send(0)
        else:
            self._transport.write(whole_answer(request.model, self._name))

    def _send(self, index: int) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(self.stream[index])
        if index + 1 < len(self.stream):
            asyncio.get_running_loop().call_soon(self._send, index + 1)


def engine_name(index: int) -> str:
    """Of the engines of one process: what the answers of each say; of the models of a gateway before them too."""
    return f"stub-{index}" if index else "stub"


async def _serve(n_chunks: int, port: int, n_engines: int) -> None:
    StubEngine.stream = stream_pieces(n_chunks)
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(partial(StubEngine, engine_name(index)), "127.0.0.1", 0 if index else port)
        for index in range(n_engines)
    ]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    print(json.dumps({"port": ports[0], "ports": ports}), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--port", type=int, default=0, help="of the first engine")
    parser.add_argument("--engines", type=int, default=1, help="so many in this process, each at a port of its own")
    args = parser.parse_args()
    uvloop.run(_serve(args.chunks, args.port, args.engines))


if __name__ == "__main__":
    main()
