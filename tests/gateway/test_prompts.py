"""A list of prompts: as many run at once as have a place, and between two turns others are let in."""

from __future__ import annotations

import asyncio
import base64
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from laya.errors import QueueTimeout
from laya.gateway.metering import used_tokens

from .front import chat, front, request, until
from .scripted_engine import DONE, STREAM_HEAD, Call, chunk, event, hello, whole
from .test_relay import events_of

pytestmark = pytest.mark.anyio


def completion(prompts: list[Any], **fields: Any) -> bytes:
    return request({"model": "stub", "prompt": prompts} | fields, "/v1/completions")


async def says_prompts(call: Call) -> None:
    """Answers each prompt with itself, as llama.cpp does: under its index in the list, with usage of its own."""
    if not call.path.startswith("/v1/completions"):
        await hello(call)
        return
    given = call.json["prompt"]
    prompts = given if isinstance(given, list) else [given]
    n = call.json.get("n", 1)
    call.write(STREAM_HEAD)
    figures = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    for index in range(len(prompts) * n):
        for text, reason in ((f"<{prompts[index // n]}", None), (">", "stop")):
            choice = {"index": index, "text": text, "finish_reason": reason}
            call.write(chunk(event({"id": f"cmpl-{len(call.body)}", "choices": [choice]}, chat=False)))
        call.write(chunk(event({"choices": [], "usage": figures}, chat=False)))
    call.write(chunk(DONE) + b"0\r\n\r\n")


PROMPTS = ["a", "bb", "ccc", "dddd", "eeeee"]
USAGE = {
    "prompt_tokens": 15,
    "completion_tokens": 10,
    "total_tokens": 25,
    "prompt_tokens_details": {"cached_tokens": 0},
}


def prompts_asked(gate: Any) -> list[Any]:
    return [body["prompt"] for body in gate.engine.bodies if "prompt" in body]


@pytest.mark.parametrize("cancels_whole", [False, True])
async def test_whole_answer_has_every_prompt_in_its_order(tmp_path: Path, cancels_whole: bool) -> None:
    async with front(tmp_path, says_prompts, cancels_whole=cancels_whole, max_num_seqs=2) as gate:
        answer = await gate.ask(completion(PROMPTS))
        assert [choice["text"] for choice in answer.json["choices"]] == [f"<{prompt}>" for prompt in PROMPTS]
        assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2, 3, 4]
        assert answer.json["usage"] == USAGE
        assert prompts_asked(gate) == [["a", "bb"], ["ccc", "dddd"], ["eeeee"]]
        assert await gate.settled() == {"served": 1}


async def test_stream_is_one_answer_under_one_id(tmp_path: Path) -> None:
    async with front(tmp_path, says_prompts, max_num_seqs=2) as gate:
        answer = await gate.ask(completion(PROMPTS, stream=True, stream_options={"include_usage": True}))
        *events, last, done = events_of(answer)
        assert done == "[DONE]"
        assert last["usage"] == USAGE
        assert len({each["id"] for each in (*events, last)}) == 1
        texts = [""] * 5
        for choice in (choice for each in events for choice in each["choices"]):
            texts[choice["index"]] += choice["text"]
        assert texts == [f"<{prompt}>" for prompt in PROMPTS]
        assert await gate.settled() == {"served": 1}


async def test_choices_of_a_prompt_stay_together(tmp_path: Path) -> None:
    async with front(tmp_path, says_prompts, max_num_seqs=3) as gate:
        answer = await gate.ask(completion(PROMPTS[:2], n=2))
        assert [choice["text"] for choice in answer.json["choices"]] == ["<a>", "<a>", "<bb>", "<bb>"]
        assert prompts_asked(gate) == [["a"], ["bb"]]
        assert answer.json["usage"]["prompt_tokens"] == 6
        assert answer.json["usage"]["completion_tokens"] == 8


