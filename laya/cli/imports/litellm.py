"""Owns: the config.yaml of LiteLLM's proxy as a configuration of Laya's: deployments, their groups, routing, keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laya.cli.imports.draft import Draft, checked_url, expect, is_secret_name, literal
from laya.cli.imports.litellm_routing import read_routing
from laya.cli.imports.providers import OTHERS, PROVIDERS, provider_of
from laya.config.document import Document, KeyPath, read_document
from laya.config.settings import SamplingDefaults
from laya.errors import ConfigError, nearest

PROGRAM = "LiteLLM"
_ENVIRON = re.compile(r"os\.environ/([A-Za-z_][A-Za-z0-9_]*)")
_LIMITS = {"rpm": "requests_per_minute", "tpm": "tokens_per_minute", "max_parallel_requests": "max_concurrent"}
_COSTS = {"input_cost_per_token": "input_per_million", "output_cost_per_token": "output_per_million"}
_MODES = {"chat": None, "completion": None, "responses": None, "embedding": "embed", "rerank": "rerank"}
_PLACEHOLDERS = ("", "none", "null", "empty", "dummy", "fake-key", "fake", "not-needed", "no-key", "anything")
_RETRIES = "what one address fails another serves, once"
_PARAMS = {
    "api_version": "an address has no query here", "max_retries": _RETRIES, "num_retries": _RETRIES,
    "drop_params": "requests pass as they are", "stream": "enable_streaming",
    "ssl_verify": "TLS is verified always: ca_file", "tags": "routing.rules",
    "region_name": "the address decides it", "allowed_openai_params": "requests pass as they are",
    "use_in_pass_through": "no pass-through", "max_budget": "limits", "budget_duration": "limits",
    "rust": "nothing to say",
    "additional_drop_params": "requests pass as they are", "mock_response": "no mock answers", "order": "routing.rules",
    "cooldown_time": "a breaker of each address decides it", "stream_timeout": "progress_timeout_s",
    "merge_reasoning_content_in_choices": "answers pass as they are", "configurable_clientside_auth_params": "no such",
}  # fmt: skip
_TAKEN = ("model", "api_base", "base_url", "api_key", "organization", "extra_headers", "timeout", "weight", *_LIMITS)
_TOP = {
    "environment_variables": "set them for `laya serve`, where it needs any", "callback_settings": "traces, /metrics",
    "include": "import each file by itself",
    "guardrails": "no guardrails here", "mcp_servers": "no MCP here", "files_settings": "no files API here",
    "finetune_settings": "no fine-tuning here", "vector_store_registry": "no vector stores here",
    "search_tools": "no search here", "prompts": "no prompts here", "agent_list": "no agents here",
}  # fmt: skip


def read_litellm(path: Path) -> Draft:
    """Raises ConfigError for a file that is none of LiteLLM's."""
    document = read_document(path, None)
    top = dict(document.data)
    if not isinstance(top.get("model_list"), list):
        hint = "is this the config.yaml of LiteLLM's proxy?"
        raise document.error(("model_list",), f"model_list: expected a list of models; {hint}")
    draft = Draft(document)
    deployments = _Deployments(draft, _credentials(document, top.pop("credential_list", None)))
    for index, entry in enumerate(top.pop("model_list")):
        where: KeyPath = ("model_list", index)
        deployments.read(where, dict(expect(document, where, entry, dict, "keys with values")))
    groups = deployments.settled()
    settings = {
        name: dict(expect(document, (name,), top.pop(name, None) or {}, dict, "keys with values"))
        for name in ("litellm_settings", "router_settings", "general_settings")
    }
    key = settings["general_settings"].pop("master_key", None)
    if key is not None:
        draft.server_key(("general_settings", "master_key"), "litellm-master", str(key), environ_of(key), role="admin")
    read_routing(draft, settings, groups)
    draft.skip_known((), top, _TOP, PROGRAM, ("model_list", "router_settings", "litellm_settings"))
    return draft


