"""A real vLLM on this CPU under Laya, with a dense model and one with experts. What every engine must do is
tests/any_engine's; here is what is vLLM's own. One server, and each model is loaded once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest
import torch
from openai import OpenAI
from transformers import AutoTokenizer

from laya.engines.cpu import cpu_flags
from laya.memory import facts_of_hf
from laya.modeling import LayaForCausalLM
from tests.conftest import RunningServer

from .real import MODELS, weight_bytes

pytestmark = pytest.mark.usefixtures("vllm_server")
HELLO = [{"role": "user", "content": "Hello there"}]
LOADED = ["dense", "moe"]
TRIES = 6  # of what depends on the tokens that chance gives
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}}


def client(server: RunningServer) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=600, trust_env=False)


def ask(server: RunningServer, model: str, **more: Any) -> httpx.Response:
    with client(server) as http:
        body = {"model": model, "messages": HELLO, "max_tokens": 8} | more
        return http.post("/v1/chat/completions", json=body)


def model_state(server: RunningServer, model: str) -> dict[str, Any]:
    models: Any = server.state()["models"]
    found: dict[str, Any] = next(each for each in models if each["id"] == model)
    return found


def metric(server: RunningServer, model: str, name: str) -> float:
    """What the engine itself says, by its metrics in Laya's."""
    with client(server) as http:
        lines = http.get("/metrics/engines").text.splitlines()
    found = (line for line in lines if line.startswith(f"vllm:{name}{{") and f'model="{model}"' in line)
    return float(next(found).rpartition(" ")[2])


def until(holds: Callable[[], bool], within_s: float = 30.0) -> None:
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, "it did not come to that"
        time.sleep(0.1)


def test_a_load_is_told_in_steps_and_ends_with_an_answer(vllm_server: RunningServer) -> None:
    answer = ask(vllm_server, "moe")
    assert answer.status_code == 200, answer.text
    with client(vllm_server) as http:
        events = http.get("/admin/events").json()["events"]
    percents = [event["figures"]["percent"] for event in events if event["model"] == "moe"]
    assert percents == sorted(percents)
    assert percents[-1] == 100
    assert len(percents) >= 3


@pytest.mark.parametrize("model", LOADED)
def test_whole_answers_and_streams_say_the_same(vllm_server: RunningServer, model: str) -> None:
    sdk = OpenAI(base_url=f"{vllm_server.url}/v1", api_key="none", max_retries=0, timeout=600)
    asked: Any = {"model": model, "messages": HELLO, "max_tokens": 24, "temperature": 0}
    whole = sdk.chat.completions.create(**asked)
    events = list(sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert whole.choices[0].message.content == text
    assert whole.model == model
    assert whole.usage is not None
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens == 24


@pytest.mark.parametrize("model", ["laya", "moe"])
def test_a_laya_model_says_what_torch_says(vllm_server: RunningServer, model: str) -> None:
    """In its own form, by Laya's router inside of vLLM, and in Mixtral's."""
    words = AutoTokenizer.from_pretrained(MODELS / "laya")
    torch_model = LayaForCausalLM.from_pretrained(MODELS / "laya", dtype=torch.float32).eval()
    for prompt in ("Laya serves models", "the ledger keeps"):
        ids = words(prompt, return_tensors="pt").input_ids
        wanted = torch_model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
        body = {"model": model, "prompt": ids[0].tolist(), "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        with client(vllm_server) as http:
            answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == words.decode(wanted)


def test_its_own_tokenizer_answers_in_either_form(vllm_server: RunningServer) -> None:
    with client(vllm_server) as http:
        theirs = http.post("/tokenize", json={"model": "dense", "prompt": "Hello there"}).json()
        ours = http.post("/tokenize", json={"model": "dense", "content": "Hello there", "with_pieces": True}).json()
        back = http.post("/detokenize", json={"model": "dense", "tokens": theirs["tokens"]}).json()
        chat = http.post("/tokenize", json={"model": "dense", "messages": HELLO}).json()
        counted = http.post("/v1/messages/count_tokens", json={"model": "dense", "messages": HELLO})
    assert theirs["count"] == len(theirs["tokens"]) and theirs["max_model_len"] == 4096
    assert [each["id"] for each in ours["tokens"]] == theirs["tokens"]
    assert back["content"] == back["prompt"] == "Hello there"
    assert counted.json()["input_tokens"] == chat["count"] > theirs["count"], counted.text


def test_max_tokens_above_the_window_are_lowered(vllm_server: RunningServer) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = ask(vllm_server, "dense", **{"max_tokens": None, name: 100_000}, stop=["e", "a", "o"])
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-laya-max-tokens"] == "4096"


def test_choices_are_sampled_side_by_side(vllm_server: RunningServer) -> None:
    answer = ask(vllm_server, "dense", n=2, temperature=1)
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_that_must_be_called_is(vllm_server: RunningServer, choice: Any) -> None:
    asked = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 100}
    answers = [ask(vllm_server, "dense", **asked, seed=seed) for seed in range(TRIES)]
    found = [call for answer in answers for call in answer.json()["choices"][0]["message"].get("tool_calls") or []]
    assert found  # chance may write blanks until its tokens are spent, but not each time
    for call in found:
        assert call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")


def test_a_schema_binds_the_answer(vllm_server: RunningServer) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "where", "schema": SCHEMA, "strict": True}}
    answer = ask(vllm_server, "dense", response_format=wanted, max_tokens=60)
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.json()["choices"][0]["message"]["content"])["city"] in ("Rome", "Oslo")


