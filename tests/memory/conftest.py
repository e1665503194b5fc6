"""Fixtures of the memory tests: small GGUF files, a budget that is never the limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_gguf import MakeGguf, write_model

from laya.memory import Budget
from laya.types import GIB


@pytest.fixture
def plenty() -> Budget:
    return Budget(bytes=512 * GIB, limit="memory available", memory_bytes=1024 * GIB, ceiling_bytes=900 * GIB)


@pytest.fixture
def make_gguf(tmp_path: Path) -> MakeGguf:
    """`make_gguf("name", n_layer=2, ...)`: see `write_model`."""

    def make(name: str = "small", **shape: Any) -> Path:
        return write_model(tmp_path / f"{name}.gguf", **shape)

    return make
