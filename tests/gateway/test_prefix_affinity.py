"""A prompt's beginning finds the engine that has it: the same hashes on both ways of a request."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from laya.gateway import plain
from laya.gateway.body import parse_body
from laya.routing import MOST_PREFIX_BYTES, RequestRouter, prefix_blocks
from laya.types import EndpointKind

CHAT = EndpointKind.CHAT
NATIVE = pytest.mark.skipif(not plain.NATIVE, reason="there is no native core here")
MOST_BODY_BYTES = 65536


def body(messages: list[Any], **members: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages} | members).encode()


def turns(name: str, n_turns: int) -> list[dict[str, str]]:
    """A conversation's messages up to its n-th question."""
    messages = [{"role": "system", "content": "You are brief."}]
    for turn in range(n_turns):
        messages += [{"role": "assistant", "content": f"answer {turn} to {name}"}] * (turn > 0)
        messages += [{"role": "user", "content": f"{name} asks question {turn}"}]
    return messages


def blocks_of(data: bytes, kind: EndpointKind = CHAT) -> bytes:
    return parse_body(kind, data).prefix_blocks()


def two_engines(policy: Any = "auto") -> RequestRouter:
    router = RequestRouter()
    router.set_model("m", [router.add_endpoint(name=f"m#{number}") for number in range(2)], ["alias"], policy)
    return router


@NATIVE
@pytest.mark.parametrize("end", ["]", " \n\t]"])
@pytest.mark.parametrize("n_bytes", [1, 300, MOST_PREFIX_BYTES - 60])
def test_both_ways_of_a_request_make_the_same_blocks(end: str, n_bytes: int) -> None:
    messages = [*turns("a", 2), {"role": "user", "content": "x{}," * (n_bytes // 4)}]
    data = body(messages).replace(b"]}", end.encode() + b"}")
    read = plain.read_plain_body(data)
    assert read is not None
    assert plain.PlainBody(data, read).prefix_blocks() == blocks_of(data) != b""


def test_blocks_of_a_turn_are_those_its_next_turn_begins_with() -> None:
    asked, next_asked = blocks_of(body(turns("a", 2))), blocks_of(body(turns("a", 3)))
    ends = [next_asked[at : at + 8] for at in range(0, len(next_asked), 8)]
    assert asked[-8:] in ends, "the whole of a turn's prompt is a block of the next"
    assert asked[-8:] not in blocks_of(body(turns("b", 3)))


def test_tools_come_first_since_templates_render_them_first() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    with_tools = [blocks_of(body(turns("a", n), tools=[tool])) for n in (1, 2)]
    assert with_tools[0][:8] != blocks_of(body(turns("a", 1)))[:8]
    assert with_tools[0][-8:] in with_tools[1]


def test_a_completion_has_the_blocks_of_its_prompt_and_an_embedding_none() -> None:
    short, long = (json.dumps({"model": "m", "prompt": "word " * n}).encode() for n in (40, 80))
    first, second = blocks_of(short, EndpointKind.COMPLETION), blocks_of(long, EndpointKind.COMPLETION)
    assert first
    assert second.startswith(first)
    assert blocks_of(b'{"model":"m","input":"x"}', EndpointKind.EMBEDDING) == b""


def test_no_more_than_the_first_64_kib_of_a_prompt_are_hashed() -> None:
    small, large = (body([{"role": "user", "content": "x" * n}]) for n in (MOST_PREFIX_BYTES, 3 << 20))
    assert blocks_of(large) == blocks_of(small)
    assert len(blocks_of(large)) == len(prefix_blocks(b"x" * MOST_PREFIX_BYTES))


@pytest.mark.parametrize("policy", ["auto", "prefix", "hash", "session", "least_tokens", "weighted", "round_robin"])
def test_only_several_engines_that_are_chosen_by_prompt_have_it_hashed(policy: Any) -> None:
    router = two_engines(policy)
    router.set_model("alone", [router.add_endpoint()], policy=policy)
    router.set_pools({"pool": ["m", "alone"]})
    of_m = {"m", "alias"} if policy in ("auto", "prefix", "hash") else set()
    assert router.names_by_prompt == of_m | {"pool"}


def http(data: bytes) -> bytes:
    return b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(data) + data


@NATIVE
def test_a_conversation_keeps_its_engine_whichever_way_its_turns_take() -> None:
    router = two_engines()
    lane = plain.lane_of(router)
    assert lane is not None
    for endpoint in range(2):
        lane.open(endpoint, "m", b"content-length: ", 16, 8192)
    homes: dict[str, set[int]] = {}
    for n_turns in range(1, 7):
        for name in "abcdefgh":
            data = body(turns(name, n_turns))
            if (n_turns + ord(name)) % 2:
                taken = lane.take(http(data), MOST_BODY_BYTES)
                assert taken is not None
                endpoint = taken[0]
                router.settle(endpoint, taken[2])
            else:
                endpoint = router.choose("m", prefix_blocks=blocks_of(data))
                router.settle(endpoint, 0)
            homes.setdefault(name, set()).add(endpoint)
    assert all(len(endpoints) == 1 for endpoints in homes.values()), homes
    assert set().union(*homes.values()) == {0, 1}, "and new conversations are spread"


@NATIVE
def test_lane_hashes_no_prompt_for_one_engine() -> None:
    router = RequestRouter()
    endpoint = router.add_endpoint()
    router.set_model("m", [endpoint])
    lane = plain.lane_of(router)
    assert lane is not None
    lane.open(endpoint, "m", b"content-length: ", 16, 8192)
    data = body(turns("a", 1))
    assert lane.take(http(data), MOST_BODY_BYTES) is not None
    assert router.table.homes("m", None, blocks_of(data)) == (-1, -1, 0)


def test_blocks_are_made_of_what_came_and_survive_nothing_else() -> None:
    """Members beside the messages change nothing, and another order of members neither."""
    one = msgspec.json.encode({"model": "m", "messages": turns("a", 2), "temperature": 0})
    other = msgspec.json.encode({"seed": 1, "messages": turns("a", 2), "model": "m", "stream": True})
    assert blocks_of(one) == blocks_of(other)
