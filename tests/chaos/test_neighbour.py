"""A neighbour thrashes: the kernel's own pressure figures rise, Laya gives its idle models back and lives on."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from laya.memory import PressureMeter, PressureTrigger
from laya.types import KIB, MIB
from tests.conftest import ROOT, RunningServer

from .conftest import Group, chat, events, share

Serve = Callable[..., RunningServer]
MakeLimited = Callable[[int], Group]
MakeModels = Callable[..., list[Path]]

UNIFIED = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
GROUP_BYTES = 64 * MIB
PROGRAMS = 4
FILE_MIB = 20  # together with the programs' own memory a little more than the group holds: what is dropped is missed at
# once, which is what the kernel counts as waiting; of a file much larger than the group it does not remember the pages
SCARCE = 0.11  # of what engines and free memory make up: between "easy" and "tight", so that the strain decides
STEADY_S = 3.0
DEADLINE_S = 60.0
CONFIG = """
version: 1
n_threads: 1
max_seq_len: 2048
max_num_seqs: 1
models:
  first: {{source: {first}}}
  second: {{source: {second}}}
"""
THRASH = """
import os, sys
data = bytes(1 << 20)
with open(sys.argv[1], "wb") as file:
    for _ in range(int(sys.argv[2])):
        file.write(data)
    os.fsync(file.fileno())
print("thrashing", flush=True)
while True:
    with open(sys.argv[1], "rb", buffering=0) as file:
        while file.read(1 << 20):
            pass
