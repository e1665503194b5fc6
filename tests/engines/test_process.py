"""One real engine child, from spawn to exit."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from laya.engines.exit_words import exit_words
from laya.engines.log import EngineLog
from laya.engines.process import CHILD_NICE, EngineProcess
from laya.engines.settings import EngineSettings
from laya.errors import BadModelFile, ConfigError, EngineFailed
from laya.types import MIB, EngineAddress

MakeSettings = Callable[..., EngineSettings]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}"


def client(address: EngineAddress) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"http://{address.host}:{address.port}",
        headers={"authorization": f"Bearer {address.api_key}"},
        timeout=60,
        trust_env=False,
    )


def failure_of(settings: EngineSettings, log: EngineLog, expected: type[Exception] = EngineFailed) -> str:
    """The message of the start that fails; afterwards no child is left."""

    async def scenario() -> str:
        process = EngineProcess(settings, log)
        with pytest.raises(expected) as raised:
            await process.start()
        assert process.pid is None or not Path(f"/proc/{process.pid}").exists()
        return str(raised.value)

    return uvloop.run(scenario())


@pytest.mark.engine
@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
def test_start_chat_stop(make_settings: MakeSettings, smollm2_path: Path, log: EngineLog, loop: Any) -> None:
    async def scenario() -> None:
        process = EngineProcess(make_settings(smollm2_path, model_id="org/small:q4"), log)
        address = await process.start()
        assert (process.state, process.address) == ("ready", address)
        assert address.cancels_whole is False
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
        async with client(address) as http:
            answer = (await http.post("/v1/chat/completions", json=body)).json()
            assert (await http.get("/props", headers={"authorization": "Bearer wrong"})).status_code == 401
        assert answer["choices"][0]["message"]["content"]
        assert answer["model"] == "org/small:q4"
        assert await process.stop() is True
        assert process.state == "exited"
        assert await process.wait_exit() == "killed by signal 15 (asked to stop)"
        assert not Path(f"/proc/{process.pid}").exists()
        assert await process.stop() is True

    loop(scenario())


@pytest.mark.engine
@pytest.mark.parametrize(
    ("fields", "slots"),
    [
        ({"slot_tokens": 512, "max_num_seqs": 3}, [512, 512, 512]),
        ({"slot_tokens": 768, "max_num_seqs": 2, "kv_unified": True}, [768, 768]),
        ({"slot_tokens": 256, "max_num_seqs": 1, "kv_cache_dtype": "q8_0", "mmap": False}, [256]),
    ],
)
def test_engine_runs_what_was_planned(
    make_settings: MakeSettings, smollm2_path: Path, log: EngineLog, fields: dict[str, Any], slots: list[int]
) -> None:
    async def scenario() -> None:
        process = EngineProcess(make_settings(smollm2_path, chat_template=TEMPLATE, **fields), log)
        async with client(await process.start()) as http:
            props = (await http.get("/props")).json()
            assert [slot["n_ctx"] for slot in (await http.get("/slots")).json()] == slots
        await process.stop()
        assert props["total_slots"] == len(slots)
        assert props["default_generation_settings"]["n_ctx"] == slots[0]
        assert props["chat_template"] == TEMPLATE
        assert props["model_alias"] == "small"

    uvloop.run(scenario())


@pytest.mark.engine
def test_child_steps_back_and_hides_its_key(make_settings: MakeSettings, smollm2_path: Path, log: EngineLog) -> None:
    async def scenario() -> None:
        process = EngineProcess(make_settings(smollm2_path), log)
        address = await process.start()
        proc = Path(f"/proc/{process.pid}")
        assert address.api_key is not None
        assert address.api_key not in (proc / "cmdline").read_text()
        assert address.api_key.encode() not in (proc / "environ").read_bytes()
        assert int((proc / "oom_score_adj").read_text()) >= 500
        assert process.pid is not None
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == CHILD_NICE
        assert os.getsid(process.pid) == process.pid
        await process.stop()

    uvloop.run(scenario())


@pytest.mark.engine
def test_measure_reads_the_childs_memory(make_settings: MakeSettings, smollm2_path: Path, log: EngineLog) -> None:
    async def scenario() -> None:
        process = EngineProcess(make_settings(smollm2_path), log)
        assert process.measure() is None
        await process.start()
        reading = process.measure()
        assert reading is not None
        assert 90 * MIB < reading.resident_bytes <= reading.peak_bytes < 400 * MIB
        assert 0 < reading.anonymous_bytes < reading.resident_bytes
        await process.stop()
        assert process.measure() is None

    uvloop.run(scenario())


@pytest.mark.engine
def test_embed_engine_is_ready_after_an_embedding(
    make_settings: MakeSettings, smollm2_path: Path, log: EngineLog
) -> None:
    async def scenario() -> None:
        process = EngineProcess(make_settings(smollm2_path, task="embed", pooling="mean"), log)
        async with client(await process.start()) as http:
            answer = (await http.post("/v1/embeddings", json={"input": "a cat"})).json()
        await process.stop()
        assert len(answer["data"][0]["embedding"]) == 576

    uvloop.run(scenario())


@pytest.mark.engine
def test_embed_engine_without_pooling_is_told_how(
    make_settings: MakeSettings, smollm2_path: Path, log: EngineLog
) -> None:
    assert "args: {pooling_type: mean}" in failure_of(make_settings(smollm2_path, task="embed"), log)


@pytest.mark.engine
def test_draft_model_speculates(make_settings: MakeSettings, smollm2_path: Path, log: EngineLog) -> None:
    async def scenario() -> None:
        process = EngineProcess(make_settings(smollm2_path, draft=smollm2_path, max_num_seqs=1), log)
        async with client(await process.start()) as http:
            body = {"prompt": "1 2 3 4 5 6", "n_predict": 12, "temperature": 0}
            answer = (await http.post("/completion", json=body)).json()
        await process.stop()
        assert answer["timings"]["draft_n_accepted"] > 0

    uvloop.run(scenario())


@pytest.mark.engine
@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (lambda whole: whole[:1_000_000], "failed to read key-value pairs"),
        (lambda whole: whole[:60_000_000], "data is not within the file bounds"),
        (lambda whole: b"not a model" * 1000, "invalid magic characters"),
    ],
    ids=["header cut", "tensors cut", "not a model"],
)
def test_corrupt_file_fails_in_the_engines_own_words(
    make_settings: MakeSettings, smollm2_path: Path, log: EngineLog, tmp_path: Path, cut: Any, words: str
) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(cut(smollm2_path.read_bytes()))
    message = failure_of(make_settings(bad), log)
    assert words in message
    assert str(bad) in message
    assert not [line for line in log.tail() if "Traceback" in line]


def test_empty_or_missing_file_costs_no_process(make_settings: MakeSettings, log: EngineLog, tmp_path: Path) -> None:
    empty = tmp_path / "empty.gguf"
    empty.touch()
    assert "empty (0 bytes)" in failure_of(make_settings(empty), log, BadModelFile)
    assert "does not exist" in failure_of(make_settings(tmp_path / "no.gguf"), log, BadModelFile)
    assert "not a file" in failure_of(make_settings(tmp_path), log, BadModelFile)
    assert log.tail() == []


def test_arg_that_fights_costs_no_process(make_settings: MakeSettings, log: EngineLog, some_gguf: Path) -> None:
    message = failure_of(make_settings(some_gguf, args={"n_ctx": 9}), log, ConfigError)
    assert message == "models.small.args.n_ctx fights the plan: use max_seq_len"


def test_arg_value_the_engine_does_not_know_is_named(
    make_settings: MakeSettings, log: EngineLog, some_gguf: Path
) -> None:
    message = failure_of(make_settings(some_gguf, args={"numa": "sideways"}), log)
    assert "numa cannot be 'sideways': it is one of disabled, distribute" in message


def test_cpu_without_avx2_costs_no_process(
    make_settings: MakeSettings, log: EngineLog, some_gguf: Path, tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags : sse4_2 avx\n")
    with pytest.raises(EngineFailed, match="AVX2"):
        uvloop.run(EngineProcess(make_settings(some_gguf), log, cpuinfo=cpuinfo).start())
    assert log.tail() == []


@pytest.mark.engine
def test_load_deadline_ends_the_child(make_settings: MakeSettings, smollm2_path: Path, log: EngineLog) -> None:
    message = failure_of(make_settings(smollm2_path, load_timeout_s=0.001), log)
    assert "not ready after 0.001 s (load_timeout_s)" in message


@pytest.mark.engine
def test_cancelled_start_leaves_no_child(make_settings: MakeSettings, smollm2_path: Path, log: EngineLog) -> None:
    async def scenario() -> None:
        process = EngineProcess(make_settings(smollm2_path), log)
        starting = asyncio.create_task(process.start())
        async for line in log.follow():
            if "loading model" in line:
                break
        starting.cancel()
        await asyncio.wait({starting})
        assert starting.cancelled()
        assert process.state == "exited"
        assert not Path(f"/proc/{process.pid}").exists()

    uvloop.run(scenario())


@pytest.mark.engine
def test_killed_child_tells_the_signal(make_settings: MakeSettings, smollm2_path: Path, log: EngineLog) -> None:
    async def scenario() -> None:
        process = EngineProcess(make_settings(smollm2_path), log)
        await process.start()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        assert await process.wait_exit() == "killed by signal 9 (out of memory or kill)"
        assert log.tail(1) == ["laya: engine ended: killed by signal 9 (out of memory or kill)"]

    uvloop.run(scenario())


@pytest.mark.engine
def test_child_is_spawned_from_the_main_thread_only(
    make_settings: MakeSettings, smollm2_path: Path, log: EngineLog
) -> None:
    async def scenario() -> None:
        process = EngineProcess(make_settings(smollm2_path), log)
        with pytest.raises(AssertionError, match="thread that lasts"):
            await asyncio.to_thread(asyncio.run, process.start())

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("returncode", "said", "words"),
    [
        (0, None, "exited with 0"),
        (1, "no such thing", "exited with 1: no such thing"),
        (-9, "an old error", "killed by signal 9 (out of memory or kill)"),
        (-11, None, "killed by signal 11 (a fault in the engine)"),
        (-6, "GGML_ASSERT(x)", "killed by signal 6 (the engine gave up): GGML_ASSERT(x)"),
        (-35, None, "killed by signal 35 (Real-time signal 1)"),
    ],
)
def test_exit_words(returncode: int, said: str | None, words: str) -> None:
    assert exit_words(returncode, said) == words
