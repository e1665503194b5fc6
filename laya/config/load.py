"""Owns: from a file, or from settings given by other means, to a checked Config."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from laya.config.checks import check_config, check_settings
from laya.config.convert import to_struct
from laya.config.document import Document, KeyPath, read_document
from laya.config.migrate import check_version
from laya.config.peers import PeerConfig
from laya.config.places import config_path
from laya.config.schema import Config, ModelConfig
from laya.config.settings import ModelSettings
from laya.config.traces import read_headers

_Level = TypeVar("_Level", bound=ModelSettings)


def load_config(path: Path | None, environ: Mapping[str, str]) -> Config:
    """The configuration in `path`; None = `./config.yaml`, else the user's own, else the defaults.

    Raises ConfigError naming the file, the line, the key, its value and what is right.
    """
    found = path or config_path(environ)
    return Config() if found is None else config_from(read_document(found, environ))


def config_from(document: Document) -> Config:
    """The checked configuration in a document; relative paths in it start from its folder."""
    check_version(document)
    config = to_struct(Config, document)
    check_config(config, document)
    config = _with_files(config, document, ())
    config.models = {name: _with_files(entry, document, ("models", name)) for name, entry in config.models.items()}
    config.peers = {
        name: msgspec.structs.replace(peer, **_secrets(peer, document, ("peers", name)))
        for name, peer in config.peers.items()
    }
    if "models_dir" in document.data:
        config.models_dir = str(_absolute(config.models_dir, document))
    if config.request_log.path is not None:
        log = _absolute(config.request_log.path, document)
        if log.is_dir():
            where = ("request_log", "path")
            raise document.error(where, f"request_log.path: {log} is a folder: write {log / 'requests.jsonl'}")
        config.request_log.path = str(log)
    if config.traces.headers_file is not None:
        config.traces.headers_file = _headers_file(config.traces.headers_file, document)
    return config


def parse_settings(settings: Mapping[str, Any], spelled: Mapping[KeyPath, str] | None = None) -> ModelConfig:
    """Checked settings of one model that came by a command line or a request; raises ConfigError.

    `spelled` maps keys to the names the user knows them by. Relative paths start from the working directory.
    """
    document = Document(dict(settings), spelled=spelled or {})
    parsed = to_struct(ModelConfig, document)
    check_settings(parsed, document)
    return _with_files(parsed, document, ())


def _with_files(settings: _Level, document: Document, path: KeyPath) -> _Level:
    """A copy whose files are there, by absolute path, and whose chat template is the text itself."""
    changes: dict[str, Any] = {}
    for name in ("mmproj", "draft"):
        if value := getattr(settings, name) or None:
            changes[name] = str(_file(value, document, (*path, name)))
    if settings.lora is not UNSET:
        changes["lora"] = [str(_file(value, document, (*path, "lora", n))) for n, value in enumerate(settings.lora)]
    if settings.engine_path:
        changes["engine_path"] = _program(settings.engine_path, document, (*path, "engine_path"))
    if isinstance(settings, ModelConfig) and settings.cmd is not None:
        changes["cwd"] = str(_folder(settings.cwd, document, (*path, "cwd")))
    if isinstance(settings, ModelConfig):
        changes |= _secrets(settings, document, path)
    if settings.chat_template and "{" not in settings.chat_template:
        changes["chat_template"] = _template(settings.chat_template, document, (*path, "chat_template"))
    return msgspec.structs.replace(settings, **changes)


def _secrets(keys: ModelConfig | PeerConfig, document: Document, path: KeyPath) -> dict[str, str]:
    """Where the key for another server and its certificates are, as far as they are said."""
    said = {name: getattr(keys, name) for name in ("key_file", "ca_file")}
    return {name: str(_file(value, document, (*path, name))) for name, value in said.items() if value}


def _absolute(value: str, document: Document) -> Path:
    return document.folder.absolute() / Path(value).expanduser()


def _file(value: str, document: Document, path: KeyPath) -> Path:
    file = _absolute(value, document)
    if not file.is_file():
        raise document.error(path, f"{document.key(path)}: there is no file {document.value(path, value)}")
    return file


def _folder(value: str | None, document: Document, path: KeyPath) -> Path:
    """None: that of the document."""
    folder = _absolute(value or ".", document)
    if not folder.is_dir():
        raise document.error(path, f"{document.key(path)}: there is no folder {document.value(path, value)}")
    return folder


def _program(value: str, document: Document, path: KeyPath) -> str:
    """A name without a slash is looked up in PATH, as a shell would. The folder of an environment stands for what it
    holds."""
    if "/" in value and os.access(_absolute(value, document) / "bin" / "python", os.X_OK):
        return str(_absolute(value, document))
    found = shutil.which(value if "/" not in value else str(_absolute(value, document)))
    if found is None:
        raise document.error(path, f"{document.key(path)}: {document.value(path, value)} is no program here")
    return found


def _headers_file(value: str, document: Document) -> str:
    """Read to see that it can be; what is in it is no part of the configuration."""
    path = ("traces", "headers_file")
    file = _file(value, document, path)
    try:
        read_headers(file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or ("it is not text" if isinstance(error, UnicodeError) else error)
        raise document.error(path, f"traces.headers_file: {document.value(path, value)}: {reason}") from None
    return str(file)


def _template(value: str, document: Document, path: KeyPath) -> str:
    try:
        return _file(value, document, path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise document.error(path, f"{document.key(path)}: cannot read {value}: {error}") from None
