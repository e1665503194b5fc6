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
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

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
LEAST_REQUESTS = ROUND + 1  # two rounds, whose memory is compared
GROWTH_LIMIT_BYTES = 5 * MIB
FILES_SLACK = 2 * N_CONNECTIONS + 2  # the engine's connections are kept: one for each request that it has at once
GONE_S = 5.0  # until the gateway has seen that its clients are gone
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


def _round(port: int, n_requests: int) -> tuple[Counter[str], Counter[str]]:
    """How many requests are to have which outcome, and of how many of a kind the answers were not the right ones."""
    asked, wrong = Counter[str](), Counter[str]()

    def one(kind: tuple[str, bytes, bool, bool], share: float) -> tuple[str, str, int, int]:
        name, request, is_stream, is_refused = kind
        n = max(N_CONNECTIONS, int(n_requests * share))
        if is_refused:
            run = asyncio.run(drive(port, request, n_requests=n, n_connections=N_CONNECTIONS, streams=False, warm_up=0))
            return "refused", name, n, n - min(run.n_failed, run.n_requests)
        _, n_failed, seen = drive_load(port, request, n, N_CONNECTIONS, is_stream, N_CHUNKS if is_stream else 0)
        return "served", name, n, n_failed + n - len(seen)

    with ThreadPoolExecutor(len(_SHARES)) as threads:
        for outcome, name, n, n_wrong in threads.map(one, _kinds(port), _SHARES):
            asked[outcome] += n
            wrong[name] += n_wrong
    return asked, wrong


def _files(child: psutil.Process, most: int) -> int:
    """What the gateway has open, once that is no more than so many, or its clients must have been seen to be gone."""
    end_s = time.monotonic() + GONE_S
    while (n_files := child.num_fds()) > most and time.monotonic() < end_s:
        time.sleep(0.05)
    return n_files


def stub_soak(n_requests: int) -> dict[str, Any]:
    """The report of one run."""
    asked, wrong = Counter[str](), Counter[str]()
    with process("laya.bench.native_stub", "--chunks", str(N_CHUNKS)) as (engine_port, _):
        gateway = process("laya.bench.stub_gateway", "--engine-port", str(engine_port), "--assembled")
        with gateway as (port, child):
            argv = [sys.executable, "-m", "laya.bench.soak_stub", str(port)]
            health = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert health.stdout is not None
            health.stdout.readline()  # it asks by now
            n_files, rss_bytes = child.num_fds(), list[int]()
            while sum(asked.values()) < n_requests:
                round_asked, round_wrong = _round(port, min(ROUND, n_requests))
                asked, wrong = asked + round_asked, wrong + round_wrong
                n_left = _files(child, n_files + FILES_SLACK)
                rss_bytes.append(child.memory_info().rss)
            seen, _ = health.communicate()
            books = asyncio.run(quiet(port))
    first = int(len(rss_bytes) * WARM_SHARE)
    report = {
        "asked": dict(asked),
        "wrong_answers": dict(wrong),
        "arrivals": books["arrivals"],
        "in_flight": books["in_flight"],
        "outcomes": books["outcomes"],
        "rounds_after_warm_up": len(rss_bytes) - first,
        "rss_growth_bytes": rss_bytes[-1] - rss_bytes[first],
        "rss_bytes": rss_bytes[-1],
        "files_growth": n_left - n_files,
        "health": json.loads(seen),
    }
    report["wrong"] = wrong_with(report)
    report["passed"] = not report["wrong"] and is_prompt(report["health"])
    return report


def wrong_with(report: dict[str, Any]) -> list[str]:
    """What is not as it has to be, in words; /health apart, which other programs may delay."""
    expected = {"served": 0, "refused": 0, "failed": 0, "cancelled": 0} | report["asked"]
    checks = {
        f"answers that were not the right ones: {report['wrong_answers']}": report["wrong_answers"],
        f"{report['in_flight']} requests without an end": report["in_flight"],
        f"outcomes {report['outcomes']} of {report['asked']} asked": report["outcomes"] != expected,
        f"{report['arrivals']} arrivals": report["arrivals"] != sum(expected.values()),
        "too few requests to see whether memory grows": report["rounds_after_warm_up"] < 2,
        f"memory grew by {report['rss_growth_bytes']} bytes": report["rss_growth_bytes"] >= GROWTH_LIMIT_BYTES,
        f"{report['files_growth']} files more": report["files_growth"] > FILES_SLACK,
    }
    return [words for words, is_wrong in checks.items() if is_wrong]


def is_prompt(health: dict[str, Any]) -> bool:
    """Whether /health was answered in time, whatever else went on."""
    return bool(health["p99_ms"] < HEALTH_P99_LIMIT_MS)


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
        answer = connection.getresponse()
        assert answer.read() and answer.status == 200
        waits_ms.append((time.perf_counter() - start_s) * 1000)
    waits_ms.sort()
    at = {f"p{p}_ms": round(waits_ms[min(len(waits_ms) - 1, len(waits_ms) * p // 100)], 2) for p in (50, 99, 100)}
    print(json.dumps({"n": len(waits_ms)} | at))


if __name__ == "__main__":
    _watch_health(int(sys.argv[1]))
