"""Owns: the gateway's end of a Ray cluster: which nodes there are, orders to them, and what their engines do.

Ray itself is spoken to by a process of its own (gateway/ray_driver.py); this knows only its lines of JSON, and imports
nothing of Ray. The process is started when the cluster is first needed, and again when it has ended; its engines ended
with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec

from laya.engines.cluster_words import EngineNews, Node, NodeSurvey, Wanted, WantedFile
from laya.engines.llamacpp_launcher import child_environment
from laya.errors import EngineFailed

logger = logging.getLogger(__name__)

DRIVER = "laya.gateway.ray_driver"
KNOCK_S = 5.0
CONNECT_S = 30.0
LINE_BYTES = 2**24
CLOSE_S = 5.0  # for the driver to leave the cluster in order
WITHOUT_RAY = "Ray is not installed here: pip install 'laya-llm[ray]'"

Listener = Callable[[EngineNews | None, str], None]  # news, or None and why the engine is lost


class Cluster:
    """One cluster, by the address of its head. Used on one event loop."""

    def __init__(self, address: str, *, on_nodes: Callable[[], None] = lambda: None) -> None:
        """on_nodes: called when a node has come or gone, or what is promised on one to others has changed."""
        self.address = address
        self.nodes: tuple[Node, ...] = ()
        self.on_nodes = on_nodes
        self._process: asyncio.subprocess.Process | None = None
        self._connecting = asyncio.Lock()
        self._connected: asyncio.Future[str | None] | None = None  # None: it is; else why not
        self._nodes_known = asyncio.Event()
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._listeners: dict[int, Listener] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def connect(self) -> None:
        """Have the driver run and the nodes known. Raises EngineFailed."""
        async with self._connecting:
            if self._process is not None and self._process.returncode is None:
                return
            if importlib.util.find_spec("ray") is None:
                raise EngineFailed(WITHOUT_RAY, param="ray.address")
            await self._knock()
            loop = asyncio.get_running_loop()
            self._connected, self._nodes_known = loop.create_future(), asyncio.Event()
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", DRIVER, self.address),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=child_environment(driver_environment()),
                limit=LINE_BYTES,
                start_new_session=True,
            )
            self._spawn(self._read(self._process))
            self._spawn(self._read_log(self._process))
            try:
                fault = await asyncio.wait_for(asyncio.shield(self._connected), CONNECT_S)
                if fault is None:
                    await asyncio.wait_for(self._nodes_known.wait(), CONNECT_S)
            except asyncio.TimeoutError:
                fault = f"no answer within {CONNECT_S:g} s"
            if fault is not None:
                await self.close()
                raise self._not_joined(fault)

    async def _knock(self) -> None:
        """Raise at once where nothing listens: Ray itself would try for a long time."""
        host, _, port = self.address.rpartition(":")
        if not host:
            return  # auto
        try:
            connecting = asyncio.open_connection(host.strip("[]"), int(port))
            _, writer = await asyncio.wait_for(connecting, KNOCK_S)
        except asyncio.TimeoutError:
            raise self._not_joined(f"no connection within {KNOCK_S:g} s") from None
        except OSError as error:
            raise self._not_joined(error.strerror or str(error)) from None
        writer.close()

    def _not_joined(self, fault: str) -> EngineFailed:
        words = f"The Ray cluster at {self.address} cannot be joined: {fault}"
        return EngineFailed(words, param="ray.address", retry_after_s=1.0)

    async def survey(
        self, files: Iterable[WantedFile], *, avoid: Collection[str] = (), others_wait_s: float
    ) -> dict[str, NodeSurvey | str]:
        """Id of a node -> what it says of itself, or why it says nothing. Raises EngineFailed.

        avoid: nodes that are not asked. others_wait_s: how long others are waited for once one has answered.
        """
        await self.connect()
        wanted = msgspec.to_builtins(Wanted(files=list(files)))
        told = await self._order("survey", wanted=wanted, avoid=list(avoid), others_wait_s=others_wait_s)
        return {
            node: answer["error"] if "error" in answer else msgspec.convert(answer, NodeSurvey)
            for node, answer in told.items()
        }

    async def start(
        self, node: Node, settings: dict[str, Any], listener: Listener, *, n_bytes: int, n_gpus: int
    ) -> tuple[int, dict[str, Any]]:
        """Place an engine: its number, and its address or error once it has answered or ended. Raises EngineFailed.

        listener: told what it does from now on.
        """
        await self.connect()
        number = next(self._numbers)
        self._listeners[number] = listener
        try:
            answer = await self._order(
                "start", engine=number, node=node.id, n_bytes=n_bytes, n_gpus=n_gpus, settings=settings
            )
        except asyncio.CancelledError:
            self.end(number)
            raise
        return number, answer

    async def stop(self, number: int) -> bool:
        """Ask the engine to end, and wait until it is gone; False: the kernel of its node holds it."""
        try:
            return bool(await self._order("stop", engine=number))
        except EngineFailed:
            return True  # no driver, no engine

    def end(self, number: int) -> None:
        """End the engine by force, without waiting."""
        self._tell({"id": next(self._numbers), "do": "end", "with": {"engine": number}})

    def forget(self, number: int) -> None:
        """Nobody listens to that engine any more."""
        self._listeners.pop(number, None)

    async def close(self) -> None:
        """Leave the cluster; what still runs on it for us ends."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), CLOSE_S)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()

    async def _order(self, what: str, **values: Any) -> Any:
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._tell({"id": number, "do": what, "with": values})
            return await answer
        finally:
            self._answers.pop(number, None)

    def _tell(self, order: dict[str, Any]) -> None:
        process = self._process
        if process is None or process.returncode is not None or process.stdin is None or process.stdin.is_closing():
            answer = self._answers.get(order["id"])
            if answer is not None:
                answer.set_exception(self._gone())
            return
        process.stdin.write(json.dumps(order).encode() + b"\n")

    def _gone(self) -> EngineFailed:
        return EngineFailed(f"The Ray cluster at {self.address} is not there any more", retry_after_s=1.0)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            try:
                self._heard(json.loads(line))
            except Exception:  # one listener's fault is not the others'
                logger.exception("a word of the Ray driver could not be acted on")
        await process.wait()
        logger.warning("the Ray driver has ended (%s)", process.returncode)
        self.nodes = ()
        self.on_nodes()
        if self._connected is not None and not self._connected.done():
            self._connected.set_result(f"its driver ended with {process.returncode}; see the server's log")
        for answer in list(self._answers.values()):
            if not answer.done():
                answer.set_exception(self._gone())
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener(None, "the Ray cluster is not there any more")

    async def _read_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        with contextlib.suppress(ValueError):  # a line longer than can be read: the rest is lost, and only a log
            while line := await process.stderr.readline():
                logger.info("ray: %s", line.decode(errors="replace").rstrip())

    def _heard(self, word: dict[str, Any]) -> None:
        if "answer" in word:
            answer = self._answers.get(word["answer"])
            if answer is not None and not answer.done():
                if "error" in word:
                    answer.set_exception(EngineFailed(f"Ray: {word['error']}", retry_after_s=1.0))
                else:
                    answer.set_result(word["result"])
        elif "engine" in word:
            listener = self._listeners.get(word["engine"])
            if listener is not None and "news" in word:
                listener(msgspec.convert(word["news"], EngineNews), "")
            elif listener is not None:
                listener(None, word["lost"])
        elif "nodes" in word:
            self.nodes = tuple(msgspec.convert(word["nodes"], list[Node]))
            self._nodes_known.set()
            self.on_nodes()
        elif self._connected is not None and not self._connected.done():
            self._connected.set_result(word.get("failed"))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def driver_environment() -> dict[str, str]:
    """Ours, and what keeps Ray from telling others of its use."""
    return {**os.environ, "RAY_USAGE_STATS_ENABLED": os.environ.get("RAY_USAGE_STATS_ENABLED", "0")}
