"""What the native core recognises as plain, against the full way, which is its oracle; and the lane end to end."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httptools
import msgspec
import pytest

from laya.errors import LayaError
from laya.gateway import plain
from laya.gateway.body import parse_body
from laya.types import EndpointKind

from .front import CHAT, chat, front, request
from .scripted_engine import Call, answers, whole

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(not plain.NATIVE, reason="there is no native core here")]
ROUNDS = 30_000
VALUES: dict[str, list[Any]] = {
    "stream": [True, False, None, 1],
    "stream_options": [{"include_usage": True}, {"include_usage": False}, {}, None, {"include_usage": True, "x": 1}],
    "max_tokens": [1, 16, 2**31 - 1, 2**31, 0, -1, 1.5, None, "4"],
    "max_completion_tokens": [1, 16, 2**31 - 1, 2**31, 0, None],
    "temperature": [0, 2, 0.7, 2.0, 2.0000001, -0.0, 1e-3, 0.30000000000000004, "1", None],
    "top_p": [0, 1, 0.95, 1.01],
    "frequency_penalty": [-2, 2, 0.5, -2.1],
    "presence_penalty": [-2, 2, 0.5, 2.1],
    "seed": [0, 1, -1, 10**18, 10**17, None],
    "stop": ["x", "a\nb", "", ["x"], [""], None],
    "user": ["someone", "", "é", None],
    "prompt_cache_key": ["k", "", None],
    "n": [1, 2, 0, 1.0],
    "tools": [[]],
    "n_predict": [4],
}
MESSAGES: list[Any] = [
    {"role": "user", "content": "hi"},
    {"role": "system", "content": "line\nbreak \u00e9 \U0001f600"},
    {"content": "turned around", "role": "assistant"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "user", "content": "hi", "name": "n"},
    {"role": "nobody", "content": "hi"},
    {"role": "user"},
    {"role": "assistant", "content": None},
]


def bodies(seed: int) -> Iterator[bytes]:
    """Chat bodies that are plain, nearly plain, and broken."""
    dice = random.Random(seed)
    for _ in range(ROUNDS):
        body: dict[str, Any] = {"model": dice.choice(["stub", "stub", "s\u00e9", "a\nb", ""])}
        body["messages"] = [dice.choice(MESSAGES[: dice.choice([3, 8])]) for _ in range(dice.choice([1, 1, 2, 0]))]
        for name in dice.sample(sorted(VALUES), dice.choice([0, 1, 2, 4])):
            body[name] = dice.choice(VALUES[name][: dice.choice([2, 9])])
        items = list(body.items())
        dice.shuffle(items)
        separators = dice.choice([(",", ":"), (", ", ": "), (" ,\n", "\t:")])
        text = json.dumps(dict(items), separators=separators, ensure_ascii=dice.random() < 0.5).encode()
        yield mutated(text, dice) if dice.random() < 0.5 else text


def mutated(text: bytes, dice: random.Random) -> bytes:
    data = bytearray(text)
    for _ in range(dice.choice([1, 1, 2])):
        at = dice.randrange(len(data))
        match dice.randrange(4):
            case 0:
                data[at] = dice.randrange(256)
            case 1:
                del data[at : at + dice.randrange(6)]
            case 2:
                data[at:at] = dice.choice([b'"', b"\\", b",", b"\\ud800", b"\xff", b"0", b".", b"e1", b" ", b"null"])
            case _:
                data[at:at] = bytes(data[dice.randrange(len(data)) :][: dice.randrange(12)])
        if not data:
            return b"{"
    return bytes(data)


@pytest.mark.parametrize("seed", [1, 2])
def test_plain_body_says_what_the_full_decoder_says(seed: int) -> None:
    n_plain = 0
    for data in bodies(seed):
        read = plain.read_plain_body(data)
        if read is None:
            continue
        n_plain += 1
        short, full = plain.PlainBody(data, read), parse_body(EndpointKind.CHAT, data)
        for name in ("model", "session", "wants_stream", "wants_usage_event", "max_tokens", "n_choices", "n_seqs",
                     "generates", "prompt_bound_tokens"):  # fmt: skip
            assert getattr(short, name) == getattr(full, name), (name, data)
        assert short.prefix_blocks() == full.prefix_blocks(), data
        for changes, drop in (
            ({"model": short.model}, ()),
            ({"model": "other", "max_tokens": 7, "stream": True, "new": [1]}, ("max_completion_tokens", "n_predict")),
        ):
            edited = msgspec.json.decode(short.edited(dict(changes), drop))
            assert edited == msgspec.json.decode(full.edited(dict(changes), drop)), data
    assert n_plain > ROUNDS // 20


class Parsed:
    """What the full parser makes of some bytes."""

    def __init__(self, parser: Any, data: bytes) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.url = self.body = b""
        self.n_begun = self.n_complete = 0
        self.keeps_alive = False
        self.parser = parser(self)
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.n_begun += 1

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.keeps_alive = self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.n_complete += 1

    def header(self, name: bytes) -> bytes | None:
        found = [value for key, value in self.headers if key == name]
        assert len(found) <= 1
        return found[0] if found else None


def nearly(text: bytes, more: list[bytes], seed: int) -> Iterator[bytes]:
    """The message with some headers of `more`, whole or mutated."""
    dice = random.Random(seed)
    for _ in range(ROUNDS):
        lines = text.split(b"\r\n")
        for extra in dice.sample(more, dice.choice([0, 0, 1, 2])):
            lines.insert(dice.randrange(1, len(lines) - 1), extra)
        data = b"\r\n".join(lines)
        yield mutated(data, dice) if dice.random() < 0.5 else data


def test_plain_request_is_what_the_full_parser_reads() -> None:
    more = [b"x-session-id: s", b"X-Request-ID: r", b"Connection: keep-alive", b"Connection: close", b"accept: */*",
            b"Transfer-Encoding: chunked", b"Content-Length: 5", b"Expect: 100-continue", b"Upgrade: h2c", b"x: ",
            b"x-laya-model: m", b"X-Laya-Priority: bulk", b"origin: http://a", b"Authorization: Bearer b", b"x:y",
            b" folded", b"x : y"]  # fmt: skip
    n_plain = 0
    for data in nearly(chat(), more, 3):
        read = plain.read_plain_request(data, 65536)
        if read is None:
            continue
        n_plain += 1
        kind, body, host, authorization, request_id, session = read
        parsed = Parsed(httptools.HttpRequestParser, data)
        assert (parsed.n_begun, parsed.n_complete, parsed.body) == (1, 1, body), data
        assert parsed.parser.get_method() == b"POST" and parsed.keeps_alive, data
        assert not parsed.parser.should_upgrade() and parsed.parser.get_http_version() == "1.1", data
        assert parsed.url == {1: b"/v1/chat/completions", 2: b"/v1/completions", 3: b"/v1/embeddings"}[kind]
        assert parsed.header(b"host") == host and parsed.header(b"authorization") == authorization, data
        assert (parsed.header(b"x-request-id") or None) == request_id, data
        assert (parsed.header(b"x-session-id") or b"").decode() == (session or ""), data
        for name in (b"expect", b"origin", b"upgrade", b"transfer-encoding", b"x-laya-model", b"x-laya-priority"):
            assert parsed.header(name) is None, data
    assert n_plain > ROUNDS // 5


def test_plain_answer_is_what_the_full_parser_reads() -> None:
    more = [b"Connection: close", b"connection: keep-alive", b"transfer-encoding: chunked", b"content-length: 3"]
    n_plain = 0
    for data in nearly(whole({"choices": [1]}), more, 4):
        read = plain.read_plain_answer(data)
        if read is None:
            continue
        n_plain += 1
        parsed = Parsed(httptools.HttpResponseParser, data)
        assert (parsed.n_begun, parsed.n_complete, parsed.body) == (1, 1, read[1]), data
        assert parsed.parser.get_status_code() == 200 and parsed.keeps_alive, data
        assert parsed.header(b"content-type") == read[0], data
    assert n_plain > ROUNDS // 5


REQUESTS = [
    CHAT,
    CHAT | {"max_tokens": 5, "temperature": 0.5, "user": "someone"},
    CHAT | {"stream": False, "seed": 1},
    CHAT | {"messages": [{"role": "user", "content": "x" * 60_000}]},
    CHAT | {"max_tokens": 9000},
    CHAT | {"temperature": 9},
    CHAT | {"model": "nope"},
    CHAT | {"n": 2},
]


@pytest.mark.parametrize("body", REQUESTS, ids=lambda body: str(sorted(body))[:40] + str(len(str(body))))
async def test_lane_and_full_way_answer_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: Any) -> None:
    """Same status, same answer, same request to the engine, same books."""
    seen = []
    for has_lane in (True, False):
        asked: list[tuple[dict[bytes, bytes], Any]] = []

        async def script(call: Call, asked: Any = asked) -> None:
            asked.append((call.headers, msgspec.json.decode(call.body)))
            await answers(whole({"choices": [{"index": 0}], "usage": {}}))(call)

        if not has_lane:
            monkeypatch.setattr("laya.gateway.shelf.lane_of", lambda router: None)
            for name in ("protocol.read_plain_request", "upstream.read_plain_answer", "plain.read_plain_body"):
                monkeypatch.setattr(f"laya.gateway.{name}", lambda *_: None)
        async with front(tmp_path, script, cancels_whole=True) as gate:
            client = await gate.client()
            data = request(body, headers=("x-session-id: s", "x-request-id: mine"))
            both = [await client.ask(data), await client.ask(data)]
            outcomes = await gate.settled()
            load = gate.gateway.router.load(gate.endpoint.index)
            for headers, _ in asked:
                headers.pop(b"host"), headers.pop(b"content-length")
            seen.append(([tuple(answer) for answer in both], asked, outcomes, load))
            assert gate.gateway.fleet.lane is None or has_lane
    assert seen[0] == seen[1]


async def test_lane_was_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laya.gateway.dispatch.Dispatcher.dispatch", None)
    monkeypatch.setattr("laya.gateway.upstream.UpstreamConnection.on_body", None)
    async with front(tmp_path, answers(whole({"choices": []})), cancels_whole=True) as gate:
        gate.endpoint.pool._idle.append(await gate.endpoint.pool._open())  # the lane opens no connections
        answer = await gate.ask(chat())
        assert (answer.status, answer.json) == (200, {"choices": []})
        assert gate.stats.outcomes["served"] == 1 and sum(gate.stats.route.counts) == 1


async def test_lane_asks_for_the_key(tmp_path: Path) -> None:
    async with front(tmp_path, answers(whole({"choices": []})), cancels_whole=True) as gate:
        client = await gate.client()
        assert (await client.ask(chat())).status == 200
        for key in ("bad", "", None, "the-ke"):
            answer = await client.ask(request(CHAT, key=key))
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key"), key
        assert (await client.ask(chat())).status == 200
        outcomes = await gate.settled()
        assert (outcomes["served"], outcomes["refused"]) == (2, 4)
        assert gate.gateway.router.load(gate.endpoint.index) == (0, 0)


def test_body_that_only_the_full_way_knows_is_left_to_it() -> None:
    for data in (b"", b"{}", b'{"model":"m","messages":[]}', b'{"model":"m","messages":[{"role":"user"}]}', b"[1]"):
        assert plain.read_plain_body(data) is None
        with pytest.raises(LayaError):
            plain.parse(EndpointKind.CHAT, data)
