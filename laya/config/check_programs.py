"""Owns: entries of models that a program or another server serves: what they lack, and what of theirs fits neither."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from laya.config.document import Document, KeyPath, dotted
from laya.config.program import PROGRAM_KEYS, VARIABLES, unknown_variable, words_of
from laya.config.remote import REMOTE_KEYS, RemoteUrl, read_url
from laya.config.schema import Config, ModelConfig
from laya.config.settings import VLLM_KV_CACHE_DTYPES, ModelSettings
from laya.config.vllm import INSTEAD, VLLM_KEYS, not_vllms
from laya.errors import ConfigError, nearest

# Settings of Laya's own engine, which others have flags of their own for, if they have them at all.
_LLAMACPP_ALONE = (
    "engine_path", "kv_cache_dtype", "kv_pool_tokens", "prompt_cache", "quantization", "gpu_layers", "experts_on_cpu",
    "gpus", "tensor_split", "mmap", "mmproj", "draft", "lora", "chat_template", "args",
)  # fmt: skip
_KEYS_OF = {"command": PROGRAM_KEYS, "remote": REMOTE_KEYS, "vllm": VLLM_KEYS}
_ELSEWHERE = {"command": "the program has settings of its own: say it in cmd", "remote": "the other server decides it"}


def check_programs(config: Config, document: Document) -> None:
    """Raises ConfigError for the first entry that cannot be honoured."""
    if config.engine in _ELSEWHERE:
        raise document.error(("engine",), f"engine: {config.engine} is said by a model under `models:`, with its keys")
    if config.engine == "vllm":
        _check_not_llamacpps(config, document, ())
    for name, entry in config.models.items():
        where, its_engine = ("models", name), config.engine if entry.engine is UNSET else entry.engine
        for engine, keys in _KEYS_OF.items():
            strange = [key for key in keys if its_engine != engine and getattr(entry, key) != default_of_key(key)]
            if strange:
                raise _error(document, (*where, strange[0]), f"goes with engine: {engine}")
        if entry.engine == "command":
            _check_program(entry, document, where)
        elif entry.engine == "remote":
            _check_remote(entry, document, where)
        elif its_engine == "vllm":
            _check_vllm(entry, document, where)
            _check_shared_kv(config, entry, document, where)
        if entry.engine in _ELSEWHERE:
            _check_settings(entry, _ELSEWHERE[entry.engine], document, where)


def default_of_key(name: str) -> Any:
    """What a key of an entry is where it does not say it."""
    field = next(field for field in msgspec.structs.fields(ModelConfig) if field.name == name)
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _check_program(entry: ModelConfig, document: Document, where: KeyPath) -> None:
    if entry.cmd is None:
        hint = "such as cmd: my-server --port ${PORT}"
        raise document.error(where, f"{dotted(where)}: engine: command needs cmd, {hint}")
    try:
        words = words_of(entry.cmd)
    except ConfigError as error:
        raise _error(document, (*where, "cmd"), error.message) from None
    for key, texts in (("cmd", words), ("env", list(entry.env.values()))):
        for text in texts:
            unknown = unknown_variable(text)
            if unknown is not None:
                close = nearest(unknown, VARIABLES)
                hint = f"did you mean ${{{close}}}? " if close else ""
                known = ", ".join(f"${{{name}}}" for name in VARIABLES)
                raise _error(document, (*where, key), f"${{{unknown}}} is not filled in: {hint}There are {known}")
    for key, texts in (("cmd", words), ("env", [*entry.env, *entry.env.values()])):
        if any("\0" in text for text in texts):
            raise _error(document, (*where, key), "no program can be given a character 0")
    for name in entry.env:
        if not name or "=" in name:
            raise _error(document, (*where, "env", name), "it is no name of a variable")
    if not any("${PORT}" in text for text in (*words, *entry.env.values())):
        raise _error(document, (*where, "cmd"), "it names no ${PORT}: the program is to listen on the port Laya picks")
    if entry.health is not None and not entry.health.startswith("/"):
        raise _error(document, (*where, "health"), f"{entry.health!r} is no path: write /{entry.health}")


def _check_remote(entry: ModelConfig, document: Document, where: KeyPath) -> None:
    if (entry.url is None) == (not entry.urls):
        raise document.error(
            where, f"{dotted(where)}: engine: remote needs url: https://host/v1, or urls: a list of them"
        )
    given: list[tuple[KeyPath, str]] = [((*where, "urls", n), url) for n, url in enumerate(entry.urls)]
    seen: set[RemoteUrl] = set()
    for path, url in given or [((*where, "url"), entry.url or "")]:
        try:
            known = read_url(url)
        except ConfigError as error:
            raise _error(document, path, error.message) from None
        if known in seen:
            raise _error(document, path, f"{known.text} stands there twice")
        seen.add(known)
    if entry.key_env is not None and entry.key_file is not None:
        raise _error(document, (*where, "key_env"), "key_file is said too: the key is in one place")
    for name, value in entry.headers.items():
        if not name.replace("-", "").replace("_", "").isalnum() or not value.isprintable() or not value.isascii():
            raise _error(document, (*where, "headers", name), "it is no header")
        if name.lower() in (
            "authorization",
            "host",
            "content-length",
            "transfer-encoding",
            "connection",
            "accept-encoding",
        ):
            hint = "use key_env or key_file" if name.lower() == "authorization" else "Laya says it"
            raise _error(document, (*where, "headers", name), hint)
    if entry.replicas not in (UNSET, None):
        raise _error(document, (*where, "replicas"), "each of urls is one")


def _check_vllm(entry: ModelConfig, document: Document, where: KeyPath) -> None:
    _check_not_llamacpps(entry, document, where)
    if entry.overflow == "trim":
        raise _error(document, (*where, "overflow"), "Laya cannot count the tokens of another engine; leave it out")


def _check_shared_kv(config: Config, entry: ModelConfig, document: Document, where: KeyPath) -> None:
    """The cache type of all models may be none of vLLM's."""
    shared = config.kv_cache_dtype
    if entry.kv_cache_dtype is UNSET and shared not in (UNSET, "auto", *VLLM_KV_CACHE_DTYPES):
        raise document.error(
            where,
            f"{dotted(where)}: engine: vllm has no cache of kv_cache_dtype {shared}, which is said for all models; "
            f"say here auto or {', '.join(VLLM_KV_CACHE_DTYPES)}",
        )


def _check_not_llamacpps(level: ModelSettings, document: Document, where: KeyPath) -> None:
    strange = not_vllms({name: getattr(level, name) for name in INSTEAD})
    if strange is not None:
        raise _error(document, (*where, strange), f"is llama.cpp's; leave it out with engine: vllm. {INSTEAD[strange]}")


def _check_settings(entry: ModelConfig, elsewhere: str, document: Document, where: KeyPath) -> None:
    if entry.source is not None:
        raise _error(document, (*where, "source"), elsewhere)
    for key in _LLAMACPP_ALONE:
        if getattr(entry, key) not in (UNSET, None):
            raise _error(document, (*where, key), elsewhere)
    if entry.memory_limit not in (UNSET, None):
        hint = "use memory: what is declared is the ceiling too" if entry.engine == "command" else elsewhere
        raise _error(document, (*where, "memory_limit"), hint)
    if entry.overflow == "trim":
        raise _error(document, (*where, "overflow"), "Laya cannot count the tokens of another engine; leave it out")


def _error(document: Document, path: KeyPath, what: str) -> ConfigError:
    return document.error(path, f"{document.key(path)}: {what}")
