"""Files for other programs, by the schemas of those programs (in build/packaging, by `make test-packaging`)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "build/packaging/bin"


@pytest.mark.parametrize(
    "words",
    [
        ["kubernetes-validate", "--strict", "deploy/kubernetes/laya.yaml"],
        ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", "deploy/compose/compose.yaml"],
        ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", "deploy/compose/compose.cuda.yaml"],
        ["check-jsonschema", "--builtin-schema", "vendor.github-workflows", ".github/workflows/ci.yml"],
        ["check-jsonschema", "--builtin-schema", "vendor.github-workflows", ".github/workflows/wheels.yml"],
    ],
    ids=lambda words: words[-1],
)
def test_by_its_schema(words: list[str]) -> None:
    done = subprocess.run([TOOLS / words[0], *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
