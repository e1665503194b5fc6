"""Ollama's API over an engine whose answers are known: lines, options, keep_alive, models, refusals."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from laya.config import ApiKey
from laya.errors import LayaError
from laya.gateway.ollama_request import chat_of, chat_of_generate, read_chat, read_generate

from .front import KEY, Answer, front, request, until
from .scripted_engine import DONE, Call, delta, streams, usage, whole

pytestmark = pytest.mark.anyio
CHAT: dict[str, Any] = {"model": "stub", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def post(path: str, body: Any, key: str | None = KEY) -> bytes:
    return request(body, path, key=key)


def lines_of(answer: Answer) -> list[Any]:
    return [json.loads(line) for line in answer.body.decode().splitlines()]


async def test_chat_streams_lines_unless_told_not_to(tmp_path: Path) -> None:
    async with front(tmp_path) as world:
        answer = await world.ask(post("/api/chat", CHAT))
        assert answer.headers["content-type"] == "application/x-ndjson"
        first, second, last = lines_of(answer)
        assert (first["message"], first["done"]) == ({"role": "assistant", "content": "Hel"}, False)
        assert (second["message"]["content"], second["model"]) == ("lo", "stub")
        assert (last["message"]["content"], last["done"], last["done_reason"]) == ("", True, "stop")
        assert (last["prompt_eval_count"], last["eval_count"]) == (9, 2)
        assert last["total_duration"] >= last["eval_duration"] >= 0 and isinstance(last["load_duration"], int)
        one = (await world.ask(post("/api/chat", CHAT | {"stream": False}))).json
        assert (one["message"]["content"], one["done"], one["eval_count"]) == ("Hello", True, 2)
        assert await world.settled() == {"served": 2}


async def test_generate_is_a_chat_of_one_turn(tmp_path: Path) -> None:
    async with front(tmp_path) as world:
        body = {"model": "stub:latest", "prompt": "hi", "system": "Be brief.", "template": "", "context": []}
        lines = lines_of(await world.ask(post("/api/generate", body)))
        assert [each["response"] for each in lines] == ["Hel", "lo", ""]
        assert (lines[-1]["done_reason"], lines[-1]["model"]) == ("stop", "stub:latest")
        sent = world.engine.bodies[0]
        assert sent["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


async def test_raw_prompt_goes_without_a_template(tmp_path: Path) -> None:
    from .scripted_engine import event

    text = event({"choices": [{"index": 0, "text": "lo", "finish_reason": "length"}]}, chat=False)
    async with front(tmp_path, streams(text, usage(), DONE)) as world:
        one = (await world.ask(post("/api/generate", {"model": "stub", "prompt": "Hel", "raw": True}))).body
        assert [json.loads(line)["response"] for line in one.splitlines()] == ["lo", ""]
        assert world.engine.calls[0].path == "/v1/completions" and world.engine.bodies[0]["prompt"] == "Hel"
        assert json.loads(one.splitlines()[-1])["done_reason"] == "length"


async def test_calls_are_told_whole(tmp_path: Path) -> None:
    pieces = [{"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"a"'}},
              {"index": 0, "function": {"arguments": ":1}"}}]  # fmt: skip
    script = streams(*(delta(tool_calls=[each]) for each in pieces), delta("tool_calls"), usage(), DONE)
    async with front(tmp_path, script) as world:
        call, last = lines_of(await world.ask(post("/api/chat", CHAT | {"tools": [TOOL]})))
        told = [{"id": "c", "function": {"index": 0, "name": "f", "arguments": {"a": 1}}}]
        assert (call["message"]["tool_calls"], call["done"], last["done_reason"]) == (told, False, "stop")
        one = (await world.ask(post("/api/chat", CHAT | {"tools": [TOOL], "stream": False}))).json
        assert one["message"]["tool_calls"] == told


async def test_thinking_stands_beside_the_content(tmp_path: Path) -> None:
    script = streams(delta(reasoning_content="Hm"), delta(content="Hi"), delta("stop"), usage(), DONE)
    async with front(tmp_path, script) as world:
        one = (await world.ask(post("/api/chat", CHAT | {"stream": False, "think": True}))).json
        assert (one["message"]["thinking"], one["message"]["content"]) == ("Hm", "Hi")
        none = (await world.ask(post("/api/chat", CHAT | {"stream": False, "think": False}))).json
        assert "thinking" not in none["message"]
        assert [each["chat_template_kwargs"]["enable_thinking"] for each in world.engine.bodies] == [True, False]


async def test_stream_that_breaks_off_ends_with_an_error_line(tmp_path: Path) -> None:
    async def breaks(call: Call) -> None:
        await streams(delta(content="Hel"), ends=False)(call)
        call.abort()

    async with front(tmp_path, breaks) as world:
        lines = lines_of(await world.ask_broken(post("/api/chat", CHAT)))
        assert lines[-1]["code"] == "engine_crashed" and not any(each.get("done") for each in lines)
        assert await world.settled() == {"failed": 1}


async def test_embeddings_keep_their_order(tmp_path: Path) -> None:
    async def vectors(call: Call) -> None:
        n_texts = len(call.json["input"]) if isinstance(call.json["input"], list) else 1
        data = [{"index": index, "embedding": [float(index), 1.0]} for index in reversed(range(n_texts))]
        call.write(whole({"object": "list", "data": data, "usage": {"prompt_tokens": 5, "total_tokens": 5}}))

    async with front(tmp_path, vectors, model={"task": "embed"}) as world:
        found = (await world.ask(post("/api/embed", {"model": "stub", "input": ["a", "b"], "dimensions": 2}))).json
        assert (found["embeddings"], found["prompt_eval_count"]) == ([[0.0, 1.0], [1.0, 1.0]], 5)
        assert world.engine.bodies[0]["dimensions"] == 2
        one = (await world.ask(post("/api/embeddings", {"model": "stub", "prompt": "a"}))).json
        assert one == {"embedding": [0.0, 1.0]}


async def test_num_ctx_above_the_window_is_refused_and_load_options_are_told(tmp_path: Path) -> None:
    async with front(tmp_path) as world:
        window = world.endpoint.planned.max_seq_len  # type: ignore[union-attr]
        answer = await world.ask(post("/api/chat", CHAT | {"options": {"num_ctx": window + 1}}))
        assert answer.status == 400 and f"served with {window} tokens" in answer.json["error"]
        fine = await world.ask(post("/api/chat", CHAT | {"options": {"num_ctx": window, "num_gpu": 1}}))
        assert (fine.status, fine.headers["x-laya-ignored"]) == (200, "options.num_gpu")


async def test_keep_alive_stands_in_for_ttl_until_the_engine_goes(tmp_path: Path) -> None:
    async with front(tmp_path, model={"ttl_s": 300.0}) as world:
        for said, ttl_s in ((-1, None), ("5m", 300.0), ("1h30m", 5400.0), (None, 300.0), (0, 0.0)):
            await world.ask(post("/api/chat", CHAT | {"keep_alive": said}))
            assert world.endpoint.ttl_s == ttl_s, said
        world.sweep(1)
        await until(lambda: world.supervisor.unloaded == ["stub"])
        done = await world.ask(post("/api/generate", {"model": "stub", "keep_alive": 0}))
        assert done.json["done_reason"] == "unload"


async def test_request_without_a_prompt_loads(tmp_path: Path) -> None:
    async with front(tmp_path, loaded=False) as world:
        done = await world.ask(post("/api/chat", {"model": "stub", "messages": []}))
        assert (done.json["done_reason"], done.json["done"]) == ("load", True)
        assert world.endpoint.pool is not None and not world.engine.calls
        assert await world.settled() == {"served": 1}


async def test_models_are_told_with_a_tag_and_seen_by_their_keys_alone(tmp_path: Path) -> None:
    other = ApiKey(name="other", sha256=sha256(b"other").hexdigest(), models=["elsewhere"])
    mine = ApiKey(name="mine", sha256=sha256(KEY.encode()).hexdigest())
    async with front(tmp_path, server={"api_keys": [mine, other]}) as world:
        (model,) = (await world.ask(request(None, "/api/tags", method="GET"))).json["models"]
        assert (model["name"], model["details"]["format"]) == ("stub:latest", "gguf")
        (running,) = (await world.ask(request(None, "/api/ps", method="GET"))).json["models"]
        assert running["context_length"] and running["size_vram"] == 0
        shown = (await world.ask(post("/api/show", {"model": "stub:latest"}))).json
        assert shown["capabilities"][0] == "completion"
        for path in ("/api/tags", "/api/ps"):
            assert (await world.ask(request(None, path, method="GET", key="other"))).json == {"models": []}
        assert (await world.ask(post("/api/show", {"model": "stub"}, key="other"))).status == 403
        assert (await world.ask(post("/api/chat", CHAT, key="other"))).status == 403
        assert "error" in (await world.ask(post("/api/chat", CHAT, key="wrong"))).json


async def test_tools_are_told_of_a_model_that_takes_them_alone(tmp_path: Path) -> None:
    for template, takes in (("{{ tools }}", True), ("{{ mytools }}", False)):
        async with front(tmp_path, model={"chat_template": template}) as world:
            shown = (await world.ask(post("/api/show", {"model": "stub"}))).json
            assert ("tools" in shown["capabilities"]) == takes
            assert (await world.ask(post("/api/chat", CHAT | {"tools": [TOOL]}))).status == (200 if takes else 501)


async def test_what_ollama_does_to_its_store_names_the_verb(tmp_path: Path) -> None:
    async with front(tmp_path) as world:
        pull = await world.ask(post("/api/pull", {"model": "x"}))
        assert pull.status == 501 and "laya pull" in pull.json["error"]
        delete = await world.ask(request({"model": "x"}, "/api/delete", method="DELETE"))
        assert "laya rm" in delete.json["error"]
        blob = await world.ask(request(b"x", "/api/blobs/sha256:1"))
        assert "models_dir" in blob.json["error"]
        assert (await world.ask(request(None, "/api/version", method="GET"))).json["version"]
        nothing = await world.ask(post("/api/nothing", {}))
        assert (nothing.status, isinstance(nothing.json["error"], str)) == (404, True)


def test_options_become_fields() -> None:
    options = {"num_predict": 7, "temperature": 0.5, "top_k": 3, "seed": 1, "stop": ["x"], "repeat_penalty": 1.1}
    body = chat_of(read_chat(json.dumps(CHAT | {"options": options, "format": "json", "logprobs": True}).encode()))
    assert (body["max_tokens"], body["temperature"], body["top_k"], body["stop"]) == (7, 0.5, 3, ["x"])
    assert (body["response_format"], body["logprobs"]) == ({"type": "json_object"}, True)
    endless = chat_of(read_chat(json.dumps(CHAT | {"options": {"num_predict": -1}, "format": {"a": 1}}).encode()))
    assert "max_tokens" not in endless and endless["response_format"]["json_schema"]["schema"] == {"a": 1}


def test_results_find_their_calls_and_images_their_place() -> None:
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("f", "g")]
    messages = [
        {"role": "user", "content": "q", "images": ["iVBORw0KGgo="]},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_name": "g"},
        {"role": "tool", "content": "1", "tool_name": "f"},
    ]
    asked, said, second, first = chat_of(read_chat(json.dumps(CHAT | {"messages": messages}).encode()))["messages"]
    assert asked["content"][1]["image_url"]["url"] == "data:image/png;base64,iVBORw0KGgo="
    assert said["tool_calls"][0]["function"]["arguments"] == '{"a":1}'
    assert first["tool_call_id"] == said["tool_calls"][0]["id"]
    assert second["tool_call_id"] == said["tool_calls"][1]["id"]


def test_results_take_their_calls_in_order_by_name_or_whichever_is_next() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("f", "g", "f", "f")]
    results = [{"role": "tool", "content": "x"} | ({"tool_name": name} if name else {})
               for name in ("g", None, "f", "h", None, "f")]  # fmt: skip
    messages = [{"role": "assistant", "tool_calls": calls}, *results]
    asked = read_chat(json.dumps(CHAT | {"messages": messages}).encode())
    ids = [each["tool_call_id"] for each in chat_of(asked)["messages"][1:]]
    assert ids == ["call_0_1", "call_0_0", "call_0_2", "call_h", "call_0_3", "call_f"]


@pytest.mark.parametrize(("fields", "said"), [
    ({"option": {}}, "Did you mean 'options'?"),
    ({"options": {"num_cxt": 1}}, "'options.num_cxt' is not a field of /api/chat"),
    ({"options": {"num_predict": 0}}, "'options.num_predict' is 0"),
    ({"options": {"num_predict": 2**31}}, "'options.num_predict' is 2147483648"),
    ({"options": {"temperature": 9}}, "'options.temperature' is 9"),
    ({"options": {"seed": 2**63}}, "'options.seed' is 9223372036854775808"),
    ({"options": {"top_k": -2}}, "'options.top_k' is -2"),
    ({"o - at `$.p": 1}, "'o - at `$.p' is not a field"),
    ({"options": {"o - at `$.p\n": 1}}, "'options.o - at `$.p\n' is not a field"),
    ({"messages": [{"role": "o - at `$.p"}]}, "'messages[0].role' is \"o - at `$.p\""),
    ({"format": "xml"}, "'format' is \"xml\""),
    ({"template": "x"}, "chat_template"),
    ({"shift": True}, "no context is shifted"),
    ({"model": ""}, "'model'"),
    ({"keep_alive": []}, "'keep_alive' is []"),
    ({"keep_alive": True}, "'keep_alive' is true"),
    ({"options": []}, "'options' is []"),
    ({"stream": ""}, "'stream' is \"\""),
    ({"messages": [{"role": "robot", "content": ""}]}, "'messages[0].role' is \"robot\""),
])  # fmt: skip
def test_request_that_is_wrong_is_told_where(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(LayaError) as caught:
        chat_of(read_chat(json.dumps(CHAT | fields).encode()))
    assert said in caught.value.message


def test_context_of_generate_is_refused_when_there_is_some() -> None:
    with pytest.raises(LayaError, match="/api/chat"):
        read_generate(b'{"model": "m", "prompt": "x", "context": [1]}')
    assert chat_of_generate(read_generate(b'{"model": "m", "prompt": "x", "context": [], "shift": false}'))["messages"]
