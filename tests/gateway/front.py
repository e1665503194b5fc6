"""The real gateway in the test's own loop, before a scripted engine, and a client that writes bytes.

Nothing waits for a deadline: `Front.sweep` says that so many seconds have passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from starlette.routing import Route
from uvicorn.server import ServerState

from laya.bench.stub_gateway import StubSupervisor, stub_plan
from laya.config import ApiKey, Config
from laya.config.routing import RoutingConfig
from laya.errors import EngineFailed
from laya.gateway.app import build_app
from laya.gateway.limits import Limits
from laya.gateway.listening import listen
from laya.gateway.server import Gateway, uvicorn_config
from laya.types import EngineAddress, ModelFile

from .scripted_engine import Script, ScriptedEngine, hello

KEY = "the-key"
LOOK_EVERY_S = 0.002
PATIENCE_S = 10.0
CHAT: dict[str, Any] = {"model": "stub", "messages": [{"role": "user", "content": "hi"}]}


class Answer(NamedTuple):
    """One HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]


def request(
    body: Any = None,
    path: str = "/v1/chat/completions",
    *,
    method: str = "POST",
    key: str | None = KEY,
    host: str = "127.0.0.1",
    headers: tuple[str, ...] = (),
    version: str = "1.1",
) -> bytes:
    """A whole request. `body`: bytes as they are, anything else as JSON, None for no body."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/{version}", f"host: {host}", *headers]
    if key is not None:
        lines.append(f"authorization: Bearer {key}")
    if body is not None:
        lines.append(f"content-length: {len(data)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def chat(**fields: Any) -> bytes:
    return request(CHAT | fields)


class Client:
    """One connection to the gateway. Keeps count of nothing: bytes out, answers in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        if not self.writer.transport.is_closing():
            self.writer.write(data)

    async def ask(self, data: bytes) -> Answer:
        self.send(data)
        return await self.answer()

    async def head(self) -> Answer:
        """The head of the next answer."""
        raw = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        first, *lines = raw.decode("latin-1").split("\r\n")[:-2]
        pairs = (line.split(": ", 1) for line in lines)
        return Answer(int(first.split()[1]), {name.lower(): value for name, value in pairs}, b"")

    async def answer(self, *, has_body: bool = True) -> Answer:
        """The next answer, whole. An answer without a length is read to the end of the connection."""
        head = await self.head()
        if not has_body or head.status == 100:
            return head
        length = head.headers.get("content-length")
        if length is not None:
            body = await asyncio.wait_for(self.reader.readexactly(int(length)), PATIENCE_S)
        elif head.headers.get("transfer-encoding") == "chunked":
            body = b"".join([piece async for piece in self.pieces()])
        else:
            body = await self.rest()
        return head._replace(body=body)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The chunks of a chunked body to its end. Raises IncompleteReadError where it breaks off."""
        while True:
            size = int(await asyncio.wait_for(self.reader.readuntil(b"\r\n"), PATIENCE_S), 16)
            data = await self.reader.readexactly(size + 2)
            if not size:
                return
            yield data[:-2]

    async def broken_answer(self) -> Answer:
        """The next answer, which is chunked and breaks off."""
        return (await self.head())._replace(body=await self.broken_body())

    async def broken_body(self) -> bytes:
        """What came of a chunked body before its connection closed, without its end."""
        body, is_whole = await self.body_so_far()
        assert not is_whole
        return body

    async def answer_so_far(self) -> Answer:
        """The next answer, whole or broken off."""
        head = await self.head()
        if "content-length" in head.headers:
            return head._replace(body=await self.reader.readexactly(int(head.headers["content-length"])))
        return head._replace(body=(await self.body_so_far())[0])

    async def body_so_far(self) -> tuple[bytes, bool]:
        """A chunked body, and whether it came to its end."""
        body = b""
        try:
            async for piece in self.pieces():
                body += piece
        except asyncio.IncompleteReadError:
            return body, False
        return body, True

    async def rest_of_answer(self) -> None:
        """Read the next answer, also one that breaks off."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError):
            await self.answer()

    async def rest(self) -> bytes:
        """Everything until the gateway closes."""
        return await asyncio.wait_for(self.reader.read(), PATIENCE_S)

    async def closed(self) -> bool:
        """Wait until the gateway closes; whether it sent nothing more before."""
        try:
            return await self.rest() == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.writer.close()

    def abort(self) -> None:
        self.writer.transport.abort()


class StandingEngines(StubSupervisor):
    """Says that every engine is ready: the first at the first address, and so on."""

    def __init__(self, addresses: list[EngineAddress]) -> None:
        super().__init__(addresses[0])
        self._addresses = addresses
        self._names: list[str] = []
        self.unloaded: list[str] = []
        self.dead: set[str] = set()  # they do not come back

    async def unload(self, model_id: str, deadline_s: float) -> None:
        self.unloaded.append(model_id)

    def register(self, model_id: str, factory: Any, release: Any, **more: Any) -> None:
        self._names.append(model_id)

    async def ensure_ready(self, model_id: str) -> EngineAddress:
        if model_id in self.dead:
            raise EngineFailed(f"'{model_id}' is dead.")
        return self._addresses[self._names.index(model_id)]


