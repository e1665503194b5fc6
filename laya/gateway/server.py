"""Owns: the life of `laya serve`: its socket, its loop, what starts first, what a signal ends, what is swept.

One process, one uvloop, one port. Models are loaded after the socket is open: `/health` answers at once, `/ready` when
the models that were asked for are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from laya.config import Config
from laya.config.places import DATABASE
from laya.engines.ceiling import Ceilings
from laya.engines.cluster import Cluster
from laya.engines.making import make_engine
from laya.engines.supervisor import SHUTDOWN_S, Supervisor
from laya.errors import LayaError, ServerStopping
from laya.gateway.apis import Apis
from laya.gateway.app import build_app
from laya.gateway.desk import Desk
from laya.gateway.dispatch import Dispatcher
from laya.gateway.endpoint import Endpoint
from laya.gateway.events import Events
from laya.gateway.expert_desk import ExpertDesk
from laya.gateway.fleet import Fleet
from laya.gateway.guarding import Guarding, claim_ceilings
from laya.gateway.inner import Inner
from laya.gateway.limits import Limits
from laya.gateway.listening import allow_connections
from laya.gateway.live_keys import LiveKeys
from laya.gateway.operating import ConfigSource, Operating
from laya.gateway.page_desk import PageDesk
from laya.gateway.protocol import LayaProtocol
from laya.gateway.traces import FLUSH_S
from laya.memory import Machine
from laya.metrics import GatewayStats
from laya.routing import RequestRouter

logger = logging.getLogger(__name__)
SWEEP_EVERY_S = 0.25
LOOK_EVERY_S = 0.05  # while the last answers finish
INTERRUPTED = 130  # the exit code after Ctrl-C


class Server(uvicorn.Server):
    """uvicorn's server with our signals: the first lets finish what runs, a second one ends at once.

    Either way engines are stopped in order, and an answer that is cut says why.
    """

    exit_code = 0

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGINT:
            self.exit_code = INTERRUPTED
        if self.should_exit:
            self.force_exit = True
            if not self._gateway.stats.in_flight:  # nobody is to be told, and engines may be on their way out
                self._gateway.supervisor.kill()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gateway.desk.closing.set()  # what would never end by itself ends now
        n_answers = self._gateway.stats.in_flight
        if n_answers and not self.force_exit:
            what = "1 answer" if n_answers == 1 else f"{n_answers} answers"
            what += f", at most {self._gateway.config.server.drain_timeout_s:g} s"
            print(f"laya: finishing {what}; signal again to stop now", file=sys.stderr, flush=True)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves this out, and engines with it
            await self.lifespan.shutdown()

    async def _wait_tasks_to_complete(self) -> None:
        """In place of uvicorn's, which has no word for the clients of what it cuts off."""
        end_s = time.monotonic() + self._gateway.config.server.drain_timeout_s
        state = self.server_state
        while (state.connections or state.tasks) and not self.force_exit and time.monotonic() < end_s:
            await asyncio.sleep(LOOK_EVERY_S)
        for endpoint in self._gateway.fleet.endpoints.values():
            endpoint.fail_all(ServerStopping("The server is stopping and could not wait for this answer to finish."))
        await asyncio.sleep(0)  # what was said to clients is written

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {sig: signal.signal(sig, self.handle_exit) for sig in handled}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


