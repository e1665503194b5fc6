"""The request log: a line for each request where it is asked for, no key ever, no content unless that is asked for."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from laya.config import RequestLogConfig
from laya.config.keys import new_key
from laya.gateway.operating import ConfigSource
from laya.gateway.request_log import MOST_WAITING, RequestLog, redacted
from laya.types import EndpointKind

from .front import KEY, Front, chat, front
from .test_usage import ended

pytestmark = pytest.mark.anyio
SECRET_WORDS = "the plan for tuesday"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ask_for_log(gate: Front, path: Path, **more: Any) -> None:
    config = gate.gateway.config
    config.request_log.path = str(path)
    for name, value in more.items():
        setattr(config.request_log, name, value)
    gate.gateway.operating._in_force(config)


def body(**more: Any) -> bytes:
    return chat(messages=[{"role": "user", "content": SECRET_WORDS}], **more)


async def test_nothing_is_written_unless_it_is_asked_for(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        await gate.ask(chat())
        gate.gateway.operating.request_log.write()
        assert not gate.gateway.operating.request_log._waiting
    assert ConfigSource(lambda: gate.gateway.config).read().request_log.path is None


@pytest.mark.parametrize("cancels_whole", [False, True])
async def test_line_tells_what_happened_and_neither_key_nor_content(tmp_path: Path, cancels_whole: bool) -> None:
    path = tmp_path / "log" / "requests.jsonl"
    async with front(tmp_path, cancels_whole=cancels_whole) as gate:
        ask_for_log(gate, path)
        assert (await gate.ask(body())).status == 200
        assert (await gate.ask(body(stream=True))).status == 200
        assert (await gate.ask(body(model="nowhere"))).status == 404
        await gate.settled()
        gate.gateway.operating.request_log.write()
    text = path.read_text()
    assert KEY not in text and SECRET_WORDS not in text
    served, streamed, refused = lines(path)
    assert (served["key"], served["model"], served["outcome"], served["error"]) == ("tests", "stub", "served", None)
    assert served["prompt_tokens"] == 9 or cancels_whole
    assert streamed["outcome"] == "served" and streamed["total_ms"] > 0
    assert (refused["model"], refused["outcome"], refused["error"]) == (None, "refused", "model_not_found")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("cancels_whole", [False, True])
async def test_content_is_written_when_asked_for_without_what_looks_like_a_key(
    tmp_path: Path, cancels_whole: bool
) -> None:
    path = tmp_path / "requests.jsonl"
    async with front(tmp_path, cancels_whole=cancels_whole) as gate:
        ask_for_log(gate, path, content=True)
        await gate.ask(body())
        await gate.ask(chat(messages=[{"role": "user", "content": "my key is sk-abcdefgh1234 " + "x" * 9000}]))
        ask_for_log(gate, path, content=False)
        await gate.ask(body())
        await gate.settled()
        gate.gateway.operating.request_log.write()
    first, long, last = lines(path)
    assert SECRET_WORDS in first["body"]
    assert "sk-abc" not in long["body"] and "[redacted]" in long["body"] and len(long["body"]) <= 4096
    assert "body" not in last


def test_what_looks_like_a_secret_is_left_out() -> None:
    for secret in ("sk-proj-AbC123_x", "Bearer abcdef.ghi-jkl", "ghp_0123456789abcdef", "hf_AbcdefGhijkl"):
        assert secret[-6:] not in redacted(f"use {secret} now"), secret
    own = new_key()
    assert own not in redacted(f"my key of this server is {own}.")
    assert redacted('{"api_key": "se\\"cret", "x": 1}') == '{"api_key": "[redacted]", "x": 1}'
    assert redacted('{"db_password":"cut off') == '{"db_password":"[redacted]"'
    assert redacted("to ask is to be a bearer of news, risk-averse") == "to ask is to be a bearer of news, risk-averse"


def test_file_is_put_aside_at_its_size_and_old_ones_go(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    log = RequestLog(RequestLogConfig(path=str(path), max_bytes=4096, keep_files=2))
    for number in range(120):
        log.note(_exchange(f"request-{number:04d}"))
        log.write()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["r.jsonl", "r.jsonl.1", "r.jsonl.2"]
    assert all(file.stat().st_size <= 4096 for file in files)
    ids = [line["request_id"] for file in reversed(files) for line in lines(file)]
    assert ids == [f"request-{number:04d}" for number in range(120 - len(ids), 120)]
    log = RequestLog(RequestLogConfig(path=str(path), max_bytes=4096, keep_files=0))
    for _ in range(40):
        log.note(_exchange("last"))
    log.write()
    assert path.stat().st_size <= 4096


def test_a_file_that_cannot_be_written_costs_lines_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = RequestLog(RequestLogConfig(path=str(tmp_path)))  # a folder
    log.note(_exchange("a"))
    log.write()
    assert "cannot be written" in caplog.text and "1 requests are missing" in caplog.text
    for _ in range(MOST_WAITING + 3):
        log.note(_exchange("a"))
    assert len(log._waiting) == MOST_WAITING


def test_a_full_file_that_cannot_be_put_aside_costs_what_it_has_no_room_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "r.jsonl"
    (tmp_path / "r.jsonl.1").mkdir()
    log = RequestLog(RequestLogConfig(path=str(path), max_bytes=4096, keep_files=1))
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(40):
        log.note(_exchange("a"))
    log.write()
    assert "Is a directory" in caplog.text and f"{40 - len(lines(path))} requests are missing" in caplog.text
    assert 0 < len(lines(path)) < 40
    assert set(os.listdir("/proc/self/fd")) == before


def _exchange(request_id: str) -> Any:
    fields = {"request_id": request_id.encode(), "parsed": None, "fault": None, "kind": EndpointKind.CHAT}
    return ended("me", model=None, **fields)
