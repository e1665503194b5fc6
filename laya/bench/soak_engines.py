"""Owns: the soak with real engines: `laya serve` in a process of its own, clients, and one who breaks things.

Three models of which not all fit at once, so that they take turns. Engines are killed, loaded and unloaded, and the
configuration is reloaded, all the while. When it is over, each model serves one request more; and when everything is
unloaded, nothing may be left of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

import laya
from laya.bench.generated_models import generated
from laya.bench.soak_clients import EXPECTED_CODES, Seen, ask, asks, client
from laya.types import MIB

N_CLIENTS = 16
CHATS, EMBEDDER = ["first", "second"], "third"
READY_S, QUIET_S, LOOK_EVERY_S = 120.0, 120.0, 0.1
FILES_SLACK = 4  # that a thread or a client opens when it is first needed
KEYS = {"admin": "laya-soak-admin", "user": "laya-soak-user"}
_CONFIG = """
version: 1
memory: {{budget: {budget_mib}MiB}}
server:
  drain_timeout_s: 20
  api_keys:
    - {{name: admin, sha256: {admin}, role: admin}}
    - {{name: user, sha256: {user}, role: user}}
max_seq_len: 512
max_num_seqs: 2
n_threads: 1
queue_timeout_s: {queue_timeout_s}
models:
  first: {{source: {smollm2}}}
  second: {{source: {dense}, kv_cache_dtype: {kv_cache_dtype}}}
  third: {{source: {dense}, task: embed}}
"""


class Serving:
    """A running `laya serve`, and its configuration."""

    def __init__(self, folder: Path, smollm2: Path, budget_mib: int) -> None:
        digests = {name: sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
        dense = generated("dense", vocabulary=smollm2)
        self._fields: dict[str, Any] = digests | {"budget_mib": budget_mib, "smollm2": smollm2, "dense": dense}
        self._file = folder / "config.yaml"
        self._log = folder / "serve.log"
        self.write(0)
        environ = os.environ | {"LAYA_HOME": str(folder / "home"), "PYTHONPATH": str(Path(laya.__file__).parent.parent)}
        with self._log.open("wb") as log:
            argv = [sys.executable, "-m", "laya.cli", "serve", "--port", "0"]
            self._child = subprocess.Popen(argv, stderr=log, stdout=subprocess.DEVNULL, cwd=folder, env=environ)
        self.process = psutil.Process(self._child.pid)
        self.url = self._wait_ready()

    def write(self, turn: int) -> None:
        """Its configuration, each turn another one: a setting of all, and one that takes an engine's restart."""
        fields = {"queue_timeout_s": 60 + turn % 5, "kv_cache_dtype": ("f16", "q8_0")[turn % 2]}
        self._file.write_text(_CONFIG.format(**self._fields | fields))

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def _wait_ready(self) -> str:
        end_s = time.monotonic() + READY_S
        while self._child.poll() is None and time.monotonic() < end_s:
            if match := re.search(r"is ready\s+(http://\S+)", self.said()):
                return match[1]
            time.sleep(LOOK_EVERY_S)
        raise SystemExit(f"the server did not start: {self.said()}")

    def stop(self) -> int:
        """SIGTERM and the exit code."""
        self._child.send_signal(signal.SIGTERM)
        try:
            return self._child.wait(60)
        finally:
            self._child.kill()


@contextlib.contextmanager
def _serving(smollm2: Path, budget_mib: int) -> Iterator[Serving]:
    with TemporaryDirectory(prefix="laya-soak-") as folder:
        serving = Serving(Path(folder), smollm2, budget_mib)
        try:
            yield serving
        finally:
            if serving.process.is_running():
                serving.stop()


