"""Owns: `laya bench gateway`: what passing through Laya adds, against the same stub engine asked directly, in one run.

Stub engine, gateway and load generator are three processes on this machine's cores, the first and the last native. Runs
alternate (direct, through Laya, through another gateway, direct, ...) and each ratio is the median over the pairs, as
machines are shared and noisy. Rows: a whole answer relayed raw; one assembled from a stream (how llama.cpp is asked);
a stream of 64 chunks written one by one, where the stub is what bounds everybody; and the same with 16 chunks to a
write, and in one write, where the stub gives several times what other gateways relay. Beside them runs a bare relay,
which passes bytes on unread: stub and load share the cores with whatever stands between, so that it says what a gateway
could reach at all.
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
from rich.console import Console
from rich.table import Table

from laya.bench import peers
from laya.bench.hardware import hardware
from laya.bench.help import description
from laya.bench.load import LoadResult, request_bytes
from laya.bench.stub_gateway import KEY

PATH = "/v1/chat/completions"
MOST_EVENTS_ASKED = 17  # that every stream of the rows has at least
BESIDE = ("direct", "bare")  # no gateways: the engine itself, and bytes passed on unread
SLOW = {"litellm": 200}  # asked so many times less: it answers some forty requests a second
MESSAGES = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "Say hello to the stub."}]


class Row(NamedTuple):
    """What is asked, and over how many connections."""

    name: str
    connections: tuple[int, ...]
    stream: bool = False
    assembled: bool = False
    chunks: int = 64
    chunks_a_write: int = 1
    share: float = 1.0  # of the requests of a plain row


ROWS = (
    Row("whole, relayed raw", (1, 8, 64)),
    Row("whole, assembled from 16 chunks", (1, 8), assembled=True, chunks=16, share=0.5),
    Row("stream of 64 chunks", (1, 8), stream=True, share=0.4),
    Row("stream of 64 chunks, 16 a write", (8,), stream=True, chunks_a_write=16, share=0.5),
    Row("stream of 64 chunks, in one write", (8,), stream=True, chunks_a_write=64, share=0.5),
)


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


def measure(row: Row, n_requests: int, n_pairs: int, against: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The rows of one kind: medians over rounds in which every target has its turn."""
    n_asked = max(20, int(n_requests * row.share))
    body = {"model": "stub", "messages": MESSAGES, "stream": row.stream}
    flags = ["--assembled"] if row.assembled else []
    shape = ["--chunks", str(row.chunks), "--chunks-a-write", str(row.chunks_a_write)]
    results = []
    with ExitStack() as stack:
        engine_port, _ = stack.enter_context(process("laya.bench.native_stub", *shape))
        gateway = process("laya.bench.stub_gateway", "--engine-port", str(engine_port), *flags)
        targets: dict[str, tuple[int, psutil.Process | None]] = {"direct": (engine_port, None)}
        targets["bare"] = stack.enter_context(process("laya.bench.bare_relay", "--engine-port", str(engine_port)))
        targets["laya"] = stack.enter_context(gateway)
        for name in against:
            targets[name] = stack.enter_context(peers.running(name, engine_port))
        for n_connections in row.connections:
            sides: dict[str, list[Side]] = {name: [] for name in targets}
            for _ in range(n_pairs):
                for name, (port, child) in targets.items():
                    is_stream = row.stream or (name in BESIDE and row.assembled)
                    request = request_bytes(port, PATH, body | {"stream": is_stream}, KEY)
                    n = max(n_connections, n_asked // SLOW.get(name, 1))
                    sides[name].append(_side(f"{row.name}, {name}", port, child, request, n, n_connections, is_stream))
            results.append(_summary(row, n_connections, n_asked, sides))
    return results


def _side(
    what: str, port: int, child: psutil.Process | None, request: bytes, n: int, n_connections: int, is_stream: bool
) -> Side:
    """One run, after a tenth of it that is not counted. Exits where an answer was not right."""
    from laya._core import drive_load  # who only starts a gateway needs no native core

    n_events = MOST_EVENTS_ASKED if is_stream else 0
    drive_load(port, request, max(n_connections, n // 10), n_connections, is_stream, n_events)
    before_s = peers.cpu_s(child) if child else 0.0
    seconds, n_failed, latencies_us = drive_load(port, request, n, n_connections, is_stream, n_events)
    spent_s = peers.cpu_s(child) - before_s if child else 0.0
    if n_failed or len(latencies_us) != n:
        raise SystemExit(f"{what}: {n_failed} of {n} answers were not right")
    return Side(LoadResult(n, n_failed, seconds, latencies_us), spent_s * 1e6 / n)


def _summary(row: Row, n_connections: int, n_requests: int, sides: dict[str, list[Side]]) -> dict[str, Any]:
    def of(name: str, figure: Callable[[Side], float]) -> list[float]:
        return [figure(side) for side in sides[name]]

    def paired(other: str, figure: Callable[[Side], float], combine: Callable[[float, float], float]) -> float:
        return statistics.median(map(combine, of("laya", figure), of(other, figure)))

    def p50_us(side: Side) -> float:
        return side.run.percentile_us(50)

    def per_s(side: Side) -> float:
        return side.run.per_s

    summary: dict[str, Any] = {
        "row": row.name,
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
    fastest = max(statistics.median(of(name, per_s)) for name in sides.keys() - set(BESIDE))
    summary["stub_over_fastest_gateway"] = round(statistics.median(of("direct", per_s)) / fastest, 2)
    summary["stub_over_bare_relay"] = round(statistics.median(map(truediv, of("direct", per_s), of("bare", per_s))), 2)
    summary["laya_over_bare_relay"] = round(paired("bare", per_s, truediv), 3)
    summary["bare_relay_cpu_us_per_request"] = round(statistics.median(of("bare", lambda side: side.cpu_us)), 1)
    if row.stream:
        summary["gateway_cpu_us_per_chunk"] = round(summary["gateway_cpu_us_per_request"] / row.chunks, 2)
    for name in sides.keys() - {*BESIDE, "laya"}:
        cpu_us = statistics.median(of(name, lambda side: side.cpu_us))
        summary[name] = {
            "p50_us": round(statistics.median(of(name, p50_us)), 1),
            "per_s": round(statistics.median(of(name, per_s)), 1),
            "cpu_us_per_request": round(cpu_us, 1),
            "cpu_us_per_chunk": round(cpu_us / row.chunks, 2) if row.stream else None,
            "laya_throughput_ratio": round(paired(name, per_s, truediv), 2),
            "laya_cpu_ratio": round(paired(name, lambda side: side.cpu_us, truediv), 2),
        }
    return summary


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="laya bench gateway", description=description(__doc__))
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--against", default="", help=f"other gateways in the same runs, of {', '.join(peers.PEERS)}")
    parser.add_argument("--row", type=int, choices=range(len(ROWS)), help="only this row")
    args = parser.parse_args(argv)
    against = tuple(name for name in args.against.split(",") if name)
    for name in against:
        if name not in peers.PEERS:
            parser.error(f"--against: '{name}' is not one of {', '.join(peers.PEERS)}")
    results = []
    for row in ROWS if args.row is None else [ROWS[args.row]]:
        results += measure(row, args.requests, args.pairs, against)
    if not args.json:
        _print(results)
    load = {"requests": args.requests, "pairs": args.pairs, "generator": "native, closed loop, same machine"}
    layer = "socket to socket, every check in place (key, limits, admission, routing, counters)"
    print(json.dumps({"bench": "gateway", "layer": layer, "load": load, "rows": results, "hardware": hardware()}))


def _print(results: list[dict[str, Any]]) -> None:
    table = Table(title="What passing through Laya adds", box=None, header_style="dim")
    columns = (
        "row",
        "connections",
        "direct_p50_us",
        "laya_p50_us",
        "added_p50_us",
        "laya_per_s",
        "throughput_ratio",
        "stub_over_fastest_gateway",
        "stub_over_bare_relay",
        "laya_over_bare_relay",
    )
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
