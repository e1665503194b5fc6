"""Owns: `laya bench gateway`: what passing through Laya adds, against the same stub engine asked directly, in one run.

Stub engine, gateway and load generator are three processes on this machine's cores. Runs alternate (direct, through
Laya, direct, ...) and each ratio is the median over the pairs, since machines are shared and noisy. Three rows: a whole
answer relayed raw, a whole answer assembled from a stream (how llama.cpp is asked), and a stream of 64 chunks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from operator import sub, truediv
from typing import Any, NamedTuple

import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from laya.bench import peers
from laya.bench.hardware import hardware
from laya.bench.load import LoadResult, drive, request_bytes
from laya.bench.stub_gateway import KEY

PATH = "/v1/chat/completions"
WARM_UP = 200  # requests that `drive` sends before it counts
SLOW = {"litellm": 200}  # asked so many times less: it answers some forty requests a second
MESSAGES = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "Say hello to the stub."}]


class Side(NamedTuple):
    """One run before one target."""

    run: LoadResult
    cpu_us: float  # of the target, a request


@contextmanager
def started(*argv: str) -> Iterator[tuple[dict[str, Any], psutil.Process]]:
    """A child and what it prints of itself; killed at the end. Exits where it does not start."""
    child = subprocess.Popen([sys.executable, "-m", *argv], stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        line = child.stdout.readline()
        if not line:
            raise SystemExit(f"{argv[0]} did not start; it says why above")
        yield json.loads(line), psutil.Process(child.pid)
    finally:
        child.kill()
        child.wait()


@contextmanager
def process(*argv: str) -> Iterator[tuple[int, psutil.Process]]:
    """A child that prints its port; killed at the end."""
    with started(*argv) as (said, child):
        yield int(said["port"]), child


def measure(
    row: dict[str, Any], n_connections: int, n_requests: int, n_pairs: int, against: tuple[str, ...] = ()
) -> dict[str, Any]:
    """One row of the table: medians over rounds in which every target has its turn."""
    streams = row["stream"]
    body = {"model": "stub", "messages": MESSAGES, "stream": streams}
    flags = ["--assembled"] if row["assembled"] else []
    with ExitStack() as stack:
        engine_port, _ = stack.enter_context(process("laya.bench.stub_engine", "--chunks", str(row["chunks"])))
        gateway = process("laya.bench.stub_gateway", "--engine-port", str(engine_port), *flags)
        targets = {"direct": (engine_port, None), "laya": stack.enter_context(gateway)}
        for name in against:
            targets[name] = stack.enter_context(peers.running(name, engine_port))
        direct_body = body | ({"stream": True} if row["assembled"] else {})
        sides: dict[str, list[Side]] = {name: [] for name in targets}
        for _ in range(n_pairs):
            for name, (port, child) in targets.items():
                request = request_bytes(port, PATH, direct_body if name == "direct" else body, KEY)
                is_stream = streams or (name == "direct" and row["assembled"])
                n_asked = max(20, n_requests // SLOW.get(name, 1))
                before_s = peers.cpu_s(child) if child else 0.0
                run = uvloop.run(
                    drive(port, request, n_requests=n_asked, n_connections=n_connections, streams=is_stream)
                )
                spent_s = peers.cpu_s(child) - before_s if child else 0.0
                sides[name].append(Side(run, spent_s * 1e6 / (n_asked + WARM_UP)))
                if run.n_failed or run.n_requests != n_asked:
                    raise SystemExit(
                        f"{row['name']}, {name}: {run.n_failed} of {run.n_requests} answers were not right"
                    )
    return _summary(row, n_connections, n_requests, sides)


def _summary(row: dict[str, Any], n_connections: int, n_requests: int, sides: dict[str, list[Side]]) -> dict[str, Any]:
    def of(name: str, figure: Callable[[Side], float]) -> list[float]:
        return [figure(side) for side in sides[name]]

    def paired(other: str, figure: Callable[[Side], float], combine: Callable[[float, float], float]) -> float:
        return statistics.median(map(combine, of("laya", figure), of(other, figure)))

    def p50_us(side: Side) -> float:
        return side.run.percentile_us(50)

    def per_s(side: Side) -> float:
        return side.run.per_s

    summary = {
        "row": row["name"],
        "connections": n_connections,
        "requests": n_requests,
        "pairs": len(sides["laya"]),
        "direct_p50_us": round(statistics.median(of("direct", p50_us)), 1),
        "laya_p50_us": round(statistics.median(of("laya", p50_us)), 1),
        "added_p50_us": round(paired("direct", p50_us, sub), 1),
        "added_p99_us": round(paired("direct", lambda side: side.run.percentile_us(99), sub), 1),
        "direct_per_s": round(statistics.median(of("direct", per_s))),
        "laya_per_s": round(statistics.median(of("laya", per_s))),
        "throughput_ratio": round(paired("direct", per_s, truediv), 3),
        "gateway_cpu_us_per_request": round(statistics.median(of("laya", lambda side: side.cpu_us)), 1),
    }
    for name in sides.keys() - {"direct", "laya"}:
        summary[name] = {
            "p50_us": round(statistics.median(of(name, p50_us)), 1),
            "per_s": round(statistics.median(of(name, per_s)), 1),
            "cpu_us_per_request": round(statistics.median(of(name, lambda side: side.cpu_us)), 1),
            "laya_throughput_ratio": round(paired(name, per_s, truediv), 2),
            "laya_cpu_ratio": round(paired(name, lambda side: side.cpu_us, truediv), 2),
        }
    return summary


ROWS = (
    {"name": "whole, relayed raw", "stream": False, "assembled": False, "chunks": 64},
    {"name": "whole, assembled from 16 chunks", "stream": False, "assembled": True, "chunks": 16},
    {"name": "stream of 64 chunks", "stream": True, "assembled": False, "chunks": 64},
)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="laya bench gateway", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--against", default="", help=f"other gateways in the same runs, of {', '.join(peers.PEERS)}")
    parser.add_argument("--row", type=int, choices=range(len(ROWS)), help="only this row")
    args = parser.parse_args(argv)
    against = tuple(name for name in args.against.split(",") if name)
    for name in against:
        if name not in peers.PEERS:
            parser.error(f"--against: '{name}' is not one of {', '.join(peers.PEERS)}")
    results = []
    for row in ROWS if args.row is None else [ROWS[args.row]]:
        n_requests = args.requests if row["name"] == ROWS[0]["name"] else max(200, args.requests // 8)
        for n_connections in (1, 8):
            results.append(measure(row, n_connections, n_requests, args.pairs, against))
    if not args.json:
        _print(results)
    load = {"requests": args.requests, "pairs": args.pairs, "generator": "laya.bench.load, closed loop, same machine"}
    layer = "socket to socket, every check in place (key, limits, admission, routing, counters)"
    print(json.dumps({"bench": "gateway", "layer": layer, "load": load, "rows": results, "hardware": hardware()}))


def _print(results: list[dict[str, Any]]) -> None:
    table = Table(title="What passing through Laya adds", box=None, header_style="dim")
    columns = ("row", "connections", "direct_p50_us", "laya_p50_us", "added_p50_us", "laya_per_s", "throughput_ratio")
    for column in (*columns, "gateway_cpu_us_per_request"):
        table.add_column(column.replace("_", " "), justify="left" if column == "row" else "right")
    for result in results:
        table.add_row(*(str(result[column]) for column in (*columns, "gateway_cpu_us_per_request")))
    console = Console(highlight=False, width=160)
    console.print(table)
    for name in sorted(peers.PEERS.keys() & set().union(*results)):
        other = Table(title=f"Laya and {name}, in the same runs", box=None, header_style="dim")
        for column in ("row", "connections", *results[0][name]):
            other.add_column(column.replace("_", " "), justify="left" if column == "row" else "right")
        for result in results:
            other.add_row(result["row"], str(result["connections"]), *map(str, result[name].values()))
        console.print(other)


if __name__ == "__main__":
    main()
