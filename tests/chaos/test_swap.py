"""What swap does for an engine that does not fit: both pieces of advice that go round, and what Laya does instead.

An engine is given less memory than it needs, in a group of its own, with a swap file of this test's beside it. "A large
swap saves the process" and "keep swappiness low" are tried as they are meant; then the ceiling as Laya sets it.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from laya.engines.ceiling import Ceiling, key_value
from laya.engines.log import EngineLog
from laya.engines.process import EngineProcess
from laya.engines.settings import EngineSettings
from laya.errors import LayaError
from laya.memory import Machine, plan_file
from laya.types import MIB, AskedSettings

from .conftest import Group

SWAP_BYTES = 1024 * MIB
N_TOKENS = 8
LIMIT_S = 120.0
MakeLimited = Callable[[int], Group]


@pytest.fixture
def swap_file(tmp_path: Path) -> Iterator[Path]:
    """A swap file that is on for one test. Skips, saying why, where the system has none of it."""
    path = tmp_path / "swap"
    try:
        subprocess.run(["fallocate", "-l", str(SWAP_BYTES), str(path)], check=True, capture_output=True)
        path.chmod(0o600)
        for command in ("mkswap", "swapon"):
            program = shutil.which(command, path="/sbin:/usr/sbin:/bin:/usr/bin")
            if program is None:
                pytest.skip(f"NOT RUN: no {command} here")
            subprocess.run([program, str(path)], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"NOT RUN: no swap file can be used here ({error.stderr.decode(errors='replace').strip()})")
    # Whatever ends this process, the machine gets its swap off again: the end of the pipe says so.
    off = subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _; exec swapoff "$0"', str(path)], stdin=subprocess.PIPE, start_new_session=True
    )
    yield path
    off.communicate()
    assert off.returncode == 0


class OneGroup:
    """Where engines go: a group that the test has made, instead of one by Laya's rules."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def make(self, model_id: str, limit_bytes: int) -> Ceiling:
        return Ceiling(self._group.limit_bytes, "v1", self._group.folder)


def swapped_out_bytes() -> int:
    return key_value(Path("/proc/vmstat"), "pswpout") * 4096


async def tokens_per_s(model: Path, group: Group) -> float:
    """Of one sequence in this group. Raises what an engine's end raises."""
    asked = AskedSettings(max_seq_len=512, max_num_seqs=1, mmap=False, n_threads=1)
    plan = plan_file(model, asked, Machine().budget(), model_id="m")
    settings = EngineSettings(model_id="m", path=model, planned=plan.settings, ceiling_bytes=plan.need_bytes)
    engine = EngineProcess(settings, EngineLog(), ceilings=OneGroup(group))  # type: ignore[arg-type]
    address = await engine.start()
    try:
        url = f"http://{address.host}:{address.port}/completion"
        body = {"prompt": "Once upon a time", "n_predict": N_TOKENS, "ignore_eos": True}
        headers = {"authorization": f"Bearer {address.api_key}"}
        async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S, headers=headers) as client:
            start_s = time.monotonic()
            try:
                (await client.post(url, json=body)).raise_for_status()
            except httpx.TimeoutException:
                return 0.0
            return N_TOKENS / (time.monotonic() - start_s)
    finally:
        await engine.stop()


def outcome(model: Path, group: Group) -> tuple[float | None, int]:
    """Tokens/s, None for an engine that died; and the bytes that went to swap meanwhile."""
    before = swapped_out_bytes()
    try:
        speed: float | None = asyncio.run(asyncio.wait_for(tokens_per_s(model, group), 2 * LIMIT_S))
    except (LayaError, httpx.TransportError):
        speed = None
    return speed, swapped_out_bytes() - before


def swappy(group: Group, swappiness: int) -> Group:
    """The group may swap without limit, and does so with this eagerness."""
    (group.folder / "memory.memsw.limit_in_bytes").write_text("-1")
    (group.folder / "memory.swappiness").write_text(str(swappiness))
    return group


def test_swap_saves_no_engine_and_a_ceiling_ends_it_alone(
    make_limited: MakeLimited, swap_file: Path, smollm2_path: Path
) -> None:
    free, _ = outcome(smollm2_path, make_limited(1024 * MIB))
    assert free is not None
    small = 72 * MIB  # its weights are 92 MiB, all of them read for each token
    eager, eager_bytes = outcome(smollm2_path, swappy(make_limited(small), 60))
    low, low_bytes = outcome(smollm2_path, swappy(make_limited(small), 10))
    laya, laya_bytes = outcome(smollm2_path, make_limited(small))

    def told(speed: float | None, n_bytes: int) -> str:
        return f"{'died' if speed is None else f'{speed:.1f} tok/s'}, {n_bytes >> 20} MiB to swap"

    print(
        f"\nfree: {free:.1f} tok/s; in {small >> 20} MiB: with a large swap {told(eager, eager_bytes)}; "
        f"with swappiness 10 {told(low, low_bytes)}; under Laya's ceiling {told(laya, laya_bytes)}"
    )
    assert laya is None and laya_bytes < 16 * MIB
    for speed in (eager, low):
        assert speed is None or speed < free / 2
