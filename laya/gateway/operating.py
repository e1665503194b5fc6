"""Owns: what the owner of a running server does to it: reload, drain, usage; and the routes of that. What is noted of
requests that have ended (usage, log, traces), and which short ways requests may take beside it.

Knows the gateway's parts by what it is given; the work is in the modules of the same names.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from laya.config import Config
from laya.config.cost import Cost
from laya.config.pools import away_of
from laya.errors import InvalidRequest
from laya.gateway.desk import reply, switch
from laya.gateway.engine_metrics import engine_metrics
from laya.gateway.reload import Reloader
from laya.gateway.reload_watch import ConfigWatch
from laya.gateway.request_log import CONTENT_LIMIT_BYTES, RequestLog
from laya.gateway.traces import TRACE_PARENT, Traces
from laya.gateway.usage import Meter, grouped
from laya.routing.rules import Rules

if TYPE_CHECKING:
    from laya.gateway.exchange import Exchange
    from laya.gateway.server import Gateway

_DAY = re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}")


class ConfigSource(NamedTuple):
    """Where the running configuration came from. read: what stands there now, checked; raises ConfigError."""

    read: Callable[[], Config]
    path: Callable[[], Path | None] = lambda: None


class Operating:
    """See the module."""

    def __init__(self, gateway: Gateway, source: ConfigSource, database: Path) -> None:
        self._gateway = gateway
        self._fleet = gateway.fleet
        self._had_terminal = has_terminal()
        self.reloader = Reloader(gateway.fleet, source.read, self._in_force, self._check)
        self._watch = ConfigWatch(
            source.path, lambda: gateway.config.server.watch_config, self.reloader.reload_and_tell
        )
        self.meter = Meter(gateway.config.store, database, self._cost_of)
        self.request_log = RequestLog(gateway.config.request_log)
        self.traces = Traces(gateway.config)
        self._choose_lanes()
        gateway.desk.registry.register(self.meter)
        gateway.desk.registry.register(self.traces)
        self.routes = [
            Route("/admin/usage", self._usage),
            Route("/metrics/engines", self._engine_metrics),
            Route("/admin/reload", self._reload, methods=["POST"]),
            Route("/admin/models/{model_id:path}/drain", self._drain, methods=["POST"]),
        ]

    async def run(self) -> None:
        """For as long as the server runs."""
        await asyncio.gather(self._watch.run(), self.meter.run(), self.request_log.run())

    def hang_up(self, end: Callable[[], None]) -> None:
        """SIGHUP: read the configuration again; or end, where it is the word of a terminal that was closed."""
        if self._had_terminal and not has_terminal():
            end()
        else:
            self._fleet.spawn(self.reloader.reload_and_tell())

    def _check(self, config: Config) -> None:
        self._gateway.keys.check_configured(config.server)

    def _in_force(self, config: Config) -> None:
        gateway = self._gateway
        gateway.dispatcher.rules = Rules(config.routing, away_of(config))
        self.traces.apply()
        self._choose_lanes()
        gateway.limits.apply(config.server)
        gateway.keys.configure(config.server)
        self._fleet.peers.follow()

    def _choose_lanes(self) -> None:
        """What rules, traces or the log ask of a request, the plain lane does not keep."""
        dispatcher, keeps, traces = self._gateway.dispatcher, self.request_log.keeps_content, self.traces.is_on
        dispatcher.keeps_said = CONTENT_LIMIT_BYTES if keeps else 0
        dispatcher.keeps_headers = dispatcher.rules.header_names | ({TRACE_PARENT} if traces else set())
        dispatcher.settled = self._settled_and_traced if traces else self._settled
        self._gateway.connection.takes_plain = not (dispatcher.rules or keeps or traces)
        dispatcher.express.close()  # whom it reads from was lent under what was said before

    def _cost_of(self, model_id: str) -> Cost | None:
        group = self._fleet.replicas_of(model_id)
        return group[0].settings.cost if group else None

    def _settled(self, exchange: Exchange) -> None:
        self.meter.count(exchange)
        self.request_log.note(exchange)
        self._gateway.desk.recent.note(exchange)

    def _settled_and_traced(self, exchange: Exchange) -> None:
        self._settled(exchange)
        self.traces.note(exchange)

    async def _reload(self, request: Request) -> Response:
        """`?dry_run=true`: only say what would change."""
        report = await self.reloader.reload(dry_run=switch(request, "dry_run"))
        return reply(msgspec.to_builtins(report) | {"has_changes": report.has_changes})

    async def _engine_metrics(self, request: Request) -> Response:
        return Response(await engine_metrics(self._fleet), media_type=CONTENT_TYPE_LATEST)

    async def _usage(self, request: Request) -> Response:
        """`?by=model` (or key, day): sums; none: rows of each. `?since=2026-01-31`: that day (UTC) and later."""
        by, since = request.query_params.get("by"), request.query_params.get("since")
        if by not in (None, "model", "key", "day"):
            raise InvalidRequest(f"'by' is '{by}': expected model, key or day.", param="by")
        if since is not None and not _DAY.fullmatch(since):
            raise InvalidRequest(f"'since' is '{since}': expected a day such as 2026-01-31.", param="since")
        rows = await self.meter.since(since or "")
        return reply({"by": by or "", "since": since or "", "usage": grouped(rows, by) if by else rows})

    async def _drain(self, request: Request) -> Response:
        """Does not wait: the state says when the model is unloaded."""
        endpoint = self._fleet.find(request.path_params["model_id"])
        self._fleet.draining.begin(endpoint)
        await asyncio.sleep(0)  # what has nothing to do begins to unload
        return self._gateway.desk.shown(endpoint)


def has_terminal() -> bool:
    """Whether somebody's terminal is there for this process."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
