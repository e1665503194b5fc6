"""A request with tools on its way: what the engine is asked for, what the client is told, and who can't do it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laya.types import ModelFile

from .front import Answer, chat, front
from .scripted_engine import DONE, answers, delta, progress, streams, usage, whole

pytestmark = pytest.mark.anyio
TOOLS: Any = [{"type": "function", "function": {"name": "now"}}, {"type": "function", "function": {"name": "then"}}]
NOW: Any = {"type": "function", "function": {"name": "now"}}
CALL = '{"name": "now", "arguments": {}}'


def said(text: str, reason: str = "stop") -> Any:
    pieces = [delta(content=text[at : at + 3]) for at in range(0, len(text), 3)]
    return streams(progress(9, 9), delta(role="assistant", content=None), *pieces, delta(reason), usage(9, 8), DONE)


def chunks_of(answer: Answer) -> list[Any]:
    return [json.loads(part[6:]) for part in answer.body.split(b"\n\n") if part.startswith(b"data: {")]


@pytest.mark.parametrize("cancels_whole", [False, True])
async def test_engine_is_told_of_the_tools_and_held_to_the_schema_of_the_call(
    tmp_path: Path, cancels_whole: bool
) -> None:
    model = {"defaults": {"stop": ["now"], "top_k": 3}}
    async with front(tmp_path, said(CALL), cancels_whole=cancels_whole, model=model) as gate:
        answer = await gate.ask(chat(tools=TOOLS, tool_choice=NOW, logprobs=True, parallel_tool_calls=False))
        asked = gate.engine.bodies[0]
        assert asked["tools"] == TOOLS and asked["tool_choice"] == "none" and asked["stream"] is True
        schema = asked["response_format"]["json_schema"]["schema"]
        assert schema["properties"]["name"] == {"const": "now"}
        assert asked["top_k"] == 3
        assert not asked.keys() & {"stop", "logprobs", "parallel_tool_calls"}
        (choice,) = answer.json["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
        assert answer.json["usage"]["completion_tokens"] == 8
        assert await gate.settled() == {"served": 1}


async def test_a_stream_ends_with_tool_calls_and_usage_only_where_asked(tmp_path: Path) -> None:
    async with front(tmp_path, said(CALL)) as gate:
        for options in (None, {"include_usage": True}):
            answer = await gate.ask(chat(tools=TOOLS, tool_choice=NOW, stream=True, stream_options=options))
            told = chunks_of(answer)
            assert answer.body.endswith(b"data: [DONE]\n\n")
            assert [chunk["usage"]["completion_tokens"] for chunk in told if "usage" in chunk] == [8] * bool(options)
            choices = [choice for chunk in told for choice in chunk["choices"]]
            assert choices[-1]["finish_reason"] == "tool_calls"
            assert b'"content":"' not in answer.body
        assert await gate.settled() == {"served": 2}


async def test_where_streams_are_off_the_one_event_has_the_call(tmp_path: Path) -> None:
    async with front(tmp_path, said(CALL), model={"enable_streaming": False}) as gate:
        (told,) = chunks_of(await gate.ask(chat(tools=TOOLS, tool_choice=NOW, stream=True)))
        (call,) = told["choices"][0]["delta"]["tool_calls"]
        assert call["index"] == 0 and call["function"]["name"] == "now"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_keeps_to_no_schema_is_an_error(tmp_path: Path, stream: bool) -> None:
    async with front(tmp_path, said("It is noon.")) as gate:
        client = await gate.client()
        client.send(chat(tools=TOOLS, tool_choice="required", stream=stream))
        answer = await client.answer_so_far()
        assert b"called no tool" in answer.body and b"engine_crashed" in answer.body
        assert await gate.settled() == {"failed": 1}


async def test_a_template_without_tools_is_refused_with_the_names_of_models_that_can(tmp_path: Path) -> None:
    async with front(tmp_path, model={"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}) as gate:
        nobody = await gate.ask(chat(tools=TOOLS))
        assert (nobody.status, nobody.error["code"], nobody.error["param"]) == (501, "not_supported", "tools")
        assert "No model here can" in nobody.error["message"]
        fleet = gate.gateway.fleet
        file = ModelFile(id="able", path=tmp_path, format="gguf", file_bytes=0, origin="config")
        file = msgspec.structs.replace(file, chat_template="{% if tools %}{{ tools }}{% endif %}")
        fleet.register(file, msgspec.structs.replace(gate.gateway.config.for_model("able"), replicas=1))
        for choice in ("auto", "required", NOW):
            refused = await gate.ask(chat(tools=TOOLS, tool_choice=choice))
            assert refused.status == 501 and "that can: able" in refused.error["message"]
        assert not gate.engine.calls
        assert (await gate.ask(chat(tools=TOOLS, tool_choice="none"))).status == 200
        assert (await gate.ask(chat())).status == 200


async def test_an_image_for_a_model_without_eyes_names_those_that_see(tmp_path: Path) -> None:
    refusal = whole({"error": {"message": "image input is not supported - hint"}}, 500)
    async with front(tmp_path, answers(refusal)) as gate:
        assert "No model here sees" in (await gate.ask(chat())).error["message"]
        file = ModelFile(id="seer", path=tmp_path, format="gguf", file_bytes=0, origin="config")
        settings = msgspec.structs.replace(gate.gateway.config.for_model("seer"), replicas=1, mmproj=tmp_path / "eyes")
        gate.gateway.fleet.register(file, settings)
        assert "that see: seer" in (await gate.ask(chat())).error["message"]


@pytest.mark.parametrize(("arguments", "reason"), [('{"city": "', "stop"), ('{"city": "Rome"}', "tool_calls")])
async def test_a_free_call_that_a_stop_sequence_cut_off_is_not_told_as_whole(
    tmp_path: Path, arguments: str, reason: str
) -> None:
    begun = {"index": 0, "id": "c1", "type": "function", "function": {"name": "now", "arguments": "{"}}
    rest = {"index": 0, "function": {"arguments": arguments[1:]}}
    events = (delta(tool_calls=[begun]), delta(tool_calls=[rest]), delta("tool_calls"), usage(), DONE)
    async with front(tmp_path, streams(*events), cancels_whole=True) as gate:
        whole_answer = await gate.ask(chat(tools=TOOLS, stop=["Paris"]))
        (choice,) = whole_answer.json["choices"]
        assert choice["finish_reason"] == reason
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == arguments
        streamed = chunks_of(await gate.ask(chat(tools=TOOLS, stop=["Paris"], stream=True)))
        assert streamed[-1]["choices"][0]["finish_reason"] == reason
        assert gate.engine.bodies[1]["stop"] == ["Paris"]
