"""The directions of the design, and what serving must not need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "vllm", "ray", "numpy", "huggingface_hub", "opentelemetry")


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=False)


def test_rooms_import_only_in_the_directions_of_the_design() -> None:
    done = run(str(Path(sys.executable).with_name("lint-imports")), "--no-cache")
    assert done.returncode == 0, done.stdout


def test_importing_and_serving_needs_no_heavy_library() -> None:
    program = (
        "import sys, laya, laya.cli.main, laya.gateway.server\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = run(sys.executable, "-c", program)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_native_core_is_built_where_there_is_a_compiler() -> None:
    done = run(sys.executable, "-c", "from laya.routing import NATIVE, WHY_NOT_NATIVE; print(NATIVE, WHY_NOT_NATIVE)")
    assert done.stdout.startswith("True"), done.stdout