class Breaker:
    """Kills, loads, unloads and reloads; each at random, one at a time."""

    def __init__(self, serving: Serving, http: httpx.AsyncClient, draw: random.Random, every_s: float) -> None:
        self.done: Counter[str] = Counter()
        self.faults: list[str] = []
        self._serving = serving
        self._http = http
        self._draw = draw
        self._every_s = every_s

    async def run(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            await asyncio.sleep(self._draw.uniform(0, 2 * self._every_s))
            act = self._draw.choice((self._kill, self._kill, self._load, self._unload, self._reload, self._hang_up))
            await act()
            self.done[act.__name__.strip("_")] += 1

    async def _kill(self) -> None:
        state = (await self._http.get("/admin/state")).json()
        pids = [model["pid"] for model in state["models"] if model["pid"]]
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._draw.choice(pids), signal.SIGKILL)

    async def _load(self) -> None:
        await self._post(f"/admin/models/{self._draw.choice([*CHATS, EMBEDDER])}/load")

    async def _unload(self) -> None:
        await self._post(f"/admin/models/{self._draw.choice([*CHATS, EMBEDDER])}/unload")

    async def _reload(self) -> None:
        self._serving.write(self._draw.randrange(100))
        await self._post("/admin/reload")

    async def _hang_up(self) -> None:
        self._serving.write(self._draw.randrange(100))
        self._serving.process.send_signal(signal.SIGHUP)

    async def _post(self, path: str) -> None:
        answer = await self._http.post(path)
        if answer.status_code != 200 and answer.json()["error"]["code"] not in EXPECTED_CODES:
            self.faults.append(f"{path}: {answer.status_code}: {answer.text[:300]}")


async def _at_rest(serving: Serving, http: httpx.AsyncClient) -> dict[str, Any]:
    """Unload everything; what is left then."""
    for name in (*CHATS, EMBEDDER):
        await http.post(f"/admin/models/{name}/unload")
    end_s = time.monotonic() + QUIET_S
    while time.monotonic() < end_s and serving.process.children(recursive=True):
        await asyncio.sleep(LOOK_EVERY_S)
    state = (await http.get("/admin/state")).json()
    return {
        "processes": len(serving.process.children(recursive=True)),
        "files": serving.process.num_fds(),
        "reserved_bytes": state["memory"]["reserved_bytes"],
        "rss_bytes": serving.process.memory_info().rss,
    }


