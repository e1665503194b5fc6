"""Keys are kept apart in an engine's sequences: which one is named, what is reused; on the engine, what was cached."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from laya.gateway.plain import parse
from laya.gateway.slots import Slots
from laya.types import EndpointKind

from .front import Front, front, until
from .keyed import chat_as, grant, keep
from .live import prompt_of
from .scripted_engine import Call, hello

COLD = {"cache_prompt": False}


def turn(key: object, *texts: str, n: int = 1) -> Any:
    """A request as slots see it: a conversation of these messages."""
    messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]
    body = json.dumps({"model": "m", "messages": messages, "n": n}).encode()
    parsed = parse(EndpointKind.CHAT, body)
    return SimpleNamespace(key=key, parsed=parsed, slot=None, sent_s=1.0, outcome=None, upstream_body=b"x")


def done(request: Any) -> None:
    request.outcome = "served"
    request.slot.release(request)


def ask(slots: Slots, key: object, *texts: str) -> dict[str, Any]:
    """A request from its sending to its end: what was set for it."""
    request = turn(key, *texts)
    fields = slots.fields_for(request, [request])
    if request.slot is not None:
        done(request)
    return fields


A, B, LONG = "ann", "bob", "tell me of the sea " * 20


def test_a_key_alone_leaves_the_choice_to_the_engine() -> None:
    slots = Slots(2, keeps_prompts=False)
    assert [ask(slots, A, f"{n}") for n in range(3)] == [{}, {}, {}]


def test_from_the_second_key_on_each_reuses_its_own_only() -> None:
    slots = Slots(2, keeps_prompts=False)
    ask(slots, A, LONG)
    assert ask(slots, B, LONG) == {"id_slot": 0} | COLD
    assert ask(slots, B, LONG, "It is wide.", "And deep?") == {"id_slot": 0}  # goes on with its own
    assert ask(slots, A, LONG) == {"id_slot": 1}  # whatever lies there is of the one key that was alone
    assert ask(slots, A, LONG, "Wide.", "Why?") == {"id_slot": 1}
    assert ask(slots, B, LONG) == {"id_slot": 0}
    assert ask(slots, "carl", LONG) == {"id_slot": 1} | COLD  # who was away for longest makes room
    assert ask(slots, A, LONG) == {"id_slot": 0} | COLD


def test_a_request_without_a_key_is_somebody_too() -> None:
    slots = Slots(1, keeps_prompts=False)
    ask(slots, None, LONG)
    assert ask(slots, A, LONG) == {"id_slot": 0} | COLD
    assert ask(slots, None, LONG) == {"id_slot": 0} | COLD


def test_requests_at_once_have_a_sequence_each() -> None:
    slots = Slots(3, keeps_prompts=False)
    ask(slots, A, "x")
    requests = [turn(who, LONG) for who in (B, B, A)]
    taken = [slots.fields_for(each, requests)["id_slot"] for each in requests]
    assert sorted(taken) == [0, 1, 2]
    done(requests[1])
    assert ask(slots, A, "y")["id_slot"] == taken[1]


def test_what_the_engine_placed_itself_is_nobodys() -> None:
    slots = Slots(2, keeps_prompts=False)
    before = turn(A, LONG)
    assert slots.fields_for(before, [before]) == {}
    beside = turn(B, LONG)
    assert slots.fields_for(beside, [before, beside]) == {"id_slot": 0} | COLD  # A's may come to lie there still
    done(beside)
    assert ask(slots, B, LONG) == {"id_slot": 1} | COLD
    assert ask(slots, B, LONG) == {"id_slot": 1}
    several = turn(A, LONG, n=2)
    assert slots.fields_for(several, [several]) == COLD
    assert ask(slots, B, LONG).items() >= COLD.items()


def test_an_engine_that_keeps_prompts_for_all_reuses_nothing() -> None:
    slots = Slots(2, keeps_prompts=True)
    assert ask(slots, A, LONG) == {}
    for who in (B, B, A):
        assert ask(slots, who, LONG).items() >= COLD.items()


def test_a_request_that_is_sent_again_takes_another_sequence() -> None:
    slots = Slots(2, keeps_prompts=False)
    ask(slots, A, "x")
    request = turn(B, LONG)
    slots.fields_for(request, [request])
    request.slot.release(request)
    assert (request.slot, request.upstream_body) == (None, b"")


@pytest.mark.parametrize("seed", range(20))
def test_no_key_ever_reuses_what_another_may_have_left(seed: int) -> None:
    """Against an engine that does what it is told: each sequence holds the key of its last prompt."""
    draw = random.Random(seed)
    slots, holds, live = Slots(3, keeps_prompts=False), [None] * 3, []
    for _ in range(300):
        if len(live) == 3 or (live and draw.random() < 0.4):
            request = live.pop(draw.randrange(len(live)))
            if request.slot is not None:
                done(request)
            continue
        who = draw.choice("abcd")
        request = turn(who, *(f"{draw.randrange(3)} {LONG}",) * draw.choice((1, 3)))
        fields = slots.fields_for(request, [*live, request])
        busy = {each.at for each in live}
        at = fields.get("id_slot")
        if at is None:
            at = draw.choice([number for number in range(3) if number not in busy])
        if at in busy:  # it waits there for another that the engine placed: begin with what that one leaves
            continue
        if fields.get("cache_prompt", True):
            assert holds[at] in (None, who), (fields, holds)
        request.at, holds[at] = at, who
        live.append(request)


# through the gateway
@pytest.mark.anyio
async def test_engine_is_told_once_two_keys_use_it(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("ann"), grant("bob"))
    async with front(tmp_path, has_slots=True, max_num_seqs=2) as gateway:
        for who in ("ann", "ann", "bob", "bob", "ann"):
            assert (await gateway.ask(chat_as(who, cache_prompt=True))).status == 200
        assert _told(gateway) == [(None, True), (None, True), (0, False), (0, True), (1, True)]
        await gateway.settled()


@pytest.mark.anyio
async def test_sharing_that_is_switched_on_is_the_engines_choice(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("ann"), grant("bob"))
    async with front(tmp_path, has_slots=True, server={"share_prompt_cache": True}) as gateway:
        for who in ("ann", "bob"):
            assert (await gateway.ask(chat_as(who))).status == 200
        assert _told(gateway) == [(None, None)] * 2


@pytest.mark.anyio
async def test_a_sequence_is_free_again_however_its_request_ended(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("ann"), grant("bob"))
    never = asyncio.Event()

    async def script(call: Call) -> None:
        if len(gateway.engine.calls) in (2, 3):
            await never.wait()
        await hello(call)

    async with front(tmp_path, has_slots=True, max_num_seqs=2) as gateway:
        gateway.engine.script = script
        await gateway.ask(chat_as("ann"))
        clients = [await gateway.client() for _ in range(2)]
        for n, client in enumerate(clients):
            client.send(chat_as("bob"))
            await until(lambda n=n: len(gateway.engine.calls) == n + 2)  # type: ignore[misc]
            assert _told(gateway)[-1] == (n, False)
        clients[0].close()
        await until(lambda: len(gateway.endpoint.live) == 1)
        assert (await gateway.ask(chat_as("bob"))).status == 200
        assert _told(gateway)[-1] == (0, None)
        clients[1].close()
        await gateway.settled()
        slots = gateway.endpoint.slots
        assert slots is not None and not any(slot.is_taken for slot in slots._slots)


def _told(gateway: Front) -> list[tuple[int | None, bool | None]]:
    return [(body.get("id_slot"), body.get("cache_prompt")) for body in gateway.engine.bodies]


# on the engine
def _serve(start_server: Callable[..., Any], *, shared: bool = False, more: str = "") -> Any:
    entries = "".join(
        f"    - {{name: {name}, role: user, sha256: {sha256(name.encode()).hexdigest()}}}\n" for name in ("ann", "bob")
    )
    admin = f"    - {{name: admin, sha256: {sha256(b'admin').hexdigest()}}}\n"
    return start_server(
        "smollm2",
        config=f"n_threads: 2\nmax_seq_len: 1024\nmax_num_seqs: 2\n{more}"
        f"server:\n  share_prompt_cache: {str(shared).lower()}\n  api_keys:\n{admin}{entries}",
    )


@pytest.fixture(scope="module")
def apart(start_server: Callable[..., Any]) -> Iterator[Any]:
    server = _serve(start_server)
    yield server
    assert server.stop() == 0


def cached(server: Any, key: str, text: str, *more: str, **fields: Any) -> tuple[int, int]:
    """(tokens of the prompt, those of them that the engine had in a cache)."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": each} for n, each in enumerate((text, *more))]
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"model": "smollm2", "messages": messages, "max_tokens": 2, "temperature": 0} | fields,
        headers={"authorization": f"Bearer {key}"}, timeout=120, trust_env=False,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.engine
