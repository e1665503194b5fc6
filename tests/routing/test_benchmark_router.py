"""tools/benchmark_router.py: its JSON line, its checks, and what it says without the native core."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from laya.bench import router as bench
from laya.bench import router_decision, router_hop, router_load
from laya.routing import NATIVE

ROOT = Path(__file__).resolve().parents[2]
DECISIONS = {"native", "python"} if NATIVE else {"python"}
FIGURES = {"mean_us", "p50_us", "p99_us", "p999_us", "per_s"}


def run_tool(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/benchmark_router.py", *args],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_tool_ends_with_one_json_line() -> None:
    done = run_tool("--requests", "2000", "--threads", "3", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report) == {"layers", "load", "hardware"}
    assert set(report["layers"]) == DECISIONS | {"gateway"}
    for layer in report["layers"].values():
        assert layer["wrong"] == 0
        assert layer.keys() >= FIGURES
    for layer in (*(report["layers"][name] for name in DECISIONS), report["layers"]["gateway"]["through"]):
        assert 0 < layer["p50_us"] <= layer["p99_us"] <= layer["p999_us"] <= layer["max_us"]
        assert layer["per_s"] > 0
    shape = {"models": 10, "endpoints": 30, "sessions": 1000, "prompt_bytes": 0}
    assert report["load"] == {"requests": 2000, "threads": 3} | shape
    assert {"cpu", "cores", "python", "laya", "compiler"} <= set(report["hardware"])


def test_tool_leads_with_the_published_figure() -> None:
    done = run_tool("--requests", "500", "--threads", "2", "--layer", "python")
    assert done.returncode == 0, done.stderr
    assert "published 0.302 ms" in done.stdout.splitlines()[0]
    assert "500 requests, 2 threads" in done.stdout


def test_gateway_layer_says_what_it_is_the_difference_of() -> None:
    done = run_tool("--requests", "300", "--threads", "1", "--layer", "gateway", "--models", "3", "--json")
    assert done.returncode == 0, done.stderr
    (layer,) = json.loads(done.stdout)["layers"].values()
    assert (layer["requests"], layer["connections"], layer["rounds"]) == (300, 1, 5)
    assert (layer["models"], layer["endpoints"]) == (3, 9), "three engines for each model unless said"
    assert layer["alone"]["p50_us"] > 0, "what nobody else asks for at the same time"
    assert layer["mean_us"] == pytest.approx(layer["through"]["mean_us"] - layer["direct"]["mean_us"])
    assert layer["route_mean_us"] > 0 and layer["inside_mean_us"] > 0, "what the gateway's own clocks say"


def test_gateway_layer_knows_which_engine_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    load = bench.RouterLoad(requests=200, threads=2, models=3, endpoints=9)
    assert router_hop.measure_gateway(load)["wrong"] == 0
    marks = router_hop.engine_marks
    monkeypatch.setattr(router_hop, "engine_marks", lambda engines: marks(engines[:1]))
    assert 0 < router_hop.measure_gateway(load)["wrong"] < 2 * load.requests, "all of a model's engines answer"
    monkeypatch.setattr(router_hop, "engine_marks", lambda engines: (b"another engine",))
    layer = router_hop.measure_gateway(load)
    assert layer["wrong"] == 2 * (layer["requests"] + layer["alone"]["requests"]), "asked directly and through Laya"


def test_tool_refuses_wrong_options_in_a_sentence() -> None:
    done = run_tool("--threads", "0")
    assert done.returncode == 2
    assert "--threads: must be 1 to 1024, not 0" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "load",
    [
        bench.RouterLoad(requests=900, threads=4, models=50, endpoints=7, sessions=0),
        bench.RouterLoad(requests=900, threads=1, models=1, endpoints=20, sessions=300),
        bench.RouterLoad(requests=900, threads=2, models=3, endpoints=9, sessions=0, prompt_bytes=700),
    ],
)
def test_bench_checks_every_answer(load: bench.RouterLoad, monkeypatch: pytest.MonkeyPatch) -> None:
    measures = [bench.LAYERS[name] for name in DECISIONS]
    assert all(measure(load)["wrong"] == 0 for measure in measures)
    asked = router_load.questions(load)
    strangers = [router_load.Question(question.model, question.session, range(0)) for question in asked]
    monkeypatch.setattr(router_decision, "questions", lambda load: strangers)
    assert all(measure(load)["wrong"] == load.requests for measure in measures)


def test_bench_without_the_native_core_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "laya._core", None)
    rooms = [name for name in sys.modules if name.startswith(("laya.routing", "laya.bench"))]
    for name in rooms:
        monkeypatch.delitem(sys.modules, name)
    twin_bench = importlib.import_module("laya.bench.router")
    assert twin_bench.main(["--requests", "200", "--threads", "2", "--json"]) == 0
    written = capsys.readouterr()
    assert "The native core is not here" in written.err
    report = json.loads(written.out)
    assert list(report["layers"]) == ["python", "gateway"]
    assert report["layers"]["python"]["implementation"] == "twin"
    assert twin_bench.main(["--requests", "200", "--layer", "native"]) == 1
