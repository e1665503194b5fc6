"""Owns: the gateway's end of a Ray cluster: which nodes there are, orders to them, and what their engines do.

Ray itself is spoken to by a process of its own (gateway/ray_driver.py); this knows only its lines of JSON, and imports
nothing of Ray. The process is started when the cluster is first needed. When it has ended, which its engines do not
outlive, another one joins as soon as the head answers again. While the head is silent nothing is placed; engines that
run go on.
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
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any

import msgspec

from laya.engines.cluster_door import why_unreachable
from laya.engines.cluster_words import EngineNews, Node, NodeSurvey, Wanted, WantedFile
from laya.engines.llamacpp_launcher import child_environment
from laya.errors import EngineFailed

logger = logging.getLogger(__name__)

DRIVER = "laya.gateway.ray_driver"
CONNECT_S = 30.0
LINE_BYTES = 2**24
CLOSE_S = 5.0  # for the driver to leave the cluster in order
REJOIN_S = (1.0, 2.0, 4.0, 8.0)  # between tries; the last one from then on
SILENT = "its head does not answer"
WITHOUT_RAY = "Ray is not installed here: pip install 'laya-llm[ray]'"

Listener = Callable[[EngineNews | None, str], None]  # news, or None and why the engine is lost


class Cluster:
    """One cluster, by the address of its head. Used on one event loop."""

    def __init__(self, address: str, *, on_nodes: Callable[[], None] = lambda: None) -> None:
        """on_nodes: called when a node has come or gone, or what is promised on one to others has changed."""
        self.address = address
        self.nodes: tuple[Node, ...] = ()
        self.fault: str | None = None  # why nothing can be placed now
        self.on_nodes = on_nodes
        self.on_fault: Callable[[], None] = lambda: None  # called when it has got one, and when it is over
        self._process: asyncio.subprocess.Process | None = None
        self._connecting = asyncio.Lock()
        self._connected: asyncio.Future[str | None] | None = None  # None: it is; else why not
        self._nodes_known = asyncio.Event()
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._surveys: set[asyncio.Future[Any]] = set()  # those of the answers that are to one
        self._listeners: dict[int, Listener] = {}
        self._unheard: set[int] = set()  # engines that Ray has still to place
        self._reading: asyncio.Task[None] | None = None
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def connect(self) -> None:
        """Have the driver run and the nodes known. Raises EngineFailed."""
        async with self._connecting:
            if self._process is not None and self._process.returncode is None:
                if self.fault is not None:
                    raise self._not_joined(self.fault)
                return
            if self._reading is not None:
                await self._reading  # what the last driver left is cleared away before the next one has anything
            if importlib.util.find_spec("ray") is None:
                raise EngineFailed(WITHOUT_RAY, param="ray.address")
            fault = await why_unreachable(self.address)
            if fault is not None:
                raise self._not_joined(fault)
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
            self._reading = self._spawn(self._read(self._process))
            self._spawn(self._read_log(self._process))
            try:
                fault = await asyncio.wait_for(asyncio.shield(self._connected), CONNECT_S)
                if fault is None:
                    await asyncio.wait_for(self._nodes_known.wait(), CONNECT_S)
            except asyncio.TimeoutError:
                fault = f"no answer within {CONNECT_S:g} s"
            if fault is not None:
                await self._end_driver()
                raise self._not_joined(fault)
            self._set_fault(None)

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
        self._unheard.add(number)
        answer: dict[str, Any] = {}
        try:
            answer = await self._order(
                "start", engine=number, node=node.id, n_bytes=n_bytes, n_gpus=n_gpus, settings=settings
            )
        except asyncio.CancelledError:
            self.end(number)
            raise
        finally:
            self._unheard.discard(number)
            if "address" not in answer:
                self.forget(number)
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
        """Leave the cluster for good; what still runs on it for us ends."""
        self._is_closing = True
        await self._end_driver()

    async def _end_driver(self) -> None:
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
        if what == "survey":
            self._surveys.add(answer)
        try:
            self._tell({"id": number, "do": what, "with": values})
            return await answer
        finally:
            self._answers.pop(number, None)
            self._surveys.discard(answer)

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
        had_joined = self._nodes_known.is_set()
        if not self._is_closing:
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
        if had_joined and not self._is_closing:
            self._set_fault("it is not there any more")
            self._spawn(self._rejoin())

    async def _rejoin(self) -> None:
        for wait_s in itertools.chain(REJOIN_S, itertools.repeat(REJOIN_S[-1])):
            await asyncio.sleep(wait_s)
            if self._is_closing:
                return
            try:
                await self.connect()
            except EngineFailed as error:
                logger.info("%s", error.message)
            else:
                return

    def _head_silent(self, is_silent: bool) -> None:
        """Who waits for the head is told that it is gone: Ray would keep them waiting for a minute."""
        self._set_fault(SILENT if is_silent else None)
        if not is_silent:
            return
        for answer in self._surveys:
            if not answer.done():
                answer.set_exception(self._not_joined(SILENT))
        for engine in list(self._unheard):
            if listener := self._listeners.get(engine):
                listener(None, f"the Ray cluster cannot place it: {SILENT}")

    def _set_fault(self, fault: str | None) -> None:
        is_turn, self.fault = (fault is None) != (self.fault is None), fault
        if is_turn:
            self.on_fault()

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
            self._unheard.discard(word["engine"])
            listener = self._listeners.get(word["engine"])
            if listener is not None and "news" in word:
                listener(msgspec.convert(word["news"], EngineNews), "")
            elif listener is not None:
                listener(None, word["lost"])
        elif "head_silent" in word:
            self._head_silent(word["head_silent"])
        elif "nodes" in word:
            self.nodes = tuple(msgspec.convert(word["nodes"], list[Node]))
            self._nodes_known.set()
            self.on_nodes()
        elif self._connected is not None and not self._connected.done():
            self._connected.set_result(word.get("failed"))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def driver_environment() -> dict[str, str]:
    """Ours, and what keeps Ray from telling others of its use."""
    return {**os.environ, "RAY_USAGE_STATS_ENABLED": os.environ.get("RAY_USAGE_STATS_ENABLED", "0")}
