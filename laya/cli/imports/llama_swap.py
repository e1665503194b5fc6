"""Owns: llama-swap's config.yaml as a configuration of Laya's: its models, macros, peers and keys."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from laya.cli.imports.command import program_cmd, split_words, without_comments
from laya.cli.imports.draft import Draft, checked_url, expect, expect_names, is_secret_name, literal, variable_of
from laya.cli.imports.gpu_flags import gpus_of
from laya.cli.imports.llama_server import filler, is_llama_server, model_of
from laya.config.document import KeyPath, dotted, read_document
from laya.config.settings import SamplingDefaults
from laya.errors import ConfigError

PROGRAM = "llama-swap"
MAX_TEXT = 64 * 1024  # of a command line once its macros are filled in
_MACRO = re.compile(r"\$\{([A-Za-z0-9_-]+)\}")
_TOGETHER = "what fits in memory together runs together"
_IN_LIST = "Laya lists a model by its id and aliases alone"
_LOG = "Laya keeps a log of each engine: `laya logs`"
_TOP = {
    "logLevel": _LOG, "logTimeFormat": _LOG, "logToStdout": _LOG, "logHTTPRequests": "request_log",
    "metricsMaxInMemory": "/metrics and `laya usage`", "performance": "/metrics", "ui": "Laya has a page of its own",
    "captureBuffer": "request_log: {content: true}", "startPort": "each engine takes a free port",
    "sendLoadingState": "server.waiting_note_s", "includeAliasesInList": _IN_LIST, "groups": _TOGETHER,
    "unloadTimeout": "an engine has 3 seconds to end", "matrix": _TOGETHER, "upstream": "engines listen for Laya alone",
    "profiles": "routing.rules, with `laya reload`", "store": "Laya keeps its own: store", "routing": "routing.rules",
    "selectors": "routing.pools and policy", "scheduler": "priorities: server.api_keys", "router": _TOGETHER,
}  # fmt: skip
_MODEL = {
    "name": _IN_LIST, "description": _IN_LIST, "metadata": _IN_LIST, "unlisted": _IN_LIST, "capabilities": _IN_LIST,
    "sendLoadingState": "server.waiting_note_s", "unloadTimeout": "an engine has 3 seconds to end",
    "cmdStop": "the process group gets SIGTERM, and SIGKILL after 3 seconds",
}  # fmt: skip
_TAKEN_TOP = ("models", "macros", "apiKeys", "peers", "hooks", "healthCheckTimeout", "globalTTL")
_TAKEN = (
    "cmd", "env", "proxy", "checkEndpoint", "ttl", "useModelName", "filters", "aliases", "macros", "timeouts",
    "concurrencyLimit",
)  # fmt: skip
_TIMEOUTS = dict.fromkeys(("connect", "keepalive", "tlsHandshake", "idleConn", "expectContinue"), "progress_timeout_s")


def read_llama_swap(path: Path) -> Draft:
    """Raises ConfigError for a file that is none of llama-swap's."""
    document = read_document(path, None)
    top = dict(document.data)
    draft = Draft(document)
    if not isinstance(top.get("models", {} if "peers" in top else None), dict):
        raise document.error(("models",), "models: expected names with settings; is this llama-swap's config.yaml?")
    macros = _macros(draft, (), top)
    if (ready_s := top.pop("healthCheckTimeout", None)) is not None:
        expect(document, ("healthCheckTimeout",), ready_s, int, "whole seconds")
        draft.setting(("healthCheckTimeout",), draft.config, "load_timeout_s", max(15, ready_s))
    if ttl := top.pop("globalTTL", None):
        draft.setting(("globalTTL",), draft.config, "ttl", ttl)
    for index, key in enumerate(expect(document, ("apiKeys",), top.pop("apiKeys", []), list, "a list of keys")):
        where: KeyPath = ("apiKeys", index)
        text = str(key)
        draft.server_key(where, f"{PROGRAM}-{index + 1}", text, variable_of(text), role="user")
    for name, entry in (top.pop("models", None) or {}).items():
        here: KeyPath = ("models", name)
        try:
            _Model(draft, here, expect(document, here, entry, dict, "keys with values"), macros).read()
        except ConfigError as error:
            if error.message.startswith(f"{document.name}:"):  # of the file's form, not of what this model asks
                raise
            draft.skip(here, error.message)
    _aliases(draft)
    for name, peer in expect(document, ("peers",), top.pop("peers", None) or {}, dict, "names of peers").items():
        _peer(draft, ("peers", name), dict(expect(document, ("peers", name), peer, dict, "keys with values")))
    _preload(draft, top.pop("hooks", None) or {})
    _groups(draft, top.get("groups") or {})
    draft.skip_known((), top, _TOP, PROGRAM, _TAKEN_TOP)
    return draft


