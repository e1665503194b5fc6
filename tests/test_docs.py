"""The page of errors lists every error as it is. What the other pages promise: tests/docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import laya.gateway.app
from laya.errors import LayaError

ROOT = Path(__file__).parent.parent


def kinds(kind: type[LayaError]) -> Iterator[type[LayaError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from kinds(below)


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