"""
pytestmark = pytest.mark.skipif(
    not Path("/proc/pressure/memory").exists(), reason="NOT RUN: this kernel tells no pressure"
)


@contextlib.contextmanager
def thrashing(group: Group, path: Path, *through: str) -> Iterator[None]:
    """Programs that re-read files for which their group is a little too small.

    through: the words of a command that starts them.
    """
    words = group.program(*through, sys.executable, "-S", "-c", THRASH, str(path), str(FILE_MIB))
    programs = [
        subprocess.Popen((*words[:-2], f"{path}{number}", words[-1]), stdout=subprocess.PIPE, text=True)
        for number in range(PROGRAMS)
    ]
    try:
        for program in programs:
            assert program.stdout is not None and program.stdout.readline() == "thrashing\n"
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


@pytest.fixture
def unified() -> Iterator[tuple[Path, Path]]:
    """Two groups of the version 2 hierarchy: the kernel counts their pressure, whoever limits their memory."""
    top = next((top for top in UNIFIED if (top / "memory.pressure").exists()), None)
    if top is None or not os.access(top, os.W_OK):
        pytest.skip("NOT RUN, this needs root and a version 2 hierarchy that counts pressure")
    folders = (top / f"chaos-{os.getpid()}-busy", top / f"chaos-{os.getpid()}-idle")
    for folder in folders:
        folder.mkdir()
    yield folders
    for folder in folders:
        folder.rmdir()


def test_pressure_of_one_group_is_told_by_its_own_file_and_trigger(
    make_limited: MakeLimited, unified: tuple[Path, Path], tmp_path: Path
) -> None:
    busy, _ = unified
    group = make_limited(GROUP_BYTES)
    meters = [PressureMeter(tmp_path, groups=[folder]) for folder in unified]
    with contextlib.closing(PressureTrigger(busy / "memory.pressure")) as trigger:
        assert not trigger.take()
        with thrashing(group, tmp_path / "data", "sh", "-c", 'echo 0 > "$0/cgroup.procs" && exec "$@"', str(busy)):
            start_s = time.monotonic()
            for meter in meters:
                meter.read(start_s)
            fired = bool(select.select([trigger], [], [], DEADLINE_S)[0])
            time.sleep(STEADY_S)
            shares = [meter.read(time.monotonic()).stall_share for meter in meters]
    print(f"\none group thrashes: its file says {shares[0]:.0%} of the time, that of a group beside it {shares[1]:.0%}")
    assert fired and shares[0] > 0
    assert shares[1] == 0.0


def engines(server: RunningServer) -> dict[str, int]:
    """Model -> pid of those that run."""
    models: list[dict[str, Any]] = server.state()["models"]  # type: ignore[assignment]
    return {model["id"]: model["pid"] for model in models if model["state"] == "ready"}


def scarce_bytes(server: RunningServer) -> int:
    """Free memory of which, beside the engines that run now, SCARCE is left."""
    anonymous = mapped = 0
    for pid in engines(server).values():
        status = Path(f"/proc/{pid}/status").read_text()
        anonymous += KIB * int(re.findall(r"RssAnon:\s+(\d+)", status)[0])
        mapped += KIB * int(re.findall(r"RssFile:\s+(\d+)", status)[0])
    return int((mapped + SCARCE * anonymous) / (1 - SCARCE))


def stalled_s() -> float:
    return int(re.findall(r"some .*total=(\d+)", Path("/proc/pressure/memory").read_text())[0]) / 1e6


def test_idle_models_are_given_back_when_a_neighbour_thrashes(
    make_limited: MakeLimited, serve: Serve, make_models: MakeModels, tmp_path: Path
) -> None:
    first, second = make_models(2)
    free_memory = tmp_path / "free"
    program = (sys.executable, str(ROOT / "tests/chaos/serve_with_memory.py"), str(free_memory))
    server = serve("first", "second", config=CONFIG.format(first=first, second=second), program=program)
    assert set(engines(server)) == {"first", "second"}
    free_memory.write_text(str(scarce_bytes(server)))
    time.sleep(STEADY_S)
    assert events(server) == [], "memory that is scarce and nobody waits for is no reason to act"
    health_s: list[float] = []
    group = make_limited(GROUP_BYTES)
    client = httpx.Client(base_url=server.url, trust_env=False, verify=False)
    with client, thrashing(group, tmp_path / "data"):
        start_s, stalled_before_s = time.monotonic(), stalled_s()
        while not any(event["kind"] == "unload_idle" for event in events(server)):
            asked_s = time.monotonic()
            assert client.get("/health").status_code == 200
            health_s.append(time.monotonic() - asked_s)
            assert time.monotonic() - start_s < DEADLINE_S, events(server)
            time.sleep(0.02)
        took_s, waited_s = time.monotonic() - start_s, stalled_s() - stalled_before_s
    kinds = [event["kind"] for event in events(server)]
    print(
        f"\nneighbour: programs waited {waited_s:.1f} s of {took_s:.1f} s; steps {kinds}; gateway meanwhile p50 "
        f"{share(health_s, 50) * 1e3:.1f}, p99 {share(health_s, 99) * 1e3:.1f} ms; left: {list(engines(server))}"
    )
    assert kinds[:3] == ["stop_admitting", "drop_caches", "unload_idle"]
    assert len(engines(server)) < 2
    free_memory.unlink()
    start_s = time.monotonic()
    while not any(event["kind"] == "admit_again" for event in events(server)):
        assert time.monotonic() - start_s < DEADLINE_S, events(server)
        time.sleep(0.1)
    assert chat(server, "first").status_code == 200
    print(f"  let in again {time.monotonic() - start_s:.1f} s after it was over, and loaded again")


def test_engine_that_works_is_stopped_last_and_its_client_is_told(
    serve: Serve, smollm2_path: Path, tmp_path: Path
) -> None:
    """Memory all but gone, nothing idle: the youngest engine goes, not the gateway, and not without a word."""
    free_memory = tmp_path / "free"
    program = (sys.executable, str(ROOT / "tests/chaos/serve_with_memory.py"), str(free_memory))
    server = serve("smollm2-135m", "--n-threads", "1", "--max-seq-len", "4096", "--max-num-seqs", "1", program=program)
    told = ""
    body = {
        "model": "smollm2-135m",
        "stream": True,
        "max_tokens": 3000,
        "messages": [{"role": "user", "content": "Tell a story that never ends."}],
        "ignore_eos": True,
    }
    asked = httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, trust_env=False, timeout=120)
    with contextlib.suppress(httpx.RemoteProtocolError), asked as answer:  # its end is missing, since it broke off
        for line in answer.iter_lines():
            if "content" in line and not free_memory.exists():
                free_memory.write_text("1048576")
                start_s = time.monotonic()
            told += line + "\n" if '"error"' in line else ""
    took_s = time.monotonic() - start_s
    while "stop_youngest" not in (kinds := [event["kind"] for event in events(server)]):
        assert time.monotonic() - start_s < DEADLINE_S, kinds
        time.sleep(0.1)
    print(f"\nall but gone: steps {kinds} in {took_s:.1f} s; the stream ended with {told.strip()}")
    assert "memory" in told and "[DONE]" not in told
    assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
    refused = chat(server, "smollm2-135m", timeout_s=60)
    assert refused.status_code in (422, 503) and "memory" in refused.text, refused.text
    free_memory.unlink()
    while "admit_again" not in [event["kind"] for event in events(server)]:
        assert time.monotonic() - start_s < DEADLINE_S
        time.sleep(0.1)
    assert chat(server, "smollm2-135m").status_code == 200