class _Model:
    """One entry under `models`."""

    def __init__(self, draft: Draft, path: KeyPath, entry: dict[str, Any], macros: dict[str, str]) -> None:
        self._draft = draft
        self._path = path
        self._entry = dict(entry)
        self._id = str(path[-1])
        self._macros = macros | _macros(draft, path, self._entry) | {"MODEL_ID": self._id}
        self._made: dict[str, Any] = {}

    def read(self) -> None:
        cmd = self._pop("cmd", str, "a command line")
        if cmd is None:
            raise ConfigError("it has no cmd")
        words = split_words(self._text(without_comments(cmd)))  # a macro in a comment may have lines
        if is_llama_server(words[0]):
            folder = self._draft.document.folder
            where = (*self._path, "cmd")
            self._made = model_of(words[1:], self._draft, where, folder, filler(os.environ))
            self._made["source"] = literal(self._made["source"])
            for name in ("proxy", "useModelName", "checkEndpoint"):
                self._entry.pop(name, None)  # Laya's own engine needs none of them
            for name, value in self._env().items():
                gpus = gpus_of(value.split(",")) if name == "CUDA_VISIBLE_DEVICES" else None
                if gpus is not None:
                    self._made["gpus"] = gpus
                    continue
                self._draft.skip((*self._path, "env"), "Laya's own engine has no environment to set: args, or "
                                 "engine: command", key=f"{dotted((*self._path, 'env'))} {name}")  # fmt: skip
        else:
            self._program(words)
        self._common()
        self._draft.models[self._id] = self._made
        self._draft.skip_known(self._path, self._entry, _MODEL, PROGRAM, _TAKEN)

    def _program(self, words: list[str]) -> None:
        proxy = self._pop("proxy", str, "an address")
        proxy = None if proxy is None else self._text(proxy)
        self._made = {"engine": "command", "cmd": program_cmd(words, proxy, self._draft, (*self._path, "cmd"))}
        health = self._pop("checkEndpoint", str, "a path")
        if health is not None:
            self._made["health"] = None if health == "none" else self._text(health)
        if (name := self._pop("useModelName", str, "a name")) is not None:
            self._made["served_model_name"] = literal(self._text(name))
        if env := self._env():
            self._made["env"] = env
        self._made["cwd"] = str(self._draft.document.folder)

    def _env(self) -> dict[str, str]:
        made: dict[str, str] = {}
        for index, item in enumerate(self._pop("env", list, "a list of NAME=value") or []):
            where = (*self._path, "env", index)
            name, has_value, value = self._text(str(item)).partition("=")
            if not has_value:
                self._draft.skip(where, "expected NAME=value")
            elif is_secret_name(name) and value and not value.startswith("${env."):
                self._draft.skip(where, f"no key is copied: write {name}: ${{env.{name}}} and set it for `laya serve`",
                                 key=f"{dotted((*self._path, 'env'))} {name}")  # fmt: skip
            else:
                made[name] = value
        return made

    def _common(self) -> None:
        draft, made = self._draft, self._made
        ttl = self._pop("ttl", int, "seconds")
        if ttl is not None and ttl >= 0:
            made["ttl"] = ttl or None
        if limit := self._pop("concurrencyLimit", int, "a whole number"):
            made["limits"] = {"max_concurrent": limit}
        _timeouts(draft, (*self._path, "timeouts"), self._pop("timeouts", dict, "keys with values") or {}, made)
        _filters(draft, (*self._path, "filters"), self._pop("filters", dict, "keys with values") or {}, made)
        aliases = self._pop("aliases", list, "a list of names") or []
        made["aliases"] = [str(each.get("id", "") if isinstance(each, dict) else each) for each in aliases]

    def _pop(self, name: str, kind: type, words: str) -> Any:
        value = self._entry.pop(name, None)
        return None if value is None else expect(self._draft.document, (*self._path, name), value, kind, words)

    def _text(self, text: str) -> str:
        return _filled(self._draft, self._path, text, self._macros)


def _macros(draft: Draft, path: KeyPath, section: dict[str, Any]) -> dict[str, str]:
    where = (*path, "macros")
    found = expect(draft.document, where, section.pop("macros", None) or {}, dict, "names with values")
    for name, value in found.items():
        if isinstance(value, (dict, list)) or value is None:
            raise draft.document.error(
                (*where, name), f"{dotted((*where, name))}: expected text, a number, true or false"
            )
    return {
        name: str(value).lower() if isinstance(value, bool) else without_comments(str(value))
        for name, value in found.items()
    }