def test_no_key_finds_anothers_prompt_in_a_cache(apart: Any) -> None:
    """Of the same long prompt a key's own second request is read from the cache, another key's not one token."""
    text = prompt_of(150, "apart")
    n_prompt, first = cached(apart, "ann", text)
    assert n_prompt > 140 and first < 40  # the template's own beginning at most, from the load's check
    assert cached(apart, "ann", text)[1] >= n_prompt - 2
    assert cached(apart, "bob", text)[1] == 0
    assert cached(apart, "bob", text)[1] >= n_prompt - 2
    cached(apart, "ann", text)  # once, as it was not known which sequence was hers while she was alone
    assert cached(apart, "ann", text)[1] >= n_prompt - 2
    assert cached(apart, "bob", text)[1] >= n_prompt - 2
    assert cached(apart, "ann", text, "tree", "More of that.")[1] >= n_prompt - 10
    assert cached(apart, "bob", text, "tree", "More of that.")[1] < n_prompt + 2  # its own turn, not ann's longer one
    assert cached(apart, "admin", text)[1] == 0  # a third key takes the place of who was away for longest
    assert cached(apart, "admin", text, n=2)[1] == 0
    for who in ("ann", "bob", "admin"):
        assert cached(apart, who, text)[1] == 0  # where several choices ran, nobody knows who left what


@pytest.mark.engine
def test_sharing_that_is_switched_on_finds_it(start_server: Callable[..., Any]) -> None:
    server = _serve(start_server, shared=True)
    text = prompt_of(150, "shared")
    n_prompt, _ = cached(server, "ann", text)
    assert cached(server, "bob", text)[1] >= n_prompt - 2
    assert server.stop() == 0


@pytest.mark.engine
def test_a_cache_of_prompts_that_all_share_is_not_read_across_keys(start_server: Callable[..., Any]) -> None:
    server = _serve(start_server, more="prompt_cache: 64MiB\n")
    text, others = prompt_of(150, "kept"), [prompt_of(150, seed) for seed in ("one", "two")]
    n_prompt, _ = cached(server, "ann", text)
    for other in others:  # hers leaves its sequence
        cached(server, "ann", other)
    assert cached(server, "ann", text)[1] >= n_prompt - 2  # and comes back while she is alone
    for who in ("bob", "bob", "ann"):
        assert cached(server, who, text)[1] == 0
    assert server.stop() == 0
