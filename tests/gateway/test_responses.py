"""The Responses API over an engine whose answers are known: events, items, refusals, what is kept and whose it is."""

from __future__ import annotations

import asyncio
import json
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from laya.config import ApiKey, StoreConfig
from laya.errors import LayaError, NotFound
from laya.gateway.responses_items import messages_of, read_items
from laya.gateway.responses_kept import KeptResponses
from laya.gateway.responses_request import Create, chat_of, read_create
from laya.store import KeptTurn

from .front import KEY, Answer, front, request, until
from .keyed import drop, grant, keep, secret
from .scripted_engine import DONE, Call, Script, answers, delta, event, progress, streams, usage

pytestmark = pytest.mark.anyio
PATH = "/v1/responses"
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}, "strict": True}


def create(*headers: str, key: str = KEY, **fields: Any) -> bytes:
    return request({"model": "stub", "input": "hi"} | fields, PATH, headers=headers, key=key)


def get(path: str, key: str = KEY, method: str = "GET") -> bytes:
    return request(None, f"{PATH}/{path}", method=method, key=key)


def events_of(answer: Answer) -> list[Any]:
    """The events, checked to be numbered and named as they say."""
    found = []
    for block in answer.body.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            name, data = lines
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    return found


def call(index: int, arguments: str | None = None, name: str | None = None, call_id: str | None = None) -> bytes:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return delta(tool_calls=[{"index": index, "function": function} | ({"id": call_id} if call_id else {})])


def tool_calls() -> Script:
    return streams(
        delta(role="assistant", content=None),
        call(0, "", "get_weather", "call_a"),
        call(0, '{"city":'),
        call(0, '"Paris"}'),
        call(1, "{}", "get_time", "call_b"),
        delta("tool_calls"),
        usage(),
        DONE,
    )


