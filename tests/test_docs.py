"""What the docs promise: every error is listed as it is, and the README's commands work as pasted."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import laya.gateway.app
from laya.errors import LayaError
from tests.conftest import RunningServer

ROOT = Path(__file__).parent.parent
DEFAULT_URL = "http://127.0.0.1:8000"


def kinds(kind: type[LayaError]) -> Iterator[type[LayaError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from kinds(below)


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_errors_page_lists_every_error_as_it_is() -> None:
    assert laya.gateway.app.MethodNotAllowed in set(kinds(LayaError))
    page = (ROOT / "docs" / "errors.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    said = {code: (row.split(" | ")[0], row.split(" | ")[-1]) for code, row in rows.items()}
    meant = {
        kind.code: ("-" if kind.code == "no_server" else str(kind.http_status), str(kind.exit_code))
        for kind in kinds(LayaError)
    }
    assert {code: said.get(code) for code in meant} == meant


@pytest.mark.engine
@pytest.mark.parametrize("command", [block for block in code_blocks("sh") if "curl" in block])
def test_readme_curl_works_as_pasted(command: str, server: RunningServer) -> None:
    done = subprocess.run(
        ["bash", "-c", command.replace(DEFAULT_URL, server.url)], capture_output=True, text=True, check=True
    )
    assert '"content":' in done.stdout, done.stdout


@pytest.mark.engine
@pytest.mark.parametrize("program", code_blocks("python"))
def test_readme_python_works_as_pasted(program: str, server: RunningServer) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program.replace(DEFAULT_URL, server.url)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip()


def test_readme_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    for link in links:
        assert (ROOT / link).is_file(), link
