"""The page's files over a socket: what a browser is given, and what it is told not to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import laya
from laya.gateway.page import PREFIX, WEB, page_files

LIMIT_BYTES = 300 * 1024
HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
INDEX = (WEB / "index.html").read_text()


@pytest.fixture(scope="module")
def locked(start_server: Callable[..., Any]) -> Any:
    """A server that wants a key for everything else."""
    return start_server("--lan", "--host", "127.0.0.1")


def get(server: Any, path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", headers=headers, trust_env=False)


def test_page_is_for_browsers_and_json_for_programs(locked: Any) -> None:
    page = get(locked, "/", **HTML)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text == INDEX
    said = get(locked, "/")
    assert said.json()["version"] == laya.__version__
    assert page.headers["vary"] == said.headers["vary"] == "accept"


@pytest.mark.parametrize(
    ("suffix", "media_type"), [(".js", "text/javascript"), (".css", "text/css"), (".svg", "image/svg+xml")]
)
def test_page_files_have_their_type_and_need_no_key(locked: Any, suffix: str, media_type: str) -> None:
    paths = [path for path in page_files() if path.endswith(suffix)]
    assert paths
    for path in paths:
        answer = get(locked, path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].split(";")[0] == media_type
        assert answer.content == (WEB / path.removeprefix(PREFIX)).read_bytes()
        assert get(locked, path, **{"if-none-match": answer.headers["etag"]}).status_code == 304
    assert get(locked, "/admin/state").status_code == 401


def test_page_forbids_all_that_is_not_its_own(locked: Any) -> None:
    for path in ("/", *page_files()):
        headers = get(locked, path, **HTML).headers
        policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'"
        assert headers["x-content-type-options"] == "nosniff"


def test_page_offers_no_file_by_a_way_around(locked: Any) -> None:
    for path in ("/page/index.html", "/page/", "/page/..%2f..%2ferrors.py", "/page/nope.js"):
        assert get(locked, path).status_code in (401, 404), path


def test_page_is_whole_small_and_asks_nobody_else() -> None:
    files = {path: content.decode() for path, content in page_files().items()}
    assert sum(len(text.encode()) for text in (INDEX, *files.values())) < LIMIT_BYTES
    named = re.findall(r'(?:href|src)="(/[^"]+)"', INDEX)
    imported = [PREFIX + name for text in files.values() for name in re.findall(r'from "\./([^"]+)"', text)]
    assert set(named) | set(imported) == set(files)
    preloaded = re.findall(r'rel="modulepreload" href="(/[^"]+)"', INDEX)
    assert set(preloaded) == set(imported), "a module that only another one names is asked for a round later"
    for text in (INDEX, *files.values()):
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
        assert not re.search(r"\bon\w+=|style=|javascript:|innerHTML|eval\(", text)
    assert not re.search(r"<script(?![^>]*src=)|<style", INDEX)


def test_page_lies_in_the_package() -> None:
    assert Path(laya.__file__).parent / "web" == WEB
