"""Owns: every answer that is not inference: models, health, metrics, admin.

Knows the fleet's public face; starts and stops nothing by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import datetime, timezone
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

import laya
from laya.engines.log import RING_LINES
from laya.errors import EngineFailed, InvalidRequest, NotFound, NotSupported, PayloadTooLarge
from laya.gateway.account import Key
from laya.gateway.endpoint import Endpoint
from laya.gateway.events import Events
from laya.gateway.explaining import explain_live
from laya.gateway.fields import whole_number
from laya.gateway.fleet import Fleet
from laya.gateway.gauge import DeviceGauge, cards, ram
from laya.gateway.hops import INSTANCE
from laya.gateway.limits import SMALL_BODY_BYTES, bad_encoding
from laya.gateway.live_keys import LiveKeys
from laya.gateway.recent import Recent
from laya.gateway.roles import key_of
from laya.gateway.tuning import load_tuned
from laya.metrics import GatewayStats, LayaCollector
from laya.routing import NATIVE

_ENCODER = msgspec.json.Encoder(enc_hook=str)
FOLLOW_FROM_LINES = 20
_SLOT_FIELDS = ("id", "n_ctx", "is_processing")  # never the prompt
_STARTED_UNIX_S = int(time.time())
_STARTED = datetime.fromtimestamp(_STARTED_UNIX_S, timezone.utc).isoformat()


def reply(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_ENCODER.encode(body), status, headers, "application/json")


class Desk:
    """The handlers."""

    def __init__(self, fleet: Fleet, stats: GatewayStats, keys: LiveKeys, events: Events | None = None) -> None:
        self.fleet = fleet
        self._keys = keys
        self._events = events or Events()
        self.registry = CollectorRegistry()
        self.registry.register(LayaCollector(stats, fleet.statuses, lambda: fleet.budget().bytes, fleet.kv_tokens))
        self._stats = stats
        self.recent = Recent(fleet.supervisor.logs)
        self.apis: list[Route] = []  # other APIs, translated to this server's own
        self.preloads_pending = 0
        self.closing = asyncio.Event()  # the server is asked to end

    async def root(self, request: Request) -> Response:
        links = {"openai_base_url": "/v1", "models": "/v1/models", "state": "/admin/state", "metrics": "/metrics"}
        return reply({"name": "laya", "version": laya.__version__, **links})

    async def health(self, request: Request) -> Response:
        return reply({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if self.preloads_pending:
            return reply({"status": "loading", "models": self.preloads_pending}, 503, {"retry-after": "1"})
        return reply({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        await self.fleet.refresh()
        found = [group[0] for group in self.fleet.served() if self.fleet.peers.is_there(group[0].model_id)]
        shown = [each for each in found if self._may_see(key_of(request), each.model_id)]
        data = [await self._model(each) for each in shown]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return reply({"object": "list", "data": data, "has_more": False} | ends)

    async def model(self, request: Request) -> Response:
        name, key = request.path_params["model_id"], key_of(request)
        if key is not None and not key.may_use(name, self.fleet.roster.id_of(name), self.fleet.roster.id_of):
            raise key.forbidden_model(name)
        return reply(await self._model(self.fleet.find(name)))

    async def _model(self, endpoint: Endpoint) -> dict[str, Any]:
        """A model in OpenAI's words and Anthropic's, whose clients ask at the same path; and what only Laya tells."""
        window = await self.fleet.window(endpoint)
        return {
            "id": endpoint.model_id,
            "object": "model",
            "created": _STARTED_UNIX_S,
            "owned_by": "laya",
            "type": "model",
            "display_name": endpoint.model_id,
            "created_at": _STARTED,
            "max_input_tokens": window,
            "context_length": window,
            "max_model_len": window,
            "task": endpoint.settings.task,
            "loaded": any(each.pool is not None for each in self.fleet.replicas(endpoint)),
            "aliases": self.fleet.aliases(endpoint),
            "peer": endpoint.settings.peer,
        }

    def _may_see(self, key: Key | None, model_id: str) -> bool:
        return key is None or key.may_use(model_id, model_id, self.fleet.roster.id_of)

    async def state(self, request: Request) -> Response:
        fleet, stats = self.fleet, self._stats
        await fleet.refresh()
        now_s = time.monotonic()
        budget = fleet.budget()
        models, key, kv_tokens = [], key_of(request), fleet.kv_tokens()
        statuses, reserved_bytes = fleet.statuses(), fleet.ledger.held("cpu")
        for status in statuses:
            if not self._may_see(key, status.id):
                continue
            doing = _doing(fleet.replicas_of(status.id), now_s)
            if key is not None and key.role == "peer":  # whose requests they are is for admins
                doing["requests"] = []
            promised, held = kv_tokens.get(status.id, (None, None))
            doing |= {"kv_tokens_promised": promised, "kv_tokens": held}
            names = {"aliases": fleet.roster.aliases(status.id) + fleet.peers.names_of(status.id)}
            models.append(msgspec.to_builtins(status, enc_hook=str) | doing | names)
        return reply(
            {
                "version": laya.__version__,
                "instance": INSTANCE,
                "native_core": NATIVE,
                "memory": {
                    "device": "cpu",
                    "budget_bytes": budget.bytes,
                    "limit": budget.limit,
                    "reserved_bytes": reserved_bytes,
                },
                "ledger": fleet.ledger.snapshot(),
                "devices": self.devices(),
                "is_paused": fleet.pausing.is_on,
                "arrivals": stats.arrivals,
                "in_flight": stats.in_flight,
                "outcomes": stats.outcomes,
                "models": models,
                "peers": fleet.peers.shown(),
                "ray": fleet.placing.shown(),
            }
        )

    def devices(self) -> list[DeviceGauge]:
        """Each device as it is now."""
        fleet = self.fleet
        budget = fleet.budget()
        return [
            ram(fleet.machine, budget, fleet.ledger.held("cpu"), fleet.statuses()),
            *cards(self._stats.gpus, fleet.ledger, fleet.config.memory.gpu),
        ]

    async def events(self, request: Request) -> Response:
        """What happened since the event with the id `after` (0: all that is kept)."""
        said = request.query_params.get("after", "0")
        after = whole_number(said)
        if after is None:
            raise InvalidRequest(f"'after' is '{said}': expected the id of an event, a whole number.", param="after")
        return reply({"events": self._events.after(after)})

    async def explain(self, request: Request) -> Response:
        """Which rule takes a request like this one, which engines could serve it, and which one would, and why."""
        await self.fleet.refresh()
        query = request.query_params
        grants = {key.name: key.grant for key in self._keys.keys}
        return reply(explain_live(self.fleet, dict(query), query.getlist("header"), grants))

    async def load(self, request: Request) -> Response:
        """`?anyway=true`: also a model that does not fit, under the ceiling of what is free. `?flags=`: with these
        settings instead of the configured ones."""
        endpoint = self.fleet.find(request.path_params["model_id"])
        if endpoint.settings.peer is not None and endpoint.is_drained:  # which was done here, so it ends here
            self.fleet.draining.undo(endpoint)
            return self.shown(endpoint)
        endpoint = self._own(request)
        anyway, flags = switch(request, "anyway"), request.query_params.get("flags", "")
        if flags:
            await load_tuned(self.fleet, endpoint, flags, anyway=anyway)
        else:
            await self.fleet.load(endpoint, anyway=anyway)
        return self.shown(endpoint)

    async def unload(self, request: Request) -> Response:
        endpoint = self._own(request)
        await self.fleet.unload_model(endpoint, "requested")
        return self.shown(endpoint)

    def _own(self, request: Request) -> Endpoint:
        """The model of a path, whose engines are for this server to start and stop."""
        endpoint = self.fleet.find(request.path_params["model_id"])
        if endpoint.settings.peer is not None:
            raise NotSupported(self.fleet.peers.told_there(endpoint.model_id), param="model")
        return endpoint

    def shown(self, endpoint: Endpoint) -> Response:
        """The state of its model. Raises NotFound where that went meanwhile."""
        status = next((status for status in self.fleet.statuses() if status.id == endpoint.model_id), None)
        if status is None:  # a reload took it away meanwhile
            raise NotFound(f"'{endpoint.model_id}' is no longer served.")
        return reply(status)

    async def slots(self, request: Request) -> Response:
        """What the engine itself says of its sequences, beside what Laya has promised (`/admin/state`)."""
        group = self.fleet.replicas(self.fleet.find(request.path_params["model_id"]))
        slots: list[dict[str, Any]] = []
        for endpoint in group:
            if endpoint.pool is None or not endpoint.is_llamacpp:
                continue
            try:
                _, answer = await endpoint.pool.fetch("GET", "/slots")
            except OSError as error:
                raise EngineFailed(f"The engine of '{endpoint.name}' does not answer: {error}") from None
            engine = {"replica": endpoint.name} if len(group) > 1 else {}
            slots += [engine | {name: slot.get(name) for name in _SLOT_FIELDS} for slot in msgspec.json.decode(answer)]
        return reply({"slots": slots})

    def _replica(self, request: Request) -> Endpoint:
        group = self.fleet.replicas(self.fleet.find(request.path_params["model_id"]))
        value = request.query_params.get("replica", "1")
        number = whole_number(value)
        if not number:
            raise InvalidRequest(f"'replica' is '{value}': expected a number from 1 on.", param="replica")
        if number > len(group):
            raise NotFound(f"'{group[0].model_id}' has no replica {number}, only {len(group)}.", param="replica")
        return group[number - 1]

    async def logs(self, request: Request) -> Response:
        """`?replica=2`: of that engine, where the model has several; the first one's otherwise. `?lines=100`: so many
        of those that are there."""
        endpoint = self._replica(request)
        follow = switch(request, "follow")
        said = request.query_params.get("lines", str(FOLLOW_FROM_LINES if follow else RING_LINES))
        n_lines = whole_number(said)
        if n_lines is None:
            raise InvalidRequest(f"'lines' is '{said}': expected a whole number.", param="lines")
        logs = self.fleet.supervisor.logs(endpoint.name)
        if follow:
            lines = _lines(logs.follow(n_lines), self.closing)
            return StreamingResponse(lines, media_type="text/plain; charset=utf-8")
        return Response("".join(line + "\n" for line in logs.tail(n_lines)), media_type="text/plain; charset=utf-8")


def _doing(group: tuple[Endpoint, ...], now_s: float) -> dict[str, Any]:
    """What the endpoints of one model work on; a model that is not served has none."""
    live = [exchange for endpoint in group for exchange in endpoint.live]
    waiting = [exchange for endpoint in group for exchange in endpoint.queue]
    used_s = [endpoint.last_used_s for endpoint in group]
    settings = group[0].settings if group else None
    return {
        "requests": [exchange.as_state(now_s) for exchange in (*live, *waiting)],
        "queued": len(waiting),
        "running": len(live),
        "pinned": settings is not None and settings.pinned,
        "ttl_s": group[0].ttl_s if group else None,
        "idle_s": None if live or waiting or not used_s else round(now_s - max(used_s), 1),
    }


async def small_body(request: Request) -> bytes:
    """The body of a request that says little. Raises PayloadTooLarge, before it has come whole."""
    fault = bad_encoding(request.headers.get("content-encoding", "").encode("latin-1"))
    if fault is not None:
        raise fault
    body = bytearray()
    async for data in request.stream():
        body += data
        if len(body) > SMALL_BODY_BYTES:
            raise PayloadTooLarge(f"A body at {request.url.path} has at most {SMALL_BODY_BYTES} bytes.")
    return bytes(body)


def switch(request: Request, name: str) -> bool:
    """A query parameter that is true or false; false when it is left out."""
    value = request.query_params.get(name, "false")
    if value not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"'{name}' is '{value}': expected true or false.", param=name)
    return value in ("true", "1")


async def _lines(lines: AsyncIterator[str], closing: asyncio.Event) -> AsyncIterator[str]:
    """Each line as it comes, until there are no more or the server ends."""
    ended = asyncio.ensure_future(closing.wait())
    line = asyncio.ensure_future(anext(lines, None))
    try:
        while True:
            await asyncio.wait((line, ended), return_when=asyncio.FIRST_COMPLETED)
            if not line.done() or (text := line.result()) is None:
                return
            yield text + "\n"
            line = asyncio.ensure_future(anext(lines, None))
    finally:
        ended.cancel()
        line.cancel()
