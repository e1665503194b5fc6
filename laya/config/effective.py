"""Owns: the configuration in effect as people may read it: every default filled in, every secret hidden."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from laya.config.document import Document
from laya.config.program import PROGRAM_KEYS
from laya.config.reference import default_of
from laya.config.remote import REMOTE_KEYS
from laya.config.resolve import RESOLVED_NAMES, SETTING_NAMES, ResolvedModel
from laya.config.schema import Config, ModelConfig
from laya.config.settings import ModelSettings
from laya.config.vllm import VLLM_KEYS

_SECRET_NAME = re.compile(r"key|token|secret|password", re.IGNORECASE)
_URL_SECRET = re.compile(r"(://[^:/@]*:).*(?=@)|([?&][^=&]*(?:key|token|secret|password)=)[^&]*", re.IGNORECASE)
_MAY_HOLD_SECRETS = frozenset({"args", "env", "headers"})
_LONG_TEXT = 200


def effective(config: Config, document: Document | None = None) -> dict[str, Any]:
    """The whole configuration as nested builtins, written as in config.yaml.

    What `document` took from the environment is shown as `${env.NAME}`, since it may be a secret.
    """
    shown: dict[str, Any] = {
        "version": config.version,
        "models_dir": config.models_dir,
        "server": msgspec.to_builtins(config.server),
        "memory": {"budget": config.memory.budget or "80%", "gpu": config.memory.gpu, "anyway": config.memory.anyway},
        "routing": msgspec.to_builtins(config.routing),
        "store": msgspec.to_builtins(config.store),
        "request_log": msgspec.to_builtins(config.request_log),
        "traces": msgspec.to_builtins(config.traces),
        "ray": msgspec.to_builtins(config.ray),
        "peers": msgspec.to_builtins(config.peers),
        **_settings(config.for_model("")),
        "models": {name: _model(config.for_model(name), entry) for name, entry in config.models.items()},
    }
    for key in shown["server"]["api_keys"]:
        key["sha256"] = key["sha256"][:8] + "..."
    hidden: dict[str, Any] = _hide(shown, _from_environment(document) if document else {})
    return hidden


def _model(model: ResolvedModel, entry: ModelConfig) -> dict[str, Any]:
    own: dict[str, Any] = {"source": model.source, "aliases": list(model.aliases)}
    own["cost"] = msgspec.to_builtins(model.cost)
    if model.engine == "vllm":
        own |= {name: getattr(entry, name) for name in VLLM_KEYS}
    if model.program is not None:
        own |= {name: getattr(entry, name) for name in PROGRAM_KEYS}
    if model.remote is not None:
        own |= {name: getattr(entry, name) for name in REMOTE_KEYS}
    return own | _settings(model)


def _settings(model: ResolvedModel) -> dict[str, Any]:
    settings = {name: getattr(model, RESOLVED_NAMES.get(name, name)) for name in SETTING_NAMES}
    undecided = {name: default_of(ModelSettings, name) for name, value in settings.items() if name not in model.fixed}
    decided = {"ttl": model.ttl_s} | ({"kv_pool_tokens": "auto"} if model.kv_pool_auto else {})
    decided |= {"prompt_cache": "auto"} if model.prompt_cache_bytes is None else {}
    written: dict[str, Any] = msgspec.to_builtins(settings | undecided | decided, enc_hook=_path_text)
    return {name: written[name] for name in SETTING_NAMES}


def _path_text(value: Any) -> str:
    assert isinstance(value, Path)
    return str(value)


def _from_environment(document: Document) -> dict[str, str]:
    """Text that came from the environment -> how it was written."""
    texts = {}
    for path, written in document.written.items():
        value: Any = document.data
        for part in path:
            value = value[part] if part != "<<" else value
        if isinstance(value, str) and value:
            texts[value] = written
    return texts


def _hide(value: Any, from_environment: dict[str, str], name: str = "", in_args: bool = False) -> Any:
    if isinstance(value, dict):
        return {
            key: _hide(member, from_environment, key, in_args or key in _MAY_HOLD_SECRETS)
            for key, member in value.items()
        }
    if isinstance(value, list):
        return [_hide(member, from_environment, name, in_args) for member in value]
    if not isinstance(value, str):
        return value
    if value in from_environment:
        return from_environment[value]
    if in_args and (_SECRET_NAME.search(name) or name.lower() in ("authorization", "cookie")):
        return "(hidden)"
    if "://" in value:
        value = _URL_SECRET.sub(lambda found: f"{found[1] or found[2]}(hidden)", value)
    return value if len(value) <= _LONG_TEXT else f"{value[:_LONG_TEXT]}... ({len(value)} characters)"
