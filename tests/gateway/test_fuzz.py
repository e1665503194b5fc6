"""Malformed requests by the thousand, the same ones each time; and what they have brought to light, one by one.

LAYA_FULL=1 sends the 20,000 of a release.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path

import pytest

from laya.bench.fuzz import GROWTH_LIMIT_BYTES, fuzz, lasting_growth
from laya.bench.fuzz_requests import case
from laya.types import MIB

from .front import front, request, until
from .live import FULL


@pytest.mark.timeout(600)
def test_no_malformed_request_brings_the_gateway_down() -> None:
    report = fuzz(Namespace(requests=20_000 if FULL else 2_000, connections=16, seed=7, only=None))
    assert report["faults"] == []
    assert report["n_tracebacks"] == 0, report["log"]
    assert report["in_flight"] == report["unaccounted"] == 0
    assert sum(report["statuses"].values()) > 0
    assert report["passed"], report


def test_memory_that_grows_in_each_part_is_a_leak_and_a_peak_that_is_reached_once_is_none() -> None:
    peak, leak = (100, 120, 130, 140, 151, 151, 151, 152), (100, 102, 104, 106, 108, 110, 112, 114)
    assert lasting_growth([mib * MIB for mib in peak]) == 2 * MIB < GROWTH_LIMIT_BYTES
    assert lasting_growth([mib * MIB for mib in leak]) == 8 * MIB > GROWTH_LIMIT_BYTES


def test_cases_are_the_same_for_the_same_seed() -> None:
    assert [case(1, number, "key") for number in range(200)] == [case(1, number, "key") for number in range(200)]
    assert case(1, 0, "key") != case(2, 0, "key")


@pytest.mark.anyio
async def test_field_that_is_not_utf_8_is_refused_where_nobody_reads_it(tmp_path: Path) -> None:
    body = (
        b'{"model": "stub", "messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "text"}, '
        b'"\xa8": true}'
    )
    async with front(tmp_path) as gate:
        answer = await gate.ask(request(body))
        assert (answer.status, answer.error["code"]) == (400, "invalid_request")
        assert await gate.settled() == {"refused": 1}


@pytest.mark.anyio
async def test_offer_of_another_protocol_for_no_url_is_a_bad_request(tmp_path: Path) -> None:
    headers = ("connection: upgrade", "upgrade: h2c")
    async with front(tmp_path) as gate:
        answer = await gate.ask(request({}, "http://[", headers=headers))
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")


@pytest.mark.anyio
@pytest.mark.parametrize(
    "query",
    ["/admin/events?after={}", "/admin/models/stub/logs?replica={}", "/admin/route/explain?model=stub&prompt_tokens={}",
     "/v1/responses/resp_1/input_items?limit={}"],
)  # fmt: skip
async def test_number_of_thousands_of_digits_is_refused(tmp_path: Path, query: str) -> None:
    async with front(tmp_path) as gate:
        answer = await gate.ask(request(path=query.format("9" * 5000), method="GET"))
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")


@pytest.mark.anyio
async def test_client_that_leaves_before_its_body_is_there_is_no_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with front(tmp_path) as gate:
        for path in ("/admin/keys", "/api/show"):
            client = await gate.client()
            client.send(request(b"", path).replace(b"content-length: 0", b"content-length: 50") + b"{")
            await until(lambda: gate.connections)
            client.close()
            await until(lambda: not gate.connections)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/admin/keys", "/api/show", "/v1/messages", "/v1/responses"])
async def test_body_that_stops_coming_is_given_up_beside_the_hot_path_too(tmp_path: Path, path: str) -> None:
    async with front(tmp_path) as gate:
        client, next_in_line = await gate.client(), await gate.client()
        part = request(b"", path).replace(b"content-length: 0", b"content-length: 50") + b"{"
        client.send(part)
        next_in_line.send(request(path="/health", method="GET") + part)
        assert (await next_in_line.answer()).status == 200
        await until(lambda: len(gate.connections) == 2 and all(each.cycle for each in gate.connections))
        gate.sweep(60)
        for each in (client, next_in_line):
            assert (await each.answer()).status == 408
            assert await each.closed()


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/admin/keys", "/api/show", "/v1/messages"])
async def test_chunk_that_is_none_is_refused_beside_the_hot_path_too(tmp_path: Path, path: str) -> None:
    async with front(tmp_path) as gate:
        client = await gate.client()
        client.send(request(None, path, headers=("transfer-encoding: chunked",)) + b"1\r\n{\r\nno\r\n")
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (400, "invalid_request")
        assert await client.closed()


@pytest.mark.anyio
async def test_nobody_is_told_to_go_on_where_the_body_has_broken_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    headers = ("transfer-encoding: chunked", "expect: 100-continue")
    async with front(tmp_path) as gate:
        client = await gate.client()
        client.send(request(None, "/v1/messages", headers=headers) + b"no\r\n")
        assert (await client.answer(has_body=False)).status == 400
        client.close()
        await until(lambda: not gate.connections)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/admin/keys", "/api/show"])
async def test_body_without_an_end_is_not_kept(tmp_path: Path, path: str) -> None:
    async with front(tmp_path) as gate:
        answer = await gate.ask(request(b" " * 200_000, path))
    assert (answer.status, answer.json["code"] if "api" in path else answer.error["code"]) == (413, "payload_too_large")
