"""Owns: what runs on a node of a Ray cluster: one engine as an actor, and what a node says of itself before.

The actor has the same child process, launcher and control group as an engine of this machine, and is its parent: it
ends with the actor, in whatever way that ends. Nothing is decided here; the settings come from the gateway. What Ray
reserves for the actor is its book-keeping, the ceiling is what holds the engine to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import ray

import laya
from laya.engines.builds import packages_for
from laya.engines.ceiling import Ceilings
from laya.engines.ceiling_place import claim
from laya.engines.child import spawn_from_this_thread
from laya.engines.cluster_words import EngineNews, NodeSurvey, Wanted, decode_settings
from laya.engines.cpu_time import family_cpu_s
from laya.engines.gpu_build import VULKAN, gpu_build, why_no_gpu
from laya.engines.log import EngineLog
from laya.engines.process import EngineProcess
from laya.engines.settings import EngineSettings
from laya.errors import EngineFailed, LayaError
from laya.memory import GpuMeter, Machine, mounts
from laya.memory.gpu import GpuMemory
from laya.memory.vllm_place import usable_bytes
from laya.models import home_path, resolve
from laya.types import PlannedSettings

logger = logging.getLogger(__name__)
NEWS_EVERY_S = 0.5
UNASKED_S = 25.0  # that the server, which asks for news all the time, may be silent: then it is gone, or cut off
WATCH_EVERY_S = 0.05  # an engine without a group can outgrow its limit only for so long


def survey(wanted: Wanted) -> dict[str, Any]:
    """What this node has: memory and cores now, and whether the model's files are here."""
    machine = Machine()
    files, missing = [], ""
    for each in wanted.files:
        try:
            files.append(str(find(Path(each.path), each.n_bytes, each.name)))
        except LayaError as error:
            missing = error.message
            break
    told = NodeSurvey(
        version=laya.__version__,
        available_bytes=machine.available_bytes(),
        n_cores=machine.cores(),
        files=files,
        gpu_bytes=_gpu_bytes(),
        missing=missing,
    )
    return dict(msgspec.to_builtins(told))


def _gpu_bytes() -> list[int]:
    """Of each GPU, where this node's own build of llama.cpp can use them."""
    cards = GpuMeter().read()
    if not cards:
        return []
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides them from who asks for none
    is_usable = why_no_gpu(None, packages_for(None, home_path()), len(cards)) is None
    return [usable_bytes(card) for card in cards] if is_usable else []


def find(path: Path, n_bytes: int, name: str | None) -> Path:
    """The same file here: where the gateway has it, else by the model's name in this node's own store.

    Raises LayaError where there is none, or one of another size.
    """
    found = path
    if not path.is_file() and name is not None:
        found = resolve(name, models_dir=Path("models"), home=home_path()).path
    if not found.is_file():
        raise LayaError(f"{path} is not there")
    if found.stat().st_size != n_bytes:
        raise LayaError(f"{found} has {found.stat().st_size} bytes there and {n_bytes} here")
    return found