class Front:
    """Gateway and engines of one test."""

    def __init__(
        self, gateway: Gateway, engines: list[ScriptedEngine], port: int, state: ServerState, limits: Limits
    ) -> None:
        self.gateway = gateway
        self.engines = engines
        self.engine = engines[0]
        self.addresses: list[EngineAddress] = []
        self.supervisor: StandingEngines = gateway.supervisor  # type: ignore[assignment]
        self.port = port
        self.limits = limits
        self.stats = gateway.stats
        self.endpoint = gateway.fleet.find("stub")
        self.endpoints = gateway.fleet.replicas(self.endpoint)
        self._state = state
        self.app: Any = None  # the cold one
        self._clients: list[Client] = []

    @property
    def connections(self) -> set[Any]:
        """The gateway's open connections."""
        connections: set[Any] = self._state.connections  # type: ignore[assignment]
        return connections

    async def client(self, limit: int = 2**26) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port, limit=limit))
        self._clients.append(client)
        return client

    async def ask(self, data: bytes) -> Answer:
        """One request on a connection of its own."""
        client = await self.client()
        answer = await client.ask(data)
        client.close()
        return answer

    async def ask_broken(self, data: bytes) -> Answer:
        """One request on a connection of its own, whose answer breaks off."""
        client = await self.client()
        client.send(data)
        return await client.broken_answer()

    def sweep(self, after_s: float) -> None:
        """What the server's sweep does `after_s` from now."""
        now_s = time.monotonic() + after_s
        for connection in list(self.connections):
            connection.sweep(now_s)
        self.gateway.dispatcher.streams.sweep(now_s)
        self.gateway.dispatcher.express.sweep(now_s)
        self.gateway.fleet.sweep(now_s)
        self.gateway.keys.sweep(now_s)

    @property
    def books(self) -> tuple[int, int, dict[str, int]]:
        """(arrivals, in flight, outcomes that are not 0); the first is checked to be the sum of the others."""
        stats = self.stats
        assert stats.arrivals == stats.in_flight + sum(stats.outcomes.values()), (stats.arrivals, stats.outcomes)
        return stats.arrivals, stats.in_flight, {name: n for name, n in stats.outcomes.items() if n}

    async def settled(self) -> dict[str, int]:
        """Wait until nothing is in flight, check that nothing is held any more, and give the outcomes."""
        await until(lambda: self.stats.in_flight == 0)
        for endpoint in self.endpoints:
            admission = endpoint.admission
            assert self.gateway.router.load(endpoint.index) == (0, 0)
            assert not endpoint.live
            if admission is not None:
                assert (admission.reserved_seqs, admission.reserved_tokens) == (0, 0)
        assert all(key.n_running == 0 for key in self.gateway.keys.keys)
        return self.books[2]

    async def close(self) -> None:
        for client in self._clients:
            client.abort()
        for connection in list(self.connections):
            connection.transport.abort()
        await until(lambda: not self.connections)


async def until(condition: Callable[[], object]) -> None:
    """Wait for what comes by itself."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        await asyncio.sleep(LOOK_EVERY_S)


def _config(server: dict[str, Any], keys: bool) -> Config:
    config = Config()
    api_keys = [ApiKey(name="tests", sha256=sha256(KEY.encode()).hexdigest())] if keys else []
    changed = msgspec.structs.replace(config.server, **({"api_keys": api_keys} | server))
    return msgspec.structs.replace(config, server=changed)


@contextlib.asynccontextmanager
async def front(
    home: Path,
    script: Script = hello,
    *,
    cancels_whole: bool = False,
    has_slots: bool = False,
    max_num_seqs: int = 4,
    loaded: bool = True,
    keys: bool = True,
    server: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    planned: dict[str, Any] | None = None,
    routing: RoutingConfig | None = None,
    template_tokens: int | None = None,
    apis: Callable[[Gateway], list[Route]] | None = None,
) -> AsyncIterator[Front]:
    """A gateway whose model 'stub' is a scripted engine. `server`, `model`, `planned`: settings other than the usual.

    loaded: False leaves the model to be loaded by the first request that names it. apis: more routes of its app.
    """
    settings = {"replicas": 1} | (model or {})
    engines = [ScriptedEngine(script) for _ in range(settings["replicas"])]
    for engine in engines:
        await engine.start()
    addresses = [
        EngineAddress(
            host="127.0.0.1",
            port=engine.port,
            api_key="engine-key",
            cancels_whole=cancels_whole,
            has_slots=has_slots,
            template_tokens=template_tokens,
        )
        for engine in engines
    ]
    config = msgspec.structs.replace(_config(server or {}, keys), routing=routing or RoutingConfig())
    gateway = Gateway(config, home=home, supervisor=StandingEngines(addresses))  # type: ignore[arg-type]
    file = ModelFile(id="stub", path=home, format="gguf", file_bytes=0, origin="config", aliases=("stub-alias",))
    endpoint = gateway.fleet.register(file, msgspec.structs.replace(config.for_model("stub"), **settings))
    plan = stub_plan(max_num_seqs)
    plan = msgspec.structs.replace(plan, settings=msgspec.structs.replace(plan.settings, **(planned or {})))
    for each, address in zip(gateway.fleet.replicas(endpoint), addresses, strict=True):
        gateway.fleet.plans[each.name] = plan
        if loaded:
            gateway.fleet.open(each, address)
    if apis is not None:
        gateway.desk.apis += apis(gateway)
    app = build_app(gateway.desk, gateway.keys, None)
    uvicorn = uvicorn_config(gateway, app)
    uvicorn.load()
    state = ServerState()
    protocol = gateway.connection
    connection = functools.partial(protocol, config=uvicorn, server_state=state, app_state={})
    listener = await asyncio.get_running_loop().create_server(connection, sock=listen("127.0.0.1", 0))
    made = Front(gateway, engines, listener.sockets[0].getsockname()[1], state, protocol.limits)
    made.app = app
    made.addresses = addresses
    try:
        yield made
    finally:
        listener.close()
        await made.close()
        for engine in engines:
            await engine.stop()