def _filled(draft: Draft, path: KeyPath, text: str, macros: dict[str, str]) -> str:
    """Every macro in its place; macros may hold others. Raises ConfigError for one that holds itself."""
    for _ in range(len(macros) + 2):
        if not any(name in macros for name in _MACRO.findall(text)):
            return text
        text = _MACRO.sub(lambda match: macros.get(match[1], match[0]), text)
        if len(text) > MAX_TEXT:
            break
    raise draft.document.error(path, f"{dotted(path)}: its macros hold themselves, or are more than {MAX_TEXT} bytes")


def _timeouts(draft: Draft, path: KeyPath, section: Any, made: dict[str, Any], *, far: bool = False) -> None:
    rest = dict(expect(draft.document, path, section, dict, "keys with values"))
    for name, key in (("responseHeader", "progress_timeout_s"), *([("connect", "connect_timeout_s")] if far else [])):
        if value := rest.pop(name, None):
            made[key] = expect(draft.document, (*path, name), value, int, "whole seconds")
    draft.skip_known(path, rest, _TIMEOUTS, PROGRAM)


def _filters(draft: Draft, path: KeyPath, section: Any, made: dict[str, Any]) -> None:
    rest = dict(expect(draft.document, path, section, dict, "keys with values"))
    params = expect(draft.document, (*path, "setParams"), rest.pop("setParams", None) or {}, dict, "keys with values")
    for name, value in params.items():
        where = (*path, "setParams", name)
        if name not in SamplingDefaults.__struct_fields__:
            draft.skip(where, "a request's own field; defaults has sampling values")
        elif draft.setting(where, made, f"defaults.{name}", value):
            draft.note(where, "a default here: a request that says its own keeps it")
    reasons = {"stripParams": "requests pass as they are; defaults gives values to those that say none",
               "setParamsByID": "a model under models: for each, with its defaults"}  # fmt: skip
    draft.skip_known(path, rest, reasons, PROGRAM)


def _aliases(draft: Draft) -> None:
    """Once all models are known, so that no alias hides one."""
    for name, entry in draft.models.items():
        for index, alias in enumerate(entry.pop("aliases", [])):
            draft.alias(("models", name, "aliases", index), alias, name)


def _peer(draft: Draft, path: KeyPath, peer: dict[str, Any]) -> None:
    document = draft.document
    proxy = expect(document, (*path, "proxy"), peer.pop("proxy", None), str, "an address")
    variable = re.match(r"\$\{env\.", proxy)
    try:
        url = proxy if variable else checked_url(proxy)
    except ConfigError as error:
        draft.skip((*path, "proxy"), error.message)
        return
    made: dict[str, Any] = {"engine": "remote", "url": url.rstrip("/") + "/v1"}
    _timeouts(draft, (*path, "timeouts"), peer.pop("timeouts", None) or {}, made, far=True)
    _filters(draft, (*path, "filters"), peer.pop("filters", None) or {}, made)
    if key := peer.pop("apiKey", None):
        draft.remote_key((*path, "apiKey"), made, str(path[-1]), variable_of(str(key)))
    for index, name in enumerate(expect_names(document, (*path, "models"), peer.pop("models", None))):
        if name in draft.models:
            draft.skip((*path, "models", index), f"{name} is a name already")
        else:
            draft.models[name] = dict(made)
    draft.skip_known(path, peer, {}, PROGRAM, ("proxy", "apiKey", "models", "filters", "timeouts"))


def _preload(draft: Draft, hooks: dict[str, Any]) -> None:
    start = dict(expect(draft.document, ("hooks",), hooks, dict, "keys with values"))
    actions = dict(
        expect(draft.document, ("hooks", "on_startup"), start.pop("on_startup", None) or {}, dict, "actions")
    )
    where: KeyPath = ("hooks", "on_startup", "preload")
    for index, name in enumerate(expect_names(draft.document, where, actions.pop("preload", None))):
        owner = _owner(draft, name)
        if owner is None:
            draft.skip((*where, index), f"{name} is no model of the configuration")
        else:
            draft.models[owner]["preload"] = True
    draft.skip_known(("hooks", "on_startup"), actions, {}, PROGRAM)
    draft.skip_known(("hooks",), start, {}, PROGRAM)


def _groups(draft: Draft, groups: dict[str, Any]) -> None:
    """Of a group Laya knows one thing: that nobody unloads its members."""
    for name, group in expect(draft.document, ("groups",), groups, dict, "names of groups").items():
        if isinstance(group, dict) and group.get("persistent") is True:
            for member in expect_names(draft.document, ("groups", name, "members"), group.get("members")):
                if (owner := _owner(draft, member)) is not None:
                    draft.models[owner]["pinned"] = True
            draft.note(("groups", name, "persistent"), "pinned: true on its members")


def _owner(draft: Draft, name: str) -> str | None:
    return next((key for key, entry in draft.models.items() if name == key or name in entry.get("aliases", ())), None)
