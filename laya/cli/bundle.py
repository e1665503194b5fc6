"""Owns: `laya doctor --bundle`: what somebody who helps needs to know of this machine, in one file without secrets.

Packed are findings, the configuration in effect, plans, versions, the state of a running server and the engines' logs.
Every text passes `redaction`; prompts, answers, keys and the database are never read.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

import laya
from laya.cli.client import ServerClient
from laya.cli.finding import Finding
from laya.cli.redaction import Redactor, secrets_of
from laya.config import Config, data_dir
from laya.config.document import Document, read_document
from laya.config.effective import effective
from laya.config.load import config_from
from laya.config.places import config_path
from laya.errors import ConfigError, LayaError
from laya.gateway.corrections import nothing_learned
from laya.gateway.kinds import kind_of
from laya.memory import Machine
from laya.models import available
from laya.routing import NATIVE, WHY_NOT_NATIVE

LOG_BYTES = 256 * 1024  # of the end of each log
LOGS = 20  # the newest
SERVER_TIMEOUT_S = 5.0
_ABOUT = """Made by `laya doctor --bundle` for somebody who helps. Secrets, prompts, answers and the paths of your home
are taken out. Look through it before you send it: every file is plain text.
"""
_MACHINE_FILES = ("meminfo", "pressure/memory", "pressure/cpu", "swaps", "self/cgroup", "cpuinfo", "version")
_VARIABLES = ("LAYA_", "HF_", "LLAMA_", "GGML_", "OMP_", "CUDA_", "OLLAMA_", "XDG_", "HTTP", "NO_PROXY", "ALL_PROXY")

Parts = dict[str, str]


def write_bundle(path: Path, findings: list[Finding], environ: Mapping[str, str]) -> list[str]:
    """Pack everything into `path`, a .tar.gz that only this user may read; gives the names of what is in it.

    Raises LayaError where the file cannot be written or is there already.
    """
    parts = collect(findings, environ)
    part = path.with_name(f".{path.name}.part")
    try:
        if path.exists():
            raise ConfigError(f"{path} is there already: --output names another file.", param="--output")
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            _pack(file, path.name.removesuffix(".tar.gz"), parts)
        part.replace(path)
    except OSError as error:
        raise LayaError(f"{path}: cannot be written ({error.strerror}).") from None
    finally:
        part.unlink(missing_ok=True)
    return sorted(parts)


def collect(findings: list[Finding], environ: Mapping[str, str]) -> Parts:
    """Name -> text of every part, redacted. What fails is told in its part and stops no other."""
    document, config, fault = _config(environ)
    home = data_dir(environ)
    redactor = _redactor(environ, home, document)
    makers: dict[str, Callable[[], str]] = {
        "doctor.json": lambda: _json(findings),
        "config.yaml": lambda: fault or _shown_config(config, document),
        "plan.json": lambda: _json(_plans(config, home)),
        "versions.json": lambda: _json(_versions()),
        "variables.txt": lambda: "\n".join(sorted(name for name in environ if name.startswith(_VARIABLES))) + "\n",
        "state.json": lambda: _json(_asked("/admin/state")),
        "events.json": lambda: _json(_asked("/admin/events")),
    } | {f"machine/{name.replace('/', '-')}.txt": _reader(Path("/proc", name)) for name in _MACHINE_FILES}
    parts = {"README.txt": _ABOUT} | {name: redactor.text(_attempt(make)) for name, make in makers.items()}
    for log in _newest_logs(home / "logs"):
        parts[f"logs/{redactor.text(log.name)}"] = redactor.log(_attempt(_reader(log)))
    return parts


def _redactor(environ: Mapping[str, str], home: Path, document: Document | None) -> Redactor:
    secrets = secrets_of(environ)
    if document is not None:  # what the config takes from the environment may be a secret under any name
        used = " ".join(document.written.values())
        secrets += [value for name, value in environ.items() if f"env.{name}}}" in used]
    lan_key = home / "lan_key"
    if lan_key.is_file():
        secrets.append(lan_key.read_text(errors="replace").strip())
    homes = {str(Path.home()): "~", environ.get("HOME", ""): "~", str(home): "$LAYA_HOME"}
    return Redactor(secrets, homes)


def _config(environ: Mapping[str, str]) -> tuple[Document | None, Config, str]:
    """The config in use; the defaults and what is wrong, where it cannot be read."""
    path = config_path(environ)
    try:
        document = None if path is None else read_document(path, environ)
        return document, Config() if document is None else config_from(document), ""
    except ConfigError as error:
        return None, Config(), f"{error.message}\n"


def _shown_config(config: Config, document: Document | None) -> str:
    shown = effective(config, document)
    for settings in (shown, *shown["models"].values()):
        for name in ("chat_template", "defaults"):  # a template or a stop text may be a user's own words
            settings[name] = _sizes(settings[name])
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)


def _sizes(value: Any) -> Any:
    """Texts as their length; numbers as they are."""
    if isinstance(value, dict):
        return {name: _sizes(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_sizes(member) for member in value]
    return f"({len(value)} characters)" if isinstance(value, str) else value


def _plans(config: Config, home: Path) -> dict[str, Any]:
    """Model -> its plan alone on this machine, or why there is none."""
    folder = Path(config.models_dir)
    budget = Machine().budget(config.memory.budget)
    names = dict.fromkeys([*config.models, *(model.id for model in available(models_dir=folder, home=home))])
    plans: dict[str, Any] = {"budget": budget}
    for name in names:
        settings = config.for_model(name)
        try:
            kind = kind_of(settings)
            file = kind.find(settings, models_dir=folder, home=home)
            plans[name] = kind.plan(settings, file, settings.asked(), budget, nothing_learned())
        except LayaError as error:
            plans[name] = error.body()
    return plans


def _versions() -> dict[str, Any]:
    return {
        "laya": laya.__version__,
        "python": sys.version,
        "platform": platform.platform(),
        "native_core": NATIVE or WHY_NOT_NATIVE,
        "packages": {package.name: package.version for package in importlib.metadata.distributions()},
    }


def _asked(path: str) -> Any:
    """What a server here says; its requests as their number only."""
    try:
        said = ServerClient().get(path, timeout_s=SERVER_TIMEOUT_S)
    except LayaError as error:
        return error.body()
    for model in said.get("models", []) if isinstance(said, dict) else []:
        model["requests"] = len(model.get("requests") or [])
    return said


def _newest_logs(folder: Path) -> list[Path]:
    logs = [path for path in folder.glob("*.log*") if path.is_file() and not path.is_symlink()]
    return sorted(logs, key=lambda path: path.stat().st_mtime, reverse=True)[:LOGS]


def _reader(path: Path) -> Callable[[], str]:
    """Reads the end of a file when it is called."""

    def read() -> str:
        with path.open("rb") as file:
            if path.stat().st_size > LOG_BYTES:
                file.seek(-LOG_BYTES, os.SEEK_END)
                file.readline()  # what is left of a line says nothing
            return file.read(LOG_BYTES).decode("utf-8", "replace")

    return read


def _attempt(make: Callable[[], str]) -> str:
    try:
        return make()
    except LayaError as error:
        return f"{error.message}\n"
    except Exception as error:  # a part that cannot be made is a finding too, and must not cost the others
        return f"{type(error).__name__}: {error}\n"


def _json(value: Any) -> str:
    return json.dumps(msgspec.to_builtins(value, enc_hook=str), indent=2) + "\n"


def _pack(file: Any, folder: str, parts: Parts) -> None:
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in sorted(parts.items()):
            content = text.encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(content))
