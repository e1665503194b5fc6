"""Owns: the lines that make another program a client of this server, for the programs that people connect most.

Knows no server: address, model, key and window come from whoever asks (`laya connect`, the page), and what comes out is
text. `snippet` is the one function to call; every text here is run against a real server by `make test-clients`, where
the program can be installed.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from laya.config.hosts import is_loopback
from laya.errors import ConfigError, nearest

PLACEHOLDER_KEY = "YOUR_LAYA_KEY"  # a server that wants no key takes any, and most clients want to send one
_ANSWER_SHARE = 4  # an answer may take a quarter of the window; the rest is for what was said before


@dataclass(frozen=True)
class Target:
    """A model of a server, as a client has to name it. context_length: tokens, None where nobody knows them."""

    base_url: str
    model: str
    api_key: str
    context_length: int | None
    needs_key: bool = True

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of one answer that a client should ask for."""
        return max(1, self.context_length // _ANSWER_SHARE) if self.context_length else None

    @property
    def is_loopback(self) -> bool:
        return is_loopback(urlsplit(self.base_url).hostname or "")


@dataclass(frozen=True)
class Snippet:
    """The lines for one client. syntax: what they are written in; where: where they are pasted, in one sentence;
    install: the command that installs the client."""

    name: str
    title: str
    syntax: str
    where: str
    install: str
    text: str


@dataclass(frozen=True)
class _Client:
    title: str
    syntax: str
    where: str
    install: str
    write: Callable[[Target], str]


def names() -> list[str]:
    """The clients that there are lines for, in the order in which they are shown."""
    return list(_CLIENTS)


def snippet(
    client: str,
    url: str,
    model: str,
    *,
    api_key: str | None = None,
    context_length: int | None = None,
    needs_key: bool = True,
) -> Snippet:
    """The lines to paste for `client` (one of `names()`).

    `url` is the server's address as the client reaches it, with or without /v1. Without `api_key` the lines hold a
    placeholder; where the server wants no key (`needs_key`) a client that can do without gets none.
    `context_length` is `/v1/models`' field of this name; where it is None the lines leave lengths out.
    Raises ConfigError for a name that is none.
    """
    found = _CLIENTS.get(client)
    if found is None:
        close = nearest(client, _CLIENTS)
        hint = f"did you mean '{close}'?" if close else f"there are {', '.join(_CLIENTS)}."
        raise ConfigError(f"'{client}' is no client that Laya knows the settings of: {hint}", param="client")
    base_url = url.rstrip("/").removesuffix("/v1") + "/v1"
    target = Target(base_url, model, api_key or PLACEHOLDER_KEY, context_length, needs_key or api_key is not None)
    return Snippet(client, found.title, found.syntax, found.where, found.install, found.write(target))


def _open_webui(target: Target) -> str:
    """A container has a loopback of its own: without the host's network it never reaches a server on 127.0.0.1. And
    Open WebUI tells models of its own tools with every message: a small window is full of them, and a model whose
    template knows no tools would be refused."""
    image = "-v open-webui:/app/backend/data ghcr.io/open-webui/open-webui:main"
    tools = "# function_calling legacy: else each message brings Open WebUI's own tools along, some 7000 tokens."
    if target.is_loopback:
        notes = [
            "# 127.0.0.1 is this machine's; a container reaches it on the host's network alone (Linux).",
            "# Else, and from another machine: `laya serve --lan` prints a key and an address to use instead.",
            tools,
        ]
        network = ["--network=host -e HOST=127.0.0.1 -e PORT=3000"]
    else:
        notes, network = [tools], ["-p 127.0.0.1:3000:8080"]
    variables = {
        "OPENAI_API_BASE_URL": target.base_url,
        "OPENAI_API_KEY": target.api_key,
        "DEFAULT_MODELS": target.model,
        "DEFAULT_MODEL_PARAMS": json.dumps({"function_calling": "legacy"}),
        "ENABLE_OLLAMA_API": "false",
    }
    flags = [f"-e {shlex.quote(f'{name}={value}')}" for name, value in variables.items()]
    return "\n".join([*notes, " \\\n  ".join(["docker run -d --name open-webui", *network, *flags, image])]) + "\n"


def _langchain(target: Target) -> str:
    profile = [f'    profile={{"max_input_tokens": {target.context_length}}},'] if target.context_length else []
    return _lines(
        "from langchain_openai import ChatOpenAI",
        "",
        "model = ChatOpenAI(",
        f"    model={json.dumps(target.model)},",
        f"    base_url={json.dumps(target.base_url)},",
        f"    api_key={json.dumps(target.api_key)},",
        *_max_tokens(target),
        *profile,
        ")",
        'print(model.invoke("Say hello.").content)',
    )


def _llamaindex(target: Target) -> str:
    window = [f"    context_window={target.context_length},"] if target.context_length else []
    return _lines(
        "from llama_index.llms.openai_like import OpenAILike",
        "",
        "llm = OpenAILike(",
        f"    model={json.dumps(target.model)},",
        f"    api_base={json.dumps(target.base_url)},",
        f"    api_key={json.dumps(target.api_key)},",
        *window,
        *_max_tokens(target),
        "    is_chat_model=True,",
        "    is_function_calling_model=True,",
        ")",
        'print(llm.complete("Say hello."))',
    )


def _litellm(target: Target) -> str:
    name = f"openai/{target.model}"
    lengths = [f"litellm.register_model({json.dumps({name: _litellm_entry(target)})})"] if target.context_length else []
    return _lines(
        "import litellm",
        "",
        *lengths,
        "answer = litellm.completion(",
        f"    model={json.dumps(name)},",
        f"    api_base={json.dumps(target.base_url)},",
        f"    api_key={json.dumps(target.api_key)},",
        *_max_tokens(target),
        '    messages=[{"role": "user", "content": "Say hello."}],',
        ")",
        "print(answer.choices[0].message.content)",
    )


def _continue(target: Target) -> str:
    lengths = [
        "    defaultCompletionOptions:",
        f"      contextLength: {target.context_length}",
        f"      maxTokens: {target.max_tokens}",
    ]
    return _lines(
        "name: Laya",
        "version: 1.0.0",
        "schema: v1",
        "models:",
        f"  - name: {json.dumps(target.model + ' (Laya)')}",
        "    provider: openai",
        f"    model: {json.dumps(target.model)}",
        f"    apiBase: {json.dumps(target.base_url)}",
        f"    apiKey: {json.dumps(target.api_key)}",
        "    roles: [chat, edit, apply]",
        *(lengths if target.context_length else []),
    )


def _llm(target: Target) -> str:
    name = shlex.quote(f"laya/{target.model}")
    limit = f" -o max_tokens {target.max_tokens}" if target.max_tokens else ""
    return _lines(
        'cat >> "$(dirname "$(llm logs path)")/extra-openai-models.yaml" <<\'END\'',
        f"- model_id: {json.dumps(f'laya/{target.model}')}",
        f"  model_name: {json.dumps(target.model)}",
        f"  api_base: {json.dumps(target.base_url)}",
        *(["  api_key_name: laya"] if target.needs_key else []),
        "END",
        *([f"llm keys set laya --value {shlex.quote(target.api_key)}"] if target.needs_key else []),
        f"llm -m {name}{limit} 'Say hello.'",
    )


def _jupyter(target: Target) -> str:
    window = f"  # of a window of {target.context_length}" if target.context_length else ""
    limit = [f"    max_tokens={target.max_tokens},{window}"] if target.max_tokens else []
    return _lines(
        "from openai import OpenAI",
        "",
        f"client = OpenAI(base_url={json.dumps(target.base_url)}, api_key={json.dumps(target.api_key)})",
        "stream = client.chat.completions.create(",
        f"    model={json.dumps(target.model)},",
        *limit,
        '    messages=[{"role": "user", "content": "Say hello."}],',
        "    stream=True,",
        ")",
        "for chunk in stream:",
        "    if chunk.choices:",
        '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
    )


def _aider(target: Target) -> str:
    name = f"openai/{target.model}"
    lengths = [
        "cat > .aider.model.metadata.json <<'END'",
        json.dumps({name: _litellm_entry(target)}),
        "END",
    ]
    return _lines(
        f"export OPENAI_API_BASE={shlex.quote(target.base_url)}",
        f"export OPENAI_API_KEY={shlex.quote(target.api_key)}",
        *(lengths if target.context_length else []),
        f"aider --model {shlex.quote(name)}",
    )


def _litellm_entry(target: Target) -> dict[str, object]:
    """A model as LiteLLM's table describes it, which aider reads too."""
    return {
        "litellm_provider": "openai",
        "mode": "chat",
        "max_input_tokens": target.context_length,
        "max_output_tokens": target.max_tokens,
        "max_tokens": target.max_tokens,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
    }


def _max_tokens(target: Target) -> list[str]:
    return [f"    max_tokens={target.max_tokens},"] if target.max_tokens else []


def _lines(*lines: str) -> str:
    return "\n".join(lines) + "\n"


_CLIENTS = {
    "open-webui": _Client("Open WebUI", "sh", "In a terminal; then open http://127.0.0.1:3000.", "docker", _open_webui),
    "langchain": _Client("LangChain", "python", "In a program.", "pip install langchain-openai", _langchain),
    "llamaindex": _Client(
        "LlamaIndex", "python", "In a program.", "pip install llama-index-llms-openai-like", _llamaindex
    ),
    "litellm": _Client("LiteLLM", "python", "In a program.", "pip install litellm", _litellm),
    "continue": _Client(
        "Continue", "yaml", "In ~/.continue/config.yaml, instead of what is there.", "Continue's extension", _continue
    ),
    "llm": _Client("llm", "sh", "In a terminal.", "pip install llm", _llm),
    "jupyter": _Client("Jupyter", "python", "In a cell.", "pip install openai", _jupyter),
    "aider": _Client("aider", "sh", "In a terminal, in the project's folder.", "pip install aider-chat", _aider),
}
