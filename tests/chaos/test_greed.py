"""An engine that lies about its size is contained: it dies alone, the bytes are named, nobody else notices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from laya.types import MIB
from tests.conftest import RunningServer

from .conftest import P99_S, chat, events, share

Serve = Callable[..., RunningServer]
pytestmark = pytest.mark.usefixtures("support")

CONFIG = """
version: 1
n_threads: 1
max_seq_len: 512
max_num_seqs: 2
models:
  honest: {{source: {model}, engine_path: {program}}}
  liar: {{source: {model}, engine_path: {program}, args: {{greed_mib: 2048}}}}
"""
ANYWAY = """
version: 1
n_threads: 1
max_seq_len: 512
max_num_seqs: 1
memory: {{budget: 580MiB}}
models:
  honest: {{source: {model}, engine_path: {program}, pinned: true}}
  big: {{source: {model}, max_seq_len: 8192, max_num_seqs: 2, kv_cache_dtype: f16}}
"""


def test_engine_that_lies_about_its_size_dies_alone_and_the_bytes_are_named(
    serve: Serve, stub_llama_server: Path, smollm2_path: Path
) -> None:
    server = serve("honest", "liar", config=CONFIG.format(model=smollm2_path, program=stub_llama_server))
    times_s: list[float] = []
    died = threading.Event()

    def ask_honest() -> None:
        with httpx.Client(base_url=server.url, trust_env=False, verify=False) as client:
            body = {"model": "honest", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
            while not died.is_set() or len(times_s) < 1000:
                start_s = time.monotonic()
                answer = client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                times_s.append(time.monotonic() - start_s)

    asking = threading.Thread(target=ask_honest)
    asking.start()
    start_s = time.monotonic()
    try:
        told = chat(server, "liar")  # with this request its greed begins
    finally:
        died.set()
        asking.join()
    error = told.json()["error"]
    (event,) = (event for event in events(server) if event["kind"] == "memory_limit")
    limit_bytes, p99_s = int(event["figures"]["limit_bytes"]), share(times_s, 99)
    print(
        f"\nliar: stopped after {time.monotonic() - start_s:.1f} s at {event['figures']['peak_bytes']:.0f} of "
        f"{limit_bytes} bytes ({limit_bytes / MIB:.0f} MiB); its client: {told.status_code} {error['message']}\n"
        f"honest meanwhile: {len(times_s)} answers, p50 {share(times_s, 50) * 1e3:.1f} ms, "
        f"p99 {p99_s * 1e3:.1f} ms, max {max(times_s) * 1e3:.1f} ms"
    )
    assert (told.status_code, error["code"], error["cause"]) == (502, "engine_crashed", "memory_limit")
    assert error["limit_bytes"] == limit_bytes and str(limit_bytes) in error["message"]
    assert event["model"] == "liar" and str(limit_bytes) in event["text"]
    metrics = httpx.get(f"{server.url}/metrics", trust_env=False).text
    assert 'laya_model_unloads_total{model="liar",reason="oom"} 1.0' in metrics
    states = {model["id"]: model for model in server.state()["models"]}  # type: ignore[attr-defined]
    assert states["honest"]["state"] == "ready" and states["honest"]["restarts"] == 0
    assert p99_s < P99_S


def test_model_loaded_anyway_dies_alone_at_its_ceiling(
    serve: Serve, stub_llama_server: Path, smollm2_path: Path
) -> None:
    """It needs twice what is free; somebody insists."""
    server = serve("honest", config=ANYWAY.format(model=smollm2_path, program=stub_llama_server))
    (honest,) = (model["pid"] for model in server.state()["models"] if model["id"] == "honest")  # type: ignore[attr-defined]
    refused = httpx.post(f"{server.url}/admin/models/big/load", trust_env=False, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "insufficient_memory")
    need_bytes = refused.json()["error"]["need_bytes"]
    start_s = time.monotonic()
    died = httpx.post(f"{server.url}/admin/models/big/load?anyway=true", trust_env=False, timeout=60)
    error = died.json()["error"]
    took_s = time.monotonic() - start_s
    print(f"\nanyway: needs {need_bytes} bytes; {died.status_code} after {took_s:.1f} s: {error['message']}")
    assert (died.status_code, error["code"]) == (422, "engine_out_of_memory")
    assert 1.8 <= need_bytes / error["limit_bytes"] <= 3
    assert str(error["limit_bytes"]) in error["message"] and str(error["peak_bytes"]) in error["message"]
    assert [event["model"] for event in events(server) if event["kind"] == "memory_limit"] == ["big"]
    assert chat(server, "honest").status_code == 200
    states = {model["id"]: model for model in server.state()["models"]}  # type: ignore[attr-defined]
    assert (states["honest"]["pid"], states["honest"]["restarts"]) == (honest, 0)
