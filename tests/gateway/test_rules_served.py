"""`routing` of the config at work in the gateway: rules and pools decide, the engine hears its own model's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from laya.config.routing import RoutingConfig

from .front import CHAT, Front, front, request
from .keyed import chat_as, grant, keep
from .test_protocol import assert_error

pytestmark = pytest.mark.anyio

ROUTING = msgspec.convert(
    {
        "pools": {"small": ["stub"]},
        "rules": [
            {"model": "auto", "headers": {"x-team": "res*"}, "to": "small"},
            {"model": "auto", "priority": "bulk", "to": "stub"},
            {"model": "gpt-*", "key": "tests", "max_prompt_tokens": 500, "to": "stub"},
        ],
    },
    RoutingConfig,
)


def asks(model: str, *headers: str, **fields: Any) -> bytes:
    return request(CHAT | {"model": model} | fields, headers=headers)


def models_asked(gate: Front) -> list[str]:
    return [body["model"] for body in gate.engine.bodies]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cancels_whole", [False, True])
async def test_rules_choose_the_model_and_the_engine_hears_its_own_name(
    tmp_path: Path, stream: bool, cancels_whole: bool
) -> None:
    async with front(tmp_path, routing=ROUTING, cancels_whole=cancels_whole) as gate:
        client = await gate.client()
        for data in (
            asks("auto", "X-Team: research", stream=stream),
            asks("auto", "x-laya-priority: bulk", stream=stream),
            asks("gpt-4o", stream=stream),
            asks("stub", stream=stream),
            asks("small", stream=stream),
        ):
            assert (await client.ask(data)).status == 200
        assert models_asked(gate) == ["stub"] * 5
        assert await gate.settled() == {"served": 5}


async def test_rules_see_the_priority_that_a_request_has(tmp_path: Path) -> None:
    """Its key's own where it asks for none, and never more than its key may."""
    keep(tmp_path, grant("batch", max_priority="bulk"), grant("other"))
    async with front(tmp_path, routing=ROUTING) as gate:
        for headers in ((), ("x-laya-priority: interactive",)):
            assert (await gate.ask(chat_as("batch", *headers, model="auto"))).status == 200
        assert (await gate.ask(chat_as("other", model="auto"))).status == 400


async def test_auto_that_no_rule_takes_says_so(tmp_path: Path) -> None:
    async with front(tmp_path, routing=ROUTING) as gate:
        for data in (asks("auto"), asks("auto", "x-team: sales"), asks("auto", "x-laya-priority: system")):
            answer = await gate.ask(data)
            assert answer.status == 400 and "auto" in answer.error["message"]
        long = [{"role": "user", "content": "x" * 600}]
        assert_error(await gate.ask(asks("gpt-4o", messages=long)), 404, "model_not_found")
        assert await gate.settled() == {"refused": 4}


async def test_pools_need_no_rules_and_may_be_named_in_the_header(tmp_path: Path) -> None:
    routing = msgspec.structs.replace(ROUTING, rules=[])
    async with front(tmp_path, routing=routing, cancels_whole=True) as gate:
        assert (await gate.ask(asks("small"))).status == 200
        assert (await gate.ask(asks("whatever", "x-laya-model: small"))).status == 200
        assert models_asked(gate) == ["stub", "stub"]


async def test_priority_that_is_none_is_refused_with_those_there_are(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        answer = await gate.ask(asks("stub", "x-laya-priority: low"))
        assert answer.status == 400
        assert answer.error["message"] == (
            "'x-laya-priority' is 'low': expected system or interactive or default or bulk."
        )
        assert (await gate.ask(asks("stub", "x-laya-priority: bulk"))).status == 200
