"""Owns: `laya connect`: the lines that connect a client to the running server, alone on stdout: they can be piped.

The lines themselves are laya/connect.py's.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from laya.cli.client import ServerClient
from laya.cli.output import print_json, printable
from laya.connect import names, snippet
from laya.errors import InvalidRequest, ModelNotFound


def connect(
    client: Annotated[str | None, typer.Argument(help="Which one; without it: all that there are lines for.")] = None,
    model: Annotated[str | None, typer.Option(help="Model id or alias; default: one that is loaded.")] = None,
    key: Annotated[str | None, typer.Option(help="The API key to write into the lines.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the lines that connect a client: this server's address, a model, its real window."""
    if client is None:
        _list(as_json)
        return
    if client not in names():
        snippet(client, "", "")  # says which ones there are, also where no server runs
    server = ServerClient()
    served = _model(server.get("/v1/models")["data"], model)
    found = snippet(
        client,
        server.url,
        model or served["id"],
        api_key=key,
        context_length=served["context_length"],
        needs_key="LAYA_API_KEY" in os.environ,  # without one it would not have said which models it has
    )
    if as_json:
        print_json(found)
        return
    print(f"{found.title} ({found.install}). {found.where}", file=sys.stderr)
    print(found.text, end="")


def _list(as_json: bool) -> None:
    known = [snippet(name, "", "") for name in names()]
    if as_json:
        print_json([{"name": each.name, "title": each.title, "install": each.install} for each in known])
        return
    for each in known:
        print(f"{each.name:12} {each.install}")


def _model(models: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    """The model of this id or alias; without a name one that generates text, a loaded one before the others."""
    if name is not None:
        found = next((each for each in models if name in (each["id"], *each["aliases"])), None)
        if found is None:
            raise ModelNotFound(name, [known for each in models for known in (each["id"], *each["aliases"])])
        if found["task"] != "chat":
            raise InvalidRequest(f"'{printable(name)}' is for `{found['task']}`; these clients chat.", param="model")
        return found
    able = [each for each in models if each["task"] == "chat"]
    if not able:
        raise InvalidRequest("This server has no model that chats: `laya pull smollm2` fetches one.", param="model")
    return next((each for each in able if each["loaded"]), able[0])
