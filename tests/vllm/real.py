"""Owns: the real vLLM of the tests: its environment, its small models, and the configuration that serves them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from laya.engines.vllm_build import find_build
from tests.conftest import ROOT

ENVIRONMENT = ROOT / "build" / "vllm"
MODELS = ROOT / "build" / "vllm-models"
MAKE = ROOT / "tests" / "vllm" / "make_models.py"
# Compiling would take a start from 40 s to over 100, and change nothing of what is tested. With more threads than one,
# each program beside it slows it down many times.
COMPACT = "structured-outputs-config: {backend: xgrammar, disable_any_whitespace: true}"  # chance would never end
CONFIG = """
load_timeout_s: 600
queue_timeout_s: 600
n_threads: 1
models:
  dense: {{engine: vllm, engine_path: "{vllm}", source: "{models}/dense", enforce_eager: true,
    max_num_seqs: 2, max_seq_len: 4096, args: {{{compact}}}}}
  moe: {{engine: vllm, engine_path: "{vllm}", source: "{models}/moe", enforce_eager: true,
    max_num_seqs: 4, max_seq_len: 1024, args: {{dtype: float32, {compact}}}}}
  laya: {{engine: vllm, engine_path: "{vllm}", source: "{models}/laya", enforce_eager: true,
    max_num_seqs: 2, max_seq_len: 1024, args: {{dtype: float32}}}}
  awq: {{engine: vllm, engine_path: "{vllm}", source: "{models}/awq", enforce_eager: true,
    max_num_seqs: 1, max_seq_len: 1024, quantization: awq}}
  too-long: {{engine: vllm, engine_path: "{vllm}", source: "{models}/dense", max_seq_len: 9000}}
  three-sides: {{engine: vllm, engine_path: "{vllm}", source: "{models}/dense", tensor_parallel_size: 3}}
  not-whole: {{engine: vllm, engine_path: "{vllm}", source: "{models}/not-whole"}}
  not-awq: {{engine: vllm, engine_path: "{vllm}", source: "{models}/dense", quantization: awq}}
"""


def config() -> str:
    """Of a server with all models; they are made where they are not. Fails where vLLM is not installed."""
    if not (ENVIRONMENT / "bin" / "python").exists():
        pytest.fail(f"{ENVIRONMENT} has no vLLM: `make test-vllm` installs it")
    find_build(ENVIRONMENT)
    if not (MODELS / ".made").exists() or (MODELS / ".made").stat().st_mtime < MAKE.stat().st_mtime:
        made = subprocess.run([sys.executable, "-m", "tests.vllm.make_models", MODELS], cwd=ROOT, check=False)
        assert made.returncode == 0, "the models could not be made"
    return CONFIG.format(vllm=ENVIRONMENT, models=MODELS, compact=COMPACT)


def weight_bytes(name: str) -> int:
    """Of the tensors of a model, as its file has them."""
    path: Path = MODELS / name / "model.safetensors"
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - header_bytes