async def test_whole_response_is_the_response_object(tmp_path: Path) -> None:
    async with front(tmp_path) as world:
        answer = await world.ask(create("x-request-id: mine", instructions="Be brief.", metadata={"a": "b"}))
        body = answer.json
        assert (answer.status, answer.headers["x-request-id"]) == (200, "mine")
        assert body["object"] == "response" and body["id"].startswith("resp_")
        assert (body["status"], body["error"], body["incomplete_details"]) == ("completed", None, None)
        (item,) = body["output"]
        assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
        assert item["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
        assert body["usage"]["input_tokens"] == 9 and body["usage"]["total_tokens"] == 11
        assert (body["metadata"], body["instructions"], body["store"]) == ({"a": "b"}, "Be brief.", True)
        sent = world.engine.bodies[0]["messages"]
        assert sent == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
        assert await world.settled() == {"served": 1}


async def test_stream_tells_each_step_in_the_official_order(tmp_path: Path) -> None:
    async with front(tmp_path) as world:
        answer = await world.ask(create(stream=True))
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = events_of(answer)
        assert [each["type"] for each in events] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
        assert events[2]["item"]["content"] == [] and events[3]["part"]["text"] == ""
        assert events[6]["text"] == "Hello"
        done = events[-1]["response"]
        assert done["output"] == [events[8]["item"]]
        kept = await world.ask(get(done["id"]))
        assert kept.json == done
        again = events_of(await world.ask(get(done["id"] + "?stream=true")))
        assert [each["type"] for each in again] == [each["type"] for each in events[:5] + events[6:]]
        assert again[-1]["response"] == done
        rest = (await world.ask(get(done["id"] + "?stream=true&starting_after=6"))).body
        assert rest.count(b"event: ") == 2
        assert (await world.ask(get(done["id"] + "?stream=false"))).json == done
        for name in ("stream", "include_obfuscation"):
            wrong = await world.ask(get(f"{done['id']}?{name}=banana"))
            assert (wrong.status, wrong.error["param"]) == (400, name)


async def test_part_that_is_added_is_still_empty(tmp_path: Path) -> None:
    entry = {"token": "Hi", "bytes": [72, 105], "logprob": -0.5, "top_logprobs": []}
    raw = {"choices": [{"index": 0, "delta": {"content": "Hi"}, "logprobs": {"content": [entry]}}]}
    async with front(tmp_path, streams(event(raw), delta("stop"), usage(), DONE)) as world:
        events = events_of(await world.ask(create(stream=True, top_logprobs=1)))
        added = next(each for each in events if each["type"] == "response.content_part.added")
        assert added["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        assert [each["token"] for each in events[-1]["response"]["output"][0]["content"][0]["logprobs"]] == ["Hi"]


async def test_calls_are_items_with_their_arguments_in_pieces(tmp_path: Path) -> None:
    async with front(tmp_path, tool_calls()) as world:
        events = events_of(await world.ask(create(stream=True, tools=[TOOL], parallel_tool_calls=True)))
        name = "response.function_call_arguments"
        assert [each["type"] for each in events[2:]] == [
            "response.output_item.added",
            f"{name}.delta",
            f"{name}.delta",
            f"{name}.done",
            "response.output_item.done",
            "response.output_item.added",
            f"{name}.delta",
            f"{name}.done",
            "response.output_item.done",
            "response.completed",
        ]
        first, second = events[-1]["response"]["output"]
        assert (first["name"], first["call_id"], first["arguments"]) == ("get_weather", "call_a", '{"city":"Paris"}')
        assert (second["name"], second["call_id"], second["arguments"]) == ("get_time", "call_b", "{}")
        assert events[2]["item"]["arguments"] == "" and first["id"] == events[3]["item_id"]
        whole = (await world.ask(create(tools=[TOOL]))).json
        assert [each["arguments"] for each in whole["output"]] == ['{"city":"Paris"}', "{}"]
        sent = world.engine.bodies[0]
        assert sent["tools"][0]["function"]["name"] == "get_weather" and sent["parallel_tool_calls"] is True


async def test_reasoning_is_an_item_before_the_message(tmp_path: Path) -> None:
    script = streams(delta(reasoning_content="Hm"), delta(reasoning_content="m."), delta(content="Hi"), delta("stop"),
                     usage(), DONE)  # fmt: skip
    async with front(tmp_path, script) as world:
        events = events_of(await world.ask(create(stream=True, reasoning={"effort": "low"})))
        reasoning, message = events[-1]["response"]["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hmm."}]
        assert message["content"][0]["text"] == "Hi"
        assert world.engine.bodies[0]["chat_template_kwargs"]["reasoning_effort"] == "low"
        more = await world.ask(create(previous_response_id=events[-1]["response"]["id"]))
        assert more.status == 200
        assert [each["content"] for each in world.engine.bodies[1]["messages"]] == ["hi", "Hi", "hi"]


async def test_answer_that_was_cut_is_incomplete(tmp_path: Path) -> None:
    script = streams(delta(content="Hel"), delta("length"), usage(), DONE)
    async with front(tmp_path, script) as world:
        whole = (await world.ask(create(max_output_tokens=1))).json
        assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert whole["completed_at"] is None and world.engine.bodies[0]["max_tokens"] == 1
        events = events_of(await world.ask(create(stream=True)))
        assert events[-1]["type"] == "response.incomplete"
        assert (await world.ask(get(whole["id"]))).json == whole


async def test_previous_response_brings_the_history(tmp_path: Path) -> None:
    async with front(tmp_path, tool_calls()) as world:
        first = (await world.ask(create(instructions="First.", tools=[TOOL]))).json
        outputs = [
            {"type": "function_call_output", "call_id": "call_a", "output": "21 degrees"},
            {"type": "function_call_output", "call_id": "call_b", "output": [{"type": "input_text", "text": "noon"}]},
        ]
        second = (await world.ask(create(input=outputs, previous_response_id=first["id"]))).json
        assert second["previous_response_id"] == first["id"]
        hi, said, *results = world.engine.bodies[1]["messages"]
        assert hi == {"role": "user", "content": "hi"}  # instructions are of one turn
        assert [each["id"] for each in said["tool_calls"]] == ["call_a", "call_b"]
        assert [each["content"] for each in results] == ["21 degrees", "noon"]
        third = (await world.ask(create(input="more", previous_response_id=second["id"]))).json
        assert len(world.engine.bodies[2]["messages"]) == 6
        assert (await world.ask(get(third["id"], method="DELETE"))).json == {
            "id": third["id"],
            "object": "response",
            "deleted": True,
        }
        assert (await world.ask(get(third["id"]))).status == 404
        gone = await world.ask(create(previous_response_id=third["id"]))
        assert (gone.status, gone.error["code"]) == (404, "previous_response_not_found")
        await world.ask(get(first["id"], method="DELETE"))
        broken = await world.ask(create(previous_response_id=second["id"]))
        assert first["id"] in broken.error["message"] and second["id"] in broken.error["message"]
        assert await world.settled() == {"served": 3, "refused": 2}


async def test_what_is_not_to_be_stored_is_not(tmp_path: Path) -> None:
    async with front(tmp_path) as world:
        body = (await world.ask(create(store=False))).json
        assert body["store"] is False
        assert (await world.ask(get(body["id"]))).status == 404


async def test_another_key_does_not_find_it(tmp_path: Path) -> None:
    other = ApiKey(name="other", sha256=sha256(b"other-key").hexdigest())
    mine = ApiKey(name="tests", sha256=sha256(KEY.encode()).hexdigest())
    async with front(tmp_path, server={"api_keys": [mine, other]}) as world:
        body = (await world.ask(create())).json
        for asked in (
            get(body["id"], "other-key"),
            get(body["id"], "other-key", "DELETE"),
            get(body["id"] + "/input_items", "other-key"),
            get(body["id"] + "/cancel", "other-key", "POST"),
            create(key="other-key", previous_response_id=body["id"]),
        ):
            assert (await world.ask(asked)).status == 404
        assert (await world.ask(get(body["id"]))).status == 200


async def test_key_made_anew_under_a_name_finds_nothing_of_the_revoked_one(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("kid"))
    async with front(tmp_path) as world:
        kid, keys = secret("kid"), world.gateway.keys
        first = keys.find("kid")
        body = (await world.ask(create(key=kid))).json
        assert (await world.ask(get(body["id"], kid))).status == 200
        drop(tmp_path, "kid")
        keep(tmp_path, grant("kid"))  # the same name, the same secret, somebody else
        world.sweep(0.0)
        await until(lambda: keys.find("kid") is not first)
        assert (await world.ask(get(body["id"], kid))).status == 404
        assert (await world.ask(create(key=kid, previous_response_id=body["id"]))).status == 404
        own = (await world.ask(create(key=kid))).json
        assert (await world.ask(get(own["id"], kid))).status == 200


async def test_input_items_come_in_pages(tmp_path: Path) -> None:
    async with front(tmp_path) as world:
        given = [{"role": "user", "content": str(index)} for index in range(5)]
        body = (await world.ask(create(input=given))).json
        path = body["id"] + "/input_items"
        newest = (await world.ask(get(path + "?limit=2"))).json
        assert [each["content"][0]["text"] for each in newest["data"]] == ["4", "3"]
        assert newest["has_more"] is True and newest["object"] == "list"
        rest = (await world.ask(get(f"{path}?limit=3&after={newest['last_id']}"))).json
        assert [each["content"][0]["text"] for each in rest["data"]] == ["2", "1", "0"]
        assert rest["has_more"] is False and rest["first_id"] == rest["data"][0]["id"]
        oldest = (await world.ask(get(path + "?order=asc&limit=1"))).json
        assert oldest["data"][0]["content"] == [{"type": "input_text", "text": "0"}]
        for wrong, param in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after"), ("befor=x", "befor")):
            answer = await world.ask(get(f"{path}?{wrong}"))
            assert (answer.status, answer.error["param"]) == (400, param)


async def test_cancel_and_methods_say_what_they_can_not(tmp_path: Path) -> None:
    async with front(tmp_path) as world:
        body = (await world.ask(create())).json
        cancelled = await world.ask(get(body["id"] + "/cancel", method="POST"))
        assert cancelled.status == 400 and "background" in cancelled.error["message"]
        assert (await world.ask(get("resp_nothing"))).error["message"] == "Response with id 'resp_nothing' not found."
        assert (await world.ask(request(None, PATH, method="GET"))).status == 405
        compacted = await world.ask(get("compact", method="POST"))
        assert compacted.status == 501 and "truncation" in compacted.error["message"]


def read_and_translate(fields: dict[str, Any]) -> dict[str, Any]:
    asked, items = read_create(json.dumps(fields).encode())
    return chat_of(asked, [], items, session=None)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"inputs": "x"}, 400, "inputs"),
        ({"temperature": 9}, 400, "temperature"),
        ({"input": []}, 400, "input"),
        ({"input": 3}, 400, "input"),
        ({"background": True}, 501, "background"),
        ({"conversation": "conv_1"}, 501, "conversation"),
        ({"prompt": {"id": "p"}}, 501, "prompt"),
        ({"tools": [{"type": "web_search"}]}, 501, "tools[0].type"),
        ({"tools": [TOOL | {"defer": 1}]}, 400, "tools[0].defer"),
        ({"prompt": False}, 501, "prompt"),
        ({"tool_choice": "must"}, 400, "tool_choice"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, 400, "tool_choice"),
        ({"tool_choice": {"type": "mcp"}}, 501, "tool_choice.type"),
        ({"text": {"format": {"type": "json_schema"}}}, 400, "text.format.name"),
        ({"text": {"verbosity": "low"}}, 400, "text.verbosity"),
        ({"include": ["file_search_call.results"]}, 400, "include[0]"),
        ({"reasoning": {"summary": "detailed"}}, 400, "reasoning.summary"),
        ({"truncation": "some"}, 400, "truncation"),
        ({"service_tier": "flex"}, 400, "service_tier"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 501, "input[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, 400, "input"),
        ({"input": [{"role": "bot", "content": "x"}]}, 400, "input[0].role"),
        ({"input": [{"role": "user"}]}, 400, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, 501, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": "x", "contents": "y"}]}, 400, "input[0].contents"),
        ({"input": [7]}, 400, "input[0]"),
    ],
)
def test_what_is_not_done_is_refused_by_name(fields: dict[str, Any], status: int, param: str) -> None:
    with pytest.raises(LayaError) as refused:
        read_and_translate({"model": "m", "input": "hi"} | fields)
    assert (refused.value.http_status, refused.value.param) == (status, param)


