"""Pulling from an http:// address: whole, resumed, changed, broken, refused."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from laya.errors import DownloadError
from laya.models import pull, resolve
from laya.models.download import UrlSource, fetch_file

from .conftest import FileServer, gguf_bytes


def leftovers(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


def test_pull_url_becomes_a_model_named_after_its_file(server: FileServer, home: Path) -> None:
    body = gguf_bytes()
    seen: list[tuple[int, int | None]] = []
    url = server.serve("/dir/Tiny-Q4_K_M.gguf", body)
    model = pull(url + "?download=true", progress=lambda done, total: seen.append((done, total)))
    assert model.id == "tiny-q4_k_m"
    assert model.path.read_bytes() == body
    assert seen[-1] == (len(body), len(body))
    assert resolve("Tiny-Q4_K_M").path == model.path
    assert leftovers(home) == ["models/tiny-q4_k_m/Tiny-Q4_K_M.gguf", "models/tiny-q4_k_m/manifest.json"]


def test_pull_twice_asks_nothing_the_second_time(server: FileServer, home: Path) -> None:
    url = server.serve("/tiny.gguf", gguf_bytes())
    first = pull(url)
    asked = len(server.requests)
    assert pull(url) == first
    assert len(server.requests) == asked


def test_pull_follows_redirects(server: FileServer, home: Path) -> None:
    server.serve("/real.gguf", gguf_bytes())
    url = server.serve("/tiny.gguf", b"", redirect="/real.gguf")
    assert pull(url).file_bytes == 300_000


def test_fetch_broken_connection_goes_on_where_it_broke(server: FileServer, tmp_path: Path) -> None:
    body = gguf_bytes()
    url = server.serve("/tiny.gguf", body, stop_after=[100_000, 50_000])
    fetched = fetch_file(url, tmp_path / "tiny.gguf", progress=lambda *_: None)
    assert fetched.path.read_bytes() == body
    assert fetched.sha256 == hashlib.sha256(body).hexdigest()
    assert server.ranges() == [None, "bytes=100000-", "bytes=150000-"]


def test_fetch_gives_up_and_the_next_call_goes_on(server: FileServer, tmp_path: Path) -> None:
    body = gguf_bytes()
    url = server.serve("/tiny.gguf", body, stop_after=[100_000, 0, 0, 0])
    target = tmp_path / "tiny.gguf"
    with pytest.raises(DownloadError, match="after 100000 bytes"):
        fetch_file(url, target, progress=lambda *_: None)
    assert not target.exists()
    assert fetch_file(url, target, progress=lambda *_: None).path.read_bytes() == body
    assert server.ranges()[-1] == "bytes=100000-"


def test_fetch_changed_file_starts_over(server: FileServer, tmp_path: Path) -> None:
    url = server.serve("/tiny.gguf", gguf_bytes(seed=3), stop_after=[100_000, 0, 0, 0])
    target = tmp_path / "tiny.gguf"
    with pytest.raises(DownloadError):
        fetch_file(url, target, progress=lambda *_: None)
    changed = gguf_bytes(seed=5)
    server.serve("/tiny.gguf", changed, etag='"v2"')
    assert fetch_file(url, target, progress=lambda *_: None).path.read_bytes() == changed


def test_fetch_without_validator_starts_over(server: FileServer, tmp_path: Path) -> None:
    body = gguf_bytes()
    url = server.serve("/tiny.gguf", body, etag=None, stop_after=[100_000])
    fetched = fetch_file(url, tmp_path / "tiny.gguf", progress=lambda *_: None)
    assert fetched.path.read_bytes() == body
    assert server.ranges() == [None, None]


def test_fetch_without_length_is_whole(server: FileServer, home: Path) -> None:
    url = server.serve("/tiny.gguf", gguf_bytes(), chunked=True)
    assert pull(url).path.read_bytes() == gguf_bytes()


def test_pull_server_errors_are_tried_again(server: FileServer, tmp_path: Path) -> None:
    url = server.serve("/tiny.gguf", gguf_bytes(), status=503)
    with pytest.raises(DownloadError, match="503"):
        fetch_file(url, tmp_path / "tiny.gguf", progress=lambda *_: None)
    assert len(server.requests) == 4


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_pull_refused_address_says_so_at_once(server: FileServer, home: Path, status: int) -> None:
    url = server.serve("/tiny.gguf", b"", status=status)
    with pytest.raises(DownloadError, match=str(status)):
        pull(url)
    assert len(server.requests) == 1
    assert leftovers(home) == []


def test_pull_unreachable_host_is_one_sentence(home: Path) -> None:
    with pytest.raises(DownloadError, match="refused"):
        pull("http://127.0.0.1:9/tiny.gguf")


def test_pull_web_page_is_no_model(server: FileServer, home: Path) -> None:
    url = server.serve("/tiny.gguf", b"<!doctype html><title>Log in</title>" * 1000)
    with pytest.raises(DownloadError, match="not a GGUF"):
        pull(url)
    assert leftovers(home) == []


def test_pull_empty_file_is_no_model(server: FileServer, home: Path) -> None:
    url = server.serve("/tiny.gguf", b"")
    with pytest.raises(DownloadError, match="empty"):
        pull(url)
    assert leftovers(home) == []


def test_pull_name_taken_by_another_source_is_refused(server: FileServer, home: Path) -> None:
    pull(server.serve("/a/tiny.gguf", gguf_bytes()))
    other = server.serve("/b/tiny.gguf", gguf_bytes(seed=9))
    with pytest.raises(DownloadError, match="taken"):
        pull(other)
    assert pull(other, model_id="Tiny Two").id == "tiny-two"


@pytest.mark.parametrize("path", ["/", "/model.bin", "/..%5cevil.gguf", "/.gguf", "/a%00.gguf"])
def test_url_source_refuses_names_it_would_not_write(path: str) -> None:
    with pytest.raises(DownloadError):
        UrlSource("http://127.0.0.1" + path)


def test_url_source_keeps_of_a_path_its_last_name_only() -> None:
    assert UrlSource("http://127.0.0.1/..%2f..%2fevil.gguf").name == "evil.gguf"


def test_pull_interrupted_leaves_no_model_and_goes_on_next_time(server: FileServer, home: Path) -> None:
    body = gguf_bytes(2_000_000)
    url = server.serve("/tiny.gguf", body, stall_after=1_000_000)
    child = subprocess.Popen(
        [sys.executable, "-c", f"from laya.models import pull; pull({url!r})"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    server.stalled.wait()  # the probe stalls first: it reads headers only, so it leaves at once
    part = home / "partial/tiny/tiny.gguf.part"
    while not (part.is_file() and part.stat().st_size == 1_000_000):
        assert child.poll() is None
        os.sched_yield()
    child.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in child.communicate()[1]
    assert not (home / "models").exists()

    server.go_on.set()
    assert pull(url).path.read_bytes() == body
    assert server.ranges()[-1] == "bytes=1000000-"


def test_pull_same_model_twice_at_once_is_refused(server: FileServer, home: Path) -> None:
    url = server.serve("/tiny.gguf", gguf_bytes())

    def during(done: int, total: int | None) -> None:
        with pytest.raises(DownloadError, match="another process"):
            pull(url)

    assert pull(url, progress=during).id == "tiny"
