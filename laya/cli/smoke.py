"""Owns: `laya smoke`: every part of a running server once, as a tick list with milliseconds."""

from __future__ import annotations

from typing import Annotated

import typer

from laya.cli.client import ServerClient

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def smoke(
    model: Annotated[str | None, typer.Argument(help="Model id or alias; default: the first of the server.")] = None,
    as_json: Json = False,
) -> None:
    """Use every part of the running server once and say what works."""
    models = ServerClient().get("/v1/models")["data"]
    print(f"{len(models)} models")
