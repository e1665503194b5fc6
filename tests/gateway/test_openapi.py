"""The admin API's document: all that is served is in it and nothing else is, and schemathesis finds it kept."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from laya.gateway.openapi import PATH, PREFIX, document, documented

from .front import KEY, front, request
from .keyed import grant, keep
from .live import FULL
from .test_roles import routes_of

pytestmark = pytest.mark.anyio
EXAMPLES = 200 if FULL else 20  # of each operation, beside those of its parameters' edges


async def test_every_admin_route_is_in_the_document_and_nothing_else(tmp_path: Path) -> None:
    async with front(tmp_path) as gateway:
        served = {
            (method, documented(route.path))
            for route in routes_of(gateway)
            for method in route.methods or ()
            if route.path.startswith(PREFIX) and method != "HEAD"
        }
        answer = await gateway.ask(request(method="GET", path=PATH))
    told = {(method.upper(), path) for path, methods in answer.json["paths"].items() for method in methods}
    assert told == served
    assert answer.json == json.loads(json.dumps(document()))


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("events?afer=5", "Did you mean 'after'?"),
        ("events?after=1&after=2", "'after' is said twice"),
        ("events?after=%D9%A3", "expected the id of an event"),  # a digit, but none of JSON's
        ("state?verbose=1", "There are: none."),
        ("usage?by=", "expected model, key or day"),
        ("usage?since=", "expected a day"),
    ],
)
async def test_parameter_that_the_document_does_not_name_is_refused(tmp_path: Path, query: str, said: str) -> None:
    async with front(tmp_path) as gateway:
        answer = await gateway.ask(request(method="GET", path=f"/admin/{query}"))
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")
    assert said in answer.error["message"]


@pytest.mark.timeout(900)
async def test_schemathesis_finds_that_the_document_is_kept(tmp_path: Path) -> None:
    """All its checks, over all its phases; models are the one that there is, and names that are none."""
    keep(tmp_path, *(grant(name) for name in ("ann", "bob")))
    described = document()
    for operation in [each for methods in described["paths"].values() for each in methods.values()]:
        for parameter in operation["parameters"]:
            if parameter["name"] == "model_id":
                there = [] if "experts" in operation["operationId"] else ["stub", "stub-alias"]  # whose file is none
                parameter["schema"] = {"enum": [*there, "no/such model", "%"]}
            elif parameter["name"] == "model" and "fit" in operation["operationId"]:
                parameter["schema"] = {"enum": ["no/such model", "%"]}  # the stub is no file of which a plan is made
            elif parameter["name"] == "flags":
                parameter["schema"] = {"enum": [""]}
    (tmp_path / "openapi.json").write_text(json.dumps(described))
    async with front(tmp_path) as gateway:
        gateway.gateway.desk.closing.set()  # a log that is followed ends at once
        found = await asyncio.to_thread(
            subprocess.run,
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", "openapi.json", "--no-color"),
                *("--url", f"http://127.0.0.1:{gateway.port}", "--header", f"Authorization: Bearer {KEY}"),
                *("--max-examples", str(EXAMPLES), "--seed", "1", "--continue-on-failure", "--request-timeout", "20"),
            ],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    assert found.returncode == 0, found.stdout
