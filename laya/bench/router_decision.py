"""Owns: what a routing decision costs inside one process: natively, and as a call from Python. Never mixed.

`native` is choose + settle inside the extension, by native threads; `python` is one `RequestRouter.choose` call, by
Python threads, which share the GIL. Every answer is checked: the endpoint must be the asked model's, and all counters
must be back at zero. Knows no engine and no HTTP.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

from laya.bench.router_load import Question, RouterLoad, questions
from laya.routing import NATIVE, RequestRouter, RouteTable
from laya.routing.table import FLAG_STREAMING, hash_name, pack_feature, prefix_blocks
from laya.types import EndpointKind

TOKENS = 128  # reserved by each request; small, so that no session leaves its endpoint for load
PREEMPTED_US = 20.0  # a longer sample was not running for part of it
MIN_SESSION_BYTES = 1 << 20
SESSION_ENTRY_BYTES = 8
WARM_UP_REQUESTS = 2000


def new_router(load: RouterLoad) -> tuple[RequestRouter, RouteTable]:
    """A router that knows the load's models, over a table whose session memory the load fills to a quarter."""
    n_sessions = max(load.sessions, load.models)
    session_bytes = max(MIN_SESSION_BYTES, 4 * SESSION_ENTRY_BYTES * n_sessions)
    window_tokens = max(8192, 2 * TOKENS * load.threads)
    table = RouteTable(max_endpoints=load.endpoints, session_bytes=session_bytes, window_tokens=window_tokens)
    router = RequestRouter(table)
    for _ in range(load.endpoints):
        router.add_endpoint()
    router.set_models((f"model-{model}", load.endpoints_of(model), ()) for model in range(load.models))
    return router, table


def measure_native(load: RouterLoad) -> dict[str, Any]:
    """Choose + settle by native threads. Raises ImportError where the extension is not there."""
    from laya._core import bench_choose

    router, table = new_router(load)
    asked = questions(load)
    features = b"".join(
        pack_feature(
            kind=EndpointKind.CHAT,
            flags=FLAG_STREAMING,
            tokens=TOKENS,
            model_hash=hash_name(question.model),
            session_hash=hash_name(question.session) if question.session else 0,
        )
        for question in asked
    )
    first = [question.answers.start for question in asked]
    count = [len(question.answers) for question in asked]
    result = bench_choose(table, features, first, count, load.threads, load.requests)
    return {
        "measures": "choose + settle",
        "implementation": "native",
        "mean_us": result["mean_ns"] / 1000,
        "p50_us": result["p50_ns"] / 1000,
        "p99_us": result["p99_ns"] / 1000,
        "p999_us": result["p999_ns"] / 1000,
        "max_us": result["max_ns"] / 1000,
        "timer_us": result["timer_ns"] / 1000,
        "per_s": load.requests / result["elapsed_s"],
        "preempted_share": result["preempted_share"],
        "sessions_moved": result["n_moved"],
        "wrong": result["n_wrong"] + _loaded_endpoints(router, load),
    }


def measure_python(load: RouterLoad) -> dict[str, Any]:
    """One `RequestRouter.choose` call by Python threads."""
    router, _ = new_router(load)
    asked = questions(load)
    for question in asked:  # every session gets its endpoint before anything is counted
        _ask(router, question)
    runs = [_PythonThread(router, asked, number, load) for number in range(load.threads)]
    start = threading.Barrier(load.threads)
    threads = [threading.Thread(target=run, args=(start,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed_s = (max(run.ended_ns for run in runs) - min(run.began_ns for run in runs)) / 1e9
    samples_us = sorted(ns / 1000 for run in runs for ns in run.samples_ns)
    return {
        "measures": "choose call",
        "implementation": "native" if NATIVE else "twin",
        **quantiles_us(samples_us),
        "timer_us": _timer_us(),
        "per_s": load.requests / elapsed_s,
        "preempted_share": sum(sample > PREEMPTED_US for sample in samples_us) / len(samples_us),
        "wrong": sum(run.wrong for run in runs) + _loaded_endpoints(router, load),
    }


class _PythonThread:
    """One thread's share of the requests: its samples and how many answers were wrong."""

    def __init__(self, router: RequestRouter, asked: list[Question], number: int, load: RouterLoad) -> None:
        share = load.requests // load.threads + (number < load.requests % load.threads)
        dice = random.Random(number)
        self._router = router
        self._warm_up = dice.choices(asked, k=min(WARM_UP_REQUESTS, load.requests) // load.threads)
        self._asked = dice.choices(asked, k=share)
        self.samples_ns = [0] * share
        self.wrong = 0
        self.began_ns = self.ended_ns = 0

    def __call__(self, start: threading.Barrier) -> None:
        for question in self._warm_up:
            _ask(self._router, question)
        start.wait()
        self.began_ns = time.perf_counter_ns()
        for i, question in enumerate(self._asked):
            endpoint, self.samples_ns[i] = _ask(self._router, question)
            self.wrong += endpoint not in question.answers
        self.ended_ns = time.perf_counter_ns()


def _ask(router: RequestRouter, question: Question) -> tuple[int, int]:
    began_ns = time.perf_counter_ns()
    endpoint = router.choose(
        question.model,
        session=question.session,
        kind=EndpointKind.CHAT,
        streaming=True,
        tokens=TOKENS,
        prefix_blocks=prefix_blocks(question.prompt) if question.prompt else b"",
    )
    took_ns = time.perf_counter_ns() - began_ns
    if endpoint >= 0:
        router.settle(endpoint, TOKENS)
    return endpoint, took_ns


def _loaded_endpoints(router: RequestRouter, load: RouterLoad) -> int:
    return sum(router.load(endpoint) != (0, 0) for endpoint in range(load.endpoints))


def quantiles_us(ordered: list[float]) -> dict[str, float]:
    """Mean, p50, p99, p99.9 and maximum of sorted samples."""
    last = len(ordered) - 1
    shares = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}
    return {"mean_us": sum(ordered) / len(ordered)} | {
        f"{name}_us": ordered[int(share * last)] for name, share in shares.items()
    }


def _timer_us() -> float:
    return min(-(time.perf_counter_ns() - time.perf_counter_ns()) for _ in range(1000)) / 1000
