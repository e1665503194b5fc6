"""The mouse keeps moving: what a person's programs feel while models load and answers stream."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.conftest import RunningServer

from .conftest import P99_S, share

Serve = Callable[..., RunningServer]
MakeModels = Callable[..., list[Path]]

N_STREAMS = 4
N_ROUNDS = 4
CONFIG = """
version: 1
max_seq_len: 2048
max_num_seqs: 1
models:
  smollm2-135m: {{max_num_seqs: {n_streams}, max_seq_len: 4096}}
  first: {{source: {first}}}
  second: {{source: {second}}}
"""
# What a pointer's program does: wake up every 10 ms. Late is what its user sees.
TICKER = """
import json, sys, time
late_s = []
next_s = time.monotonic()
print("ticking", flush=True)
while True:
    next_s += 0.01
    time.sleep(max(0.0, next_s - time.monotonic()))
    late_s.append(time.monotonic() - next_s)
    next_s = max(next_s, time.monotonic() - 0.01)
    if len(late_s) % 10 == 0 and sys.stdin in __import__("select").select([sys.stdin], [], [], 0)[0]:
        print(json.dumps(late_s), flush=True)
        break
"""


class Felt:
    """Delays in seconds."""

    def __init__(self) -> None:
        self.ticks: list[float] = []
        self.commands: list[float] = []

    def told(self) -> str:
        parts = []
        for name, values in (("tick", self.ticks), ("shell command", self.commands)):
            p50, p99 = share(values, 50) * 1e3, share(values, 99) * 1e3
            parts.append(f"{name} p50 {p50:.1f}, p99 {p99:.1f}, max {max(values) * 1e3:.1f} ms of {len(values)}")
        return "; ".join(parts)


# A user at a shell, in a process of its own: in this one, its delays would be those of the clients' threads.
SHELL = """
import json, select, subprocess, sys, time
took_s = []
print("ticking", flush=True)
while not select.select([sys.stdin], [], [], 0.02)[0]:
    start_s = time.monotonic()
    subprocess.run(["/bin/sh", "-c", "ls / > /dev/null"], check=True)
    took_s.append(time.monotonic() - start_s)
print(json.dumps(took_s), flush=True)
"""


@contextmanager
def feeling() -> Iterator[Felt]:
    """A ticker and a shell, running beside the body of the `with`."""
    felt = Felt()
    programs = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # as a terminal's: the kernel shares the cores out by session
        )
        for code in (TICKER, SHELL)
    ]
    for program in programs:
        assert program.stdout is not None and program.stdout.readline() == "ticking\n"
    try:
        yield felt
    finally:
        for program, values in zip(programs, (felt.ticks, felt.commands), strict=True):
            values.extend(json.loads(program.communicate("stop\n", timeout=30)[0]))


def stream(server: RunningServer, ended: threading.Event, counts: list[int]) -> None:
    """One answer after the other, as they come."""
    body = {
        "model": "smollm2-135m",
        "stream": True,
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "Tell a long story of the sea."}],
    }
    with httpx.Client(base_url=server.url, trust_env=False, verify=False, timeout=120) as client:
        while not ended.is_set():
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                assert answer.status_code == 200
                for line in answer.iter_lines():
                    counts.append(len(line))
                    if ended.is_set():
                        break


def test_ticker_and_shell_stay_smooth_while_models_load_and_answers_stream(
    serve: Serve, make_models: MakeModels
) -> None:
    first, second = make_models(2, n_layer=12, n_embd=1024, n_head=8, n_head_kv=8, head_dim=128, n_ff=3072)
    server = serve("smollm2-135m", config=CONFIG.format(n_streams=N_STREAMS, first=first, second=second))
    with feeling() as quiet:
        time.sleep(3)
    ended, counts = threading.Event(), list[int]()
    streams = [threading.Thread(target=stream, args=(server, ended, counts)) for _ in range(N_STREAMS)]
    for thread in streams:
        thread.start()
    loads_s: list[float] = []
    try:
        while len(counts) < 10:  # the streams have begun
            time.sleep(0.05)
        with feeling() as busy:
            for _ in range(N_ROUNDS):
                start_s = time.monotonic()
                loads = [threading.Thread(target=admin, args=(server, name, "load")) for name in ("first", "second")]
                for thread in loads:
                    thread.start()
                for thread in loads:
                    thread.join()
                loads_s.append(time.monotonic() - start_s)
                for name in ("first", "second"):
                    admin(server, name, "unload")
    finally:
        ended.set()
        for thread in streams:
            thread.join()
    print(
        f"\nquiet: {quiet.told()}\n2 models of {first.stat().st_size >> 20} MiB loading {N_ROUNDS} times "
        f"({share(loads_s, 50):.1f} s), {N_STREAMS} streams: {busy.told()}"
    )
    assert share(busy.ticks, 99) < P99_S
    assert share(busy.commands, 99) < P99_S


def admin(server: RunningServer, model: str, verb: str) -> None:
    answer = httpx.post(f"{server.url}/admin/models/{model}/{verb}", trust_env=False, timeout=120)
    assert answer.status_code == 200, answer.text
