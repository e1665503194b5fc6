"""Coroutine tests run on the loop that serves: uvloop. The server of embeddings is shared, as `server` for chats is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .live import Serving

EMBEDDING = """
version: 1
n_threads: 1
models:
  emb: {source: smollm2, task: embed, max_seq_len: 128, preload: true}
  talk: {source: smollm2, max_seq_len: 256, max_num_seqs: 1}
"""


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session")
def embedding(start_server: Callable[..., Any]) -> Iterator[Serving]:
    """One model twice: for embeddings, loaded; for chat, known only."""
    server = start_server(config=EMBEDDING)
    yield server
    assert server.stop() == 0
