"""Lines in any pieces, a ring, a bounded file, followers, and the engine's own words."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import uvloop

from laya.engines.log import LINE_BYTES, EngineLog, log_path

LOAD_ERRORS = b"""0.00.003.591 I srv    load_model: loading model 'x.gguf'
0.00.027.764 E llama_model_load: error loading model: tensor 'a' data is not within the file bounds
0.00.027.790 E llama_model_load_from_file_impl: failed to load model
0.00.028.264 E srv          init: exiting due to model loading error
"""


def test_lines_arrive_whole_however_they_were_cut() -> None:
    log = EngineLog()
    for piece in (b"on", b"e\ntw", b"o\r\n", b"", b"\xff\nthr", b"ee"):
        log.feed(piece)
    assert log.tail() == ["one", "two", "\ufffd"]
    log.close()
    assert log.tail(2) == ["\ufffd", "three"]


def test_ring_keeps_the_last_lines() -> None:
    log = EngineLog(ring_lines=3)
    log.feed(b"".join(b"%d\n" % i for i in range(10)))
    assert log.tail() == ["7", "8", "9"]
    assert log.tail(0) == []


def test_line_without_end_is_cut() -> None:
    log = EngineLog()
    log.feed(b"x" * (3 * LINE_BYTES + 5))
    assert [len(line) for line in log.tail()] == [LINE_BYTES] * 3
    log.feed(b"y" * 2 * LINE_BYTES + b"\n")
    assert max(len(line) for line in log.tail()) == LINE_BYTES


def test_file_is_rotated_at_each_start(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "logs" / "m.log")
    log.begin("first")
    log.feed(b"one\n")
    log.begin("second")
    log.feed(b"two\n")
    log.close()
    assert log.path is not None
    assert log.path.read_text() == "laya: second\ntwo\n"
    assert (tmp_path / "logs" / "m.log.1").read_text() == "laya: first\none\n"


def test_file_never_grows_past_its_size(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "m.log", file_bytes=1000)
    log.begin("start")
    for _ in range(100):
        log.feed(b"x" * 99 + b"\n")
    log.close()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 1000


def test_folder_that_cannot_be_written_costs_the_file_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    log = EngineLog(tmp_path / "file" / "m.log")
    log.begin("start")
    log.feed(b"one\n")
    assert log.tail() == ["laya: start", "one"]


@pytest.mark.parametrize(
    ("model_id", "name"),
    [("qwen3:8b", "qwen3:8b.log"), ("org/model", "org_model.log"), ("../x", "_x.log"), ("..", ".log")],
)
def test_log_path_stays_in_its_folder(tmp_path: Path, model_id: str, name: str) -> None:
    assert log_path(tmp_path, model_id) == tmp_path / name


def test_follow_gives_the_tail_then_new_lines_then_ends() -> None:
    async def scenario() -> list[str]:
        log = EngineLog()
        log.feed(b"old\nlast\n")
        seen: list[str] = []
        started = asyncio.Event()

        async def reader() -> None:
            async for line in log.follow(1):
                seen.append(line)
                started.set()

        task = asyncio.create_task(reader())
        await started.wait()
        log.feed(b"new\n")
        log.close()
        await task
        return seen

    assert uvloop.run(scenario()) == ["last", "new"]


def test_follow_that_lags_skips_what_the_ring_dropped() -> None:
    async def scenario() -> list[str]:
        log = EngineLog(ring_lines=2)
        log.feed(b"0\n")
        lines = log.follow(1)
        seen = [await anext(lines)]
        log.feed(b"1\n2\n3\n")
        log.close()
        return seen + [line async for line in lines]

    assert uvloop.run(scenario()) == ["0", "2", "3"]


def test_error_words_of_a_load_are_the_first_error() -> None:
    log = EngineLog()
    log.feed(LOAD_ERRORS)
    assert log.error_words(first=True) == "error loading model: tensor 'a' data is not within the file bounds"


def test_error_words_of_a_crash_are_the_last() -> None:
    log = EngineLog()
    log.feed(b"0.01.000 E srv    send_error: an old one\n0.02 I slot: no error here\nggml.c:7: GGML_ASSERT(x) failed\n")
    log.feed(b"0.03.000 I srv  stop: failed to nothing\n")
    assert log.error_words(first=False) == "ggml.c:7: GGML_ASSERT(x) failed"


def test_error_words_know_plain_errors() -> None:
    log = EngineLog()
    log.feed(b"usage: ...\nerror: invalid argument: --nonsense\n")
    assert log.error_words(first=True) == "error: invalid argument: --nonsense"


def test_error_words_forget_the_process_before() -> None:
    log = EngineLog()
    log.begin("first")
    log.feed(LOAD_ERRORS)
    log.begin("second")
    assert log.error_words(first=True) is None
