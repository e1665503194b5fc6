"""Owns: `laya key`: create, list, show, revoke; by the server that runs, else in the store that the next one reads.

`--here` always writes this machine's store, which its server reads again within a second: who owns the machine is never
locked out. A key is printed once, alone on stdout, so that it can be piped into a file.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from laya.cli.client import ServerClient
from laya.cli.output import print_json, print_table, printable, shown
from laya.config import load_config
from laya.config.check_routing import AUTO
from laya.config.hosts import is_loopback
from laya.config.keys import MIN_KEY_CHARS, hash_key
from laya.config.places import DATABASE
from laya.errors import ConfigError, InvalidRequest, LayaError, NoServer
from laya.gateway.key_desk import AskedKey, make
from laya.gateway.key_desk import revoke as end
from laya.gateway.key_desk import shown as shown_key
from laya.gateway.live_keys import LiveKeys
from laya.models import available, entries, home_path

key_app = typer.Typer(help="Make, list and revoke API keys, live.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Who uses the key.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Here = Annotated[bool, typer.Option("--here", help="In this machine's store, whatever server runs.")]
_REFUSED = ("invalid_api_key", "forbidden")


@key_app.command()
def create(
    name: Name,
    role: Annotated[
        str | None, typer.Option(help="user (the default), metrics, peer or admin (what the first key is).")
    ] = None,
    models: Annotated[list[str] | None, typer.Option(help="Only these models: once each, or with commas.")] = None,
    expires: Annotated[str | None, typer.Option(help="2027-01-31 (its last day), a moment, or 30d from now.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(min=1, help="Requests at once.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Requests in a minute.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Tokens of prompts and answers.")] = None,
    priority: Annotated[
        str | None, typer.Option(help="Of requests that ask for none: system, interactive, default or bulk.")
    ] = None,
    max_priority: Annotated[str | None, typer.Option(help="The most urgent that a request may ask for.")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", help="A key you have: typed unseen, or piped in.")] = False,
    here: Here = False,
    as_json: Json = False,
) -> None:
    """Make a key and print it, once; only its digest is kept. In force at once."""
    fields: dict[str, Any] = {
        "name": name,
        "role": role,
        "models": [each for word in models or [] for each in word.split(",") if each],
        "expires": expires,
        "max_concurrent": max_concurrent,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "priority": priority,
        "max_priority": max_priority,
        "sha256": hash_key(_read_key()) if stdin else None,
    }
    made = _keys(here).create({key: value for key, value in fields.items() if value not in (None, [])})
    if as_json:
        print_json(made)
        return
    _say(f"{made['name']}: {_summary(made)}")
    for words in (*made.get("warnings", ()), *([made["notice"]] if "notice" in made else ())):
        _say(words)
    if "key" in made:
        _say("The key, which is not shown again:")
        print(made["key"])


@key_app.command("list")
def list_keys(here: Here = False, as_json: Json = False) -> None:
    """Show every key, what it may do and what it has left; never the keys themselves."""
    found = _keys(here).all()
    if as_json:
        print_json({"keys": found})
    elif not found:
        _say(
            "No key is here: a server on this machine answers to this machine alone. `laya key create NAME` makes one."
        )
    else:
        _print_table(found)


@key_app.command()
def show(name: Name, here: Here = False, as_json: Json = False) -> None:
    """Show one key: what it may do, what it runs and has left of this minute."""
    found = _keys(here).one(name)
    if as_json:
        print_json(found)
        return
    for field, value in found.items():
        if value not in (None, []):
            print(f"{field:<20} {printable(', '.join(value) if isinstance(value, list) else str(value))}")


@key_app.command("revoke")
def revoke_key(
    name: Name,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="End what it runs too, instead of letting it finish.")
    ] = False,
    here: Here = False,
    as_json: Json = False,
) -> None:
    """End a key: its next request is refused. What it runs may finish, or ends with --cancel."""
    ended = _keys(here).revoke(name, cancel=cancel)
    if as_json:
        print_json(ended)
        return
    running = f", {ended['cancelled']} of its requests ended" if ended.get("cancelled") else ""
    print(f"{printable(ended['name'])}: revoked{running}")
    if "notice" in ended:
        _say(ended["notice"])


class _OfServer:
    """The keys of the server that runs."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client

    def create(self, fields: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = self._client.post("/admin/keys", fields)
        return made

    def all(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._client.get("/admin/keys")["keys"]
        return found

    def one(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self._client.get(f"/admin/keys/{name}")
        return found

    def revoke(self, name: str, *, cancel: bool) -> dict[str, Any]:
        params = {"cancel": "true"} if cancel else None
        ended: dict[str, Any] = self._client.delete(f"/admin/keys/{name}", params)
        return ended


class _OfStore:
    """The keys in this machine's store, and those of the config that a server here would use."""

    def __init__(self) -> None:
        self._config = load_config(None, os.environ)
        self._keys = LiveKeys(self._config.server, home_path() / DATABASE)

    def create(self, fields: dict[str, Any]) -> dict[str, Any]:
        try:
            asked = msgspec.convert(fields, AskedKey)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"This describes no key: {error}.".replace("`", "'")) from None
        return asyncio.run(make(self._keys, asked, self._known() if asked.models else ()))

    def _known(self) -> set[str]:
        """Every name that a request to a server here could use."""
        files = available(models_dir=Path(self._config.models_dir), home=home_path())
        names = {name for file in files for name in (file.id, *file.aliases)}
        names |= {name for entry in entries() for name in entry.names}  # of what may be pulled
        names |= {alias for model in self._config.models.values() for alias in model.aliases}
        return names | {AUTO, *self._config.models, *self._config.routing.pools}

    def all(self) -> list[dict[str, Any]]:
        return [shown_key(key) for key in self._keys.keys]

    def one(self, name: str) -> dict[str, Any]:
        return shown_key(self._keys.find(name))

    def revoke(self, name: str, *, cancel: bool) -> dict[str, Any]:
        if cancel:
            raise ConfigError("--cancel is for a server that runs, through which the key is revoked; leave it out.")
        return asyncio.run(end(self._keys, name))


def _keys(here: bool) -> _OfServer | _OfStore:
    """Those of the server, where one runs; an error of it says how the owner of this machine goes on all the same."""
    if here:
        return _OfStore()
    client = ServerClient()
    try:
        client.get("/admin/keys")
    except NoServer:
        if os.environ.get("LAYA_URL"):  # a server was meant, not this machine's store
            raise
        return _OfStore()
    except LayaError as error:
        if error.code in _REFUSED and is_loopback(urlsplit(client.url).hostname or ""):
            error.message += " On the server's own machine, `--here` writes its store without a key."
        raise
    return _OfServer(client)


def _read_key() -> str:
    key = (getpass.getpass("API key: ") if sys.stdin.isatty() else sys.stdin.readline()).strip()
    if len(key) < MIN_KEY_CHARS:
        raise ConfigError(f"the key has {len(key)} characters; with fewer than {MIN_KEY_CHARS} it could be guessed.")
    return key


def _summary(key: dict[str, Any]) -> str:
    """What a key may do, in words."""
    limits = _limits(key)
    until = [f"until {key['expires']}"] if key["expires"] else []
    models = ["models " + ", ".join(key["models"])] if key["models"] else []
    return "; ".join([key["role"], *models, *limits, *until])


def _limits(key: dict[str, Any]) -> list[str]:
    return [words.format(key[name]) for name, words in _LIMIT_WORDS.items() if key.get(name) is not None]


_LIMIT_WORDS = {
    "max_concurrent": "{} at once",
    "requests_per_minute": "{} requests a minute",
    "tokens_per_minute": "{} tokens a minute",
    "priority": "priority {}",
    "max_priority": "at most {}",
}


def _print_table(found: Sequence[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("name", "role", "models", "limits", "expires", "from"):
        table.add_column(column)
    for key in found:
        cells = (key["name"], key["role"], ", ".join(key["models"]) or "all", ", ".join(_limits(key)) or "none")
        table.add_row(*map(shown, cells), key["expires"] or "never", key["origin"])
    print_table(Console(highlight=False), table)


def _say(words: str) -> None:
    print(words, file=sys.stderr)
