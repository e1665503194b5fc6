"""Programs of a user's own behind a real server: OpenAI's API by its official client, the ledger, the ceiling."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionToolParam

from laya.gateway.guarding import claim_ceilings
from laya.types import MIB

from .live import Serving, model_state, plain, sdk

pytestmark = pytest.mark.engine
PROGRAMS = Path(__file__).parent.parent / "engines"
CONFIG = """
models:
  own:
    engine: command
    cmd: {python} {programs}/openai_program.py --port ${{PORT}} --api-key ${{API_KEY}} --seconds-a-word 0.05
    served_model_name: its-own-name
    memory: 128MiB
    max_num_seqs: 4
  vectors:
    engine: command
    cmd: [{python}, "{programs}/openai_program.py", --port, "${{PORT}}", --model, "${{MODEL}}"]
    task: embed
    cancels_whole: true
  nameless:
    engine: command
    cmd: {python} {programs}/openai_program.py --port ${{PORT}} --any-model
    memory: 96MiB
    cancels_whole: true
  no-streams:
    engine: command
    cmd: {python} {programs}/openai_program.py --port ${{PORT}} --model ${{MODEL}} --no-streams
    memory: 96MiB
  oracle:
    engine: command
    cmd: {python} {programs}/openai_program.py --port ${{PORT}} --model ${{MODEL}}
    served_model_name: their-oracle
    task: decide
  hog:
    engine: command
    cmd: {python} {programs}/openai_program.py --port ${{PORT}} --model ${{MODEL}} --hold 256
    memory: 96MiB
  real:
    engine: command
    cmd: {python} {programs}/xllamacpp_program.py ${{PORT}} {gguf}
    served_model_name: their-name
    memory: 600MiB
    env: {{PYTHONSAFEPATH: "1"}}
  moody:
    engine: command
    cmd: {python} {programs}/openai_program.py --port ${{PORT}} --model ${{MODEL}} --moody
    memory: 96MiB
    progress_timeout_s: 2
  nowhere:
    engine: command
    cmd: lama-server --port ${{PORT}}
