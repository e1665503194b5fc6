"""What does not fit and what is broken: refused with figures and names, before a tensor is read, by CLI and by API."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from .live import MODEL, Serving, model_state, plain, sdk, user

pytestmark = pytest.mark.engine

CONFIG = """
version: 1
n_threads: 1
memory: {budget: 420MiB}
models:
  fits: {source: smollm2, max_seq_len: 4096, max_num_seqs: 2, pinned: true, preload: true}
  huge: {source: smollm2, max_seq_len: 8192, max_num_seqs: 64}
  second: {source: smollm2, max_seq_len: 4096, max_num_seqs: 2}
"""
ALL_TOO_BIG = ("huge", "second")
WRONG = {
    "empty": "empty (0 bytes)",
    "text": "not a GGUF file",
    "page": "a web page",
    "short": "cut off",  # in the header's first entries
    "half": "cut off",  # in the vocabulary
    "cut": "cut off",  # in the tensors
    "header": "corrupt",
    "zeros": "version 0",
}


@pytest.fixture(scope="module")
def tight(start_server: Callable[..., Any], smollm2_path: Path) -> Iterator[Serving]:
    """A budget that one pinned model fills; beside it a folder with files that are no models."""
    server = start_server(config=CONFIG)
    bad_files(server.cwd / "models", smollm2_path)
    yield server
    assert server.stop() == 0


def bad_files(folder: Path, good: Path) -> None:
    """A file of each name in `WRONG`."""
    folder.mkdir()
    with good.open("rb") as source:
        start = source.read(10_000_000)
    for name, content in {
        "empty": b"",
        "text": b"This is no model." * 100,
        "page": b"<!DOCTYPE html><html>404</html>",
        "short": start[:500],
        "half": start[:1_000_000],
        "cut": start,
        "header": start[:8] + b"\xff" * 16 + start[24:],
        "zeros": start[:4] + bytes(2000),
    }.items():
        (folder / f"{name}.gguf").write_bytes(content)


def serve(laya_home: Path, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """`laya serve` that is expected to end by itself."""
    environ = os.environ | {"LAYA_HOME": str(laya_home), "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        [sys.executable, "-m", "laya.cli", "serve", *args, "--port", "0"],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environ,
        timeout=60,
        check=False,
    )


def test_serve_refuses_a_model_that_does_not_fit(laya_home: Path, tmp_path: Path) -> None:
    ended = serve(laya_home, tmp_path, "smollm2", "--memory-budget", "100MiB")
    assert ended.returncode == 3
    assert MODEL in ended.stderr and "100 MiB may be used (memory.budget)" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "is ready" not in ended.stderr


def test_serve_says_what_would_fit(laya_home: Path, tmp_path: Path) -> None:
    ended = serve(laya_home, tmp_path, "smollm2", "--memory-budget", "400MiB", "--max-num-seqs", "8")
    assert ended.returncode == 3
    assert "What fits: --m" in ended.stderr


@pytest.mark.parametrize("name", WRONG)
def test_serve_names_the_broken_file(laya_home: Path, tmp_path: Path, smollm2_path: Path, name: str) -> None:
    bad_files(tmp_path / "models", smollm2_path)
    ended = serve(laya_home, tmp_path, name)
    assert ended.returncode == 2
    assert f"{name}.gguf" in ended.stderr
    assert WRONG[name] in ended.stderr
    assert "Traceback" not in ended.stderr
    by_path = serve(laya_home, tmp_path, f"models/{name}.gguf")
    assert by_path.returncode == 2
    assert f"{name}.gguf" in by_path.stderr


def test_serve_names_the_file_that_is_not_there(laya_home: Path, tmp_path: Path) -> None:
    ended = serve(laya_home, tmp_path, "./gone.gguf")
    assert ended.returncode == 2
    assert "gone.gguf" in ended.stderr and "no such file" in ended.stderr
    unknown = serve(laya_home, tmp_path, "smolm2")
    assert unknown.returncode == 2
    assert "Did you mean 'smollm2'" in unknown.stderr


@pytest.mark.parametrize("model", ALL_TOO_BIG)
def test_request_for_what_does_not_fit_is_refused_with_figures(tight: Serving, model: str) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        sdk(tight).chat.completions.create(model=model, messages=user("Hi"), max_tokens=1)
    error: Any = refused.value.body
    assert refused.value.code == "insufficient_memory"
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert error["need_bytes"] > error["available_bytes"] >= 0
    assert error["limit"].startswith("memory.budget, less what is pinned: 'fits'")
    assert error["suggestions"] and all(flags.startswith("--") for flags in error["suggestions"])
    assert all(flags in error["message"] for flags in error["suggestions"])
    state = model_state(tight, model)
    assert (state["state"], state["pid"], state["restarts"]) == ("unloaded", None, 0)


def test_refused_load_touches_neither_the_loaded_model_nor_its_memory(tight: Serving) -> None:
    before = model_state(tight, "fits")
    engines = len(psutil.Process(tight.pid).children())
    with plain(tight) as client:
        reserved = client.get("/admin/state").json()["memory"]["reserved_bytes"]
        for model in ALL_TOO_BIG:
            assert client.post(f"/admin/models/{model}/load").status_code == 422
        assert client.get("/admin/state").json()["memory"]["reserved_bytes"] == reserved
    assert model_state(tight, "fits")["pid"] == before["pid"]
    assert len(psutil.Process(tight.pid).children()) == engines == 1
    answer = sdk(tight).chat.completions.create(model="fits", messages=user("Hi"), max_tokens=1)
    assert answer.usage is not None and answer.usage.completion_tokens == 1


def test_window_of_a_model_that_does_not_fit_is_not_made_up(tight: Serving) -> None:
    model: Any = sdk(tight).models.retrieve("huge")
    assert model.max_model_len is None


@pytest.mark.parametrize("name", WRONG)
def test_request_for_a_broken_file_names_what_is_wrong(tight: Any, name: str) -> None:
    with plain(tight) as client:
        body = {"model": name, "messages": user("Hi"), "max_tokens": 1}
        answers = [client.post("/v1/chat/completions", json=body) for _ in range(2)]
        listed = client.get("/v1/models")
    for response in answers:
        assert response.status_code == 422
        error = response.json()["error"]
        assert error["code"] == "bad_model_file"
        assert f"{name}.gguf" in error["message"] and WRONG[name] in error["message"]
        assert response.headers["x-should-retry"] == "false"
    assert listed.status_code == 200


def test_path_of_a_client_is_never_opened(tight: Any, smollm2_path: Path) -> None:
    copy = tight.cwd / "elsewhere.gguf"
    shutil.copyfile(smollm2_path, copy)
    with plain(tight) as client:
        for name in (str(copy), "./elsewhere.gguf", "../models/empty.gguf", "~/x.gguf", "file:///etc/passwd"):
            body = {"model": name, "messages": user("Hi"), "max_tokens": 1}
            assert client.post("/v1/chat/completions", json=body).status_code == 404, name
        assert client.get(f"/v1/models/{copy}").status_code == 404
