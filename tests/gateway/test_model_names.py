"""Models through the official SDK: their windows, and the names that each answers to."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from .live import MODEL, Serving, plain, sdk, user

pytestmark = pytest.mark.engine


def test_alias_answers_under_the_model_id(server: Serving) -> None:
    for name in ("smollm2", MODEL, "smollm2-135m:q4_1"):
        answer = sdk(server).chat.completions.create(model=name, messages=user("Hi"), max_tokens=1)
        assert answer.model == MODEL


def test_models_tell_their_window(server: Serving) -> None:
    client = sdk(server)
    model: Any = client.models.retrieve(MODEL)
    assert model.context_length == model.max_model_len == 4096
    assert model.loaded is True
    assert client.models.retrieve("smollm2").id == MODEL


def test_unknown_model_is_named_with_the_nearest(server: Serving) -> None:
    with pytest.raises(openai.NotFoundError, match="Did you mean 'smollm2'") as refused:
        sdk(server).models.retrieve("smolm2")
    assert refused.value.code == "model_not_found"
    with plain(server) as client:
        response = client.post("/v1/completions", json={"model": "smolm2", "prompt": "x"})
    assert response.json()["error"]["nearest"] == "smollm2"
