"""Owns: the verbs of `laya`, in the order of its help, and loading only the one that is asked for.

A verb's module may import the server, the hub's client or a terminal library; `laya plan` needs none of them and is to
answer at once. Help, and a word that is no verb, load them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import typer


class Verb(NamedTuple):
    """Where a verb is. takes_flags: undeclared words are its own to read. is_group: it has verbs of its own.
    has_own_help: it answers `--help` by itself."""

    module: str
    function: str
    takes_flags: bool = False
    is_more: bool = False
    is_group: bool = False
    has_own_help: bool = False


VERBS = {
    "serve": Verb("serve", "serve", takes_flags=True),
    "run": Verb("serve", "run", takes_flags=True),
    "chat": Verb("chat", "chat"),
    "pull": Verb("models", "pull"),
    "list": Verb("models", "list_models"),
    "rm": Verb("models", "rm"),
    "show": Verb("models", "show"),
    "plan": Verb("plan", "plan", takes_flags=True),
    "ps": Verb("running", "ps"),
    "load": Verb("running", "load"),
    "unload": Verb("running", "unload"),
    "logs": Verb("running", "logs"),
    "drain": Verb("drain", "drain", is_more=True),
    "reload": Verb("reload", "reload", is_more=True),
    "connect": Verb("connect", "connect", is_more=True),
    "top": Verb("top", "top", is_more=True),
    "usage": Verb("usage", "usage", is_more=True),
    "doctor": Verb("doctor", "doctor"),
    "smoke": Verb("smoke", "smoke", is_more=True),
    "bench": Verb("bench", "bench", takes_flags=True, is_more=True, has_own_help=True),
    "train": Verb("lab", "train", takes_flags=True, is_more=True, has_own_help=True),
    "upcycle": Verb("lab", "upcycle", takes_flags=True, is_more=True, has_own_help=True),
    "experts": Verb("experts", "experts", is_more=True),
    "eval": Verb("lab", "evaluate", takes_flags=True, is_more=True, has_own_help=True),
    "export": Verb("lab", "export", takes_flags=True, is_more=True, has_own_help=True),
    "quantize": Verb("quantize", "quantize", is_more=True),
    "key": Verb("key", "key_app", is_more=True, is_group=True),
    "config": Verb("config", "config_app", is_more=True, is_group=True),
    "engines": Verb("engines", "engines_app", is_more=True, is_group=True),
    "import": Verb("importing", "import_app", is_more=True, is_group=True),
    "route": Verb("route", "route_app", is_more=True, is_group=True),
    "service": Verb("service", "service_app", is_more=True, is_group=True),
}
_FLAGS_PASS: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
_MORE = "More"


def app_for(words: Sequence[str]) -> typer.Typer:
    """The command line's parser, with the verb that `words` begin with, or with all of them."""
    app = typer.Typer(
        name="laya",
        help="Serve open-weight language models on your own machine: planned memory, OpenAI API.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_nothing)  # one verb alone would become the whole command
    asked = words[0] if words else ""
    for name, verb in {asked: VERBS[asked]}.items() if asked in VERBS else VERBS.items():
        found: Any = getattr(import_module(f"laya.cli.{verb.module}"), verb.function)
        panel = _MORE if verb.is_more else None
        if verb.is_group:
            app.add_typer(found, name=name, rich_help_panel=panel)
        else:
            settings = _FLAGS_PASS if verb.takes_flags else {}
            if verb.has_own_help:
                settings = settings | {"help_option_names": []}
            app.command(name, context_settings=settings or None, rich_help_panel=panel)(found)
    return app


def _nothing() -> None:
    return None
