"""How another Laya is asked for its state: what it says, and every way in which it does not."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from laya.config.peers import PeerConfig, read_peer
from laya.engines.peer import PeerFault, ask_peer

STATE = {
    "version": "9.9",
    "a_field_of_tomorrow": 1,
    "memory": {"budget_bytes": 100, "reserved_bytes": 30, "limit": "x"},
    "models": [
        {"id": "a", "state": "ready", "task": "chat", "plan": {"settings": {"max_seq_len": 4096}}, "pid": 7},
        {"id": "b", "state": "state of tomorrow", "task": "task of tomorrow"},
        {"id": "c/d", "state": "unloaded", "extra": {"peer": {"name": "c"}}},
    ],
}


class Scripted:
    """A server that answers everything in the same way; `seen` has the paths and the keys that came."""

    def __init__(self) -> None:
        self.status, self.body, self.headers = 200, json.dumps(STATE).encode(), {}
        self.is_silent = False
        self.ended = threading.Event()
        self.seen: list[tuple[str, str | None]] = []
        self._httpd = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._httpd.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._httpd.server_address[1]}"
        threading.Thread(target=self._httpd.serve_forever, daemon=True).start()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                """Nobody reads it."""

            def do_GET(self) -> None:
                server.seen.append((self.path, self.headers["authorization"]))
                if server.is_silent:
                    server.ended.wait()
                self.send_response(server.status)
                for name, value in server.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(server.body)

        return Handler

    def stop(self) -> None:
        self.ended.set()
        self._httpd.shutdown()
        self._httpd.server_close()


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    server = Scripted()
    yield server
    server.stop()


async def fault(url: str, **keys: Any) -> PeerFault:
    with pytest.raises(PeerFault) as caught:
        await ask_peer("attic", read_peer(PeerConfig(url=url, **keys)))
    return caught.value


@pytest.mark.anyio
async def test_state_is_read_whatever_else_it_says(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTIC_KEY", "sk-secret")
    state = await ask_peer("attic", read_peer(PeerConfig(url=scripted.url + "/v1", key_env="ATTIC_KEY")))
    assert scripted.seen == [("/admin/state", "Bearer sk-secret")]
    assert (state.version, state.free_bytes) == ("9.9", 70)
    a, b, c = state.models
    assert (a.known_state, a.known_task, a.window, a.is_its_own) == ("ready", "chat", 4096, True)
    assert (b.known_state, b.known_task, b.window) == ("ready", None, None)
    assert not c.is_its_own


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (401, b"", "refused", r"refuses the key \(401\); its key needs the role peer or admin there"),
        (403, b"sk-secret", "refused", r"refuses the key \(403\)"),
        (404, b"{}", "refused", "is no Laya"),
        (200, b"<html>", "refused", "is no Laya"),
        (200, b'{"models": 1}', "refused", "is no Laya"),
        (302, b"", "refused", "redirects to http://elsewhere: set url to that"),
        (503, b"", "silent", "answers 503"),
    ],
)
async def test_what_is_no_state_has_its_reason(
    scripted: Scripted, status: int, body: bytes, kind: str, words: str
) -> None:
    scripted.status, scripted.body, scripted.headers = status, body, {"location": "http://elsewhere"}
    found = await fault(scripted.url)
    assert found.kind == kind
    assert re.search(words, found.message), found.message
    assert "sk-secret" not in found.message


@pytest.mark.anyio
async def test_who_is_not_there_or_silent_is_told_apart(scripted: Scripted) -> None:
    scripted.is_silent = True
    late = await fault(scripted.url, connect_timeout_s=0.3)
    assert late.kind == "silent" and "no answer within 0.3 s" in late.message
    gone = await fault("http://127.0.0.1:9")
    assert gone.kind == "unreachable" and "cannot be reached" in gone.message


@pytest.mark.anyio
async def test_key_that_is_not_there_is_told_by_its_name(scripted: Scripted) -> None:
    found = await fault(scripted.url, key_env="LAYA_TEST_NO_SUCH_KEY")
    assert "the environment has no LAYA_TEST_NO_SUCH_KEY" in found.message and not scripted.seen
