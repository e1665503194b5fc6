"""Owns: what two engines that are busy at once do to each other, against one that has the machine to itself.

    python -m laya.bench.neighbours MODEL.gguf

Both are loaded, through the fleet that serves, and asked together; then each alone. Threads are shared out by the
fleet as requests come and go (laya/gateway/threads.py); `--fixed N,M` gives the engines so many for good instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from laya.bench.hardware import hardware
from laya.bench.help import description
from laya.config import Config, with_settings
from laya.gateway.endpoint import Endpoint
from laya.gateway.server import Gateway
from laya.types import ModelFile

N_TOKENS = 48
ANSWER_S = 120.0
N_ROUNDS = 3
PROMPT = "Once upon a time there was a small engine that"


class Asked:
    """Enough of a request for its endpoint to be busy."""

    outcome = None


async def rate(endpoints: list[Endpoint]) -> list[float]:
    """Tokens per second of each engine, all asked at once."""

    async def ask(endpoint: Endpoint) -> float:
        assert endpoint.pool is not None
        asked: Any = Asked()
        endpoint.live.add(asked)
        endpoint.on_busy(endpoint)
        body = {"prompt": PROMPT, "max_tokens": N_TOKENS, "ignore_eos": True, "temperature": 0}
        start_s = time.monotonic()
        data = json.dumps(body).encode()
        status, _ = await endpoint.pool.fetch("POST", "/v1/completions", data, deadline_s=ANSWER_S)
        endpoint.live.discard(asked)
        endpoint.on_busy(endpoint)
        assert status == 200, f"{endpoint.model_id} answered {status}"
        return N_TOKENS / (time.monotonic() - start_s)

    return list(await asyncio.gather(*(ask(endpoint) for endpoint in endpoints)))


async def measure(path: Path, fixed: list[int] | None) -> dict[str, Any]:
    """Rates alone and together, the median of the rounds."""
    config = with_settings(Config(), {"max_seq_len": 512, "max_num_seqs": 1})
    with tempfile.TemporaryDirectory() as home:
        gateway = Gateway(config, home=Path(home))
        endpoints = []
        for number, name in enumerate(("first", "second")):
            file = ModelFile(id=name, path=path, format="gguf", file_bytes=path.stat().st_size, origin="config")
            settings = config.for_model(name)
            if fixed is not None:
                settings = msgspec.structs.replace(settings, n_threads=fixed[number])
            endpoints.append(gateway.fleet.register(file, settings))
        try:
            for endpoint in endpoints:
                await gateway.fleet.load(endpoint)
            if fixed is not None:
                gateway.fleet.threads.stop_sharing()
            rounds = [
                {"together": await rate(endpoints), "alone": [(await rate([each]))[0] for each in endpoints]}
                for _ in range(N_ROUNDS)
            ]
        finally:
            await gateway.supervisor.shutdown()
    alone = sorted(value for each in rounds for value in each["alone"])[len(endpoints) * N_ROUNDS // 2]
    together = sorted(sum(each["together"]) for each in rounds)[N_ROUNDS // 2]
    return {
        "hardware": hardware(),
        "threads": fixed or "shared out",
        "alone_tokens_per_s": round(alone, 1),
        "together_tokens_per_s": round(together, 1),
        "ratio": round(together / alone, 2),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("model", type=Path)
    parser.add_argument("--fixed", help="threads of the two engines, e.g. 2,2")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    fixed = [int(word) for word in options.fixed.split(",")] if options.fixed else None
    result = asyncio.run(measure(options.model, fixed))
    if options.json:
        print(json.dumps(result))
        return
    print(f"{result['hardware']}\nthreads {result['threads']}")
    print(f"alone {result['alone_tokens_per_s']} tok/s, two at once {result['together_tokens_per_s']} together")
    print(f"ratio {result['ratio']}")


if __name__ == "__main__":
    main()
