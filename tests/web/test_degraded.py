"""A server whose engine was to compute on a GPU and does not: `laya ps`, the page and the metrics say degraded.

The card is played, and the engine is a stand-in for a llama-server; plan, server, command and browser are real.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from laya.types import MIB
from tests.conftest import ROOT, PlayedNvml, RunningServer

STAND_IN = ROOT / "tests" / "engines" / "stand_in_llama_server.py"
CARD = {"name": "NVIDIA GeForce RTX 4090", "total": 24564 * MIB, "free": 23752 * MIB}
CONFIG = """
max_seq_len: 512
max_num_seqs: 1
defaults: {{max_tokens: 8}}
models:
  fallen: {{source: smollm2, engine_path: {program}, args: {{offloads: 0}}, preload: true}}
  half: {{source: smollm2, engine_path: {program}, args: {{offloads: 12}}, preload: true}}
  whole: {{source: smollm2, engine_path: {program}, args: {{offloads: 33}}, preload: true}}
"""


@pytest.fixture(scope="module")
def server(laya_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Three models whose plan puts every layer on the card."""
    folder = tmp_path_factory.mktemp("degraded")
    program = folder / "llama-server"
    program.write_text(f"#!{sys.executable}\n{STAND_IN.read_text()}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (folder / "config.yaml").write_text(CONFIG.format(program=program))
    nvml = PlayedNvml(folder / "nvml.json")
    nvml.play(CARD)
    path = os.pathsep.join([str(nvml.folder), str(ROOT)])
    variables = (f"PYTHONPATH={path}", f"PLAYED_NVML={nvml.script}")
    running = RunningServer(laya_home, (), folder, ("env", *variables, sys.executable, "-m", "laya.cli"))
    running.wait_ready()
    yield running
    assert running.stop() == 0


def test_state_metrics_and_the_servers_own_words_say_degraded(server: RunningServer) -> None:
    models: Any = {model["id"]: model for model in httpx.get(f"{server.url}/admin/state").json()["models"]}
    assert {name: models[name]["state"] for name in ("fallen", "half", "whole")} == {
        "fallen": "degraded",
        "half": "degraded",
        "whole": "ready",
    }
    assert models["fallen"]["gpu_layers"] == {
        "planned": 31,
        "loaded": 0,
        "total": 33,
        "why_none": None,
    }
    metrics = httpx.get(f"{server.url}/metrics").text
    for line in (
        'laya_model_state{model="fallen",state="degraded"} 1.0',
        'laya_model_state{model="whole",state="degraded"} 0.0',
        'laya_gpu_layers{model="fallen",where="planned"} 31.0',
        'laya_gpu_layers{model="fallen",where="gpu"} 0.0',
        'laya_gpu_layers{model="half",where="gpu"} 12.0',
    ):
        assert line in metrics
    said = "".join(server.said)
    assert "degraded  None of the 31 layers planned for a GPU is on one: the CPU computes everything" in said
    assert "GPU idle  NVIDIA GeForce RTX 4090: the engine is CPU only; laya doctor says what to do" in said
    kinds = [event["model"] for event in httpx.get(f"{server.url}/admin/events").json()["events"]
             if event["kind"] == "degraded"]  # fmt: skip
    assert sorted(kinds) == ["fallen", "half"]


def test_ps_says_degraded_in_red(server: RunningServer) -> None:
    environ = os.environ | {"LAYA_URL": server.url, "FORCE_COLOR": "1", "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "laya.cli", "ps"]
    out = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    lines = {line.split()[0]: line for line in out.splitlines() if line.split()}
    assert "\x1b[31mdegraded" in lines["fallen"] and "\x1b[31m0/33" in lines["fallen"]
    assert "\x1b[31mdegraded" in lines["half"] and "\x1b[31m12/33" in lines["half"]
    assert "\x1b[32mready" in lines["whole"] and "33/33" in lines["whole"]
    assert "half: 12 of the 31 layers planned for a GPU are on one, the CPU has the rest." in out


def test_page_says_degraded_in_red(server: RunningServer, page: Any) -> None:
    page.goto(server.url)
    page.get_by_role("group", name=re.compile("^(?!RAM).*: .* measured, .* promised")).wait_for()  # a bar of its own
    page.get_by_role("group", name=re.compile("^RAM: ")).wait_for()
    rows = page.get_by_role("region", name="Models").get_by_role("listitem")
    colours = {}
    for name, layers in (("fallen", "GPU 0/33 layers"), ("half", "GPU 12/33 layers"), ("whole", "GPU 33/33 layers")):
        row = rows.filter(has_text=name)
        row.get_by_text(layers).wait_for()
        colours[name] = row.locator(".layers").evaluate("each => getComputedStyle(each).color")
        row.get_by_role("button", name=f"Unload {name}").wait_for()
    red = rows.filter(has_text="fallen").locator(".state.degraded").evaluate("each => getComputedStyle(each).color")
    assert (colours["fallen"], colours["half"]) == (red, red)
    assert colours["whole"] != red
    assert "None of the 31 layers" in rows.filter(has_text="fallen").locator(".error").inner_text()