class Gateway:
    """Everything of one running server, wired."""

    def __init__(
        self,
        config: Config,
        *,
        home: Path,
        supervisor: Supervisor | None = None,
        source: ConfigSource | None = None,
    ) -> None:
        """source: where a reload finds the configuration; None: it is the one given, whatever happens to a file."""
        self.stats = GatewayStats()
        self.router = RequestRouter()
        self.events = Events()
        self.ceilings = Ceilings()
        self.cluster = Cluster(config.ray.address) if config.ray.address is not None else None
        if supervisor is None:
            self.ceilings, support = claim_ceilings()
            logger.info("%s", support.words)
            maker = functools.partial(make_engine, ceilings=self.ceilings, cluster=self.cluster)
            supervisor = Supervisor(logs_dir=home / "logs", make_engine=maker)
        self.supervisor = supervisor
        self.fleet = Fleet(
            config,
            home=home,
            router=self.router,
            stats=self.stats,
            supervisor=self.supervisor,
            machine=Machine(),
            events=self.events,
            cluster=self.cluster,
        )
        if self.cluster is not None:
            self.cluster.on_nodes = self.fleet.nodes_changed
            self.cluster.on_fault = self.fleet.cluster_fault_changed
        self.config = config
        self.keys = LiveKeys(config.server, home / DATABASE)
        self.dispatcher = Dispatcher(self.fleet, self.router, self.keys, self.stats)
        self.limits = Limits.of(config.server)
        self.fleet.pump = self.dispatcher.pump
        self.fleet.pass_on = self.dispatcher.retries.try_elsewhere
        self.guarding = Guarding(
            self.fleet.relief,
            self.supervisor,
            self.ceilings,
            events=self.events,
            stats=self.stats,
            available_bytes=self.fleet.machine.available_bytes,
            model_of=self.fleet.model_of,
        )
        self.dispatcher.crash_error = self.guarding.crash_error
        self.desk = Desk(self.fleet, self.stats, self.keys, self.events)
        self.inner = Inner(self.dispatcher, self.limits)
        self.apis = Apis(config, self.inner, self.fleet, home / DATABASE)
        self.connection = self._connection()
        self.operating = Operating(self, source or ConfigSource(lambda: config), home / DATABASE)
        self.page = PageDesk(self.desk)
        self.desk.apis += ExpertDesk(self.fleet, self.ceilings).routes()
        self.desk.apis += self.apis.routes + self.operating.routes + self.page.routes()

    def check_entries(self) -> dict[str, LayaError]:
        """Models of the config that are not served, each an event. Raises ConfigError where there is no other one."""
        entries = self.fleet.roster.entries
        entries.check_any(len(self.fleet.endpoints))
        for model_id, fault in entries.faults.items():
            self.events.add("model_failed", f"models.{model_id} is not served: {fault.message}", model=model_id)
        return dict(entries.faults)

    def _connection(self) -> type[LayaProtocol]:
        """The connection class of this server. Which lanes it takes is `Operating`'s to say."""
        own = {"dispatcher": self.dispatcher, "limits": self.limits, "lane": self.fleet.lane}
        return type("Connection", (LayaProtocol,), own)


async def sweep(server: uvicorn.Server, gateway: Gateway) -> None:
    while True:
        await asyncio.sleep(SWEEP_EVERY_S)
        now_s = time.monotonic()
        connections: list[Any] = list(server.server_state.connections)
        for swept in (
            *connections,
            gateway.dispatcher.streams,
            gateway.dispatcher.express,
            gateway.fleet,
            gateway.keys,
        ):
            try:
                swept.sweep(now_s)
            except Exception:  # no fault in one place ends the deadlines of the others
                logger.exception("a sweep failed")


def run(
    config: Config,
    *,
    home: Path,
    sock: socket.socket,
    preload: list[str],
    on_loaded: Callable[[Gateway, Endpoint], None],
    on_ready: Callable[[Gateway], None],
    source: ConfigSource | None = None,
) -> int:
    """Serve until a signal; gives the exit code. Raises what refused a model of `preload`, ConfigError where no model
    can be served."""
    allow_connections()
    gateway = Gateway(config, home=home, source=source)
    gateway.fleet.scan()
    faults = gateway.check_entries()
    wanted = [gateway.fleet.find(name) for name in preload if name not in faults]
    failure: list[LayaError] = []

    async def load_all() -> None:
        if gateway.cluster is not None:
            try:
                await gateway.cluster.connect()
            except LayaError as error:
                failure.append(error)
                server.should_exit = True
                return
        for endpoint in wanted:
            try:
                await gateway.fleet.load(endpoint)
            except LayaError as error:
                failure.append(error)
                server.should_exit = True
                return
            gateway.desk.preloads_pending -= 1
            on_loaded(gateway, endpoint)
        on_ready(gateway)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        gateway.desk.preloads_pending = len(wanted)
        work = (
            sweep(server, gateway),
            gateway.guarding.run(),
            gateway.apis.run(),
            gateway.operating.run(),
            gateway.page.history.run(),
            load_all(),
            gateway.fleet.peers.run(),
        )
        end = functools.partial(server.handle_exit, signal.SIGTERM, None)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, gateway.operating.hang_up, end)
        tasks = [asyncio.create_task(each) for each in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await gateway.supervisor.shutdown(0.0 if server.force_exit else SHUTDOWN_S)
            if gateway.cluster is not None:
                await gateway.cluster.close()
            gateway.dispatcher.streams.close()
            gateway.dispatcher.express.close()
            await gateway.operating.traces.close(0.0 if server.force_exit else FLUSH_S)

    server = Server(uvicorn_config(gateway, build_app(gateway.desk, gateway.keys, lifespan)), gateway)
    server.run(sockets=[sock])
    if failure:
        raise failure[0]
    return server.exit_code


def uvicorn_config(gateway: Gateway, app: Any) -> uvicorn.Config:
    uvicorn_log = logging.getLogger("uvicorn.error")
    uvicorn_log.setLevel(logging.ERROR)  # its lesser words are of its inner life
    uvicorn_log.addFilter(_is_fault)
    return uvicorn.Config(
        app,
        http=gateway.connection,
        loop="uvloop",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(gateway.config.server.keep_alive_s),
    )


def _is_fault(record: logging.LogRecord) -> bool:
    """What is cancelled because the server ends is no fault."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
