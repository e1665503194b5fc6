"""An engine program for chaos: a llama-server that computes nothing and, if told to, takes memory no plan knows of.

It speaks llama.cpp's HTTP as the bench's stub engine does. With the first chat request it begins to take `--greed-mib`
MiB, 64 MiB a second, and its answers come a word a second, so that one is always under way.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any

import uvloop

from laya.bench import stub_engine

STEP_MIB = 4
MIB_PER_S = 64
taken: list[bytearray] = []


def value_of(flag: str, default: str) -> str:
    return sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else default


def take(mib: int) -> None:
    """Touch the memory, so that it is really held."""
    for _ in range(0, mib, STEP_MIB):
        taken.append(bytearray(b"x" * (STEP_MIB << 20)))
        time.sleep(STEP_MIB / MIB_PER_S)


class GreedyEngine(stub_engine.StubEngine):
    """Answers completions too, and begins to take memory with the first chat."""

    greed_mib = int(value_of("--greed-mib", "0"))
    has_begun = False

    def on_message_complete(self) -> None:
        if self._url.startswith(b"/v1/chat") and self.greed_mib and not GreedyEngine.has_begun:
            GreedyEngine.has_begun = True
            threading.Thread(target=take, args=(self.greed_mib,), daemon=True).start()
        if self._url == b"/v1/completions":
            self._answer({"model": value_of("--alias", "stub"), "choices": [{"text": " there"}], "usage": {}})
        elif self._url.endswith(b"input_tokens"):
            self._answer({"input_tokens": 9})
        elif self._url.startswith((b"/health", b"/slots", b"/props")):
            self._answer({"status": "ok"})
        else:
            super().on_message_complete()

    def _send(self, index: int) -> None:
        if not self.greed_mib:
            super()._send(index)
        elif not self._transport.is_closing() and index < len(self.stream):
            self._transport.write(self.stream[index])
            asyncio.get_running_loop().call_later(1.0, self._send, index + 1)

    def _answer(self, body: dict[str, Any]) -> None:
        data = json.dumps(body | {"usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}).encode()
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))


async def serve() -> None:
    GreedyEngine.stream = stub_engine.stream_pieces(8)
    server = await asyncio.get_running_loop().create_server(GreedyEngine, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    print(f"0.00.000.001 I srv          init: listening on http://127.0.0.1:{port}", file=sys.stderr, flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve())
