"""What llama.cpp's embeddings are held to here: the window, the task, the plan. The rest is in tests/any_engine."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from .live import Serving, plain, prompt_of, sdk, user

pytestmark = pytest.mark.engine
WIDTH = 576


def embed(server: Serving, given: Any, **fields: Any) -> list[list[float]]:
    answer = sdk(server).embeddings.create(model="emb", input=given, encoding_format="float", **fields)
    assert answer.model == "emb"
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return [item.embedding for item in answer.data]


def test_vector_does_not_depend_on_what_is_computed_beside_it(embedding: Serving) -> None:
    texts = ["A cat sat on the mat.", "Interest rates rose by two points.", "Hi", "tree " * 50]
    for vector, text in zip(embed(embedding, texts), texts, strict=True):
        (alone,) = embed(embedding, text)
        dot = sum(x * y for x, y in zip(vector, alone, strict=True))
        assert dot / math.hypot(*vector) / math.hypot(*alone) > 0.9999


def test_input_longer_than_the_window_is_refused_with_both_numbers(embedding: Serving) -> None:
    for given in (prompt_of(300), ["short", prompt_of(300)], [9060] * 300):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 128 tokens") as refused:
            embed(embedding, given)
        error: Any = refused.value.body
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
        assert error["max_seq_len"] == 128
        assert 290 < error["prompt_tokens"] <= 301
    assert len(embed(embedding, prompt_of(120))[0]) == WIDTH


def test_other_tasks_are_not_supported_and_name_the_models_that_are(embedding: Serving) -> None:
    client = sdk(embedding)
    with pytest.raises(openai.APIStatusError, match=r"task 'embed', not 'chat'.*talk") as refused:
        client.chat.completions.create(model="emb", messages=user("Hi"))
    assert (refused.value.status_code, refused.value.code) == (501, "not_supported")
    assert refused.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.APIStatusError, match=r"task 'chat', not 'embed'.*emb") as refused:
        client.embeddings.create(model="talk", input="Hi")
    assert refused.value.status_code == 501
    with plain(embedding) as http:
        body = {"model": "emb", "query": "a", "documents": ["b"]}
        assert http.post("/v1/rerank", json=body).status_code == 501
        models = {model["id"]: model for model in http.get("/v1/models").json()["data"]}
    assert models["talk"]["loaded"] is False  # none of this made an engine start
    assert (models["emb"]["task"], models["emb"]["max_model_len"]) == ("embed", 128)


def test_embedding_engine_stays_below_its_plan(embedding: Serving) -> None:
    embed(embedding, [prompt_of(120, seed=f"s{index}") for index in range(4)])
    with plain(embedding) as client:
        state = next(state for state in client.get("/admin/state").json()["models"] if state["id"] == "emb")
    planned = sum(device["total_bytes"] for device in state["plan"]["devices"])
    assert 0 < state["measured_bytes"] <= planned
