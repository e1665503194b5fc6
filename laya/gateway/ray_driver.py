"""Owns: the program `python -m laya.gateway.ray_driver ADDRESS`: the one process that speaks to Ray for a gateway.

Apart from the gateway, because a Ray driver holds some 100 MiB and threads of its own, and is ended by Ray when the
cluster's head is gone, which must not end who answers requests. Orders come on stdin, answers and news go to stdout, a
line of JSON each. The actors are this driver's: when it ends, in whatever way, Ray ends them, and their engines with
them. Decides nothing: which engine goes to which node is said by the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections import Counter
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from laya.engines.child_start import die_with_parent
from laya.engines.cluster_words import Node, Wanted
from laya.gateway.ray_actor import EngineActor, survey

logger = logging.getLogger(__name__)
LOOK_EVERY_S = 0.5
HEAD_SILENT_S = 5.0  # that a look, which takes milliseconds, may take until the head is said to be gone
SILENT_S = 10.0  # an actor that says nothing for so long is lost, whatever Ray still thinks of its node
PLACE_S = 30.0  # for a worker process to come up on the node
FIRST_S = 20.0  # for the first answer of a survey; a worker process comes up for it
SETTLE_S = 3.0  # Ray's figures may trail behind what was ended
LOST = (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError)  # not what our own code in it raised


class Driver:
    """See the module."""

    def __init__(self) -> None:
        self._actors: dict[int, Any] = {}
        self._placed: dict[int, tuple[str, int, int]] = {}  # engine -> node, bytes, GPUs, until its actor is gone
        self._tasks: set[asyncio.Task[None]] = set()
        self._told: list[Node] | None = None
        self._nodes: list[Node] = []
        self._is_head_silent = False
        # made once: a new one is sent to the head with its first call, which stops this loop until it is there
        self._survey = ray.remote(num_cpus=0, max_retries=0)(survey)
        self._engine = ray.remote(EngineActor)

    async def run(self) -> None:
        """Until stdin ends."""
        self._spawn(self._watch_nodes())
        reader = asyncio.StreamReader(limit=2**24)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            order = json.loads(line)
            self._spawn(self._obey(order))
        if self._is_head_silent:  # who leaves in order waits for it; Ray ends what is ours without our help
            os._exit(0)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of the Ray driver failed", exc_info=error)

    async def _obey(self, order: dict[str, Any]) -> None:
        try:
            result = await getattr(self, f"_do_{order['do']}")(**order["with"])
        except Exception as error:  # whatever Ray says; the gateway tells it to whoever asked
            told = str(error).strip().splitlines()
            _say({"answer": order["id"], "error": told[-1] if told else type(error).__name__})
        else:
            _say({"answer": order["id"], "result": result})

    # orders
    async def _do_survey(self, wanted: dict[str, Any], avoid: list[str], others_wait_s: float) -> dict[str, Any]:
        """Node -> what it says of itself, or why it says nothing."""
        asked = msgspec.convert(wanted, Wanted)

        async def ask(node: Node) -> dict[str, Any]:
            reference = self._survey.options(scheduling_strategy=_only(node.id)).remote(asked)
            try:
                return dict(await _result(reference))
            except asyncio.CancelledError:
                ray.cancel(reference, force=True)
                raise
            except ray.exceptions.RayError as error:
                return {"error": _why_not(error)}

        asking = {node.id: asyncio.ensure_future(ask(node)) for node in self._nodes if node.id not in avoid}
        if asking:
            await asyncio.wait(asking.values(), timeout=FIRST_S, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(asking.values(), timeout=others_wait_s)
        silent = {"error": "it does not answer"}
        answers = {node: task.result() if task.done() else silent for node, task in asking.items()}
        for task in asking.values():
            task.cancel()
        return answers

    async def _do_start(self, engine: int, node: str, n_bytes: int, n_gpus: int, settings: dict[str, Any]) -> Any:
        """Its address, its error, or how it was lost. Where it fails nothing is left on the node."""
        options = {
            "memory": n_bytes,
            "num_gpus": n_gpus,
            "num_cpus": 0,
            "max_restarts": 0,  # another node is another plan, so that is the gateway's
            "scheduling_strategy": _only(node),
        }
        self._placed[engine] = (node, n_bytes, n_gpus)
        actor = self._actors[engine] = self._engine.options(**options).remote(settings)
        self._spawn(self._follow(engine, actor))
        answer: dict[str, Any] = {}
        try:
            answer = await _result(actor.start.remote())
        except LOST as error:
            answer = {"lost": _why_lost(error)}
        finally:
            if "address" not in answer:
                await self._do_end(engine)
        return answer

    async def _do_stop(self, engine: int) -> bool:
        """Ask the engine to end, and wait for it; False: its kernel holds it."""
        actor = self._actors.get(engine)
        is_gone = True
        if actor is not None:
            with contextlib.suppress(ray.exceptions.RayError, asyncio.TimeoutError):  # its node is gone, or silent
                is_gone = bool(await asyncio.wait_for(_result(actor.stop.remote()), SILENT_S))
        await self._do_end(engine)
        return is_gone

    async def _do_end(self, engine: int) -> None:
        """End the actor, and with it whatever is left of the engine."""
        actor = self._actors.pop(engine, None)
        if actor is not None:
            ray.kill(actor, no_restart=True)
            asyncio.get_running_loop().call_later(SETTLE_S, self._placed.pop, engine, None)

    # news
    async def _follow(self, engine: int, actor: Any) -> None:
        """Tell what the engine does, until it is no more."""
        wait_s = PLACE_S
        while engine in self._actors:
            try:
                news = await asyncio.wait_for(_result(actor.news.remote()), wait_s)
            except asyncio.TimeoutError:
                lost = f"it has said nothing for {wait_s:g} s"
            except ray.exceptions.RayError as error:
                lost = _why_lost(error)
            else:
                wait_s = SILENT_S
                _say({"engine": engine, "news": news})
                if news["exit_reason"] is None:
                    continue
                await self._do_end(engine)
                return
            if self._actors.get(engine) is actor:
                _say({"engine": engine, "lost": lost})
                await self._do_end(engine)
            return

    async def _watch_nodes(self) -> None:
        while True:
            looking = asyncio.ensure_future(asyncio.to_thread(self._look))
            if not (await asyncio.wait([looking], timeout=HEAD_SILENT_S))[0]:
                self._tell_head(is_silent=True)
            try:
                self._nodes = await looking
            except Exception:  # of Ray's many
                logger.exception("the nodes of the cluster could not be looked at")
                self._tell_head(is_silent=True)
            else:
                self._tell_head(is_silent=False)
            if self._nodes != self._told:
                self._told = self._nodes
                _say({"nodes": msgspec.to_builtins(self._nodes)})
            await asyncio.sleep(LOOK_EVERY_S)

    def _tell_head(self, *, is_silent: bool) -> None:
        if is_silent != self._is_head_silent:
            self._is_head_silent = is_silent
            _say({"head_silent": is_silent})

    def _look(self) -> list[Node]:
        """The nodes that are there and have memory to promise."""
        free = ray._private.state.available_resources_per_node()  # no public call tells it by node
        alive = [each for each in ray.nodes() if each["Alive"] and each["Resources"].get("memory")]
        alive.sort(key=lambda each: (each["NodeName"], each["NodeID"]))
        times = Counter(each["NodeName"] for each in alive)
        own, own_gpus = Counter[str](), Counter[str]()
        for node_id, n_bytes, n_gpus in list(self._placed.values()):
            own[node_id] += n_bytes
            own_gpus[node_id] += n_gpus
        found = []
        for each in alive:
            node_id, name, has = each["NodeID"], each["NodeName"], each["Resources"]
            left = free.get(node_id, has)
            taken_bytes = int(has["memory"]) - int(left.get("memory", 0))
            n_gpus = int(has.get("GPU", 0))
            found.append(
                Node(
                    id=node_id,
                    name=name if times[name] == 1 else f"{name}/{node_id[:6]}",
                    address=each["NodeManagerAddress"],
                    memory_bytes=int(has["memory"]),
                    others_bytes=max(0, taken_bytes - own[node_id]),
                    n_gpus=n_gpus,
                    others_gpus=max(0, n_gpus - int(left.get("GPU", 0)) - own_gpus[node_id]),
                )
            )
        return found


def _only(node_id: str) -> Any:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


async def _result(reference: Any) -> Any:
    return await reference


def _why_not(error: Exception) -> str:
    """Why a node does not answer a question, in words."""
    words = str(error).strip().splitlines()[-1]
    return "Laya is not installed there" if "No module named 'laya'" in words else words


def _why_lost(error: Exception) -> str:
    if isinstance(error, ray.exceptions.ActorUnschedulableError):
        return "Ray cannot place it there"
    return "its process on the node is gone, or the node is"


_report = -1  # where lines for the gateway go; set by main()


def _say(message: dict[str, Any]) -> None:
    os.write(_report, json.dumps(message).encode() + b"\n")


def main() -> None:
    """Until the gateway closes our stdin, or the cluster is gone."""
    global _report
    die_with_parent()
    _report = os.dup(1)
    os.dup2(2, 1)  # what Ray prints is for the log
    began_s = time.monotonic()
    try:
        ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.WARNING, namespace="laya")
    except Exception as error:  # of Ray's many
        told = str(error).strip().splitlines()
        _say({"failed": told[0] if told else type(error).__name__})
        sys.exit(1)
    _say({"connected": round(time.monotonic() - began_s, 3)})
    try:
        asyncio.run(Driver().run())
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
