"""Prompts that are longer than the window of the model, on any engine: refused in OpenAI's words and by its code."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.gateway.live import prompt_of, sdk, user

from .target import Target

pytestmark = [pytest.mark.engine, pytest.mark.needs("laya")]


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_longer_than_the_window_is_refused_by_its_code(target: Target, stream: bool) -> None:
    client = sdk(target)
    fields: Any = {"model": target.model, "max_tokens": 1, "stream": stream}
    for ask in (
        lambda: client.chat.completions.create(messages=user(prompt_of(5000)), **fields),
        lambda: client.completions.create(prompt=prompt_of(5000), **fields),
    ):
        with pytest.raises(openai.BadRequestError, match=r"maximum context length is \d+ tokens") as refused:
            ask()
        assert refused.value.code == "context_length_exceeded"
        assert refused.value.response.headers["x-should-retry"] == "false"
    assert client.completions.create(model=target.model, prompt="Hi", max_tokens=1).choices
