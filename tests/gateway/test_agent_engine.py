"""A coding agent's first request, 24,561 tokens of rules, tools and one wish, on the real engine: it runs where the
window holds it, and elsewhere is refused with both numbers before the engine computes anything."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

import laya.models
from laya.bench.generated_families import GeneratedShape
from laya.bench.generated_models import generate

from .agent_request import chat_request, message_request
from .live import MODEL, Serving, busy_slots, plain, sdk

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
N_TOKENS = 24_561  # by SmolLM2's tokenizer and the template that tells it of tools; the engine's own count, as tested
WINDOW = 32_768
# One narrow layer, so that a long prompt is read in seconds; the vocabulary and the template are SmolLM2's.
NARROW = GeneratedShape(n_layer=1, n_embd=64, n_head=1, n_head_kv=1, head_dim=64, n_ff=64)
TEMPLATE = Path(laya.models.__file__).parent / "templates" / "smollm2.jinja"


@pytest.fixture(scope="module")
def wide(
    start_server: Callable[..., Any], smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    path = generate(tmp_path_factory.mktemp("models") / "narrow.gguf", NARROW, vocabulary=smollm2_path)
    model = f"source: {path}, chat_template: {TEMPLATE}, max_num_seqs: 1"
    models = f"  wide: {{{model}, max_seq_len: {WINDOW}}}\n  small: {{{model}, max_seq_len: 1024}}\n"
    server = start_server(config=f"version: 1\nn_threads: 1\nmodels:\n{models}")
    yield server
    assert server.stop() == 0


def messages_sdk(server: Serving) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=240)


def tokens_read(server: Serving) -> float:
    """Tokens of prompts that the engine itself says it has computed."""
    with plain(server) as client:
        said = re.search(r"^llamacpp:prompt_tokens_total\{.*\} (\S+)$", client.get("/metrics/engines").text, re.M)
    assert said is not None
    return float(said[1])


def test_request_runs_where_the_window_that_was_told_holds_it(wide: Serving) -> None:
    told: Any = sdk(wide).models.retrieve("wide")
    assert (told.max_model_len, told.context_length, told.max_input_tokens) == (WINDOW, WINDOW, WINDOW)
    assert told.loaded is False  # before anything of it was asked
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(sdk(wide).chat.completions.create(model="wide", max_tokens=2, **chat_request(), **options))
    assert chunks[-1].usage.prompt_tokens == N_TOKENS
    assert chunks[-1].usage.completion_tokens == 2
    made = messages_sdk(wide).messages.create(model="wide", max_tokens=2, **message_request())
    assert (made.usage.cache_read_input_tokens or 0) + made.usage.input_tokens == N_TOKENS
    assert made.stop_reason == "max_tokens"


def test_count_is_exact_however_small_the_window(wide: Serving) -> None:
    with pytest.raises(openai.BadRequestError, match=f"is 1024 tokens.* resulted in {N_TOKENS} tokens"):
        sdk(wide).chat.completions.create(model="small", **chat_request())


def test_request_is_refused_with_both_numbers_where_it_does_not_fit(server: Serving) -> None:
    told: Any = sdk(server).models.retrieve("smollm2")
    before = tokens_read(server)
    for fields in ({}, {"stream": True}, {"max_tokens": 1}):
        with pytest.raises(openai.BadRequestError) as refused:
            sdk(server).chat.completions.create(model="smollm2", **chat_request(), **fields)
        error: Any = refused.value.body
        assert refused.value.code == "context_length_exceeded"
        assert (error["prompt_tokens"], error["max_seq_len"]) == (N_TOKENS, told.max_model_len)
        assert f"maximum context length is {told.max_model_len} tokens" in error["message"]
        assert f"resulted in {N_TOKENS} tokens" in error["message"]
        assert refused.value.response.headers["x-should-retry"] == "false"
    assert (tokens_read(server), busy_slots(server)) == (before, 0)


def test_message_is_refused_with_both_numbers_where_it_does_not_fit(server: Serving) -> None:
    with messages_sdk(server) as client:
        counted = client.messages.count_tokens(model="smollm2", **message_request())
        assert counted.input_tokens == N_TOKENS
        assert client.models.retrieve(MODEL).max_input_tokens == 4096
        before = tokens_read(server)
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(model="smollm2", max_tokens=1000, **message_request())
        with pytest.raises(anthropic.BadRequestError) as streamed, client.messages.stream(
            model="smollm2", max_tokens=1000, **message_request()
        ):
            pass
    for each in (refused, streamed):
        body: Any = each.value.body
        assert body["error"]["message"] == f"prompt is too long: {N_TOKENS} tokens > 4096 maximum"
        assert body["error"]["code"] == "context_length_exceeded"
        assert (body["error"]["prompt_tokens"], body["error"]["max_seq_len"]) == (N_TOKENS, 4096)
    assert (tokens_read(server), busy_slots(server)) == (before, 0)
