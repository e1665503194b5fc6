"""What the tests against a running server share: clients, prompts of known size, waiting for what comes by itself."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import httpx
import openai

FULL = os.environ.get("LAYA_FULL") == "1"  # the counts and deadlines of a release instead of those of every change
LOOK_EVERY_S = 0.05
MODEL = "smollm2-135m"  # what answers call the default model; requests name it by its alias, smollm2


class Addressed(Protocol):
    """A server that listens somewhere."""

    @property
    def url(self) -> str: ...


class Serving(Protocol):
    """A server of the suite's conftest."""

    url: str
    pid: int
    cwd: Path


def sdk(server: Addressed) -> openai.OpenAI:
    """The official client. It does not retry: a test sees the first answer."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=240)


def async_sdk(server: Addressed) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=240)


def plain(server: Addressed) -> httpx.Client:
    """A client that shows what is on the wire."""
    # no certificates to load: a test that watches an engine must not take the CPU from it
    return httpx.Client(base_url=server.url, trust_env=False, verify=False, timeout=240)


def user(text: str) -> Any:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def prompt_of(n_tokens: int, seed: str = "") -> str:
    """A text of about `n_tokens` tokens (never more), which no cache holds when its seed is new."""
    return " ".join([seed or "Read", *["tree"] * (n_tokens - len(seed) - 2)])


def model_state(server: Serving, model: str = MODEL) -> dict[str, Any]:
    """The model's part of /admin/state."""
    with plain(server) as client:
        models: list[dict[str, Any]] = client.get("/admin/state").json()["models"]
    return next(state for state in models if state["id"] == model)


def busy_slots(server: Serving, model: str = MODEL) -> int:
    """Sequences that the engine itself computes on."""
    with plain(server) as client:
        slots = client.get(f"/admin/models/{model}/slots").json()["slots"]
    return sum(slot["is_processing"] for slot in slots)


def is_idle(server: Serving, model: str = MODEL) -> bool:
    """Whether neither Laya nor the engine has anything to do for the model."""
    state = model_state(server, model)
    return state["running"] == 0 and state["queued"] == 0 and busy_slots(server, model) == 0


def until(condition: Callable[[], object], deadline_s: float = 60.0) -> float:
    """Seconds until the condition held. Fails when it does not within the deadline."""
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() - start_s < deadline_s, f"not within {deadline_s:g} s"
        time.sleep(LOOK_EVERY_S)
    return time.monotonic() - start_s


def lines_so_far(response: httpx.Response) -> Iterator[str]:
    """The lines of a stream, also of one that breaks off."""
    with contextlib.suppress(httpx.RemoteProtocolError):
        yield from response.iter_lines()


def events_of(response: httpx.Response) -> list[str]:
    """The data of a server-sent stream's events, and its comments with their colon."""
    lines = [line for line in response.text.split("\n") if line]
    return [line.removeprefix("data: ") for line in lines]
