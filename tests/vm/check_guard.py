"""Runs in the guest, as a service of its systemd: the guard with cgroup v2, by a group of our own and by a scope.

Prints what it saw; the last line says whether all of it was right.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import httpx

import tests.conftest
from laya.engines.ceiling import key_value
from laya.gateway.guarding import ceiling_support
from laya.models import resolve
from laya.types import MIB
from tests.conftest import PROGRAM, ROOT, RunningServer

TOP = Path("/sys/fs/cgroup")
HOME = ROOT / "build" / "test-home"
STUB = '#!/bin/sh\nPYTHONPATH={root} exec {python} {root}/tests/chaos/stub_llama_server.py "$@"\n'
CONFIG = """
version: 1
n_threads: 1
max_seq_len: 512
max_num_seqs: 1
load_timeout_s: 600
models:
  smollm2-135m: {{}}
  honest: {{source: {model}, engine_path: {program}}}
  liar: {{source: {model}, engine_path: {program}, args: {{greed_mib: 2048}}}}
"""
ZRAM_BYTES = 512 * MIB
LOOKED_AT = "smollm2-135m" if os.environ.get("GUARD_REAL_ENGINE") == "1" else "honest"
PATIENCE_S = 600.0  # a guest without KVM is a slow machine


def swap_on() -> None:
    """Swap there is, so that not using it means something."""
    if Path("/sys/block/zram0/disksize").exists():
        Path("/sys/block/zram0/disksize").write_text(str(ZRAM_BYTES))
        subprocess.run(["/sbin/mkswap", "/dev/zram0"], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["/sbin/swapon", "/dev/zram0"], check=True)
    print("swap:", Path("/proc/swaps").read_text().splitlines()[1:] or "none", flush=True)


def group_of(pid: int) -> Path:
    """The folder of a process's group."""
    line = Path(f"/proc/{pid}/cgroup").read_text().strip()
    return TOP / line.partition("::/")[2]


def models_of(server: RunningServer) -> dict[str, dict[str, Any]]:
    models: list[dict[str, Any]] = server.state()["models"]  # type: ignore[assignment]
    return {model["id"]: model for model in models}


def ask(server: RunningServer, model: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, trust_env=False, timeout=PATIENCE_S)


def check(label: str, folder: Path, program: tuple[str, ...], expected_parent: str) -> None:
    """One server: where its engines are, what holds them, what happens to one that lies."""
    server = RunningServer(HOME, tuple(dict.fromkeys((LOOKED_AT, "honest", "liar"))), folder, program)
    try:
        server.wait_ready()
        print("  " + "  ".join(line.strip() for line in server.said if "ceiling" in line), flush=True)
        models = models_of(server)
        group = group_of(models[LOOKED_AT]["pid"])
        values = {
            name: (group / name).read_text().strip() for name in ("memory.max", "memory.swap.max", "memory.oom.group")
        }
        print(
            f"{label}: engine in {group.relative_to(TOP)} {values}; gateway in {group_of(server.pid).relative_to(TOP)}"
        )
        assert expected_parent in str(group.parent), group
        assert int(values["memory.max"]) > 100 * MIB and values["memory.swap.max"] == "0"
        assert values["memory.oom.group"] == "1"
        assert ask(server, LOOKED_AT).status_code == 200
        swapped = key_value(Path("/proc/vmstat"), "pswpout")
        end_s = time.monotonic() + PATIENCE_S
        while (told := ask(server, "liar")).status_code == 200:  # a slow guest takes its time to be greedy
            assert time.monotonic() < end_s, "it was not stopped"
        error = told.json()["error"]
        swapped = key_value(Path("/proc/vmstat"), "pswpout") - swapped
        print(f"  liar: {told.status_code} {error['message']} {swapped} pages were swapped out meanwhile")
        assert (told.status_code, error["cause"]) == (502, "memory_limit")
        after = models_of(server)
        assert after[LOOKED_AT]["pid"] == models[LOOKED_AT]["pid"]
        assert ask(server, "honest").status_code == 200
        events = httpx.get(f"{server.url}/admin/events", trust_env=False).json()["events"]
        print("  events:", json.dumps([event["kind"] for event in events]), flush=True)
        assert {event["model"] for event in events if event["kind"] == "memory_limit"} == {"liar"}
    except AssertionError:
        print("".join(server.said))
        raise
    finally:
        server.stop()
    assert not group.exists(), f"{group} is left"


def main() -> None:
    tests.conftest.READY_S = PATIENCE_S
    print(f"\nkernel {os.uname().release}; {ceiling_support().words}", flush=True)
    swap_on()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / "llama-server"
        program.write_text(STUB.format(root=ROOT, python=sys.executable))
        program.chmod(0o755)
        model = resolve("smollm2", home=HOME).path
        (folder / "config.yaml").write_text(CONFIG.format(model=model, program=program))
        own = TOP / "alone"
        own.mkdir()
        enter = ("sh", "-c", 'echo 0 > "$0/cgroup.procs" && exec "$@"', str(own), *PROGRAM)
        start_s = time.monotonic()
        check("systemd, a scope on request", folder, PROGRAM, ".scope")
        check("cgroup v2, a group of our own", folder, enter, "/alone")
        print(f"  {time.monotonic() - start_s:.0f} s", flush=True)
    print("guard in the guest: passed", flush=True)


try:
    main()
except BaseException:
    traceback.print_exc(file=sys.stdout)
    print("guard in the guest: FAILED", flush=True)
    raise
