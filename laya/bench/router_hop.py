"""Owns: what the whole hop through the gateway adds to a request: the third layer of the router's bench.

Stub engines (one process), the gateway with every check in place (a second) and the load (this one) share the machine.
Rounds alternate between the engines asked directly and through the gateway; what is added is the difference of the two,
seen by the client. Each model has an engine of its own, which writes its name into its answers: a request that any
other engine answered is wrong.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
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


def measure_gateway(load: RouterLoad) -> dict[str, Any]:
    """Whole answers over `threads` connections. Raises SystemExit where a process does not start."""
    n_engines = min(load.models, MOST_ENGINES)
    n_connections = min(load.threads, MOST_CONNECTIONS)
    per_round = max(1, min(load.requests, MOST_REQUESTS) // N_ROUNDS)
    with ExitStack() as stack:
        engines, _ = stack.enter_context(started("laya.bench.stub_engine", "--engines", str(n_engines)))
        ports = map(str, engines["ports"])
        gateway_argv = ("--max-num-seqs", str(MOST_CONNECTIONS), "--engine-port", *ports)
        port, _ = stack.enter_context(process("laya.bench.stub_gateway", *gateway_argv))
        asked_direct, asked = _asked(load, 1, engines["port"]), _asked(load, n_engines, port)
        direct, through = [], []
        for _ in range(N_ROUNDS):
            direct.append(_run(engines["port"], asked_direct, per_round, n_connections))
            through.append(_run(port, asked, per_round, n_connections))
        inside = _inside(port)
    return _summary(direct, through) | inside | {"connections": n_connections, "models": n_engines}


def _asked(load: RouterLoad, n_engines: int, port: int) -> list[Asked]:
    """The load's questions, as far as there are engines for their models."""
    fewer = dataclasses.replace(load, models=n_engines, endpoints=n_engines, prompt_bytes=0)
    found = []
    for question in questions(fewer):
        name = engine_name(question.answers.start)
        body = {"model": name, "messages": MESSAGES} | ({"user": question.session} if question.session else {})
        found.append(Asked(request_bytes(port, PATH, body, KEY), engine_mark(name)))
    return found


def engine_mark(model: str) -> bytes:
    """What only the engine of this model writes into its answers."""
    return b'"system_fingerprint":"%b"' % model.encode()


def _run(port: int, asked: list[Asked], n_requests: int, n_connections: int) -> LoadResult:
    return uvloop.run(drive(port, asked, n_requests=n_requests, n_connections=n_connections, streams=False))


def _summary(direct: list[LoadResult], through: list[LoadResult]) -> dict[str, Any]:
    sides = [quantiles_us(sorted(us for run in runs for us in run.latencies_us)) for runs in (direct, through)]
    per_s = [sum(run.n_requests for run in runs) / sum(run.seconds for run in runs) for runs in (direct, through)]
    n_asked = sum(run.n_requests for run in through)
    return {
        "measures": "added by the hop",
        "implementation": "laya serve",
        **{name: sides[1][name] - sides[0][name] for name in sides[0] if name != "max_us"},
        "per_s": per_s[1],
        "direct": sides[0] | {"per_s": per_s[0]},
        "through": sides[1] | {"per_s": per_s[1]},
        "requests": n_asked,
        "rounds": len(through),
        "wrong": sum(run.n_failed for run in (*direct, *through)),
    }


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
