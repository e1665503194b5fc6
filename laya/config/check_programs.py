"""Owns: entries of models whose engine is a program: what they lack, and what of theirs fits no program."""

from __future__ import annotations

from msgspec import UNSET

from laya.config.document import Document, KeyPath, dotted
from laya.config.program import PROGRAM_KEYS, VARIABLES, default_of_key, unknown_variable, words_of
from laya.config.schema import Config, ModelConfig
from laya.errors import ConfigError, nearest

# Settings of Laya's own engine, which a program has flags of its own for, if it has them at all.
_LLAMACPP_ALONE = (
    "engine_path", "kv_cache_dtype", "kv_pool_tokens", "prompt_cache", "quantization", "gpu_layers", "experts_on_cpu",
    "gpus", "mmap", "mmproj", "draft", "lora", "chat_template", "args",
)  # fmt: skip


def check_programs(config: Config, document: Document) -> None:
    """Raises ConfigError for the first entry that cannot be honoured."""
    if config.engine == "command":
        path: KeyPath = ("engine",)
        raise document.error(path, "engine: command is said by a model under `models:`, with its cmd")
    for name, entry in config.models.items():
        where = ("models", name)
        if entry.engine == "command":
            _check_program(entry, document, where)
            continue
        for key in PROGRAM_KEYS:
            if getattr(entry, key) != default_of_key(key):
                raise _error(document, (*where, key), "goes with engine: command")


def _check_program(entry: ModelConfig, document: Document, where: KeyPath) -> None:
    if entry.cmd is None:
        raise document.error(
            where, f"{dotted(where)}: engine: command needs cmd, such as cmd: my-server --port ${{PORT}}"
        )
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
    if not any("${PORT}" in text for text in (*words, *entry.env.values())):
        raise _error(document, (*where, "cmd"), "it names no ${PORT}: the program is to listen on the port Laya picks")
    if entry.health is not None and not entry.health.startswith("/"):
        raise _error(document, (*where, "health"), f"{entry.health!r} is no path: write /{entry.health}")
    if entry.source is not None:
        raise _error(document, (*where, "source"), "the program knows its model: say it in cmd")
    for key in _LLAMACPP_ALONE:
        if getattr(entry, key) not in (UNSET, None):
            raise _error(document, (*where, key), "the program has settings of its own: say it in cmd")
    if entry.memory_limit not in (UNSET, None):
        raise _error(document, (*where, "memory_limit"), "use memory: what is declared is the ceiling too")
    if entry.overflow == "trim":
        raise _error(document, (*where, "overflow"), "Laya cannot count the tokens of a program; leave it out")


def _error(document: Document, path: KeyPath, what: str) -> ConfigError:
    return document.error(path, f"{document.key(path)}: {what}")
