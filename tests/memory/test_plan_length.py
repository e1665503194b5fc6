"""`laya plan` on lengths a model was not trained for: refused with both numbers, unless the file says how to go on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from small_gguf import MakeGguf

ROOT = Path(__file__).parents[2]


def laya_plan(model: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"LAYA_HOME": str(model.parent / "home"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "laya.cli", "plan", str(model), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=model.parent, env=environ, check=False)


def test_length_above_the_trained_one_is_refused_with_both_numbers(make_gguf: MakeGguf) -> None:
    done = laya_plan(make_gguf(n_ctx_train=2048), "--max-seq-len", "4096")
    assert done.returncode == 2
    assert "4096" in done.stderr and "2048" in done.stderr
    assert "Traceback" not in done.stderr


def test_trained_length_itself_is_planned(make_gguf: MakeGguf) -> None:
    assert laya_plan(make_gguf(n_ctx_train=2048), "--max-seq-len", "2048").returncode == 0


def test_rope_scaling_in_the_file_lifts_the_limit(make_gguf: MakeGguf) -> None:
    path = make_gguf(n_ctx_train=2048, keys={"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0})
    assert laya_plan(path, "--max-seq-len", "4096").returncode == 0
