"""Texts that are only counted: how much of them an engine is given at a time, and that no plan is blamed for them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from laya.bench.stub_gateway import stub_plan
from laya.engines.ceiling import LimitHit
from laya.engines.hooks import Ending
from laya.errors import InvalidRequest
from laya.gateway.body_errors import ALL_MEMBERS_LIMIT, MEMBERS_LIMIT
from laya.gateway.counting import LEAST_BYTES, SMALL_BYTES, Counting, counted_bytes_most
from laya.types import MIB, DevicePlan

from .front import CHAT, chat, front, request

pytestmark = pytest.mark.anyio
LARGE = LEAST_BYTES // 2


class Reader:
    """Reads texts until `end`."""

    def __init__(self) -> None:
        self.reads: list[asyncio.Future[tuple[int, bytes]]] = []

    async def fetch(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        self.reads.append(asyncio.get_running_loop().create_future())
        return await self.reads[-1]


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_no_more_is_read_at_once_than_is_planned_for_whoever_left() -> None:
    reader = Reader()
    counting = Counting(reader.fetch)
    asked = [asyncio.ensure_future(counting.ask("/tokenize", b"", LARGE)) for _ in range(4)]
    await turns()
    assert len(reader.reads) == 2
    asked[0].cancel()
    asked[2].cancel()
    await turns()
    assert len(reader.reads) == 2  # the engine reads on for the one that left
    await asyncio.wait_for(_small(counting, reader), 5)  # it waits for nobody
    reader.reads[0].set_result((200, b""))
    await turns()
    assert len(reader.reads) == 4
    for read in (reader.reads[1], reader.reads[3]):
        read.set_result((200, b"read"))
    assert await asyncio.gather(asked[1], asked[3]) == [(200, b"read")] * 2
    assert not counting.may_have_killed


async def _small(counting: Counting, reader: Reader) -> None:
    asked = asyncio.ensure_future(counting.ask("/tokenize", b"", SMALL_BYTES))
    await turns()
    reader.reads[2].set_result((200, b""))
    await asked
    assert counting.may_have_killed  # what the large ones do


async def test_an_end_under_a_large_text_is_known_for_it() -> None:
    reader = Reader()
    counting = Counting(reader.fetch)
    for n_bytes, may_have_killed in ((SMALL_BYTES, False), (LARGE, True)):
        asked = asyncio.ensure_future(counting.ask("/tokenize", b"", n_bytes))
        await turns()
        reader.reads[-1].set_exception(ConnectionResetError())
        with pytest.raises(ConnectionResetError):
            await asked
        assert counting.may_have_killed == may_have_killed


def test_the_most_follows_from_what_the_ceiling_leaves_and_from_the_window() -> None:
    plan = stub_plan(1)
    device = DevicePlan(device="cpu", budget_bytes=64 << 30, terms={}, total_bytes=560 * MIB)
    plan.devices[:] = [device]
    assert counted_bytes_most(plan) == 44 * MIB // 160
    assert counted_bytes_most(plan, memory_limit_bytes=560 * MIB) == LEAST_BYTES
    plan.devices[:] = []  # of a server elsewhere
    assert counted_bytes_most(plan) == LEAST_BYTES
    with pytest.raises(InvalidRequest, match=f"The text has 9999999 bytes; .* at most {LEAST_BYTES} "):
        Counting(Reader().fetch).check(9_999_999, "The text")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/tokenize", {"content": "q z " * 40_000}),
        ("/tokenize", {"content": "q z " * 15_000, "with_pieces": True}),
        ("/tokenize", {"messages": [{"role": "user", "content": "q z " * 40_000}]}),
        ("/detokenize", {"tokens": [1] * 140_000}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "é😀" * 40_000}]}),
        ("/v1/responses/input_tokens", {"input": "é😀" * 40_000}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "q z " * 40_000}]}),
        ("/v1/completions", {"prompt": "q z " * 40_000}),
    ],
)
async def test_larger_texts_are_refused_on_every_way_to_the_tokenizer(
    tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    async with front(tmp_path) as gate:
        answer = await gate.ask(request({"model": "stub"} | fields, path))
        assert answer.status == 400 and "of one request into tokens" in str(answer.json)
        assert gate.engine.n_counts == 0 and gate.engine.calls == []


async def test_images_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "eyes.gguf").touch()
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 2 * LEAST_BYTES}}
    async with front(tmp_path, model={"mmproj": str(tmp_path / "eyes.gguf")}) as gate:
        gate.engine.prompt_tokens = 5000
        content = [{"type": "text", "text": "What is it?"}, image]
        answer = await gate.ask(chat(messages=[{"role": "user", "content": content}], max_tokens=8000))
        assert (answer.status, gate.engine.n_counts) == (200, 1)


async def test_engines_are_not_sent_what_they_read_nothing_of(tmp_path: Path) -> None:
    unread = {"metadata": {"a": "b"}, "safety_identifier": "me", "store": True}
    async with front(tmp_path) as gate:
        counted: list[Any] = []

        def count(body: Any) -> int:
            counted.append(body)
            return 5000

        gate.engine.count_of = count
        answer = await gate.ask(chat(max_tokens=8000, logit_bias={"5": 1}, **unread))
        assert answer.status == 200
        assert not (unread.keys() | {"logit_bias"}) & counted[0].keys()
        assert not unread.keys() & gate.engine.bodies[0].keys() and "logit_bias" in gate.engine.bodies[0]


@pytest.mark.parametrize("is_same", [False, True])
@pytest.mark.parametrize("n_over", [0, 1])
@pytest.mark.parametrize("where", ["logit_bias", "metadata", "chat_template_kwargs"])
async def test_objects_have_a_limit_of_members(tmp_path: Path, where: str, n_over: int, is_same: bool) -> None:
    names = ["1" if is_same else str(index) for index in range(MEMBERS_LIMIT + n_over)]
    members = ",".join(f'"{name}" : 1' for name in names)
    body = json.dumps(CHAT)[:-1] + f', "{where}": {{"a": 0}}}}'
    body = body.replace('{"a": 0}', "{" + members + "}")
    async with front(tmp_path) as gate:
        answer = await gate.ask(request(body.encode()))
        assert answer.status == (400 if n_over else 200)
        assert not n_over or f"one object takes {MEMBERS_LIMIT}" in answer.error["message"]


async def test_all_objects_together_have_a_limit_of_members_too(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        for n_objects, status in ((16, 200), (17, 400)):
            objects = [{f'{index}"\\': 1 for index in range(MEMBERS_LIMIT - 8)}] * n_objects
            answer = await gate.ask(chat(metadata={"a": objects}))
            assert answer.status == status
        assert f"more than {ALL_MEMBERS_LIMIT} members in all" in answer.error["message"]
        asked = chat(messages=[{"role": "user", "content": '"a": "b\\": ' * ALL_MEMBERS_LIMIT}])
        assert "tokens" in (await gate.ask(asked)).error["message"]


async def test_texts_with_many_colons_are_no_objects(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        answer = await gate.ask(chat(messages=[{"role": "user", "content": '{"a": 1}' * 2 * MEMBERS_LIMIT}]))
        assert answer.status == 200


async def test_a_death_under_a_large_text_teaches_nothing(tmp_path: Path) -> None:
    hit = LimitHit(limit_bytes=MIB, peak_bytes=MIB, by_kernel=True)
    learned: list[bool] = []
    async with front(tmp_path) as gate:
        fleet, endpoint = gate.gateway.fleet, gate.endpoint
        fleet.loading.learn = lambda *args, was_killed: learned.append(was_killed)
        assert endpoint.pool is not None
        reader = Reader()
        counting = endpoint.pool.counting = Counting(reader.fetch)
        asked = asyncio.ensure_future(counting.ask("/tokenize", b"", LARGE))
        await turns()
        for _ in range(2):
            fleet._ended(endpoint, Ending(peak_bytes=MIB, limit_hit=hit))
        assert learned == []
        fleet._outgrown.check(endpoint.name)
        reader.reads[0].set_result((200, b""))
        await asked
        fleet._ended(endpoint, Ending(peak_bytes=MIB, limit_hit=hit))
        await asyncio.gather(*fleet._tasks)
        assert learned == [True]