def test_fields_that_say_nothing_are_as_if_they_were_not_there() -> None:
    asked, _ = read_create(b'{"model": "m", "input": "hi", "tools": null, "background": false, "text": null}')
    assert asked == Create(model="m", input="hi", background=False)


def test_output_of_a_response_is_input_as_it_is() -> None:
    sdk_form = [
        {"role": "user", "content": "a"},
        {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": None},
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": None, "status": None},
        {"type": "function_call_output", "call_id": "c", "output": "d"},
    ]
    items = read_items(sdk_form)
    assert all(item["id"] for item in items)
    roles = [message["role"] for message in messages_of(None, items)]
    assert roles == ["user", "assistant", "tool"]


def test_what_the_system_says_first_is_one_message() -> None:
    image = [{"type": "input_image", "image_url": "data:x"}]
    for given, contents in (
        (["a", "b"], ["I\n\na\n\nb"]),
        (["a", None, "b"], ["I\n\na", "hi", "b"]),
        (["a", image, "b"], ["I\n\na", [{"type": "image_url", "image_url": {"url": "data:x"}}], "b"]),
    ):
        items = [{"role": "developer" if each else "user", "content": each or "hi"} for each in given]
        assert [each["content"] for each in messages_of("I", read_items(items))] == contents


def test_a_named_tool_is_the_only_one_told_and_required() -> None:
    tools = [TOOL, TOOL | {"name": "other"}]
    for choice, names, mode in (
        ({"type": "function", "name": "other"}, ["other"], "required"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]},
            ["other"],
            "auto",
        ),
        ("required", ["get_weather", "other"], "required"),
        (None, ["get_weather", "other"], "auto"),
    ):
        chat = read_and_translate({"input": "x", "tools": tools, "tool_choice": choice})
        assert [tool["function"]["name"] for tool in chat["tools"]] == names
        assert chat["tool_choice"] == mode


