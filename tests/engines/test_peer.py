"""How another Laya is asked for its state: what it says, and every way in which it does not."""

from __future__ import annotations

import contextlib
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
        self.again = b""  # after the body, again and again
        self.pause_s = 0.0
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
                with contextlib.suppress(ConnectionError):
                    while server.again and not server.ended.wait(server.pause_s):
                        self.wfile.write(server.again)

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
    a, b, _ = state.models
    assert (a.known_state, a.known_task, a.window) == ("ready", "chat", 4096)
    assert (b.known_state, b.known_task, b.window) == ("ready", None, None)
    assert [each.is_served for each in state.models] == [True, False, False]


@pytest.mark.anyio
async def test_models_that_could_not_be_called_so_here_are_left_out(scripted: Scripted) -> None:
    names = ["", " ", "a\nb", "\x1b[31m", "x" * 201, "мо дель", "日本/模"]
    models = [{"id": name, "state": "ready", "aliases": ["", "z/w"]} for name in names]
    scripted.body = json.dumps(STATE | {"models": models}).encode()
    state = await ask_peer("attic", read_peer(PeerConfig(url=scripted.url)))
    assert [each.id for each in state.models if each.is_served] == ["мо дель", "日本/模"]
    assert state.models[-1].known_aliases == ("z/w",)


@pytest.mark.anyio
@pytest.mark.parametrize("plan", [[1], {"settings": [1]}, {"settings": {"max_seq_len": "x"}}, {"settings": None}, 7])
async def test_a_plan_of_another_form_tells_no_window(scripted: Scripted, plan: Any) -> None:
    scripted.body = json.dumps(STATE | {"models": [{"id": "a", "state": "ready", "plan": plan}]}).encode()
    state = await ask_peer("attic", read_peer(PeerConfig(url=scripted.url)))
    assert state.models[0].window is None


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("again", "pause_s", "words"), [(b" " * 65536, 0.0, "more than 16 MiB of state"), (b" ", 0.05, "no answer within")]
)
async def test_a_state_that_never_ends_is_given_up(
    scripted: Scripted, again: bytes, pause_s: float, words: str
) -> None:
    scripted.body, scripted.again, scripted.pause_s = b"", again, pause_s
    limit_s = 0.5 if pause_s else 30.0
    assert words in (await fault(scripted.url, connect_timeout_s=limit_s)).message


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (
            401,
            b"",
            "refused",
            r"wants a key \(key_env or key_file\) \(401\); its key needs the role peer or admin there",
        ),
        (403, b"sk-secret", "refused", r"wants a key \(key_env or key_file\) \(403\)"),
        (404, b"{}", "refused", "is no Laya"),
        (200, b"<html>", "refused", "is no Laya"),
        (200, b'{"models": 1}', "refused", "is no Laya"),
        (200, json.dumps(STATE | {"models": STATE["models"] * 400}).encode(), "refused", "1200 models, more than 1000"),
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
async def test_a_key_that_is_refused_is_not_shown(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTIC_KEY", "sk-secret")
    scripted.status, scripted.body = 401, b"sk-secret"
    found = await fault(scripted.url, key_env="ATTIC_KEY")
    assert "refuses the key (401)" in found.message and "sk-secret" not in found.message


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