class _Deployments:
    """The entries of model_list, until all are known: those of one name are one model, or a pool."""

    def __init__(self, draft: Draft, credentials: Mapping[str, dict[str, Any]]) -> None:
        self._draft = draft
        self._credentials = credentials
        self._groups: dict[str, list[dict[str, Any]]] = {}

    def read(self, path: KeyPath, entry: dict[str, Any]) -> None:
        draft, document = self._draft, self._draft.document
        name = expect(document, (*path, "model_name"), entry.pop("model_name", None), str, "a name")
        where = (*path, "litellm_params")
        params = dict(expect(document, where, entry.pop("litellm_params", None), dict, "keys with values"))
        model = expect(document, (*where, "model"), params.pop("model", None), str, "provider/model")
        if "*" in name + model:
            draft.skip(path, "each model is named, under models", key=f"model_list {name}")
            return
        told = len(draft.told)
        credential = params.pop("litellm_credential_name", None)
        params = dict(self._credentials.get(str(credential), {})) | params
        try:
            made = self._remote(where, name, model, params)
        except ConfigError as error:
            draft.skip(path, error.message, key=f"model_list {name}")
            return
        for short, key in _LIMITS.items():
            limit = params.pop(short, None) or entry.pop(short, None)
            if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
                made.setdefault("limits", {})[key] = limit
            elif limit is not None:
                draft.skip(path, f"limits.{key} takes a whole number", key=f"model_list {name} {short}")
        info = dict(expect(document, (*path, "model_info"), entry.pop("model_info", None) or {}, dict, "keys"))
        for its, ours in _COSTS.items():
            price = params.pop(its, info.pop(its, None))
            if isinstance(price, int | float) and not isinstance(price, bool) and price >= 0:
                made.setdefault("cost", {})[ours] = round(price * 1_000_000, 9)
            elif price is not None:
                draft.skip((*path, its), f"cost.{ours} takes a number", key=f"model_list {name} {its}")
        mode = info.pop("mode", "embedding" if "embed" in model else None)
        if mode not in (*_MODES, None):
            del draft.told[told:]
            draft.skip((*path, "model_info", "mode"), f"Laya has no {mode}", key=f"model_list {name}")
            return
        if mode is not None and _MODES[mode]:
            made["task"] = _MODES[mode]
        for key in info:
            draft.skip((*path, "model_info", key), "no such facts are kept of a model of another server")
        draft.skip_known(where, params, _PARAMS, PROGRAM, _TAKEN)
        draft.skip_known(path, entry, _PARAMS, PROGRAM)
        self._groups.setdefault(name, []).append(made)

    def _remote(self, path: KeyPath, name: str, model: str, params: dict[str, Any]) -> dict[str, Any]:
        draft = self._draft
        provider, its_name = provider_of(model, params.pop("custom_llm_provider", None))
        base_key = "api_base" if "api_base" in params else "base_url"
        base = params.pop(base_key, None)
        if provider not in PROVIDERS:
            close = nearest(provider, [*PROVIDERS, *OTHERS])
            unknown = f"no provider {provider} is known" + (f", did you mean {close}?" if close else "")
            why = OTHERS.get(provider) or (unknown if provider else "its name tells no provider")
            raise ConfigError(f"{provider or model}: {why}")
        known = PROVIDERS[provider]
        made: dict[str, Any] = {
            "engine": "remote",
            "url": _url(base, known.url, known.adds_v1, provider),
            "model": literal(its_name),
        }
        key = params.pop("api_key", None)
        if key is None and base is None and known.key_env:
            made["key_env"] = known.key_env
        elif key is not None and str(key).lower() not in _PLACEHOLDERS:
            draft.remote_key((*path, "api_key"), made, name, environ_of(key))
        headers = params.pop("extra_headers", None) or params.pop("headers", None) or {}
        headers = dict(expect(draft.document, (*path, "extra_headers"), headers, dict, "names with values"))
        if (organization := params.pop("organization", None)) is not None:
            headers["OpenAI-Organization"] = organization
        self._headers(path, headers, made)
        if (timeout := params.pop("timeout", None)) is not None:
            draft.setting((*path, "timeout"), made, "progress_timeout_s", timeout)
        if (weight := params.pop("weight", None)) is not None:
            made["weight"] = weight
        for sampling in [key for key in params if key in SamplingDefaults.__struct_fields__]:
            draft.setting((*path, sampling), made, f"defaults.{sampling}", params.pop(sampling))
        return made

    def _headers(self, path: KeyPath, headers: dict[str, Any], made: dict[str, Any]) -> None:
        for header, value in headers.items():
            variable = environ_of(value)
            if header.lower() == "authorization" or (is_secret_name(header) and variable is None):
                self._draft.skip((*path, "extra_headers"), "no key is copied: key_env or key_file, or ${env.NAME}",
                                 key=f"{'.'.join(map(str, path))}.extra_headers {header}")  # fmt: skip
            elif not re.fullmatch(r"[\w-]+", header) or not isinstance(value, str):
                self._draft.skip((*path, "extra_headers"), f"{header} is no header that can be sent")
            else:
                made.setdefault("headers", {})[header] = f"${{env.{variable}}}" if variable else literal(value)

    def settled(self) -> dict[str, list[str]]:
        """Puts models and pools in the draft; gives the models of each name."""
        groups: dict[str, list[str]] = {}
        pools: dict[str, list[str]] = {}
        for name, deployments in self._groups.items():
            merged = _merged(deployments)
            if len(merged) == 1:
                merged[0].pop("weight", None)
                self._draft.models[name] = merged[0]
                groups[name] = [name]
                continue
            members = [self._free(f"{name}-{number}") for number in range(1, len(merged) + 1)]
            self._draft.models.update(zip(members, merged, strict=True))
            pools[name] = groups[name] = members
        if pools:
            self._draft.config["routing"] = {"pools": pools}
            if any("weight" in self._draft.models[member] for members in pools.values() for member in members):
                self._draft.config["policy"] = "weighted"
        return groups

    def _free(self, name: str) -> str:
        while name in self._groups or name in self._draft.models:
            name += "x"
        return name


