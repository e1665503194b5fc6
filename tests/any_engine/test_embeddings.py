"""Embeddings through the official SDK on the real engine, and what a model of another task answers."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import openai
import pytest

from tests.gateway.live import plain, sdk

from .target import Target

pytestmark = [pytest.mark.engine, pytest.mark.needs("embeddings")]


def embed(embedder: Target, given: Any, **fields: Any) -> list[list[float]]:
    answer = sdk(embedder).embeddings.create(model=embedder.model, input=given, encoding_format="float", **fields)
    assert answer.model == embedder.model_id
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return [item.embedding for item in answer.data]


def likeness(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def test_embedding_is_a_finite_vector_of_the_models_width(embedder: Target) -> None:
    (vector,) = embed(embedder, "A cat sat on the mat.")
    assert all(math.isfinite(value) for value in vector)
    assert any(vector)


def test_list_is_embedded_in_its_order(embedder: Target) -> None:
    texts = ["A cat sat on the mat.", "A dog sat on the mat.", "Interest rates rose by two points.", "Hi", "tree " * 50]
    together = embed(embedder, texts)
    for vector, text in zip(together, texts, strict=True):
        alone = embed(embedder, text)[0]
        assert max(together, key=lambda other: likeness(other, alone)) is vector
    assert likeness(together[0], together[1]) > likeness(together[0], together[2])


def test_token_ids_are_embedded(embedder: Target) -> None:
    (vector,) = embed(embedder, [60, 28, 90])
    assert len(vector) == len(embed(embedder, "A cat")[0])
    assert len(embed(embedder, [[60, 28], [90]])) == 2


def test_sdk_default_is_base64_and_equal_to_floats(embedder: Target) -> None:
    (vector,) = embed(embedder, "A cat")
    # the SDK asks for base64 and decodes it
    default = sdk(embedder).embeddings.create(model=embedder.model, input="A cat")
    assert default.data[0].embedding == pytest.approx(vector, abs=1e-6)
    with plain(embedder) as client:
        body = {"model": embedder.model, "input": "A cat", "encoding_format": "base64"}
        item = client.post("/v1/embeddings", json=body).json()["data"][0]
    decoded = struct.unpack(f"<{len(vector)}f", base64.b64decode(item["embedding"]))
    assert list(decoded) == pytest.approx(vector, abs=1e-6)


def test_usage_counts_the_tokens_read(embedder: Target) -> None:
    usage = sdk(embedder).embeddings.create(model=embedder.model, input=["one two", "three"]).usage
    assert usage.prompt_tokens == usage.total_tokens >= 3


def test_bad_embedding_requests_are_refused_by_name(embedder: Target) -> None:
    for fields, param in (
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            sdk(embedder).embeddings.create(model=embedder.model, **fields)
        assert refused.value.param == param