"""
HANG: Any = [{"role": "user", "content": "hang"}]
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def programs(start_server: Callable[..., Any], smollm2_path: Path) -> Iterator[Serving]:
    config = CONFIG.format(python=sys.executable, programs=PROGRAMS, gguf=smollm2_path)
    server = start_server(config=config)
    yield server
    assert server.stop() == 0


@pytest.fixture
def client(programs: Serving) -> openai.OpenAI:
    return sdk(programs)


def said(model: dict[str, Any]) -> dict[str, int]:
    terms: dict[str, int] = model["plan"]["devices"][0]["terms"]
    return terms


def test_program_that_decides_is_asked_under_its_own_name(programs: Serving) -> None:
    questions = {name: {"type": "noul", "instructions": "Is it?"} for name in ("z", "a")}
    with plain(programs) as http:
        answer = http.post("/v1/systemone", json={"model": "oracle", "state": None, "questions": questions})
        assert (answer.status_code, answer.json()["model"]) == (200, "oracle")
        assert list(answer.json()["answers"]) == ["z", "a"]
        refused = http.post("/v1/systemone", json={"model": "own", "state": "", "questions": questions})
        assert refused.status_code == 422 and "oracle" in refused.json()["error"]["message"]


def test_chat_whole_and_streamed_with_the_name_of_the_model_here(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="own", messages=[{"role": "user", "content": "Hi"}])
    assert (answer.choices[0].message.content, answer.model) == ("Hello from a program", "own")
    assert answer.usage is not None and answer.usage.completion_tokens == 4
    events = list(
        client.chat.completions.create(
            model="own",
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(choice.delta.content or "" for event in events for choice in event.choices)
    assert text == "Hello from a program"
    assert {event.model for event in events} == {"own"}
    assert events[-1].usage is not None and events[-1].usage.total_tokens == 9


def test_answers_carry_the_name_here_where_the_program_has_one_of_its_own(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    for _ in range(2):  # the second over a kept connection, as the plain lane takes it
        assert client.chat.completions.create(model="nameless", messages=messages).model == "nameless"
    events = client.chat.completions.create(model="nameless", messages=messages, stream=True)
    assert {event.model for event in events} == {"nameless"}


def test_program_without_streams_answers_whole_and_says_so_to_who_wants_one(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    answer = client.chat.completions.create(model="no-streams", messages=messages)
    assert (answer.choices[0].message.content, answer.model) == ("Hello from a program", "no-streams")
    with pytest.raises(openai.InternalServerError, match="answers whole where it was asked for a stream"):
        client.chat.completions.create(model="no-streams", messages=messages, stream=True)


def test_tools_pass_as_the_program_has_them(client: openai.OpenAI) -> None:
    for choice in ("auto", "required"):
        answer = client.chat.completions.create(
            model="own",
            messages=[{"role": "user", "content": "Paris?"}],
            tools=[WEATHER],
            tool_choice=choice,  # type: ignore[call-overload]
        )
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
        assert answer.choices[0].finish_reason == "tool_calls"


def test_errors_of_the_program_are_in_its_words(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"maximum context length is 4096 tokens"):
        client.chat.completions.create(model="own", messages=[{"role": "user", "content": "Hi"}], max_tokens=9000)
    with pytest.raises(openai.InternalServerError, match="has the task 'embed'"):
        client.chat.completions.create(model="vectors", messages=[{"role": "user", "content": "Hi"}])


def test_client_that_leaves_is_left_by_the_program(programs: Serving, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="own", messages=[{"role": "user", "content": "Hi"}], stream=True)
    next(iter(stream))
    stream.close()
    path, query = "/admin/models/own/logs", {"follow": "true"}
    with plain(programs) as http, http.stream("GET", path, params=query) as lines:
        assert any("client left" in line for line in lines.iter_lines())


def test_embeddings(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="vectors", input=["a", "bcd"], encoding_format="float")
    assert [each.embedding for each in answer.data] == [[0.5, 1.0], [0.5, 3.0]]
    assert answer.model == "vectors"


def test_ledger_holds_what_is_declared_and_learns_what_is_not(programs: Serving, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="own", messages=[{"role": "user", "content": "Hi"}])
    own = model_state(programs, "own")
    assert said(own) == {"declared": 128 * MIB} and 0 < own["measured_bytes"] < 128 * MIB
    client.embeddings.create(model="vectors", input="a")
    with plain(programs) as http:
        http.post("/admin/models/vectors/unload").raise_for_status()
    client.embeddings.create(model="vectors", input="a")
    terms = said(model_state(programs, "vectors"))
    assert list(terms) == ["learned"] and 64 * MIB < terms["learned"] < 256 * MIB
    shown = client.models.retrieve("own").model_dump()
    assert shown["loaded"] and shown["max_model_len"] is None


def test_liar_ends_at_its_ceiling_and_its_neighbour_stays(programs: Serving, client: openai.OpenAI) -> None:
    if not claim_ceilings()[1].has_hard_limit:
        pytest.skip("nothing can hold a process to its memory here")
    client.chat.completions.create(model="own", messages=[{"role": "user", "content": "Hi"}])
    pid = model_state(programs, "own")["pid"]
    with pytest.raises(openai.APIStatusError, match=r"stopped at its memory limit of 96\.0 MiB") as caught:
        client.chat.completions.create(model="hog", messages=[{"role": "user", "content": "Hi"}])
    assert caught.value.code in ("engine_crashed", "engine_out_of_memory")
    assert model_state(programs, "own")["pid"] == pid
    client.chat.completions.create(model="own", messages=[{"role": "user", "content": "Hi"}])


def test_request_that_gets_nothing_ends_and_the_program_that_serves_others_stays(
    programs: Serving, client: openai.OpenAI
) -> None:
    client.chat.completions.create(model="moody", messages=[{"role": "user", "content": "Hi"}])
    pid = model_state(programs, "moody")["pid"]
    with ThreadPoolExecutor(1) as other:
        hangs = other.submit(sdk(programs).chat.completions.create, model="moody", messages=HANG)
        while not hangs.done():
            client.chat.completions.create(model="moody", messages=[{"role": "user", "content": "Hi"}])
            time.sleep(0.1)
    with pytest.raises(openai.InternalServerError, match=r"has said nothing to a request for \d+ s") as caught:
        hangs.result()
    assert (caught.value.status_code, caught.value.code) == (503, "engine_stuck")
    assert model_state(programs, "moody")["pid"] == pid


def test_program_that_stalls_in_the_middle_of_all_it_has_is_started_anew(
    programs: Serving, client: openai.OpenAI
) -> None:
    stall: Any = [{"role": "user", "content": "stall"}]
    stream = client.chat.completions.create(model="moody", messages=stall, stream=True)
    pid = model_state(programs, "moody")["pid"]
    with pytest.raises(openai.APIError, match="is stuck: it has said nothing to a request"):
        list(stream)
    client.chat.completions.create(model="moody", messages=[{"role": "user", "content": "Hi"}])
    assert model_state(programs, "moody")["pid"] != pid
    with plain(programs) as http:
        assert "engine_stuck" in {event["kind"] for event in http.get("/admin/events").json()["events"]}


def test_program_that_is_not_there_fails_alone_with_the_nearest_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="PATH has no program lama-server") as caught:
        client.chat.completions.create(model="nowhere", messages=[{"role": "user", "content": "Hi"}])
    assert (caught.value.status_code, caught.value.code) == (503, "model_misconfigured")
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_real_engine_by_command(programs: Serving, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(model="real", messages=messages, max_tokens=12, temperature=0)
    assert whole.model == "real" and whole.usage is not None and whole.usage.completion_tokens > 1
    stream = client.chat.completions.create(model="real", messages=messages, max_tokens=12, temperature=0, stream=True)
    text = "".join(choice.delta.content or "" for event in stream for choice in event.choices)
    assert text == whole.choices[0].message.content
    state = model_state(programs, "real")
    assert os.getpriority(os.PRIO_PROCESS, state["pid"]) == 15
