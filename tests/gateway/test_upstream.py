"""Connections to an engine: kept, retired, never reused dirty; and answers cut out of whatever bytes come."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest

from laya.gateway.pool import UpstreamPool
from laya.gateway.upstream import UpstreamConnection
from laya.types import EngineAddress

from .front import until
from .scripted_engine import Call, Script, ScriptedEngine, answers, chunk, whole

pytestmark = pytest.mark.anyio
OK = whole({"ok": 1})
REQUEST = b"POST /v1/completions"


class Handler:
    """Writes down what it is told."""

    is_whole = False
    takes_whole = False

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.broken: tuple[str, bool] | None = None
        self.over = asyncio.Event()

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status, self.headers = status, headers

    def on_data(self, data: bytes) -> None:
        self.body += data

    def on_asked(self) -> None:
        """It waits."""

    def on_end(self) -> None:
        assert not self.over.is_set()
        self.over.set()

    def on_broken(self, reason: str, *, reusable: bool) -> None:
        assert not self.over.is_set()
        self.broken = (reason, reusable)
        self.over.set()


def pool_of(port: int, **address: object) -> UpstreamPool:
    return UpstreamPool(EngineAddress(host="127.0.0.1", port=port, api_key="k", cancels_whole=True, **address))  # type: ignore


@contextlib.asynccontextmanager
async def engine_and_pool(script: Script, **address: object) -> AsyncIterator[tuple[ScriptedEngine, UpstreamPool]]:
    engine = ScriptedEngine(script)
    await engine.start()
    pool = pool_of(engine.port, **address)
    try:
        yield engine, pool
    finally:
        pool.close()
        await engine.stop()


async def connected(pool: UpstreamPool) -> UpstreamConnection:
    kept = pool.take()
    if kept is not None:
        return kept
    future: asyncio.Future[UpstreamConnection | OSError] = asyncio.get_running_loop().create_future()
    pool.connect(future.set_result)
    result = await asyncio.wait_for(future, 5)
    assert isinstance(result, UpstreamConnection), result
    return result


async def ask(pool: UpstreamPool) -> Handler:
    handler = Handler()
    (await connected(pool)).send(pool.request_bytes(REQUEST, b"{}"), handler)
    await asyncio.wait_for(handler.over.wait(), 5)
    return handler


async def test_answer_is_cut_out(tmp_path: object) -> None:
    async with engine_and_pool(answers(OK)) as (engine, pool):
        handler = await ask(pool)
        assert (handler.status, handler.body, handler.broken) == (200, b'{"ok": 1}', None)
        assert handler.headers[b"content-type"] == b"application/json"
        assert engine.calls[0].headers[b"authorization"] == b"Bearer k"


async def test_connection_is_kept_and_retired() -> None:
    async with engine_and_pool(answers(OK), answers_kept=3) as (engine, pool):
        for _ in range(4):
            await ask(pool)
        assert engine.n_connections == 2
        pool.address = msgspec.structs.replace(pool.address, idle_limit_s=-1.0)
        await ask(pool)
        assert engine.n_connections == 3


@pytest.mark.parametrize("close", [b"connection: close\r\n", b"Connection: Close\r\n"])
async def test_connection_that_says_close_is_not_kept(close: bytes) -> None:
    async with engine_and_pool(answers(OK.replace(b"\r\n\r\n", b"\r\n" + close + b"\r\n"))) as (_, pool):
        await ask(pool)
        assert pool.take() is None


async def test_streamed_answer_of_an_engine_that_keeps_none_is_not_kept() -> None:
    stream = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(b"a") + b"0\r\n\r\n"
    async with engine_and_pool(answers(stream)) as (engine, pool):
        await ask(pool)
        assert pool.take() is not None
        other = pool_of(engine.port, keeps_streams=False)
        await ask(other)
        assert other.take() is None


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_answer_in_pieces_is_put_together(size: int) -> None:
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(b"abc") + chunk(b"d" * 500) + b"0\r\n\r\n"

    async def script(call: Call) -> None:
        for start in range(0, len(answer), size):
            call.write(answer[start : start + size])
            await asyncio.sleep(0)

    async with engine_and_pool(script) as (_, pool):
        assert (await ask(pool)).body == b"abc" + b"d" * 500


async def test_answer_that_ends_with_the_connection_is_whole() -> None:
    async def script(call: Call) -> None:
        call.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nuntil the end")
        call.close()

    async with engine_and_pool(script) as (_, pool):
        handler = await ask(pool)
        assert (handler.broken, handler.body) == (None, b"until the end")
        assert pool.take() is None


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(b"abc"),
    ],
)
@pytest.mark.parametrize("reset", [False, True])
async def test_answer_that_breaks_off_is_broken(sent: bytes, reset: bool) -> None:
    async def script(call: Call) -> None:
        call.write(sent)
        await asyncio.sleep(0.01)
        if reset:
            call.abort()
        else:
            call.close()

    async with engine_and_pool(script) as (_, pool):
        handler = await ask(pool)
        assert handler.broken is not None and not handler.broken[1]


async def test_new_connection_that_closes_unread_is_not_tried_again() -> None:
    async def script(call: Call) -> None:
        call.close()

    async with engine_and_pool(script) as (_, pool):
        handler = await ask(pool)
        assert handler.broken is not None and not handler.broken[1]


async def test_kept_connection_that_closes_unread_may_be_tried_again() -> None:
    async def script(call: Call) -> None:
        call.write(OK) if call.n_requests == 1 else call.abort()

    async with engine_and_pool(script) as (engine, pool):
        await ask(pool)
        handler = await ask(pool)
        assert handler.broken is not None and handler.broken[1]
        assert engine.n_connections == 1


async def test_kept_connection_closed_meanwhile_is_not_taken() -> None:
    async with engine_and_pool(answers(OK)) as (engine, pool):
        await ask(pool)
        next(iter(engine.open)).close()
        await until(lambda: not engine.open)
        await asyncio.sleep(0.01)
        assert pool.take() is None


@pytest.mark.parametrize(
    "garbage", [b"SSH-2.0-x\r\n", b"\x00" * 50, b"HTTP/1.1 200 OK\r\nx\r\n\r\n", b"HTTP/1.1 999999 OK\r\n\r\n"]
)
async def test_what_is_not_http_is_broken(garbage: bytes) -> None:
    async with engine_and_pool(answers(garbage)) as (engine, pool):
        handler = await ask(pool)
        assert handler.broken is not None and "not HTTP" in handler.broken[0]
        await until(lambda: not engine.open)
        assert pool.take() is None


@pytest.mark.parametrize(
    "more", [b"HTTP/1.1 408 Late\r\ncontent-length: 0\r\n\r\n", b"more than was promised", OK + OK]
)
async def test_bytes_that_nobody_asked_for_retire_the_connection(more: bytes) -> None:
    async with engine_and_pool(answers(OK, more)) as (engine, pool):
        assert (await ask(pool)).broken is None
        await until(lambda: not engine.open)
        assert pool.take() is None
        assert (await ask(pool)).broken is None
        assert engine.n_connections == 2


async def test_informational_answer_is_passed_over() -> None:
    async with engine_and_pool(answers(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n", OK)) as (_, pool):
        handler = await ask(pool)
        assert (handler.status, handler.body) == (200, b'{"ok": 1}')


async def test_connection_is_given_back_reading_again() -> None:
    """Its last answer may have been paused, because its client read slowly, at the very moment it was complete."""

    class Pausing(Handler):
        def __init__(self, connection: UpstreamConnection) -> None:
            super().__init__()
            self.connection = connection

        def on_data(self, data: bytes) -> None:
            self.connection.pause()

    async with engine_and_pool(answers(OK)) as (engine, pool):
        connection = await connected(pool)
        handler = Pausing(connection)
        connection.send(pool.request_bytes(REQUEST, b"{}"), handler)
        await handler.over.wait()
        assert (await ask(pool)).body == b'{"ok": 1}'
        assert engine.n_connections == 1


async def test_fault_of_a_handler_breaks_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(Handler):
        def on_data(self, data: bytes) -> None:
            raise ZeroDivisionError

    class FaultyEnd(Handler):
        def on_end(self) -> None:
            raise ZeroDivisionError

    async with engine_and_pool(answers(OK)) as (_, pool):
        for handler in (Faulty(), FaultyEnd()):
            caplog.clear()
            (await connected(pool)).send(pool.request_bytes(REQUEST, b"{}"), handler)
            await asyncio.wait_for(handler.over.wait(), 5)
            assert handler.broken == ("Laya could not relay its answer", False)
            assert "ZeroDivisionError" in caplog.text
        assert (await ask(pool)).broken is None


async def test_aborted_connection_tells_nobody() -> None:
    async def silent(call: Call) -> None:
        await call.gone.wait()

    async with engine_and_pool(silent) as (engine, pool):
        handler = Handler()
        connection = await connected(pool)
        connection.send(pool.request_bytes(REQUEST, b"{}"), handler)
        await until(lambda: engine.calls)
        connection.abort()
        await asyncio.wait_for(engine.calls[0].gone.wait(), 5)
        assert not handler.over.is_set()


async def test_engine_that_hangs_up_at_once_is_an_error() -> None:
    """Also when the connection is lost before anybody was told that it is there."""
    async with engine_and_pool(answers(OK)) as (engine, pool):
        engine.on_connect = Call.abort
        outcomes: list[object] = []

        def then(result: UpstreamConnection | OSError) -> None:
            if isinstance(result, OSError):
                outcomes.append(result)
                return
            handler = Handler()
            result.send(pool.request_bytes(REQUEST, b"{}"), handler)
            outcomes.append(handler)

        for _ in range(50):
            pool.connect(then)
        await until(lambda: len(outcomes) == 50)
        await until(lambda: all(isinstance(one, OSError) or one.over.is_set() for one in outcomes))  # type: ignore


async def test_connection_lost_before_it_is_handed_on_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made = UpstreamConnection.connection_made

    def made_and_lost(connection: UpstreamConnection, transport: asyncio.BaseTransport) -> None:
        made(connection, transport)
        connection.connection_lost(None)

    async with engine_and_pool(answers(OK)) as (_, pool):
        monkeypatch.setattr(UpstreamConnection, "connection_made", made_and_lost)
        outcomes: list[UpstreamConnection | OSError] = []
        pool.connect(outcomes.append)
        await until(lambda: outcomes)
        assert isinstance(outcomes[0], OSError)


async def test_nobody_there_is_an_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        pool = pool_of(free.getsockname()[1])
        outcomes: list[UpstreamConnection | OSError] = []
        pool.connect(outcomes.append)
        await until(lambda: outcomes)
        assert isinstance(outcomes[0], OSError)
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            await pool.fetch("GET", "/health")


async def test_closed_pool_keeps_nothing() -> None:
    async with engine_and_pool(answers(OK)) as (engine, pool):
        connection = await connected(pool)
        pool.close()
        handler = Handler()
        connection.send(pool.request_bytes(REQUEST, b"{}"), handler)
        await handler.over.wait()
        assert handler.broken is None and pool.take() is None
        await until(lambda: not engine.open)


async def test_fetch_gives_status_and_body() -> None:
    async with engine_and_pool(answers(whole({"a": 1}, 404))) as (_, pool):
        assert await pool.fetch("GET", "/props", b"{}") == (404, b'{"a": 1}')


async def test_fetch_goes_again_over_a_closed_connection_and_only_once() -> None:
    async def script(call: Call) -> None:
        call.write(OK) if call.n_requests == 1 else call.abort()

    async with engine_and_pool(script) as (engine, pool):
        for _ in range(2):
            assert (await pool.fetch("POST", "/x", b"{}"))[0] == 200
        assert engine.n_connections == 2

        async def never(call: Call) -> None:
            call.abort()

        engine.script = never
        with pytest.raises(OSError, match=r"closed|lost"):
            await pool.fetch("POST", "/x", b"{}")


async def test_fetch_has_a_deadline() -> None:
    async def silent(call: Call) -> None:
        await call.gone.wait()

    async with engine_and_pool(silent) as (engine, pool):
        with pytest.raises(OSError, match="no answer"):
            await pool.fetch("POST", "/x", b"{}", deadline_s=0.01)
        await asyncio.wait_for(engine.calls[0].gone.wait(), 5)
