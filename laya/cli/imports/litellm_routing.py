"""Owns: LiteLLM's router and module settings as rules, aliases and settings of Laya's."""

from __future__ import annotations

from typing import Any

from laya.cli.imports.draft import Draft, expect, expect_names
from laya.config.document import KeyPath

_BREAKER = "a breaker of each engine decides it"
_RETRIES = "what one address fails another serves, once"
_TRACES = "traces, request_log and /metrics"
_REDIS = "one server here: nothing is shared"
_REASONS = {
    "num_retries": _RETRIES, "retry_policy": _RETRIES, "retry_after": _RETRIES, "max_fallbacks": "all are tried",
    "allowed_fails": _BREAKER, "allowed_fails_policy": _BREAKER, "cooldown_time": _BREAKER,
    "disable_cooldowns": _BREAKER,
    "context_window_fallbacks": "a rule with min_prompt_tokens", "content_policy_fallbacks": "no content policy here",
    "redis_host": _REDIS, "redis_port": _REDIS, "redis_password": _REDIS, "redis_url": _REDIS,
    "enable_pre_call_checks": "max_seq_len", "enable_tag_filtering": "routing.rules with headers",
    "tag_filtering_match_any": "routing.rules with headers", "routing_strategy_args": "policy",
    "default_litellm_params": "settings at the top level", "stream_timeout": "progress_timeout_s",
    "optional_pre_call_checks": "policy: auto keeps a session where it is", "routing_groups": "routing.rules",
    "drop_params": "requests pass as they are", "modify_params": "requests pass as they are",
    "cache": "no answers are kept",
    "cache_params": "no answers are kept", "set_verbose": "LAYA_DEBUG=1", "json_logs": "request_log",
    "callbacks": _TRACES, "success_callback": _TRACES, "failure_callback": _TRACES, "service_callbacks": _TRACES,
    "turn_off_message_logging": "request_log has no content unless asked", "telemetry": "there is none",
    "redact_user_api_key_info": "keys are known by hash", "ssl_verify": "TLS is verified always: ca_file",
    "max_budget": "limits, server.api_keys", "budget_duration": "limits, server.api_keys", "force_ipv4": "the address",
    "default_team_settings": "server.api_keys", "max_parallel_requests": "limits",
    "request_timeout": "progress_timeout_s",
    "database_url": "store: {url: ...}", "store_model_in_db": "models are in config.yaml", "alerting": "/metrics",
    "alerting_threshold": "/metrics", "allowed_routes": "server.api_keys with role", "custom_auth": "server.api_keys",
    "background_health_checks": "addresses are asked every 15 seconds", "health_check_interval": "15 seconds",
    "global_max_parallel_requests": "limits", "completion_model": "a rule", "enable_jwt_auth": "server.api_keys",
    "infer_model_from_keys": "models are named", "pass_through_endpoints": "no pass-through",
    "proxy_batch_write_at": "store",
    "database_connection_pool_limit": "store", "database_connection_timeout": "store",
    "proxy_budget_rescheduler_min_time":
    "no budgets", "master_key": "server.api_keys", "salt_key": "keys are known by hash",
    "ui_access_mode": "roles of keys",
    "use_redis_transaction_buffer": _REDIS, "enforce_user_param": "server.api_keys",
    "disable_spend_logs": "`laya usage`",
}  # fmt: skip
_POLICIES = {
    "least-busy": "least_tokens", "usage-based-routing": "least_tokens", "usage-based-routing-v2": "least_tokens",
}  # fmt: skip


