"""An engine never outlives its supervisor, however the supervisor ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

WAIT_MS = 20_000
SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from laya.engines.log import EngineLog
from laya.engines.process import EngineProcess
from laya.engines.settings import EngineSettings
from laya.types import PlannedSettings

async def main(path, engine_path):
    planned = PlannedSettings(
        max_seq_len=256, slot_tokens=256, max_num_seqs=1, kv_cache_dtype="f16", kv_unified=False, kv_pool_tokens=256,
        n_batch=128, n_ubatch=128, n_threads=1, task="chat", mmap=True,
    )
    own = Path(engine_path) if engine_path else None
    settings = EngineSettings(model_id="m", path=Path(path), planned=planned, engine_path=own)
    process = EngineProcess(settings, EngineLog())
    await process.start()
    print(process.pid, flush=True)
    await process.wait_exit()

asyncio.run(main(*sys.argv[1:]))
"""


def dies_with_its_parent(path: Path, engine_path: str) -> bool:
    parent = subprocess.Popen([sys.executable, "-c", SUPERVISOR, path, engine_path], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    engine = os.pidfd_open(int(parent.stdout.readline()))
    try:
        parent.kill()
        parent.wait()
        poll = select.poll()
        poll.register(engine, select.POLLIN)
        return bool(poll.poll(WAIT_MS))
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(engine, signal.SIGKILL)
        os.close(engine)
        parent.stdout.close()


@pytest.mark.engine
def test_killed_parent_takes_the_engine_with_it(smollm2_path: Path) -> None:
    assert dies_with_its_parent(smollm2_path, "")


def test_killed_parent_takes_the_own_server_with_it(some_gguf: Path, llama_server: Path) -> None:
    assert dies_with_its_parent(some_gguf, str(llama_server))


def test_child_of_another_parent_refuses_to_run(some_gguf: Path) -> None:
    document = '{"parent_pid": 1, "nice": 0, "oom_score_adj": 0, "command": ["/bin/echo", "ran"], "environment": {}}'
    child = subprocess.run(
        [sys.executable, "-m", "laya.engines.program_child"],
        input=document,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (child.returncode, child.stdout, child.stderr) == (1, "", "")