LONG_TOKENS = 2 * 4000  # some ten seconds of it
LONG = {"model": "dense", "messages": HELLO, "max_tokens": 4000, "n": 2, "temperature": 1, "ignore_eos": True}


def test_a_client_that_leaves_a_stream_ends_its_request_in_the_engine(vllm_server: RunningServer) -> None:
    ask(vllm_server, "dense")
    before = metric(vllm_server, "dense", "generation_tokens_total")
    with (
        contextlib.suppress(httpx.ReadTimeout),  # on a busy machine the first line may come late
        client(vllm_server) as http,
        http.stream("POST", "/v1/chat/completions", json=LONG | {"stream": True}, timeout=1) as answer,
    ):
        next(answer.iter_lines())
    until(lambda: metric(vllm_server, "dense", "num_requests_running") == 0)
    assert metric(vllm_server, "dense", "generation_tokens_total") - before < LONG_TOKENS


def test_a_client_that_leaves_a_whole_answer_ends_its_request_in_the_engine(vllm_server: RunningServer) -> None:
    ask(vllm_server, "dense")
    before = metric(vllm_server, "dense", "generation_tokens_total")
    with client(vllm_server) as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/chat/completions", json=LONG, timeout=1)
    until(lambda: vllm_server.state()["in_flight"] == 0)
    until(lambda: metric(vllm_server, "dense", "num_requests_running") == 0)
    assert metric(vllm_server, "dense", "generation_tokens_total") - before < LONG_TOKENS


@pytest.mark.parametrize("model", LOADED)
def test_memory_is_within_the_plan(vllm_server: RunningServer, model: str) -> None:
    ask(vllm_server, model)
    ledger: Any = vllm_server.state()["ledger"]
    owner = ledger["cpu"]["owners"][model]
    # its KV cache is resident from the start; a full batch, which these tests never ask for, is what may be missing
    assert 0.9 * owner["promised"] <= owner["measured"] <= owner["promised"], owner


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("too-long", "above the 4096 tokens that 'too-long' was trained for"),
        ("three-sides", "tensor_parallel_size 3 does not divide the 4 attention heads"),
        ("not-whole", "lacks model.layers.1.mlp.down_proj.weight"),
        ("not-awq", "the checkpoint is not quantized"),
    ],
)
def test_what_vllm_would_refuse_or_answer_by_chance_is_refused_before(
    vllm_server: RunningServer, model: str, words: str
) -> None:
    answer = ask(vllm_server, model)
    assert answer.status_code in (422, 503), answer.text  # of its file, or of what the configuration says of it
    assert words in answer.json()["error"]["message"]
    assert model_state(vllm_server, model)["pid"] is None


def test_packed_weights_are_planned_to_the_byte_and_run_where_the_engine_can(vllm_server: RunningServer) -> None:
    for name in ("awq", "gptq", "dense", "moe"):
        assert facts_of_hf(MODELS / name).weights.total_bytes == weight_bytes(name)
    answer = ask(vllm_server, "awq")
    if "avx512f" in cpu_flags():
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0
    else:
        assert answer.status_code == 501
        assert "AVX-512" in answer.json()["error"]["message"]


def test_an_engine_that_dies_is_told_and_leaves_nothing(vllm_server: RunningServer) -> None:
    """Last, as its model is gone."""
    ask(vllm_server, "moe")
    family = psutil.Process(model_state(vllm_server, "moe")["pid"]).children(recursive=True)
    worker = next(process for process in family if "Worker" in process.name())
    os.kill(worker.pid, signal.SIGKILL)
    until(lambda: model_state(vllm_server, "moe")["state"] == "failed", within_s=60)
    assert "stopped by itself" in model_state(vllm_server, "moe")["error"]
    assert ask(vllm_server, "dense").status_code == 200
    until(lambda: not any(process.is_running() for process in family))
