"""Fixtures of the engine tests: decided settings, logs, and a stand-in for a llama-server binary."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from laya.engines.log import EngineLog
from laya.engines.settings import EngineSettings
from laya.types import PlannedSettings

SMALL: dict[str, Any] = {
    "max_seq_len": 512,
    "slot_tokens": 512,
    "max_num_seqs": 2,
    "kv_cache_dtype": "f16",
    "kv_unified": False,
    "kv_pool_tokens": 1024,
    "n_batch": 128,
    "n_ubatch": 128,
    "n_threads": 1,  # two on a busy machine of two cores would wait for each other
    "task": "chat",
    "mmap": True,
    "prompt_cache_bytes": 0,
}
MakeSettings = Callable[..., EngineSettings]


@pytest.fixture(scope="session")
def make_settings() -> MakeSettings:
    """`make_settings(path, n_threads=1, args=...)`: fields of the plan and of the engine by name."""

    def make(path: Path, **fields: Any) -> EngineSettings:
        decided = {name: fields.pop(name) for name in PlannedSettings.__struct_fields__ if name in fields}
        planned = PlannedSettings(**SMALL | decided)
        engine: dict[str, Any] = {"model_id": "small", "path": path, "planned": planned}
        return EngineSettings(**engine | fields)

    return make


@pytest.fixture
def log(tmp_path: Path) -> EngineLog:
    return EngineLog(tmp_path / "logs" / "small.log")


@pytest.fixture
def llama_server(tmp_path: Path) -> Path:
    """An executable that takes llama-server's flags."""
    source = Path(__file__).with_name("stand_in_llama_server.py").read_text()
    program = tmp_path / "llama-server"
    program.write_text(f"#!{sys.executable}\n{source}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


@pytest.fixture
def some_gguf(tmp_path: Path) -> Path:
    """A file that passes for a model where nothing reads it."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path
