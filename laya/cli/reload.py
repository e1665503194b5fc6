"""Owns: `laya reload`: the server reads its configuration again; what that changes, in words."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from laya.cli.client import ServerClient
from laya.cli.output import print_json, printable


def reload(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Have the server read its configuration again. No stream is dropped; a wrong file changes nothing."""
    report = ServerClient().post("/admin/reload", params={"dry_run": "true"} if dry_run else None, timeout_s=None)
    if as_json:
        print_json(report)
        return
    lines = [*_models(report), *(f"set      {_setting(each)}" for each in report["settings"])]
    for line in lines:
        print(printable(line))
    if not report["has_changes"]:
        print("nothing changed: what the file says is in force")  # also where the server watches it, and was first
    elif dry_run:
        print("nothing was changed: this was a dry run")
    for each in report["needs_server_restart"]:
        print(printable(f"waits    {_setting(each)}   takes a new start of the server"))
    for model_id, reason in report["not_served"].items():
        print(printable(f"not served  models.{model_id}: {reason}"))


def _models(report: dict[str, Any]) -> list[str]:
    lines = [f"added    {model_id}" for model_id in report["added"]]
    lines += [f"removed  {model_id}   finishes what it has" for model_id in report["removed"]]
    for model in report["changed"]:
        how = f"   {_how(model)}" if model["restarts"] else ""
        lines.append(f"changed  {model['id']}   {', '.join(map(_setting, model['settings']))}{how}")
    return lines


def _how(model: dict[str, Any]) -> str:
    """How its engines come to what they are started with."""
    if model["is_rolling"]:
        return "its engines are loaded anew one after another"
    if model["at_once"]:
        return f"its engines are loaded anew at once: {model['at_once']}"
    return "loaded anew after its requests"


def _setting(setting: dict[str, Any]) -> str:
    if setting["was"] is None and setting["now"] is None:
        return str(setting["name"])
    was, now = ("unset" if value is None else str(value) for value in (setting["was"], setting["now"]))
    return f"{setting['name']} {was} -> {now}"