class EngineActor:
    """One engine, started once. Ray runs its methods on one event loop, whose thread lasts as long as its process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = decode_settings(settings)
        self._host = ray.util.get_node_ip_address()
        self._news = asyncio.Event()
        self._log = _ToldLog()
        self._engine: EngineProcess | None = None
        self._exit_reason: str | None = None
        self._asked_s = time.monotonic()  # when the server was last heard of
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> dict[str, Any]:
        """Its address, or the error, once the engine has answered or ended."""
        spawn_from_this_thread()
        ceilings = _claim_ceilings()
        try:
            settings = at_node(self._settings, self._host, numbers_of(ray.get_gpu_ids(), GpuMeter().read()))
        except LayaError as error:
            return self._failure(error)
        self._engine = EngineProcess(settings, self._log, ceilings=ceilings)
        self._spawn(self._watch_ceiling(ceilings))
        self._spawn(self._watch_server())
        try:
            address = await self._engine.start()
        except LayaError as error:
            return self._failure(error)
        self._spawn(self._watch_exit(self._engine))
        return {"address": msgspec.to_builtins(address)}

    def _failure(self, error: LayaError) -> dict[str, Any]:
        """With the last of its log, as the actor ends before it is asked for news again."""
        hit = self._engine.limit_hit if self._engine is not None else None
        told = msgspec.to_builtins(hit) if hit is not None else None
        return {"error": error.message, "limit_hit": told, "log": self._log.take()}

    async def news(self) -> dict[str, Any]:
        """What happened since the last call, after a while at the latest: so it is also a sign of life."""
        self._asked_s = time.monotonic()
        if self._exit_reason is None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), NEWS_EVERY_S)
        self._news.clear()
        engine, reading = self._engine, None
        if engine is not None and self._exit_reason is None:
            reading = engine.measure()
        hit = engine.limit_hit if engine is not None else None
        told = EngineNews(
            log=self._log.take(),
            pid=engine.pid if engine is not None else None,
            load_percent=engine.load_percent if engine is not None else None,
            cpu_s=family_cpu_s(engine.pid) if reading is not None and engine is not None and engine.pid else None,
            memory=reading,
            exit_reason=self._exit_reason,
            limit_hit=hit if self._exit_reason is not None else None,
        )
        return dict(msgspec.to_builtins(told))

    async def stop(self) -> bool:
        """Whether it is gone."""
        return await self._engine.stop() if self._engine is not None else True

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch_exit(self, engine: EngineProcess) -> None:
        self._exit_reason = await engine.wait_exit()
        self._news.set()

    async def _watch_server(self) -> None:
        """End this process, and the engine with it, where nobody asks any more: Ray itself takes a minute to notice a
        server that was killed when the head of the cluster was gone, and longer for one that only hangs."""
        while (silent_s := time.monotonic() - self._asked_s) < UNASKED_S:
            await asyncio.sleep(min(UNASKED_S - silent_s, NEWS_EVERY_S))
        logger.warning("nothing was heard of the server for %g s: its engine ends", UNASKED_S)
        await self.stop()
        os._exit(0)

    async def _watch_ceiling(self, ceilings: Ceilings) -> None:
        while self._exit_reason is None:
            ceilings.check_watched()
            await asyncio.sleep(WATCH_EVERY_S if ceilings.is_watching else NEWS_EVERY_S)


def at_node(settings: EngineSettings, host: str, gpus: list[int]) -> EngineSettings:
    """The settings with what only the node knows: its address, its build of llama.cpp, and the GPUs that Ray gave."""
    packages, on_gpus = packages_for(None, home_path()), bool(settings.planned.gpus)
    return msgspec.structs.replace(
        settings,
        host=host,
        planned=on_these(settings.planned, gpus),
        packages=packages,
        sees_all_gpus=on_gpus and gpu_build(None, packages).kind == VULKAN,
    )


def numbers_of(ids: Iterable[Any], cards: Iterable[GpuMemory]) -> list[int]:
    """NVML's numbers of GPUs that Ray gave, who calls them by number, or by UUID where the node was started so."""
    numbers = {card.uuid: card.index for card in cards}
    try:
        return sorted(int(each) if str(each).isdigit() else numbers[str(each)] for each in ids)
    except KeyError as unknown:
        raise EngineFailed(f"Ray gave the GPU {unknown}, which NVML does not know there") from None


def on_these(planned: PlannedSettings, gpus: list[int]) -> PlannedSettings:
    """The same layers, on these GPUs instead of the first ones."""
    if not planned.gpus:
        return planned
    layers = dict(zip(gpus, (planned.tensor_split[number] for number in planned.gpus), strict=True))
    return msgspec.structs.replace(planned, tensor_split=tuple(layers.get(n, 0) for n in range(gpus[-1] + 1)))


class _ToldLog(EngineLog):
    """An engine's log that is kept by the gateway; lines of Laya's own here are told with the engine's."""

    def __init__(self) -> None:
        super().__init__()
        self._told: list[str] = []

    def _append(self, lines: list[bytes]) -> None:
        super()._append(lines)
        self._told += [line.decode(errors="replace") for line in lines]

    def take(self) -> list[str]:
        """What came since the last call."""
        told, self._told = self._told, []
        return told


def _claim_ceilings() -> Ceilings:
    """What holds this engine to its bytes on this node."""
    ceilings, support = claim(lambda: [(mount.kind, mount.group) for mount in mounts(Path("/"), "memory")])
    ceilings.remove_leftovers()
    logger.info("%s", support.words)
    return ceilings
