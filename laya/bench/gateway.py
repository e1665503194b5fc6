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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from laya.bench.hardware import hardware
from laya.bench.load import LoadResult, drive, request_bytes
from laya.bench.stub_gateway import KEY

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "Say hello to the stub."}]


@contextmanager
def process(*argv: str) -> Iterator[tuple[int, psutil.Process]]:
    """A child that prints its port; killed at the end."""
    child = subprocess.Popen([sys.executable, "-m", *argv], stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        yield int(json.loads(child.stdout.readline())["port"]), psutil.Process(child.pid)
    finally:
        child.kill()
        child.wait()


def measure(row: dict[str, Any], n_connections: int, n_requests: int, n_pairs: int) -> dict[str, Any]:
    """One row of the table: medians over alternating pairs of runs."""
    streams = row["stream"]
    body = {"model": "stub", "messages": MESSAGES, "stream": streams}
    flags = ["--assembled"] if row["assembled"] else []
    with (
        process("laya.bench.stub_engine", "--chunks", str(row["chunks"])) as (engine_port, _),
        process("laya.bench.stub_gateway", "--engine-port", str(engine_port), *flags) as (port, gateway),
    ):
        runs: dict[str, list[LoadResult]] = {"direct": [], "laya": []}
        cpu_us = []
        direct_body = body | ({"stream": True} if row["assembled"] else {})
        targets = {
            "direct": (engine_port, request_bytes(engine_port, PATH, direct_body), streams or row["assembled"]),
            "laya": (port, request_bytes(port, PATH, body, KEY), streams),
        }
        for _ in range(n_pairs):
            for name, (target_port, request, check_done) in targets.items():
                before_s = sum(gateway.cpu_times()[:2])
                run = uvloop.run(
                    drive(target_port, request, n_requests=n_requests, n_connections=n_connections, streams=check_done)
                )
                runs[name].append(run)
                if name == "laya":
                    cpu_us.append((sum(gateway.cpu_times()[:2]) - before_s) * 1e6 / (n_requests + 200))
    return _summary(row, n_connections, n_requests, runs, cpu_us)


def _summary(
    row: dict[str, Any], n_connections: int, n_requests: int, runs: dict[str, list[LoadResult]], cpu_us: list[float]
) -> dict[str, Any]:
    failed = sum(run.n_failed for side in runs.values() for run in side)
    answered = sum(run.n_requests for side in runs.values() for run in side)
    if failed or answered != 2 * n_requests * len(cpu_us):
        raise SystemExit(f"{row['name']}: {failed} of {answered} answers were not right; nothing was measured")
    p50 = {side: [run.percentile_us(50) for run in results] for side, results in runs.items()}
    p99 = {side: [run.percentile_us(99) for run in results] for side, results in runs.items()}
    rate = {side: [run.per_s for run in results] for side, results in runs.items()}

    def paired(values: dict[str, list[float]], combine: Any) -> float:
        pairs = zip(values["laya"], values["direct"], strict=True)
        return statistics.median([float(combine(laya, direct)) for laya, direct in pairs])

    return {
        "row": row["name"],
        "connections": n_connections,
        "requests": n_requests,
        "pairs": len(cpu_us),
        "direct_p50_us": round(statistics.median(p50["direct"]), 1),
        "laya_p50_us": round(statistics.median(p50["laya"]), 1),
        "added_p50_us": round(paired(p50, lambda laya, direct: laya - direct), 1),
        "added_p99_us": round(paired(p99, lambda laya, direct: laya - direct), 1),
        "direct_per_s": round(statistics.median(rate["direct"])),
        "laya_per_s": round(statistics.median(rate["laya"])),
        "throughput_ratio": round(paired(rate, lambda laya, direct: laya / direct), 3),
        "gateway_cpu_us_per_request": round(statistics.median(cpu_us), 1),
    }


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
    args = parser.parse_args(argv)
    results = []
    for row in ROWS:
        n_requests = args.requests if row["name"] == ROWS[0]["name"] else max(200, args.requests // 8)
        for n_connections in (1, 8):
            results.append(measure(row, n_connections, n_requests, args.pairs))
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
    Console(highlight=False, width=160).print(table)


if __name__ == "__main__":
    main()
