"""Owns: the keys under `routing` in config.yaml: pools, rules, and what a rule asks of a request. Decides nothing."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from laya.types import Priority

Percent = Annotated[int, Meta(ge=0, le=100)]
Tokens = Annotated[int, Meta(ge=0)]
KindName = Literal["chat", "completion", "embedding", "rerank", "decision"]


class RouteRule(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """One rule: what it asks of a request (all of what it names), and the model that then serves it."""

    name: Annotated[str, Meta(description="What `laya route explain` calls it; `rule 1` and so on unless said.")] = ""
    model: Annotated[
        str | list[str], Meta(description="Names that requests ask for, with * and ?; `auto` is one. None = any.")
    ] = []
    headers: Annotated[
        dict[str, str], Meta(description="Headers and the values they must have, with * and ?: {x-team: research}.")
    ] = {}
    key: Annotated[str | list[str], Meta(description="Names of API keys. None = any.")] = []
    kind: Annotated[
        KindName | list[KindName],
        Meta(description="Endpoints: chat, completion, embedding, rerank or decision. None = any."),
    ] = []
    min_prompt_tokens: Annotated[Tokens | None, Meta(description="Shortest prompt, in tokens by their bound.")] = None
    max_prompt_tokens: Annotated[Tokens | None, Meta(description="Longest prompt, in tokens by their bound.")] = None
    priority: Annotated[
        Priority | list[Priority],
        Meta(description="Priorities of requests: system, interactive, default or bulk. None = any."),
    ] = []
    to: Annotated[str, Meta(description="The model or pool that serves the request.")] = ""
    split: Annotated[
        dict[str, Percent],
        Meta(
            description="Instead of `to`: models or pools and percentages, 100 in all. A session keeps its own.",
            extra={"words": "models or pools with whole percentages that add up to 100"},
        ),
    ] = {}
    fallbacks: Annotated[
        list[str], Meta(description="Models or pools to try in this order where `to` has no engine for the request.")
    ] = []
    spillover: Annotated[
        bool,
        Meta(
            description="true: a pool's models of other servers, then `fallbacks`, also serve while `to` has no room."
        ),
    ] = False


class RoutingConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which model serves a request, where that is not the one it names."""

    pools: Annotated[
        dict[str, list[str]],
        Meta(description="Names that stand for several models: {small: [a, b]}; a loaded one serves first."),
    ] = {}
    rules: Annotated[
        list[RouteRule], Meta(description="The first rule that a request meets decides. None = the model it names.")
    ] = []
