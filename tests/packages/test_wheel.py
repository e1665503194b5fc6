"""The wheel as it is built for others: what is in it, and that it serves from an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build/packaging/bin/python"


def run(*words: object, timeout_s: float = 900) -> str:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(BUILD, "-m", "build", "--wheel", "--outdir", folder, f"-Cbuild-dir={ROOT}/build/packaging/native", ROOT)
    (found,) = folder.glob("laya_llm-*.whl")
    return found


def test_what_is_in_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = run("git", "-C", ROOT, "ls-files", "laya").split()
    assert not set(tracked) - names  # page, texts, recipes, catalogue, laya-nano, types
    assert {"laya/py.typed", "laya/_threads.so", "laya/models/shipped/laya-nano.gguf"} <= names
    assert any(name.startswith("laya/_core.") and name.endswith(".so") for name in names)
    assert not [name for name in names if name.endswith(".pyc") or name.startswith(("tests/", "csrc/"))]
    assert "entry_points.txt" in {Path(name).name for name in names if ".dist-info/" in name}


def test_it_serves_from_outside(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", "-c", ROOT / "lock.txt", wheel)
    said = run(ROOT / "scripts/check_wheel", python)
    assert str(tmp_path / "venv") in said and "answer:" in said, said
