"""The Responses API beyond what tests/any_engine asks: clients that leave, and kill -9 of everything."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

from .live import Serving, is_idle, model_state, plain, sdk, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

LONG: Any = {"model": "smollm2", "input": "Count from 1 to 1000.", "temperature": 0, "max_output_tokens": 1000}


def ask(server: Serving, **fields: Any) -> Any:
    return sdk(server).responses.create(**({"model": "smollm2", "temperature": 0, "max_output_tokens": 8} | fields))


def test_client_that_leaves_frees_the_slot(server: Serving) -> None:
    with plain(server) as client, client.stream("POST", "/v1/responses", json=LONG | {"stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        assert model_state(server)["running"] == 1
    until(lambda: is_idle(server), 10)


def test_client_that_leaves_a_whole_answer_frees_the_slot(server: Serving) -> None:
    with plain(server) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/responses", json=LONG, timeout=0.5)
    until(lambda: is_idle(server), 10)


@pytest.mark.anyio
def test_conversation_outlives_kill_of_engine_and_server(start_server: Callable[..., Any]) -> None:
    settings = ("smollm2", "--max-num-seqs", "1", "--max-seq-len", "2048", "--n-threads", "1")
    first_server = start_server(*settings)
    first = ask(first_server, input="My name is Ann. " + "I like trees. " * 20)
    second = ask(first_server, input="And I like apples.", previous_response_id=first.id)
    engine = model_state(first_server)["pid"]
    os.kill(engine, signal.SIGKILL)
    os.kill(first_server.pid, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(engine))
    server = start_server(*settings)
    with sdk(server) as client:
        assert client.responses.retrieve(second.id).output_text == second.output_text
    third = ask(server, input="What is my name?", previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens + second.usage.output_tokens