async def reads_texts(call: Call) -> None:
    """Tells of each text how long it is, as llama.cpp does."""
    texts = call.json.get("input") or call.json["documents"]
    n_tokens = sum(map(len, texts))
    answer = {"model": "its own", "object": "list", "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens}}
    if call.path.startswith("/v1/rerank"):
        assert "top_n" not in call.json
        found = [{"index": index, "relevance_score": len(text)} for index, text in enumerate(texts)]
        call.write(whole(answer | {"results": sorted(found, key=lambda each: -each["relevance_score"])}))
    else:
        data = [{"object": "embedding", "index": index, "embedding": [len(text)]} for index, text in enumerate(texts)]
        call.write(whole(answer | {"data": data}))


TEXTS = ["x" * n for n in (3000, 900, 200, 5000, 1, 2, 3, 4000, 4)]


async def test_texts_to_embed_go_a_few_at_a_time(tmp_path: Path) -> None:
    async with front(tmp_path, reads_texts, model={"task": "embed"}, planned={"n_ubatch": 100_000}) as gate:
        answer = (await gate.ask(request({"model": "stub", "input": TEXTS}, "/v1/embeddings"))).json
        assert [each["embedding"] for each in answer["data"]] == [[len(text)] for text in TEXTS]
        assert [each["index"] for each in answer["data"]] == list(range(len(TEXTS)))
        assert answer["usage"] == {"prompt_tokens": sum(map(len, TEXTS)), "total_tokens": sum(map(len, TEXTS))}
        asked = [body["input"] for body in gate.engine.bodies]
        assert [text for texts in asked for text in texts] == TEXTS
        assert [len(texts) for texts in asked] == [2, 1, 1, 3, 2]
        assert await gate.settled() == {"served": 1}


async def test_many_short_texts_are_no_short_turn(tmp_path: Path) -> None:
    async with front(tmp_path, reads_texts, model={"task": "embed"}, planned={"n_ubatch": 100_000}) as gate:
        answer = await gate.ask(request({"model": "stub", "input": ["x"] * 200}, "/v1/embeddings"))
        assert len(answer.json["data"]) == 200
        assert [len(body["input"]) for body in gate.engine.bodies] == [64, 64, 64, 8]


@pytest.mark.parametrize("given", ["a", ["a"], [1, 2], ["a", "b"], ["x" * 5000, "b"]])
async def test_embeddings_are_cut_to_the_dimensions_that_were_asked(tmp_path: Path, given: Any) -> None:
    async def script(call: Call) -> None:
        texts = call.json["input"]
        n_texts = len(texts) if isinstance(texts, list) and not isinstance(texts[0], int) else 1
        vector: Any = [3.0, 4.0, 5.0]
        if call.json.get("encoding_format") == "base64":
            vector = base64.b64encode(array("f", vector)).decode()
        data = [{"index": index, "embedding": vector, "object": "embedding"} for index in range(n_texts)]
        call.write(whole({"object": "list", "data": data, "usage": {"prompt_tokens": 1, "total_tokens": 1}}))

    async with front(tmp_path, script, model={"task": "embed"}, planned={"n_ubatch": 100_000}) as gate:
        asked = {"model": "stub", "input": given, "dimensions": 2}
        found = (await gate.ask(request(asked, "/v1/embeddings"))).json["data"]
        assert [each["embedding"] for each in found] == [pytest.approx([0.6, 0.8])] * len(found)
        packed = (await gate.ask(request(asked | {"encoding_format": "base64"}, "/v1/embeddings"))).json["data"]
        assert [list(array("f", base64.b64decode(each["embedding"]))) for each in packed] == [
            pytest.approx([0.6, 0.8])
        ] * len(found)
        wrong = await gate.ask(request(asked | {"dimensions": 4}, "/v1/embeddings"))
        assert (wrong.status, wrong.error["param"]) == (400, "dimensions")
        assert "have 3" in wrong.error["message"]
        assert await gate.settled() == {"served": 2, "refused": 1}


@pytest.mark.parametrize(
    "said", [{"data": [{"index": 0}]}, {"other": []}, {"data": [{"index": 0, "embedding": "abc"}]}]
)
async def test_answer_that_is_no_list_of_embeddings_is_the_engines_fault(tmp_path: Path, said: Any) -> None:
    async def script(call: Call) -> None:
        call.write(whole(said))

    async with front(tmp_path, script, model={"task": "embed"}) as gate:
        answer = await gate.ask(request({"model": "stub", "input": "a", "dimensions": 2}, "/v1/embeddings"))
        assert answer.error["code"] == "engine_crashed"
        assert await gate.settled() == {"failed": 1}


async def test_answers_that_wait_for_later_turns_are_held_within_the_limit_of_bodies(tmp_path: Path) -> None:
    async with front(tmp_path, reads_texts, model={"task": "embed"}, planned={"n_ubatch": 100_000}) as gate:
        asked = request({"model": "stub", "input": ["x"] * 200}, "/v1/embeddings")
        bodies = gate.limits.bodies
        assert (await gate.ask(asked)).status == 200
        bodies.limit_bytes = 5000  # one turn's answer, not two
        refused = await gate.ask(asked)
        assert (refused.status, refused.error["code"]) == (503, "server_busy")
        assert len(gate.engine.bodies) == 4 + 2
        assert await gate.settled() == {"served": 1, "refused": 1}
        assert bodies.held_bytes == 0


async def test_documents_to_rank_are_ranked_together(tmp_path: Path) -> None:
    async with front(tmp_path, reads_texts, model={"task": "rerank"}, planned={"n_ubatch": 100_000}) as gate:
        body = {"model": "stub", "query": "q", "documents": TEXTS, "top_n": 3}
        answer = (await gate.ask(request(body, "/v1/rerank"))).json
        assert [each["index"] for each in answer["results"]] == [3, 7, 0]
        assert len(gate.engine.bodies) > 1 and {body["query"] for body in gate.engine.bodies} == {"q"}


async def test_list_of_texts_gives_way_and_fails_as_a_whole(tmp_path: Path) -> None:
    turns: list[Any] = []
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        turns.append(call.json["input"])
        await go_on.wait()
        if len(turns) >= 4:  # also when it is asked once more
            call.reset()
        else:
            await reads_texts(call)

    async with front(tmp_path, script, model={"task": "embed"}, max_num_seqs=1, planned={"n_ubatch": 10**6}) as gate:
        long = asyncio.ensure_future(gate.ask(request({"model": "stub", "input": TEXTS}, "/v1/embeddings")))
        await until(lambda: turns)
        other = asyncio.ensure_future(gate.ask(request({"model": "stub", "input": ["y"]}, "/v1/embeddings")))
        await until(lambda: len(gate.endpoint.queue) == 1)
        go_on.set()
        assert (await other).json["data"][0]["embedding"] == [1]
        assert turns[1] == ["y"]  # after one turn of the list
        assert (await long).error["code"] == "engine_crashed"
        assert await gate.settled() == {"served": 1, "failed": 1}


async def test_others_are_let_in_between_the_prompts(tmp_path: Path) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def script(call: Call) -> None:
        if call.path.startswith("/v1/completions"):
            begun.set()
            await go_on.wait()
        await says_prompts(call)

    async with front(tmp_path, script, max_num_seqs=1) as gate:
        long = asyncio.ensure_future(gate.ask(completion(["p"] * 2048)))
        await begun.wait()
        other = asyncio.ensure_future(gate.ask(chat()))
        await until(lambda: len(gate.endpoint.queue) == 1)
        go_on.set()
        assert (await other).status == 200
        assert len(prompts_asked(gate)) < 2048
        assert len((await long).json["choices"]) == 2048
        assert await gate.settled() == {"served": 2}


async def test_client_that_leaves_between_two_turns_leaves_nothing(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def script(call: Call) -> None:
        if not call.path.startswith("/v1/completions"):
            await release.wait()
        await says_prompts(call)

    async with front(tmp_path, script, max_num_seqs=1) as gate:
        gate.endpoint.hold("tests", "so that both wait")
        client = await gate.client()
        client.send(completion(PROMPTS, stream=True))
        await until(lambda: len(gate.endpoint.queue) == 1)
        other = asyncio.ensure_future(gate.ask(chat()))
        await until(lambda: len(gate.endpoint.queue) == 2)
        gate.endpoint.hold("tests", None)
        gate.gateway.dispatcher.pump(gate.endpoint)
        await until(lambda: prompts_asked(gate) and len(gate.endpoint.queue) == 1 and gate.endpoint.is_running)
        await until(lambda: any("messages" in body for body in gate.engine.bodies))
        client.abort()
        await until(lambda: not gate.endpoint.queue)
        release.set()
        assert (await other).status == 200
        assert await gate.settled() == {"cancelled": 1, "served": 1}


async def test_engine_that_fails_in_a_later_turn_fails_the_request(tmp_path: Path) -> None:
    async def script(call: Call) -> None:
        if call.json["prompt"] != ["a"]:
            call.reset()
            return
        await says_prompts(call)

    async with front(tmp_path, script, max_num_seqs=1) as gate:
        answer = await gate.ask(completion(PROMPTS))
        assert answer.error["code"] == "engine_crashed"
        broken = await gate.ask_broken(completion(PROMPTS, stream=True))
        assert b"<a" in broken.body
        assert b"engine_crashed" in broken.body
        assert await gate.settled() == {"failed": 2}


async def test_another_replica_begins_with_the_first_prompt(tmp_path: Path) -> None:
    async with front(tmp_path, says_prompts, max_num_seqs=1, model={"replicas": 2}) as gate:
        failing: list[Any] = []

        async def fails_once(call: Call) -> None:
            if call.json["prompt"] == ["ccc"] and not failing:
                failing.append(call)
                call.abort()
                return
            await says_prompts(call)

        for engine in gate.engines:
            engine.script = fails_once
        answer = await gate.ask(completion(PROMPTS))
        assert [choice["text"] for choice in answer.json["choices"]] == [f"<{prompt}>" for prompt in PROMPTS]
        assert answer.json["usage"] == USAGE
        assert failing


async def test_turn_is_as_long_as_the_pool_of_tokens_allows(tmp_path: Path) -> None:
    planned = {"kv_unified": True, "kv_pool_tokens": 300, "max_seq_len": 256, "n_batch": 32}
    async with front(tmp_path, says_prompts, max_num_seqs=4, planned=planned) as gate:
        answer = await gate.ask(completion(PROMPTS[:3], max_tokens=150))
        assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2]
        assert prompts_asked(gate) == [["a"], ["bb"], ["ccc"]]
        client = await gate.client()
        client.send(completion(PROMPTS[:3]))
        head = (await client.reader.readuntil(b"\r\n\r\n")).lower()
        assert head.count(b"x-laya-max-tokens") == 1  # not once for each turn


@pytest.mark.parametrize("why", [None, QueueTimeout("no room", 1.0)])
async def test_wait_between_two_turns_has_a_patience_of_its_own(tmp_path: Path, why: QueueTimeout | None) -> None:
    async with front(tmp_path, says_prompts, max_num_seqs=2, model={"queue_timeout_s": 60.0}) as gate:
        seen: list[Any] = []

        async def script(call: Call) -> None:
            gate.endpoint.hold("tests", "so that the second turn waits")
            seen.extend(gate.endpoint.live)
            seen[0].arrived_s -= 1000.0  # it takes long
            await says_prompts(call)

        gate.engine.script = script
        answer = asyncio.ensure_future(gate.ask(completion(PROMPTS)))
        await until(lambda: len(gate.endpoint.queue) == 1)
        gate.endpoint.no_room = why
        gate.endpoint.expire(time.monotonic() + 50.0)
        assert len(gate.endpoint.queue) == 1
        gate.endpoint.expire(time.monotonic() + 61.0)
        error = (await answer).error
        assert error["message"].startswith("no room" if why else "Waited 61 s")
        assert await gate.settled() == {"refused": 1}
        assert used_tokens(seen[0], 999) == 10  # the first turn's, of which a key is charged