def test_images_and_structured_output_are_translated() -> None:
    parts = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": "data:x", "detail": "low"}]
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    body = {"input": [{"role": "user", "content": parts}], "text": {"format": form}, "top_logprobs": 2}
    asked, items = read_create(json.dumps(body).encode())
    chat = chat_of(asked, [], items, session="s")
    assert chat["messages"][0]["content"][1] == {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}
    assert chat["response_format"]["json_schema"] == {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert (chat["logprobs"], chat["top_logprobs"], chat["prompt_cache_key"]) == (True, 2, "s")


async def test_engine_that_breaks_off_is_a_failed_response_and_not_kept(tmp_path: Path) -> None:
    async def broken(call: Call) -> None:
        await streams(delta(content="Hel"), ends=False)(call)
        call.close()

    async with front(tmp_path, broken) as world:
        events = events_of(await world.ask(create(stream=True)))
        failed = events[-1]
        assert failed["type"] == "response.failed"
        assert failed["response"]["error"]["code"] == "server_error" and failed["response"]["error"]["message"]
        assert failed["response"]["output"][0]["status"] == "incomplete"
        assert (await world.ask(get(failed["response"]["id"]))).status == 404
        assert (await world.ask(create())).status == 502
        assert await world.settled() == {"failed": 2}


async def test_long_prefill_is_told_by_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laya.gateway.relay.PREFILL_NOTE_EVERY_S", 0.0)
    script = streams(progress(3, 9), delta(content="Hi"), delta("stop"), usage(), DONE)
    async with front(tmp_path, script) as world:
        answer = await world.ask(create(stream=True))
        assert b"\n\n: prefill 33 %\n\n" in answer.body
        assert events_of(answer)[-1]["type"] == "response.completed"


async def test_store_that_can_not_be_written_fails_the_turn(tmp_path: Path) -> None:
    async with front(tmp_path) as world:
        world.gateway.apis.kept.path = tmp_path  # a folder
        answer = await world.ask(create())
        assert (answer.status, answer.error["code"]) == (500, "store_failed")
        events = events_of(await world.ask(create(stream=True)))
        assert events[-1]["type"] == "response.failed"
        assert (await world.ask(create(store=False))).status == 200
        assert await world.settled() == {"failed": 2, "served": 1}


async def test_client_that_leaves_frees_its_engine_and_leaves_nothing(tmp_path: Path) -> None:
    async with front(tmp_path, streams(delta(content="Hel"), ends=False)) as world:
        client = await world.client()
        client.send(create(stream=True))
        await client.head()
        client.abort()
        await asyncio.wait_for(world.engine.calls[0].gone.wait(), 1)
        assert await world.settled() == {"cancelled": 1}


async def test_turns_of_a_conversation_name_one_session(tmp_path: Path) -> None:
    async with front(tmp_path) as world:
        first = (await world.ask(create())).json
        second = (await world.ask(create(previous_response_id=first["id"]))).json
        await world.ask(create(previous_response_id=second["id"]))
        sessions = [body["prompt_cache_key"] for body in world.engine.bodies]
        assert sessions == [first["id"]] * 3


async def test_event_in_pieces_is_one(tmp_path: Path) -> None:
    raw = event({"choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": "stop"}]}) + usage() + DONE
    pieces = [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"]
    pieces += [raw[at : at + 7] for at in range(0, len(raw), 7)]

    async def script(call: Call) -> None:
        await answers(*pieces)(call)
        call.close()

    async with front(tmp_path, script) as world:
        events = events_of(await world.ask(create(stream=True)))
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hi"


async def test_truncation_auto_drops_the_oldest_turns(tmp_path: Path) -> None:
    async with front(tmp_path, planned={"max_seq_len": 64}) as world:
        world.engine.count_of = lambda body: 30 * len(body["messages"])
        given = [{"role": role, "content": f"{role} {n}"} for n in range(2) for role in ("user", "assistant")]
        given.append({"role": "user", "content": "last"})
        refused = await world.ask(create(input=given))
        assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
        trimmed = await world.ask(create(input=given, truncation="auto"))
        assert trimmed.status == 200 and trimmed.headers["x-laya-trimmed"] == "4"
        assert [each["content"] for each in world.engine.bodies[-1]["messages"]] == ["last"]
        assert trimmed.json["truncation"] == "auto"


async def test_turn_that_is_cancelled_by_its_id_says_so(tmp_path: Path) -> None:
    async with front(tmp_path, streams(delta(content="Hel"), ends=False)) as world:
        client = await world.client()
        client.send(create("x-request-id: turn-1", stream=True))
        await client.head()
        cancelled = await world.ask(request(None, "/v1/requests/turn-1", method="DELETE"))
        assert cancelled.status == 200
        body = b"".join([piece async for piece in client.pieces()])
        assert b"event: response.failed" in body and b"cancelled" in body
        await world.settled()


async def test_old_turns_are_forgotten_in_the_background(tmp_path: Path) -> None:
    kept = KeptResponses(StoreConfig(keep=3600.0), tmp_path / "laya.db", 10**6)
    for name, age_s in (("old", 7200), ("new", 0)):
        created_s = time.time() - age_s
        await kept.keep(KeptTurn(id=name, owner="", previous_id=None, root_id=name, created_s=created_s, document="{}",
                                 input="[]"))  # fmt: skip
    work = asyncio.ensure_future(kept.keep_pruned())
    await asyncio.sleep(0)  # it is the next one in line of the store's thread
    with pytest.raises(NotFound):
        await kept.find("old", "")
    assert (await kept.find("new", "")).id == "new"
    work.cancel()
