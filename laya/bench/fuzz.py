"""Owns: `laya bench fuzz`: malformed HTTP requests and bodies, the same for the same seed, at the real gateway.

Before a stub engine, so that nothing but the gateway is at stake. Fails where an answer is a 5xx that no
client can have caused, where a whole request gets no answer, where a valid request is not served meanwhile, where a
traceback is logged, and where a request, a file descriptor or memory stays. `--only NUMBER` runs one case again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httptools
import msgspec
import psutil

from laya.bench.fuzz_requests import Case, case
from laya.bench.gateway import process
from laya.bench.hardware import hardware
from laya.bench.help import description
from laya.bench.load import request_bytes
from laya.bench.stub_gateway import KEY
from laya.types import MIB

ALLOWED = frozenset(
    {100, 200, 201, 304, 400, 401, 403, 404, 405, 408, 409, 413, 415, 417, 422, 429, 431, 499, 501, 503}
)
QUIET_S = 0.15  # without a byte, and what may be incomplete is taken to be
PATIENCE_S = 20.0
N_PARTS = 8  # of the cases; memory is looked at after each, and the first half warms up
GROWTH_LIMIT_BYTES = 5 * MIB
CANARY_EVERY = 100
_MOST_SHOWN = 20


class Fault(msgspec.Struct):
    """A case that showed something wrong."""

    number: int
    what: str


class _Reader:
    """Answers out of one connection's bytes."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.n_whole = 0
        self.bodies: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        self.statuses.append(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        if self.statuses and self.statuses[-1] != 100:
            self.n_whole += 1
            self.bodies.append(self._body)
        self._body = b""


async def send(port: int, asked: Case) -> tuple[list[int], str | None]:
    """The statuses of the answers to a case, and what is wrong, if anything."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    answers = _Reader()
    try:
        for piece in asked.pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        fault = await _read(reader, writer, asked, answers)
    except (ConnectionError, asyncio.IncompleteReadError):
        fault = None if answers.statuses or not asked.framed else "the connection broke without an answer"
    finally:
        writer.transport.abort()
    odd = [status for status in answers.statuses if status not in ALLOWED]
    return answers.statuses, f"answered {odd}: {answers.bodies[-1:]!r:.300}" if odd else fault


async def _read(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: Case, answers: _Reader
) -> str | None:
    is_ended = False
    while answers.n_whole < asked.n_requests:
        quiet_s = PATIENCE_S if asked.framed or is_ended else QUIET_S
        try:
            data = await asyncio.wait_for(reader.read(65536), quiet_s)
        except asyncio.TimeoutError:
            if is_ended:
                return f"not closed in {PATIENCE_S:g} s after the client's end"
            if asked.framed:
                return f"no answer in {PATIENCE_S:g} s"
            writer.write_eof()
            is_ended = True
            continue
        if not data:
            return "closed without an answer" if asked.framed and not answers.statuses else None
        try:
            answers.feed(data)
        except httptools.HttpParserError as error:  # HEAD has a length and no body; a stream may be cut by our own end
            return None if is_ended or b"HEAD" in b"".join(asked.pieces) else f"not HTTP: {error}: {data[:200]!r}"
    return None


class Run:
    """One run against a gateway at `port`."""

    def __init__(self, port: int, seed: int) -> None:
        self.statuses: Counter[int] = Counter()
        self.faults: list[Fault] = []
        self._port = port
        self._seed = seed

    async def cases(self, numbers: Iterator[int], n_connections: int) -> None:
        async def work() -> None:
            for number in numbers:
                statuses, fault = await send(self._port, case(self._seed, number, KEY))
                self.statuses.update(statuses or [0])
                if fault is not None:
                    self.faults.append(Fault(number, fault))
                if number % CANARY_EVERY == 0:
                    await self._canary(number)

        await asyncio.gather(*(work() for _ in range(n_connections)))

    async def _canary(self, number: int) -> None:
        """A valid request is served meanwhile."""
        body = {"model": "stub", "messages": [{"role": "user", "content": "hi"}]}
        valid = Case([request_bytes(self._port, "/v1/chat/completions", body, KEY)], framed=True)
        statuses, fault = await send(self._port, valid)
        if fault is not None or statuses != [200]:
            self.faults.append(Fault(number, f"a valid request meanwhile: {statuses}, {fault}"))


async def state(port: int) -> dict[str, Any]:
    """/admin/state of the gateway."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /admin/state HTTP/1.0\r\nhost: 127.0.0.1\r\nauthorization: Bearer {KEY}\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    found: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return found


async def quiet(port: int, deadline_s: float = PATIENCE_S) -> dict[str, Any]:
    """The state once nothing is in flight, or at the deadline."""
    end_s = time.monotonic() + deadline_s
    while True:
        found = await state(port)
        if not found["in_flight"] or time.monotonic() > end_s:
            return found
        await asyncio.sleep(0.05)


@contextmanager
def target(home: Path) -> Iterator[tuple[int, psutil.Process, Path]]:
    """The real gateway before a fuzz engine: its port, its process, its log. Killed at the end."""
    log = home / "gateway.log"
    with process("laya.bench.fuzz_engine") as (engine_port, _), log.open("wb") as file:
        argv = ("laya.bench.stub_gateway", "--engine-port", str(engine_port), "--assembled", "--home", str(home))
        child = subprocess.Popen([sys.executable, "-m", *argv], stdout=subprocess.PIPE, stderr=file)
        assert child.stdout is not None
        try:
            line = child.stdout.readline()
            if not line:
                raise SystemExit(f"the gateway did not start: {log.read_text()}")
            yield json.loads(line)["port"], psutil.Process(child.pid), log
        finally:
            child.kill()
            child.wait()


async def _measure(port: int, child: psutil.Process, args: argparse.Namespace) -> dict[str, Any]:
    run = Run(port, args.seed)
    numbers = [args.only] * N_PARTS if args.only is not None else range(args.requests)
    start_s, n_files, rss_bytes = time.monotonic(), list[int](), list[int]()
    for part in range(N_PARTS):
        start, end = (len(numbers) * at // N_PARTS for at in (part, part + 1))
        await run.cases(iter(numbers[start:end]), args.connections)
        books = await quiet(port)
        n_files.append(child.num_fds())
        rss_bytes.append(child.memory_info().rss)
    await asyncio.sleep(0.5)  # connections that we closed are seen to be
    return {
        "statuses": {str(status): n for status, n in sorted(run.statuses.items())},
        "faults": [msgspec.to_builtins(fault) for fault in run.faults[:_MOST_SHOWN]],
        "n_faults": len(run.faults),
        "in_flight": books["in_flight"],
        "unaccounted": books["arrivals"] - books["in_flight"] - sum(books["outcomes"].values()),
        "outcomes": books["outcomes"],
        "rss_bytes": rss_bytes,
        "rss_growth_bytes": lasting_growth(rss_bytes),
        "files_growth": child.num_fds() - n_files[0],
        "seconds": round(time.monotonic() - start_s, 1),
    }


def lasting_growth(rss_bytes: Sequence[int]) -> int:
    """What memory would have grown by in the second half had each part of it grown as the median one did: a leak grows
    in each, and the largest case of a run makes the allocator keep its peak once."""
    grown = [after - before for before, after in pairwise(rss_bytes[len(rss_bytes) // 2 - 1 :])]
    return int(median(grown) * len(grown))


def fuzz(args: argparse.Namespace) -> dict[str, Any]:
    """The report of one run."""
    with TemporaryDirectory(prefix="laya-fuzz-") as folder, target(Path(folder)) as (port, child, log):
        report = asyncio.run(_measure(port, child, args))
        said = log.read_text(errors="replace")
    report["n_tracebacks"] = said.count("Traceback (most recent call last)")
    report["log"] = said
    report["passed"] = (
        not (report["n_faults"] or report["n_tracebacks"] or report["in_flight"] or report["unaccounted"])
        and report["files_growth"] <= args.connections
        and report["rss_growth_bytes"] < GROWTH_LIMIT_BYTES
    )
    return report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="laya bench fuzz", description=description(__doc__))
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this case alone")
    args = parser.parse_args(argv)
    report = fuzz(args)
    if not args.json:
        for fault in report["faults"]:
            print(f"case {fault['number']}: {fault['what']}")
        print(report["log"])
    del report["log"]
    load = {"requests": args.requests, "connections": args.connections, "seed": args.seed}
    layer = "sockets of the gateway, a stub engine behind it"
    print(json.dumps({"bench": "fuzz", "layer": layer, "load": load} | report | {"hardware": hardware()}))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
