"""Owns: what the whole hop through the gateway adds to a request: the third layer of the router's bench.

Stub engines (one process), the gateway with every check in place (a second) and the load (this one) share the machine.
Rounds alternate between the engines asked directly and through the gateway; what is added is the difference of the two,
seen by the client. Each model has engines of its own, which write their names into their answers: a request that any
other engine answered is wrong.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from typing import Any

import uvloop
from prometheus_client.parser import text_string_to_metric_families

from laya.bench.gateway import MESSAGES, PATH, process, started
from laya.bench.load import Asked, LoadResult, drive, request_bytes
from laya.bench.router_decision import quantiles_us
from laya.bench.router_load import RouterLoad, questions
from laya.bench.stub_engine import engine_name
from laya.bench.stub_gateway import KEY

N_ROUNDS = 5
MOST_REQUESTS = 50_000
MOST_CONNECTIONS = 256
MOST_ENGINES = 64  # each has a port and connections
MOST_SESSIONS = 10_000
ALONE_REQUESTS = 2_000
Target = tuple[int, list[Asked]]  # a port, and what is asked there


def measure_gateway(load: RouterLoad) -> dict[str, Any]:
    """Whole answers over `threads` connections, and over one with all three processes on one core. Exits where a
    process does not start."""
    n_models = min(load.models, MOST_ENGINES)
    replicas = max(1, min(load.endpoints // load.models, MOST_ENGINES // n_models))
    n_connections = min(load.threads, MOST_CONNECTIONS)
    n_requests = min(load.requests, MOST_REQUESTS)
    with ExitStack() as stack:
        engine_argv = ("laya.bench.stub_engine", "--engines", str(n_models * replicas))
        engines, engine = stack.enter_context(started(*engine_argv))
        gateway_argv = ("--max-num-seqs", str(MOST_CONNECTIONS), "--replicas", str(replicas), "--engine-port")
        ports = map(str, engines["ports"])
        port, gateway = stack.enter_context(process("laya.bench.stub_gateway", *gateway_argv, *ports))
        targets = (engines["port"], _asked(load, 1, 1, engines["port"])), (port, _asked(load, n_models, replicas, port))
        together = _added(targets, n_requests, n_connections)
        with _one_core(os.getpid(), engine.pid, gateway.pid):
            alone = _added(targets, min(n_requests, ALONE_REQUESTS), 1)
        inside = _inside(port)
    shape = {"models": n_models, "endpoints": n_models * replicas, "wrong": together["wrong"] + alone["wrong"]}
    return together | {"alone": alone} | inside | shape


@contextmanager
def _one_core(*pids: int) -> Iterator[None]:
    """One request at a time needs no more; and no figure then depends on which sleeping cores had to be woken."""
    cores = os.sched_getaffinity(0)
    for pid in pids:
        os.sched_setaffinity(pid, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _added(targets: tuple[Target, Target], n_requests: int, n_connections: int) -> dict[str, Any]:
    """Direct and through the gateway in alternating rounds, and the difference of the two."""
    runs: tuple[list[LoadResult], list[LoadResult]] = [], []
    for _ in range(N_ROUNDS):
        for side, (port, asked) in zip(runs, targets, strict=True):
            load = drive(
                port, asked, n_requests=max(1, n_requests // N_ROUNDS), n_connections=n_connections, streams=False
            )
            side.append(uvloop.run(load))
    direct, through = (_seen(side) for side in runs)
    return {
        "measures": "added by the hop",
        "implementation": "laya serve",
        **{figure: through[figure] - direct[figure] for figure in ("mean_us", "p50_us", "p99_us", "p999_us")},
        "per_s": through["per_s"],
        "direct": direct,
        "through": through,
        "requests": sum(run.n_requests for run in runs[1]),
        "connections": n_connections,
        "rounds": N_ROUNDS,
        "wrong": sum(run.n_failed for side in runs for run in side),
    }


def _seen(runs: list[LoadResult]) -> dict[str, float]:
    samples_us = sorted(us for run in runs for us in run.latencies_us)
    return quantiles_us(samples_us) | {"per_s": len(samples_us) / sum(run.seconds for run in runs)}


def _asked(load: RouterLoad, n_models: int, replicas: int, port: int) -> list[Asked]:
    """The load's questions, as far as there are engines for their models."""
    n_sessions = min(load.sessions, MOST_SESSIONS)
    n_endpoints = n_models * replicas
    fewer = dataclasses.replace(load, models=n_models, endpoints=n_endpoints, sessions=n_sessions, prompt_bytes=0)
    found = []
    for question in questions(fewer):
        model = engine_name(question.answers.start // replicas)
        body = {"model": model, "messages": MESSAGES} | ({"user": question.session} if question.session else {})
        found.append(Asked(request_bytes(port, PATH, body, KEY), engine_marks(question.answers)))
    return found


def engine_marks(engines: range) -> tuple[bytes, ...]:
    """What only these engines write into their answers."""
    return tuple(b'"system_fingerprint":"%b"' % engine_name(index).encode() for index in engines)


def _inside(port: int) -> dict[str, float]:
    """What the gateway itself says of its requests so far: means of its own clocks, in µs."""
    connection = HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/metrics", headers={"authorization": f"Bearer {KEY}"})
    text = connection.getresponse().read().decode()
    connection.close()
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }

    def mean_us(name: str) -> float:
        return values[f"{name}_sum"] / max(1.0, values[f"{name}_count"]) * 1e6

    return {"route_mean_us": mean_us("laya_route_seconds"), "inside_mean_us": mean_us("laya_gateway_added_seconds")}
