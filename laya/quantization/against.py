"""Owns: a model of ours and another one, here or at an address, on the same tasks through OpenAI's API."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from laya.errors import ConfigError
from laya.quantization.answers import Against, Server, against, ask_all, check_there
from laya.quantization.inspection import file_facts
from laya.quantization.serving import SERVED_TOKENS, Row, served
from laya.quantization.tasks import Task
from laya.quantization.variants import gguf_model


def remote(address: str, key_env: str) -> Server | None:
    """The server of `http://host/v1#model`; None for what is no address.

    Raises ConfigError where the model lacks, and what `check_there` raises: it is asked only after minutes of work.
    """
    url, _, model = address.partition("#")
    if urlsplit(url).scheme not in ("http", "https"):
        return None
    if not model:
        raise ConfigError(f"--against {address}: which model? Write it behind a #: {url}#MODEL", param="against")
    server = Server(name=model, base_url=url.rstrip("/"), model=model, key=os.environ.get(key_env))
    check_there(server)
    return server


def other_row(name: str) -> Row:
    """A model that is here. Raises what `resolve` raises."""
    model = gguf_model(name)
    facts = file_facts(model.path)
    room = min(SERVED_TOKENS, facts.n_ctx_train or SERVED_TOKENS)
    return Row(name=model.id, path=model.path, is_chat=facts.chat_template, max_seq_len=room)


async def run_against(
    row: Row,
    theirs: Server | Row,
    tasks: Sequence[Task],
    n_threads: int,
    folder: Path,
    tell: Callable[[str], None],
    nice: int | None = None,
) -> Against:
    """Both answer every task, ours through Laya. Raises EngineFailed naming who did not answer."""
    rows = [row] if isinstance(theirs, Server) else [row, theirs]
    async with served(rows, n_threads, folder, tell, nice) as here:
        other = theirs if isinstance(theirs, Server) else here.server(theirs)
        tell(f"tasks: {row.name}")
        ours = await asyncio.to_thread(ask_all, here.server(row), tasks)
        tell(f"tasks: {other.name}")
        they = await asyncio.to_thread(ask_all, other, tasks)
    return against(tasks, (row.name, ours), (other.name, they))
