"""Fixtures of the memory tests: the default model's file, small GGUF files, a budget that is never the limit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from small_gguf import MakeGguf, write_model

from laya.memory import Budget
from laya.types import GIB


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file."""
    path = os.environ.get("LAYA_TEST_GGUF")
    if not path:
        pytest.skip("LAYA_TEST_GGUF does not name the default model's file")
    return Path(path)


@pytest.fixture
def plenty() -> Budget:
    return Budget(bytes=512 * GIB, limit="memory available", memory_bytes=1024 * GIB, ceiling_bytes=900 * GIB)


@pytest.fixture
def make_gguf(tmp_path: Path) -> MakeGguf:
    """`make_gguf("name", n_layer=2, ...)`: see `write_model`."""

    def make(name: str = "small", **shape: Any) -> Path:
        return write_model(tmp_path / f"{name}.gguf", **shape)

    return make
