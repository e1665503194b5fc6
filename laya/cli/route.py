"""Owns: `laya route explain`: which rule takes a request, which engines could serve it, with which scores, and why.

It asks the server that runs; where none does, or a configuration is named, it decides from that as a server would that
has just started: every engine ready and none busy. Results go to stdout; faults are raised.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from laya.cli.client import ServerClient
from laya.cli.output import print_json, print_table, shown
from laya.config import Config, load_config
from laya.config.check_routing import targets
from laya.config.places import DATABASE
from laya.config.pools import away_of, first_of
from laya.errors import ConfigError, ModelNotPulled, NoServer
from laya.gateway.heads import PRIORITY
from laya.gateway.live_keys import LiveKeys
from laya.gateway.queueing import granted
from laya.models import home_path, resolve
from laya.routing import Explanation, RequestRouter, prefix_blocks
from laya.routing.rules import RequestFacts, Rules
from laya.routing.told import Told, tell, with_costs
from laya.types import PRIORITIES, EndpointKind, KeyGrant, Priority

route_app = typer.Typer(help="See which model and which engine a request goes to, and why.", no_args_is_help=True)
_BYTES_PER_TOKEN = 4  # of English text; a server bounds a prompt by what it counts


@route_app.callback()
def _route() -> None:
    """See which model and which engine a request goes to, and why."""


Model = Annotated[str, typer.Option("--model", "-m", help="The model that the request names; auto = by rules.")]
Header = Annotated[list[str] | None, typer.Option("--header", "-H", help="x-team: research; may be repeated.")]
Key = Annotated[str | None, typer.Option("--key", help="Name of the API key.")]
Kind = Annotated[str, typer.Option("--kind", help="chat, completion, embedding, rerank or decision.")]
PriorityName = Annotated[
    str | None, typer.Option("--priority", help="system, interactive, default or bulk; as its header says.")
]
Session = Annotated[str | None, typer.Option("--session", help="The session's id.")]
Prompt = Annotated[str, typer.Option("--prompt", help="The prompt; its beginning counts.")]
PromptTokens = Annotated[int | None, typer.Option("--prompt-tokens", min=0, help="Its length, instead of --prompt.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Default: ./config.yaml if there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@route_app.command()
def explain(
    model: Model,
    header: Header = None,
    key: Key = None,
    kind: Kind = "chat",
    priority: PriorityName = None,
    session: Session = None,
    prompt: Prompt = "",
    prompt_tokens: PromptTokens = None,
    config_file: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Say which rule takes a request, which engines could serve it, and which one does, and why."""
    config = load_config(config_file, os.environ)
    headers = dict(_header(text) for text in header or [])
    facts = RequestFacts(
        model=model,
        kind=EndpointKind[_one_of("--kind", kind, [kind.name.lower() for kind in EndpointKind]).upper()],
        headers=headers,
        key=key,
        prompt_tokens=len(prompt) // _BYTES_PER_TOKEN if prompt_tokens is None else prompt_tokens,
        session=session,
    )
    asked = _priority(priority, headers)
    told = None if config_file else _ask_server(facts, asked, prompt)
    if told is None:
        facts = replace(facts, priority=granted(asked, _grant(config, key)))
        rules = Rules(config.routing, away_of(config))
        router = _idle_router(config, rules.decide(facts).models)
        told = tell(router, rules, facts, prefix_blocks=prefix_blocks(prompt))
        told = with_costs(told, lambda candidate: _cost(config, candidate.name))
    if as_json:
        print_json(msgspec.to_builtins(told))
    else:
        _print(told)


def _cost(config: Config, engine: str) -> str | None:
    cost = config.for_model(engine.partition("#")[0]).cost
    return cost.words if cost is not None else None


def _ask_server(facts: RequestFacts, asked: Priority | None, prompt: str) -> Told | None:
    """What the server that runs would do now; None where none does."""
    query: list[tuple[str, str]] = [("model", facts.model), ("kind", facts.kind.name.lower())]
    query += [("prompt_tokens", str(facts.prompt_tokens)), ("prompt", prompt)]
    query += [("header", f"{name}: {value}") for name, value in facts.headers.items()]
    said = (("session", facts.session), ("key", facts.key), ("priority", asked))
    query += [(name, value) for name, value in said if value is not None]
    try:
        return msgspec.convert(ServerClient().get("/admin/route/explain", query), Told)
    except NoServer:
        return None


