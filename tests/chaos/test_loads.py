"""Many loads at once: the budget holds however they come, and one model is loaded once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from laya.types import MIB
from tests.conftest import RunningServer

from .conftest import chat, results_of

Serve = Callable[..., RunningServer]
MakeModels = Callable[..., list[Path]]

N_MODELS = 20
N_STORM = 200
BUDGET_MIB = 700  # for three of them or four
CONFIG = """
version: 1
n_threads: 1
max_seq_len: 4096
max_num_seqs: 1
queue_size: 256
memory: {{budget: {budget_mib}MiB}}
models:
{models}
"""


class Watch:
    """What the server promised and what its engines held, seen again and again."""

    def __init__(self, server: RunningServer) -> None:
        self.looks = 0
        self.most_reserved = self.most_measured = self.most_loaded = 0
        self._server = server
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        with httpx.Client(base_url=self._server.url, trust_env=False, verify=False, timeout=60) as client:
            while not self._ended.is_set():
                state: dict[str, Any] = client.get("/admin/state").json()
                running = [model for model in state["models"] if model["pid"] is not None]
                self.looks += 1
                self.most_reserved = max(self.most_reserved, state["memory"]["reserved_bytes"])
                self.most_measured = max(self.most_measured, sum(map(resident_bytes, running)))
                self.most_loaded = max(self.most_loaded, len(running))
                time.sleep(0.01)


def resident_bytes(model: dict[str, Any]) -> int:
    """What the engine holds now; 0 when it has just gone."""
    try:
        status = Path(f"/proc/{model['pid']}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS")), 0)


def test_20_parallel_loads_never_pass_the_budget(serve: Serve, make_models: MakeModels) -> None:
    models = make_models(N_MODELS)
    lines = "\n".join(f"  m{index}: {{source: {path}}}" for index, path in enumerate(models))
    server = serve(config=CONFIG.format(budget_mib=BUDGET_MIB, models=lines))
    start_s = time.monotonic()
    with Watch(server) as watch, ThreadPoolExecutor(N_MODELS) as pool:
        answers = results_of([pool.submit(chat, server, f"m{index}", timeout_s=250) for index in range(N_MODELS)])
    codes = [answer.status_code for answer in answers]
    print(
        f"\n20 models at once in {BUDGET_MIB} MiB: {time.monotonic() - start_s:.1f} s, answers {sorted(codes)}; most "
        f"promised {watch.most_reserved / MIB:.0f} MiB, most resident {watch.most_measured / MIB:.0f} MiB, at most "
        f"{watch.most_loaded} loaded, in {watch.looks} looks"
    )
    assert watch.most_reserved <= BUDGET_MIB * MIB
    assert watch.most_measured <= BUDGET_MIB * MIB
    assert watch.most_loaded >= 2
    assert set(codes) <= {200, 422, 503} and codes.count(200) >= 1
    for answer in answers:
        assert answer.status_code == 200 or "MiB" in answer.json()["error"]["message"], answer.text


def test_storm_of_requests_for_one_model_is_one_load(serve: Serve, make_models: MakeModels) -> None:
    (model,) = make_models(1)
    server = serve(config=CONFIG.format(budget_mib=BUDGET_MIB, models=f"  stormed: {{source: {model}}}"))
    with ThreadPoolExecutor(N_STORM) as pool:
        answers = results_of(
            [pool.submit(chat, server, "stormed", timeout_s=250, max_tokens=1) for _ in range(N_STORM)]
        )
    log = httpx.get(f"{server.url}/admin/models/stormed/logs", trust_env=False).text
    starts = log.count("laya: engine for stormed started")
    codes = [answer.status_code for answer in answers]
    print(f"\n{N_STORM} requests for a model that was not loaded: {starts} load, {codes.count(200)} answered")
    assert starts == 1
    assert set(codes) == {200}
