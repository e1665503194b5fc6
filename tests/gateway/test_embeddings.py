"""Embeddings through the official SDK on the real engine, and what a model of another task answers."""

from __future__ import annotations

import base64
import math
import struct
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


def likeness(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def test_embedding_is_a_finite_vector_of_the_models_width(embedding: Serving) -> None:
    (vector,) = embed(embedding, "A cat sat on the mat.")
    assert len(vector) == WIDTH
    assert all(math.isfinite(value) for value in vector)
    assert any(vector)


def test_list_is_embedded_in_its_order(embedding: Serving) -> None:
    texts = ["A cat sat on the mat.", "A dog sat on the mat.", "Interest rates rose by two points.", "Hi", "tree " * 50]
    together = embed(embedding, texts)
    for vector, text in zip(together, texts, strict=True):
        assert likeness(vector, embed(embedding, text)[0]) > 0.9999  # whatever was computed beside it
    assert likeness(together[0], together[1]) > likeness(together[0], together[2])


def test_token_ids_are_embedded(embedding: Serving) -> None:
    (vector,) = embed(embedding, [9060, 28, 905])
    assert len(vector) == WIDTH
    assert len(embed(embedding, [[9060, 28], [905]])) == 2


def test_sdk_default_is_base64_and_equal_to_floats(embedding: Serving) -> None:
    (vector,) = embed(embedding, "A cat")
    default = sdk(embedding).embeddings.create(model="emb", input="A cat")  # the SDK asks for base64 and decodes it
    assert default.data[0].embedding == pytest.approx(vector, abs=1e-6)
    with plain(embedding) as client:
        body = {"model": "emb", "input": "A cat", "encoding_format": "base64"}
        item = client.post("/v1/embeddings", json=body).json()["data"][0]
    decoded = struct.unpack(f"<{WIDTH}f", base64.b64decode(item["embedding"]))
    assert list(decoded) == pytest.approx(vector, abs=1e-6)


def test_usage_counts_the_tokens_read(embedding: Serving) -> None:
    usage = sdk(embedding).embeddings.create(model="emb", input=["one two", "three"]).usage
    assert usage.prompt_tokens == usage.total_tokens >= 3


def test_input_longer_than_the_window_is_refused_with_both_numbers(embedding: Serving) -> None:
    for given in (prompt_of(300), ["short", prompt_of(300)], [9060] * 300):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 128 tokens") as refused:
            embed(embedding, given)
        error: Any = refused.value.body
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
        assert error["max_seq_len"] == 128
        assert 290 < error["prompt_tokens"] <= 301
    assert len(embed(embedding, prompt_of(120))[0]) == WIDTH


def test_bad_embedding_requests_are_refused_by_name(embedding: Serving) -> None:
    for fields, param in (
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            sdk(embedding).embeddings.create(model="emb", **fields)
        assert refused.value.param == param


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
