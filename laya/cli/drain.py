"""Owns: `laya drain`: a model takes nothing new, finishes what it has, and is unloaded; the wait for that."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from laya.cli.client import ServerClient
from laya.cli.output import print_json, printable

LOOK_EVERY_S = 0.5


def drain(
    model: Annotated[str, typer.Argument(help="Model id or alias.")],
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return at once, while its requests go on.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Finish what a model has, take nothing new, then unload it. Undone by `laya load`."""
    client = ServerClient()
    status: dict[str, Any] = client.post(f"/admin/models/{model}/drain")
    while not no_wait and status["extra"].get("is_drained") and status["state"] not in ("unloaded", "failed"):
        time.sleep(LOOK_EVERY_S)
        models = client.get("/admin/state")["models"]
        status = next((each for each in models if each["id"] == status["id"]), status | {"state": "unloaded"})
    if as_json:
        print_json(status)
    elif not status["extra"].get("is_drained"):
        print(f"{printable(status['id'])}: {status['state']}; it was loaded again meanwhile")
    else:
        print(f"{printable(status['id'])}: {status['state']}; `laya load {printable(status['id'])}` opens it again")
