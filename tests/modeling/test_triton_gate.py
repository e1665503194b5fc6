"""The Triton kernel, in its interpreter, and on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="NOT RUN: triton is not installed")
@pytest.mark.parametrize("interpreted", [True, False])
def test_triton_gate_chooses_as_the_oracle_does(interpreted: bool) -> None:
    if not interpreted and not torch.cuda.is_available():
        pytest.skip("NOT RUN: no GPU here")
    environment = os.environ | ({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if interpreted else {})
    words = [sys.executable, "-m", "tests.modeling.triton_cases"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith(f"right on {'cpu' if interpreted else 'cuda'}\n")