def read_routing(draft: Draft, settings: dict[str, dict[str, Any]], groups: dict[str, list[str]]) -> None:
    """settings: LiteLLM's three sections; the router's come before the module's, where both say a thing."""
    router, module = settings["router_settings"], settings["litellm_settings"]
    timeouts = [("router_settings", "timeout", router), ("litellm_settings", "request_timeout", module)]
    said = [(section, key, source.pop(key)) for section, key, source in timeouts if source.get(key) is not None]
    if said:
        draft.setting(said[0][:2], draft.config, "progress_timeout_s", said[0][2])
    _strategy(draft, router.pop("routing_strategy", None))
    aliases = _aliases(draft, router, groups)
    _rules(draft, router, module, groups, aliases)
    for name, section in settings.items():
        draft.skip_known((name,), section, _REASONS, "LiteLLM", ("fallbacks", "routing_strategy", "model_group_alias"))


def _strategy(draft: Draft, strategy: Any) -> None:
    if strategy is None:
        return
    path: KeyPath = ("router_settings", "routing_strategy")
    if isinstance(strategy, str) and strategy in _POLICIES:
        draft.setting(path, draft.config, "policy", _POLICIES[strategy])
        weighted = [name for name, entry in draft.models.items() if entry.pop("weight", None) is not None]
        if weighted:
            draft.skip(path, f"the weights of {', '.join(weighted)} go with policy: weighted, and this one is said")
    elif draft.config.get("policy") != "weighted":
        draft.skip(path, "policy: auto is used: session, prompt, then load")


def _aliases(draft: Draft, router: dict[str, Any], groups: dict[str, list[str]]) -> dict[str, list[str]]:
    """Other names of groups. A pool has none, so a rule leads to it."""
    path: KeyPath = ("router_settings", "model_group_alias")
    found: dict[str, list[str]] = {}
    for alias, target in expect(
        draft.document, path, router.pop("model_group_alias", None) or {}, dict, "names"
    ).items():
        group = target.get("model") if isinstance(target, dict) else target
        group = expect(draft.document, (*path, alias), group, str, "the name of a model")
        if group not in groups:
            draft.skip((*path, alias), f"{group} is no model of the configuration")
        elif alias in groups:
            draft.skip((*path, alias), f"{alias} is a name already")
        else:
            found.setdefault(group, []).append(alias)
            if groups[group] == [group]:
                draft.alias((*path, alias), alias, group)
    return found


def _rules(
    draft: Draft,
    router: dict[str, Any],
    module: dict[str, Any],
    groups: dict[str, list[str]],
    aliases: dict[str, list[str]],
) -> None:
    fallbacks: dict[str, list[str]] = {}
    by_default: list[str] = []
    for section, source in (("router_settings", router), ("litellm_settings", module)):
        path: KeyPath = (section, "fallbacks")
        said = expect(draft.document, path, source.pop("fallbacks", None) or [], list, "a list")
        for index, entry in enumerate(said):
            for name, targets in expect(draft.document, (*path, index), entry, dict, "{model: [others]}").items():
                where = (*path, index, name)
                known = _known(draft, where, targets, groups, aliases)
                if name == "*":
                    by_default += known
                elif name not in groups:
                    draft.skip(where, f"{name} is no model of the configuration")
                else:
                    fallbacks.setdefault(name, []).extend(known)
        where = (section, "default_fallbacks")
        by_default += _known(draft, where, source.pop("default_fallbacks", None) or [], groups, aliases)
    rules: list[dict[str, Any]] = []
    for name, members in groups.items():
        chain = [other for other in dict.fromkeys(fallbacks.get(name, by_default)) if other != name]
        names = [name, *aliases.get(name, [])]
        if chain:
            rules.append({"model": names, "to": name, "fallbacks": chain})
        elif members != [name] and len(names) > 1:
            rules.append({"model": names[1:], "to": name})
    if rules:
        draft.config.setdefault("routing", {})["rules"] = rules


def _known(
    draft: Draft, path: KeyPath, targets: Any, groups: dict[str, list[str]], aliases: dict[str, list[str]]
) -> list[str]:
    owners = {alias: group for group, names in aliases.items() for alias in names}
    known: list[str] = []
    for target in expect_names(draft.document, path, targets):
        group = owners.get(target, target)
        if group in groups:
            known.append(group)
        else:
            draft.skip(path, f"{target} is no model of the configuration")
    return known