def _idle_router(config: Config, asked: Sequence[str]) -> RequestRouter:
    """A router that knows the models of the configuration, and those that the request and the rules lead to.

    Raises ModelNotFound for a name that is none of a model.
    """
    router = RequestRouter()
    for name in dict.fromkeys((*config.models, *sorted(targets(config.routing)), *asked)):
        if router.resolve(name) is not None or name in config.routing.pools:
            continue
        if name not in config.models and config.for_model(name).peer is None:  # whose models it alone knows
            with suppress(ModelNotPulled):  # it can be pulled, so it is a model
                resolve(name, models_dir=Path(config.models_dir), home=home_path())
        model = config.for_model(name)
        names = [model.id] if model.replicas == 1 else [f"{model.id}#{n + 1}" for n in range(model.replicas)]
        endpoints = [router.add_endpoint(name=name, weight=model.weight) for name in names]
        for endpoint in endpoints:
            router.set_capacity(endpoint, model.max_num_seqs or 0, model.kv_pool_tokens or 0)
        router.set_model(model.id, endpoints, model.aliases, model.policy)
    router.set_pools(first_of(config), config.for_model("").policy)
    return router


def _header(text: str) -> tuple[str, str]:
    name, separator, value = text.partition(":" if ":" in text else "=")
    if not separator or not name.strip():
        raise ConfigError(f"--header {text}: expected a name and a value, such as 'x-team: research'", param="--header")
    return name.strip().lower(), value.strip()


def _grant(config: Config, key: str | None) -> KeyGrant | None:
    """Of the key with this name, in the configuration or in the store that the next server reads."""
    if key is None:
        return None
    keys = LiveKeys(config.server, home_path() / DATABASE).keys
    return next((each.grant for each in keys if each.name == key), None)


def _priority(option: str | None, headers: Mapping[str, str]) -> Priority | None:
    """What the option says, else the header that says it to a server."""
    name, said = ("--priority", option) if option is not None else (f"--header {PRIORITY}:", headers.get(PRIORITY))
    if said is None:
        return None
    return next(known for known in PRIORITIES if known == _one_of(name, said, PRIORITIES))


def _one_of(option: str, value: str, known: Any) -> str:
    if value not in known:
        raise ConfigError(f"{option} {value}: expected {' or '.join(known)}", param=option)
    return value


def _print(told: Told) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for verdict in told.verdicts:
        said = f"no, it asks for {shown(verdict.misses)}" if verdict.misses else "[bold]takes it[/]"
        console.print(f"rule      {shown(verdict.rule)}: {said}")
    if told.rule is None:
        console.print("rule      none takes it: the model that it names serves it")
    for at, explanation in enumerate(told.tried):
        then = "when full" if told.spills else "else"
        console.print(f"{'serves' if at == 0 else then:<9} {shown(explanation.model)}, policy {explanation.policy}")
        print_table(console, _table(explanation))
        chosen = next((candidate for candidate in explanation.candidates if candidate.is_chosen), None)
        name = shown(chosen.name) if chosen else "none"
        console.print(f"{'chosen' if at == 0 else 'then':<9} [bold]{name}[/]: {explanation.why}")
    where = (
        "Of the server as it is now." if told.is_live else "From the configuration, with every engine ready and idle."
    )
    console.print(f"[dim]{where}[/]")


def _table(explanation: Explanation) -> Table:
    table = Table(box=None, pad_edge=True, header_style="dim")
    has_costs = any(candidate.cost for candidate in explanation.candidates)
    titles = ("", "candidate", "may be chosen", "room", "reserved", "weight", "score")
    for title in (*titles, *(("cost of a million tokens",) if has_costs else ())):
        table.add_column(title, no_wrap=True)
    for candidate in explanation.candidates:
        table.add_row(
            "->" if candidate.is_chosen else "",
            shown(candidate.name),
            "yes" if candidate.is_eligible else f"no: {candidate.why_not}",
            "yes" if candidate.has_room else "no",
            f"{candidate.tokens} tokens, {candidate.n_seqs} sequences",
            str(candidate.weight),
            "" if candidate.score is None else f"{candidate.score / 2**64:.4f}",
            *([candidate.cost or "-"] if has_costs else []),
        )
    return table
