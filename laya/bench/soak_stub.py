"""Owns: the soak before a stub engine: requests of every kind by the ten thousand, and what they leave in the gateway.

Whole answers, streams and refusals run side by side, over connections that come and go, while a process of its own asks
for /health. Memory is looked at after a warm-up, since buffers, tables and code paths fill once.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from laya._core import drive_load
from laya.bench.fuzz import quiet
from laya.bench.gateway import process
from laya.bench.load import drive, request_bytes
from laya.bench.stub_gateway import KEY
from laya.types import MIB

N_CHUNKS = 16
N_CONNECTIONS = 8  # of each kind at once
ROUND = 3000  # requests; each round has connections of its own
WARM_SHARE = 0.3
GROWTH_LIMIT_BYTES = 5 * MIB
HEALTH_P99_LIMIT_MS = 20.0
HEALTH_EVERY_S = 0.005
_CHAT = "/v1/chat/completions"
_BODY: dict[str, Any] = {"model": "stub", "messages": [{"role": "user", "content": "Say hello to the stub."}]}


def _kinds(port: int) -> list[tuple[str, bytes, bool, bool]]:
    """(name, request, whether it is a stream, whether it is refused)."""

    def ask(body: dict[str, Any], key: str = KEY) -> bytes:
        return request_bytes(port, _CHAT, body, key)

    return [
        ("whole", ask(_BODY), False, False),
        ("stream", ask(_BODY | {"stream": True}), True, False),
        ("refused: a field", ask(_BODY | {"temperature": 9}), False, True),
        ("refused: no such model", ask(_BODY | {"model": "nobody"}), False, True),
        ("refused: the key", ask(_BODY, "laya-wrong"), False, True),
    ]


_SHARES = (0.4, 0.3, 0.1, 0.1, 0.1)


def _round(port: int, n_requests: int) -> dict[str, int]:
    """How many answers of each kind were not the right ones, where some were not."""

    def one(kind: tuple[str, bytes, bool, bool], share: float) -> tuple[str, int]:
        name, request, is_stream, is_refused = kind
        n = max(N_CONNECTIONS, int(n_requests * share))
        if is_refused:
            run = asyncio.run(drive(port, request, n_requests=n, n_connections=N_CONNECTIONS, streams=False, warm_up=0))
            return name, n - run.n_failed
        _, n_failed, seen = drive_load(port, request, n, N_CONNECTIONS, is_stream, N_CHUNKS if is_stream else 0)
        return name, n_failed + n - len(seen)

    with ThreadPoolExecutor(len(_SHARES)) as threads:
        return {name: n for name, n in threads.map(one, _kinds(port), _SHARES) if n}


def stub_soak(n_requests: int) -> dict[str, Any]:
    """The report of one run."""
    wrong: dict[str, int] = {}
    with process("laya.bench.native_stub", "--chunks", str(N_CHUNKS)) as (engine_port, _):
        gateway = process("laya.bench.stub_gateway", "--engine-port", str(engine_port), "--assembled")
        with gateway as (port, child):
            argv = [sys.executable, "-m", "laya.bench.soak_stub", str(port)]
            health = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert health.stdout is not None
            health.stdout.readline()  # it asks by now
            rss_bytes, n_files, n_done = [], [], 0
            while n_done < n_requests:
                for name, n in _round(port, min(ROUND, n_requests)).items():
                    wrong[name] = wrong.get(name, 0) + n
                n_done += min(ROUND, n_requests)
                rss_bytes.append(child.memory_info().rss)
                n_files.append(child.num_fds())
            seen, _ = health.communicate()
            books = asyncio.run(quiet(port))
    first = int(len(rss_bytes) * WARM_SHARE)
    return _report(json.loads(seen), wrong, books, rss_bytes[first:], n_files[first:])


def _report(
    health: dict[str, Any], wrong: dict[str, int], books: dict[str, Any], rss_bytes: list[int], n_files: list[int]
) -> dict[str, Any]:
    """What was seen from the end of the warm-up on, and whether it is right."""
    report = {
        "wrong_answers": wrong,
        "arrivals": books["arrivals"],
        "in_flight": books["in_flight"],
        "outcomes": books["outcomes"],
        "unaccounted": books["arrivals"] - books["in_flight"] - sum(books["outcomes"].values()),
        "rss_growth_bytes": rss_bytes[-1] - rss_bytes[0],
        "rss_bytes": rss_bytes[-1],
        "files_growth": n_files[-1] - n_files[0],
        "health": health,
    }
    report["leaks_nothing"] = (
        not (wrong or report["in_flight"] or report["unaccounted"])
        and report["rss_growth_bytes"] < GROWTH_LIMIT_BYTES
        and report["files_growth"] <= len(_SHARES) * N_CONNECTIONS
    )
    report["passed"] = report["leaks_nothing"] and health["p99_ms"] < HEALTH_P99_LIMIT_MS
    return report


def _watch_health(port: int) -> None:
    """Ask until nobody writes to us any more; prints the percentiles in milliseconds."""
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    waits_ms: list[float] = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    print("asking", flush=True)
    while not waits_ms or not ended.wait(HEALTH_EVERY_S):
        start_s = time.perf_counter()
        connection.request("GET", "/health")
        assert connection.getresponse().read()
        waits_ms.append((time.perf_counter() - start_s) * 1000)
    waits_ms.sort()
    at = {f"p{p}_ms": round(waits_ms[min(len(waits_ms) - 1, len(waits_ms) * p // 100)], 2) for p in (50, 99, 100)}
    print(json.dumps({"n": len(waits_ms)} | at))


if __name__ == "__main__":
    _watch_health(int(sys.argv[1]))
