"""Owns: the real gateway before the stub engine: every check of `laya serve` in place, with no model loaded.

Only the supervisor (which would start a child) and the plan (which would read a file) are stand-ins; protocol, routing,
admission, relay and settling are the ones that serve. Run: `python -m laya.bench.stub_gateway --engine-port N`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from laya.bench.stub_engine import engine_name
from laya.config import ApiKey, Config
from laya.engines.log import EngineLog
from laya.gateway.app import build_app
from laya.gateway.listening import listen
from laya.gateway.server import Gateway, Server, sweep, uvicorn_config
from laya.types import DevicePlan, EngineAddress, ModelFile, ModelStatus, Plan, PlannedSettings

KEY = "laya-bench-key"
NO_HOME = Path("/dev/null/laya")  # nothing of a bench is kept: its gateway is killed and could not clear it away


def stub_plan(max_num_seqs: int) -> Plan:
    settings = PlannedSettings(
        max_seq_len=8192, slot_tokens=8192, max_num_seqs=max_num_seqs, kv_cache_dtype="f16", kv_unified=False,
        kv_pool_tokens=8192 * max_num_seqs, n_batch=128, n_ubatch=128, n_threads=1, task="chat", mmap=True,
    )  # fmt: skip
    device = DevicePlan(device="cpu", budget_bytes=1, terms={"weights": 1}, total_bytes=1)
    return Plan(
        model="stub", fits=True, devices=[device], settings=settings, reasons={}, suggestions=[], verdict="stub"
    )


class StubSupervisor:
    """Says that the engine is ready; it is, in a process of its own."""

    def __init__(self, address: EngineAddress) -> None:
        self._address = address
        self._models: list[str] = []

    def on_state(self, listener: Any) -> None:
        return

    def register(self, model_id: str, factory: Any, release: Any, **more: Any) -> None:
        self._models.append(model_id)

    def load_percent(self, model_id: str) -> int | None:
        return None

    def cpu_s(self, model_id: str) -> float | None:
        return None

    async def ensure_ready(self, model_id: str) -> EngineAddress:
        return self._address

    def status(self) -> list[ModelStatus]:
        return [ModelStatus(id=model_id, state="ready", task="chat", since_s=0.0) for model_id in self._models]

    async def unload(self, model_id: str, deadline_s: float) -> None:
        return

    def logs(self, model_id: str) -> EngineLog:
        return EngineLog()

    async def shutdown(self) -> None:
        return


def build(
    engine_ports: Sequence[int], *, replicas: int = 1, cancels_whole: bool, max_num_seqs: int, home: Path = NO_HOME
) -> Gateway:
    """A gateway whose models, 'stub', 'stub-1' and so on, are served at so many ports of this machine each.

    home: a folder for what it keeps; without one, whatever keeps something fails.
    """
    addresses = [
        EngineAddress(host="127.0.0.1", port=port, api_key="stub-key", cancels_whole=cancels_whole)
        for port in engine_ports
    ]
    config = Config()
    key = ApiKey(name="bench", sha256=sha256(KEY.encode()).hexdigest())
    config = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, api_keys=[key]))
    gateway = Gateway(config, home=home, supervisor=StubSupervisor(addresses[0]))  # type: ignore[arg-type]
    for index in range(len(addresses) // replicas):
        model = engine_name(index)
        file = ModelFile(id=model, path=NO_HOME / model, format="gguf", file_bytes=0, origin="config")
        settings = msgspec.structs.replace(config.for_model(model), replicas=replicas)
        group = gateway.fleet.replicas(gateway.fleet.register(file, settings))
        for endpoint, address in zip(group, addresses[index * replicas :], strict=False):
            gateway.fleet.plans[endpoint.name] = stub_plan(max_num_seqs)
            gateway.fleet.open(endpoint, address)
    return gateway


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-port", type=int, required=True, nargs="+", metavar="N")
    parser.add_argument("--replicas", type=int, default=1, help="so many of the ports, in turn, are of one model")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--home", type=Path, default=NO_HOME, help="for what is kept, such as conversations")
    parser.add_argument("--assembled", action="store_true", help="treat the engine as llama.cpp: always stream from it")
    args = parser.parse_args()
    gateway = build(
        args.engine_port,
        replicas=args.replicas,
        cancels_whole=not args.assembled,
        max_num_seqs=args.max_num_seqs,
        home=args.home,
    )
    sock = listen("127.0.0.1", args.port)

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(sweep(server, gateway))
        print(json.dumps({"port": sock.getsockname()[1]}), flush=True)
        yield
        sweeping.cancel()

    app = build_app(gateway.desk, gateway.keys, lifespan)
    server = Server(uvicorn_config(gateway, app), gateway)
    server.run(sockets=[sock])


if __name__ == "__main__":
    main()