def _names(serving: Serving) -> Counter[str]:
    """What the server has open, by name or kind."""
    names: Counter[str] = Counter()
    for each in Path(f"/proc/{serving.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            names[re.sub(r"\d+", "N", os.readlink(each))] += 1
    return names


async def _quiet(http: httpx.AsyncClient) -> dict[str, Any]:
    """The state once nothing is in flight and no engine computes; the last one seen where that does not come."""
    end_s = time.monotonic() + QUIET_S
    while True:
        state: dict[str, Any] = (await http.get("/admin/state")).json()
        state["busy_slots"] = 0
        for model in state["models"]:
            if model["state"] == "ready":
                answer = await http.get(f"/admin/models/{model['id']}/slots")
                state["busy_slots"] += sum(slot["is_processing"] for slot in answer.json().get("slots", []))
        if not (state["in_flight"] or state["busy_slots"]) or time.monotonic() > end_s:
            return state
        await asyncio.sleep(LOOK_EVERY_S)


async def _each_serves(http: httpx.AsyncClient, seen: Seen) -> dict[str, Any]:
    """The state in the end, when each model in turn has been loaded, has served and has been looked at."""
    last = [asks(random.Random(0), [name], EMBEDDER)[0] for name in CHATS]
    last += [asked for asked in asks(random.Random(0), CHATS, EMBEDDER) if asked.body["model"] == EMBEDDER]
    state = await _quiet(http)
    busy_slots, n_served = state["busy_slots"], 0
    for asked in last:
        n_whole, end_s = seen.ends["whole"], time.monotonic() + QUIET_S
        while seen.ends["whole"] == n_whole and time.monotonic() < end_s:
            await ask(http, asked, seen)  # again where its engine was killed often, and backs off
            await asyncio.sleep(LOOK_EVERY_S)
        state = await _quiet(http)
        busy_slots += state["busy_slots"]
        n_served += seen.ends["whole"] > n_whole
    return state | {"busy_slots": busy_slots, "served_after": n_served}


async def _drive(serving: Serving, seconds: float, seed: int, every_s: float) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {KEYS['admin']}"}
    async with httpx.AsyncClient(base_url=serving.url, headers=headers, timeout=180, trust_env=False) as http:
        seen = Seen()
        each_first = [asks(random.Random(seed), [name], EMBEDDER)[0] for name in CHATS]
        for asked in (*asks(random.Random(seed), CHATS, EMBEDDER), *each_first):
            await ask(http, asked, seen)  # what is there from its first use on is there now
        before, n_warm = await _at_rest(serving, http), _names(serving)
        end_s = time.monotonic() + seconds
        breaker = Breaker(serving, http, random.Random(seed), every_s)
        clients = [
            client(serving.url, KEYS["user"], random.Random(f"{seed}/{n}"), (CHATS, EMBEDDER), end_s, seen)
            for n in range(N_CLIENTS)
        ]
        await asyncio.gather(breaker.run(end_s), *clients)
        state = await _each_serves(http, seen)
        events = (await http.get("/admin/events")).json()["events"]
        after = await _at_rest(serving, http)
    return {
        "new_files": dict(_names(serving) - n_warm),
        "seconds": seconds,
        "clients_saw": dict(seen.ends.most_common()),
        "faults": [*seen.faults, *breaker.faults],
        "broken": dict(breaker.done),
        "events": dict(Counter(event["kind"] for event in events).most_common()),
        "arrivals": state["arrivals"],
        "outcomes": state["outcomes"],
        "in_flight": state["in_flight"],
        "unaccounted": state["arrivals"] - state["in_flight"] - sum(state["outcomes"].values()),
        "busy_slots": state["busy_slots"],
        "served_after": state["served_after"],
        "before": before,
        "after": after,
    }


def engines_soak(
    smollm2: Path, seconds: float, *, seed: int = 0, every_s: float = 3.0, budget_mib: int = 340
) -> dict[str, Any]:
    """The report of one run. every_s: how often something is broken. smollm2: a small chat model's file."""
    with _serving(smollm2, budget_mib) as serving:
        report = asyncio.run(_drive(serving, seconds, seed, every_s))
        report["exit_code"] = serving.stop()
        report["log"] = serving.said()
    before, after = report["before"], report["after"]
    report["n_tracebacks"] = report["log"].count("Traceback (most recent call last)")
    report["rss_growth_mib"] = round((after["rss_bytes"] - before["rss_bytes"]) / MIB, 1)
    report["files_growth"] = after["files"] - before["files"]
    report["wrong"] = wrong_with(report)
    report["passed"] = not report["wrong"]
    return report


def wrong_with(report: dict[str, Any]) -> list[str]:
    """What is not as it has to be, in words."""
    saw, after = report["clients_saw"], report["after"]
    n_asked, n_left, n_whole = sum(saw.values()), saw.get("left", 0), saw.get("whole", 0)
    n_models, n_served = len(CHATS) + 1, report["outcomes"]["served"]
    checks = {
        f"{len(report['faults'])} answers that are none": report["faults"],
        f"{report['n_tracebacks']} tracebacks in the log": report["n_tracebacks"],
        f"{report['in_flight']} requests without an end": report["in_flight"],
        f"{report['unaccounted']} arrivals without an outcome": report["unaccounted"],
        # who left at once may not have been heard
        f"{report['arrivals']} arrivals of {n_asked} asked": not n_asked - n_left <= report["arrivals"] <= n_asked,
        f"{n_served} served, {n_whole} whole answers": not n_whole <= n_served <= n_whole + n_left,
        "nothing was broken": not sum(report["broken"].values()),
        f"{report['served_after']} of {n_models} models serve afterwards": report["served_after"] != n_models,
        f"{report['busy_slots']} slots compute for nobody": report["busy_slots"],
        f"{after['processes']} processes left": after["processes"],
        f"{after['reserved_bytes']} bytes still reserved": after["reserved_bytes"],
        f"{report['files_growth']} files more": report["files_growth"] > FILES_SLACK,
        f"exit code {report['exit_code']}": report["exit_code"] != 0,
    }
    return [words for words, is_wrong in checks.items() if is_wrong]


def shown(report: dict[str, Any]) -> str:
    """The report without the log, for people."""
    return json.dumps({name: value for name, value in report.items() if name != "log"}, indent=1)
