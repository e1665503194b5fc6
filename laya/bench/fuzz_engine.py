"""Owns: the stub engine that whatever passes the gateway may reach: what it cannot read it refuses, as an engine does.

Speaks a little more than `stub_engine.py`: tokens, embeddings, templates. Prints its address.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import uvloop

from laya.bench.stub_engine import StubEngine, stream_pieces

N_CHUNKS = 8
_USAGE = {"prompt_tokens": 3, "total_tokens": 3}
_VECTOR = {"object": "embedding", "index": 0, "embedding": [0.25, 0.5]}
_ANSWERS: dict[bytes, Any] = {
    b"/tokenize": {"tokens": [1, 2, 3]},
    b"/detokenize": {"content": "three"},
    b"/apply-template": {"prompt": "hello"},
    b"/slots": [{"id": 0, "n_ctx": 8192, "is_processing": False}],
    b"/v1/embeddings": {"object": "list", "model": "stub", "data": [_VECTOR], "usage": _USAGE},
}


def _answer(status: bytes, body: Any) -> bytes:
    data = json.dumps(body).encode()
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (status, len(data), data)


_REFUSAL = _answer(b"400 Bad Request", {"error": {"code": 400, "message": "not read", "type": "invalid_request_error"}})


class FuzzEngine(StubEngine):
    """One connection."""

    def on_message_complete(self) -> None:
        answer = _ANSWERS.get(self._url.partition(b"?")[0])
        if answer is not None:
            self._transport.write(_answer(b"200 OK", answer))
            return
        try:
            super().on_message_complete()
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._transport.write(_REFUSAL)


async def _serve() -> None:
    StubEngine.stream = stream_pieces(N_CHUNKS)
    server = await asyncio.get_running_loop().create_server(FuzzEngine, "127.0.0.1", 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve())
