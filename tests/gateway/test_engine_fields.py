"""Which of llama.cpp's own fields a request may carry, and how far."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
import yaml

from laya.config.settings import ModelSettings
from laya.errors import InvalidRequest, NotSupported
from laya.gateway.body import ChatHead, CompletionHead, parse_body
from laya.gateway.known_fields import _NOT_DONE, _OF_CHATS, _OF_COMPLETIONS, OF_LLAMACPP
from laya.types import EndpointKind

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}

WRONG = [
    ("n_probs", 49152, "'n_probs' is 49152: Expected 'int' <= 20."),
    ("n_probs", -1, "'n_probs' is -1: Expected 'int' >= 0."),
    ("top_k", -2, "'top_k' is -2: Expected 'float' >= -1.0."),
    ("top_k", 1.5, "'top_k' is 1.5: it is a whole number."),
    ("min_p", 1.5, "'min_p' is 1.5: Expected 'float' <= 1.0."),
    ("typical_p", -0.5, "'typical_p' is -0.5: Expected 'float' >= 0.0."),
    ("repeat_last_n", -2, "'repeat_last_n' is -2: Expected 'int' >= -1."),
    ("repeat_penalty", 0, "'repeat_penalty' is 0: Expected 'float' > 0.0."),
    ("dry_penalty_last_n", -2, "'dry_penalty_last_n' is -2: Expected 'int' >= -1."),
    ("dry_sequence_breakers", ["x"] * 65, None),
    ("mirostat", 3, "'mirostat' is 3: Expected 'int' <= 2."),
    ("samplers", ["dry"] * 33, None),
    ("n_predict", 0, "'n_predict' is 0: it is 1 or more, or -1 for no limit."),
    ("n_predict", -2, "'n_predict' is -2: it is 1 or more, or -1 for no limit."),
    ("n_predict", 2**31, "'n_predict' is 2147483648: Expected 'int' <= 2147483647."),
    ("id_slot", 0, "'id_slot' is 0: requests can't choose a slot, leave it out."),
    ("lora", [{"id": 0, "scale": 2}], "'lora' can't be set by a request: adapters are set in the config, with 'lora'."),
    ("lora", [], "'lora' can't be set by a request: adapters are set in the config, with 'lora'."),
    ("n_cmpl", 500, "'n_cmpl' can't be set by a request: use 'n'."),
    ("grammar_lazy", True, "'grammar_lazy' can't be set by a request: use 'tools'."),
    ("grammar_triggers", [], "'grammar_triggers' can't be set by a request: use 'tools'."),
    ("cache_prompt", 1, "'cache_prompt' is 1: Expected 'bool | null', got 'int'."),
]


@pytest.mark.parametrize(("field", "value", "message"), WRONG)
@pytest.mark.parametrize(("kind", "body"), [(EndpointKind.CHAT, CHAT), (EndpointKind.COMPLETION, COMPLETION)])
def test_engine_field_out_of_range_is_named_with_its_value(
    kind: EndpointKind, body: dict[str, Any], field: str, value: Any, message: str | None
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(kind, json.dumps(body | {field: value}).encode())
    assert caught.value.param == field
    assert message is None or caught.value.message == message


@pytest.mark.parametrize(
    "fields",
    [
        {"n_probs": 20, "top_k": -1, "min_p": 0, "typical_p": 1, "repeat_last_n": -1, "repeat_penalty": 1.1},
        {"top_k": 40, "min_keep": 0, "n_keep": -1, "n_discard": 0, "id_slot": -1, "mirostat": 2, "mirostat_tau": 5.0},
        {"samplers": ["top_k", "temperature"], "cache_prompt": False, "timings_per_token": True},
        {"samplers": "kt", "return_progress": True, "dry_sequence_breakers": ["\n"], "t_max_predict_ms": -1},
        dict.fromkeys([field for field, _, _ in WRONG]),
    ],
)
def test_engine_fields_in_range_are_passed_on(fields: dict[str, Any]) -> None:
    parsed = parse_body(EndpointKind.CHAT, json.dumps(CHAT | fields).encode())
    assert json.loads(parsed.edited({})) == CHAT | fields


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({"n_predict": 5}, 5),
        ({"n_predict": -1}, None),
        ({"n_predict": 9, "max_tokens": 5}, 5),
        ({"n_predict": -1, "max_tokens": 5}, 5),
    ],
)
def test_n_predict_counts_as_max_tokens(fields: dict[str, Any], max_tokens: int | None) -> None:
    for kind, body in ((EndpointKind.CHAT, CHAT), (EndpointKind.COMPLETION, COMPLETION)):
        assert parse_body(kind, json.dumps(body | fields).encode()).max_tokens == max_tokens


def undone(body: dict[str, Any], **fields: Any) -> Any:
    kind = EndpointKind.CHAT if body is CHAT else EndpointKind.COMPLETION
    return parse_body(kind, json.dumps(body | fields).encode()).not_done


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (CHAT, {"modalities": ["text", "audio"]}),
        (CHAT, {"web_search_options": {"search_context_size": "low"}}),
        (CHAT, {"guided_json": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 99}}}}),
        (CHAT, {"structured_outputs": {"choice": ["a"]}}),
        (CHAT, {"best_of": 2}),
        (CHAT, {"prompt": "a"}),
        (CHAT, {"enable_thinking": False}),
        (CHAT, {"repetition_penalty": 1.1}),
        (COMPLETION, {"response_format": {"type": "json_object"}}),
        (COMPLETION, {"tools": [{}]}),
        (COMPLETION, {"messages": [{}]}),
        (COMPLETION, {"prompt_logprobs": 1}),
    ],
)
def test_what_makes_another_answer_is_told_by_name(body: dict[str, Any], fields: dict[str, Any]) -> None:
    error = undone(body, **fields)
    assert isinstance(error, NotSupported) and [error.param] == list(fields)


def test_what_to_do_instead_is_there_to_be_done() -> None:
    known = {*ChatHead.__struct_fields__, *CompletionHead.__struct_fields__, *OF_LLAMACPP, "pattern", "system"}
    for advice in (each for table in (_NOT_DONE, _OF_CHATS, _OF_COMPLETIONS) for each in table.values()):
        assert set(re.findall(r"'(\w+)'", advice)) <= known | set(ModelSettings.__struct_fields__), advice
        for setting in re.findall(r"`(.*)`", advice):
            msgspec.convert(yaml.safe_load(setting), ModelSettings)


@pytest.mark.parametrize(
    ("name", "close"),
    [("Stream", "stream"), ("temprature", "temperature"), ("max_token", "max_tokens"), ("q" * 10**6, None)],
)
def test_unknown_field_is_told_with_the_nearest_known_one(name: str, close: str | None) -> None:
    for body in (CHAT, COMPLETION):
        error = undone(body, **{name: True})
        assert isinstance(error, InvalidRequest) and len(error.message) < 200
        assert close is None or f"Did you mean '{close}'?" in error.message
        assert undone(body, **{name: None}) is None


@pytest.mark.parametrize(
    "fields",
    [
        # OpenAI's SDKs, LangChain, LiteLLM
        {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "s", "verbosity": "low"},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "reasoning_effort": "high", "modalities": ["text"]},
        {"parallel_tool_calls": False, "prediction": {"type": "content", "content": "a"}, "stream_options": None},
        # coding agents and chat pages, by way of routers
        {"provider": {"order": ["a"]}, "transforms": [], "include_reasoning": True, "usage": {"include": True}},
        {"reasoning": {"effort": "low"}, "thinking": {"type": "enabled"}, "session_id": "s", "chat_id": "c", "id": "i"},
        # what clients of vLLM send beside
        {"top_k": 20, "min_p": 0.1, "repetition_penalty": 1.0, "min_tokens": 0, "skip_special_tokens": True},
        {"chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": True, "ignore_eos": True},
        {"use_beam_search": False, "best_of": 1, "stop_token_ids": [], "guided_json": None, "cache_salt": "a"},
        # llama.cpp's own
        {
            "dynatemp_range": 0.1,
            "top_n_sigma": 1,
            "reasoning_format": "auto",
            "mirostat_tau": 5.0,
            "cache_prompt": True,
        },
        {"samplers": ["top_k"], "n_probs": 1, "post_sampling_probs": True, "return_tokens": True, "keep_alive": "5m"},
    ],
)
def test_what_clients_send_passes(fields: dict[str, Any]) -> None:
    assert undone(CHAT, **fields) is None
    assert undone(COMPLETION, **{name: value for name, value in fields.items() if name != "tools"}) is None


@pytest.mark.parametrize(("name", "value"), [("chat_template_kwargs", 5), ("reasoning_effort", 5), ("modalities", "a")])
def test_chat_field_of_a_wrong_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        undone(CHAT, **{name: value})
    assert caught.value.param == name


def test_what_a_client_said_is_cut_in_errors() -> None:
    for fields in (
        {"messages": [{"role": "r" * 10**6}]},
        {"tool_choice": "r" * 10**6},
        {"logit_bias": {"r" * 10**6: "a"}},
    ):
        with pytest.raises(InvalidRequest) as caught:
            parse_body(EndpointKind.CHAT, json.dumps(CHAT | fields).encode())
        assert len(json.dumps(caught.value.body())) < 3000
    assert len(InvalidRequest("a b " * 10**6).message) < 9000
    assert InvalidRequest("/" + "x" * 500).message == "/" + "x" * 500


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        (
            EndpointKind.EMBEDDING,
            {"dimension": 8},
            "'dimension' is not a field of /v1/embeddings. Did you mean 'dimensions'?",
        ),
        (EndpointKind.EMBEDDING, {"temperature": 1}, "'temperature' is not a field of /v1/embeddings."),
        (EndpointKind.RERANK, {"top_k": 2}, "'top_k' is not a field of /v1/rerank. Did you mean 'top_n'?"),
        (EndpointKind.EMBEDDING, {"dimensions": 8, "user": "u", "priority": 1, "truncate": False}, None),
        (EndpointKind.RERANK, {"top_n": 2, "return_documents": True, "max_chunks_per_doc": None}, None),
    ],
)
def test_fields_of_what_is_only_read(kind: EndpointKind, more: dict[str, Any], said: str | None) -> None:
    body: dict[str, Any] = {"input": "a"} if kind is EndpointKind.EMBEDDING else {"query": "a", "documents": ["b"]}
    fault = parse_body(kind, json.dumps(body | more).encode()).not_done
    assert (fault.message if fault is not None else None) == said