def _merged(deployments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Deployments that differ in nothing but their address are one model with several `urls`."""
    merged: list[dict[str, Any]] = []
    for made in deployments:
        rest = {key: value for key, value in made.items() if key != "url"}
        twin = next(
            (each for each in merged if {k: v for k, v in each.items() if k not in ("url", "urls")} == rest), None
        )
        if twin is None:
            merged.append(made)
        else:
            urls = twin.pop("urls", None) or [twin.pop("url")]
            twin["urls"] = urls if made["url"] in urls else [*urls, made["url"]]
    for made in merged:
        n_urls = len(made.get("urls", ()))
        if n_urls == 1:
            made["url"] = made.pop("urls")[0]
        for key in made.get("limits", {}) if n_urls > 1 else ():
            made["limits"][key] *= n_urls  # LiteLLM's are of each deployment, Laya's of the model
    return merged


def _url(base: Any, known: str | None, adds_v1: bool, provider: str) -> str:
    if base is None and known is None:
        raise ConfigError(f"{provider} needs an api_base")
    if (variable := environ_of(base)) is not None:
        return f"${{env.{variable}}}" + ("/v1" if adds_v1 else "")
    url = str(base or known).rstrip("/")
    for path in ("/chat/completions", "/completions", "/embeddings"):
        url = url.removesuffix(path)
    checked_url(url)
    return url + "/v1" if adds_v1 and not url.endswith("/v1") else url


def _credentials(document: Document, section: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for index, entry in enumerate(expect(document, ("credential_list",), section or [], list, "a list")):
        where: KeyPath = ("credential_list", index)
        entry = expect(document, where, entry, dict, "keys with values")
        values = expect(document, where, entry.get("credential_values") or {}, dict, "keys with values")
        found[str(entry.get("credential_name"))] = values
    return found


def environ_of(value: Any) -> str | None:
    """NAME, where the value is `os.environ/NAME`."""
    match = _ENVIRON.fullmatch(value) if isinstance(value, str) else None
    return match[1] if match else None
