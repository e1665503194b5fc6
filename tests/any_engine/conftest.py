"""Runs each test of this folder on every engine that can what it needs.

`target` is the server and the model of the engine's that chats, `embedder` that for embeddings: by the fixtures
`NAME_target` and `NAME_embedder` of the engine's name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import ROOT, RunningServer
from tests.gateway.live import MODEL

from .target import ENGINES, Target, asked_engines

LOAD_S = 600.0
PROGRAM = ROOT / "tests" / "engines" / "xllamacpp_program.py"
TEMPLATE = ROOT / "laya" / "models" / "templates" / "smollm2.jinja"
# llama.cpp's own server as a program of a user's own, and this suite's other Laya as a remote
OTHERS = """
models:
  own:
    engine: command
    cmd: [{python}, {program}, "${{PORT}}", {gguf}, --chat-template, {template}]
    served_model_name: their-name
    memory: 600MiB
    env: {{PYTHONSAFEPATH: "1"}}
  own-emb:
    engine: command
    cmd: [{python}, {program}, "${{PORT}}", {gguf}, --embedding]
    task: embed
    served_model_name: their-name
    memory: 600MiB
    env: {{PYTHONSAFEPATH: "1"}}
  far: {{engine: remote, url: "{chat}/v1", model: smollm2}}
  far-emb: {{engine: remote, url: "{embed}/v1", model: emb, task: embed}}
"""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*abilities): what an engine must be able to do for this test")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """An engine that can't do what a test needs is no case of it."""
    needed = {word for mark in metafunc.definition.iter_markers("needs") for word in mark.args}
    for fixture in {"target", "embedder"} & set(metafunc.fixturenames):
        able = [name for name in asked_engines() if needed <= ENGINES[name]]
        metafunc.parametrize(fixture, able, indirect=True, scope="session")


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Target:
    found: Target = request.getfixturevalue(f"{request.param}_target")
    return found


@pytest.fixture(scope="session")
def embedder(request: pytest.FixtureRequest) -> Target:
    found: Target = request.getfixturevalue(f"{request.param}_embedder")
    return found


@pytest.fixture(scope="session")
def llamacpp_target(server: RunningServer) -> Target:
    return Target(server.url, "smollm2", MODEL)


@pytest.fixture(scope="session")
def llamacpp_embedder(embedding: RunningServer) -> Target:
    return Target(embedding.url, "emb", "emb")


@pytest.fixture(scope="session")
def others(
    start_server: Callable[..., RunningServer], server: RunningServer, embedding: RunningServer, smollm2_path: Path
) -> Iterator[RunningServer]:
    """One server for the engines that are not Laya's own."""
    config = OTHERS.format(
        python=sys.executable,
        program=PROGRAM,
        gguf=smollm2_path,
        template=TEMPLATE,
        chat=server.url,
        embed=embedding.url,
    )
    other = start_server(config=config)
    yield other
    assert other.stop() == 0


@pytest.fixture(scope="session")
def command_target(others: RunningServer) -> Target:
    return Target(others.url, "own", "own")


@pytest.fixture(scope="session")
def command_embedder(others: RunningServer) -> Target:
    return Target(others.url, "own-emb", "own-emb")


@pytest.fixture(scope="session")
def remote_target(others: RunningServer) -> Target:
    return Target(others.url, "far", "far")


@pytest.fixture(scope="session")
def remote_embedder(others: RunningServer) -> Target:
    return Target(others.url, "far-emb", "far-emb")


@pytest.fixture(scope="session")
def vllm_target(vllm_server: RunningServer) -> Target:
    return loaded(vllm_server, "dense")


@pytest.fixture(scope="session")
def vllm_moe_target(vllm_server: RunningServer) -> Target:
    return loaded(vllm_server, "moe")


def loaded(server: RunningServer, model: str) -> Target:
    """A start of it may take longer than a client waits."""
    url = f"{server.url}/admin/models/{model}/load"
    httpx.post(url, json={}, timeout=LOAD_S, trust_env=False).raise_for_status()
    return Target(server.url, model, model)


@pytest.fixture(scope="session")
def server_target() -> Target:
    model = os.environ["LAYA_TEST_MODEL"]
    return Target(os.environ["LAYA_TEST_URL"], model, model)


@pytest.fixture(scope="session")
def server_embedder(server_target: Target) -> Target:
    return server_target
