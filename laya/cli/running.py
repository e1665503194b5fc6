"""Owns: the verbs that ask a running server: ps, load, unload, logs."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from laya.cli.client import ServerClient
from laya.cli.output import print_json, print_table, printable, printable_lines, shown
from laya.types import ALL_LAYERS, ANY_LENGTH, MIB

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Model = Annotated[str, typer.Argument(help="Model id or alias.")]


def ps(as_json: Json = False) -> None:
    """Show loaded models, their memory and the requests they work on.

    MEASURED is the most that was resident, mapped pages of the model's file included; HELD is what an engine holds now
    that the kernel cannot drop. The ceiling stops an engine by what it holds: mapped pages are dropped first, so that
    MEASURED may stand above it. GPU is how many of its layers are on GPUs.
    """
    state = ServerClient().get("/admin/state")
    if as_json:
        print_json(state)
        return
    console = Console(highlight=False)
    shown_models = [model for model in state["models"] if model["state"] != "unloaded"]
    has_gpu = any(model["gpu_layers"] for model in shown_models)
    table = Table(box=None, pad_edge=False, header_style="dim")
    nodes = [_nodes_of(model) for model in shown_models]
    for column, justify in (
        ("MODEL", "left"), ("STATE", "left"), ("PLANNED", "right"), ("MEASURED", "right"), ("HELD", "right"),
        *([("GPU", "right")] if has_gpu else []),
        ("CONTEXT", "right"), ("RUNNING", "right"), ("QUEUED", "right"), ("IDLE", "right"),
        *([("NODE", "left")] if any(nodes) else []), ("", "left"),
    ):  # fmt: skip
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for model, node in zip(shown_models, nodes, strict=True):
        *cells, doing = _row(model, has_gpu=has_gpu)
        table.add_row(*cells, *([node] if any(nodes) else []), doing)
    memory = state["memory"]
    console.print(
        f"{memory['reserved_bytes'] / MIB:.0f} of {memory['budget_bytes'] / MIB:.0f} MiB reserved ({memory['limit']})"
    )
    if shown_models:
        print_table(console, table)
    for model in shown_models:
        variant = (model["plan"] or {}).get("variant")
        if variant:
            words = f"{model['id']}: {variant['quantization']} ({variant['id']}), {variant['reason']}"
            console.print(f"[dim]{shown(words)}[/]", soft_wrap=True)
        if model["error"]:  # on a line of its own: it is a sentence, and the table has no room for one
            console.print(f"[red]{shown(model['id'])}: {shown(model['error'])}[/]", soft_wrap=True)
    for peer in state.get("peers", []):
        console.print(_peer(peer), soft_wrap=True)
    if ray := state.get("ray"):
        console.print(_cluster(ray), soft_wrap=True)
    n_unloaded = len(state["models"]) - len(shown_models)
    if n_unloaded:
        console.print(f"[dim]{n_unloaded} more can be loaded: laya list[/]")


def _cluster(ray: dict[str, Any]) -> str:
    head = f"ray cluster  {shown(ray['address'])}  "
    if ray["error"]:
        return f"{head}[red]takes no engines: {shown(ray['error'])}[/]"
    nodes = ", ".join(f"{shown(node['name'])} {node['memory_bytes'] / MIB:.0f} MiB" for node in ray["nodes"])
    return f"{head}[green]joined[/]  nodes: {nodes or 'none with memory to promise'}"


def _peer(peer: dict[str, Any]) -> str:
    head = f"peer {shown(peer['name'])}  {shown(peer['url'])}  "
    if peer["state"] != "reachable":
        return f"{head}[red]{peer['state']}[/]"  # why is told with each of its models, and in the events
    free, budget = peer["free_bytes"] / MIB, peer["budget_bytes"] / MIB
    return f"{head}[green]reachable[/]  {free:.0f} of {budget:.0f} MiB free, models: {peer['models']}"


def _row(model: dict[str, Any], *, has_gpu: bool) -> list[str]:
    plan, measured = model["plan"], model["measured_bytes"]
    colour = {"ready": "green", "failed": "red", "degraded": "red"}.get(model["state"], "yellow")
    settings = plan["settings"] if plan else None
    return [
        shown(model["id"]),
        f"[{colour}]{model['state']}[/]{_ready_of(model)}{_percent_of(model)}",
        f"{sum(device['total_bytes'] for device in plan['devices']) / MIB:.0f} MiB" if plan else "-",
        f"{measured / MIB:.0f} MiB" if measured else "-",
        f"{model['anonymous_bytes'] / MIB:.0f} MiB" if model["anonymous_bytes"] else "-",
        *([_gpu_of(model["gpu_layers"])] if has_gpu else []),
        _size_of(settings) if settings else "-",
        str(model["running"]),
        str(model["queued"]),
        f"{model['idle_s']:.0f} s" if model["idle_s"] is not None else "-",
        _doing(model["requests"]),
    ]


def _gpu_of(layers: dict[str, Any] | None) -> str:
    """`33/33`: layers on GPUs, of all; in red where more were planned there."""
    if layers is None:
        return "-"
    most = layers["total"] or (layers["planned"] if layers["planned"] < ALL_LAYERS else "all")
    words = f"{layers['loaded']}/{most}" if layers["planned"] else "none"
    return f"[red]{words}[/]" if layers["loaded"] < layers["planned"] or layers["why_none"] else words


def _nodes_of(model: dict[str, Any]) -> str:
    """Where its engines are in a cluster; "" on this machine."""
    engines = model.get("extra", {}).get("replicas") or [model]
    return ", ".join(dict.fromkeys(shown(engine["node"]) for engine in engines if engine.get("node")))


def _size_of(settings: dict[str, Any]) -> str:
    length = settings["max_seq_len"]
    return f"{settings['max_num_seqs']} x {'any' if length == ANY_LENGTH else length}"


def _ready_of(model: dict[str, Any]) -> str:
    """` 1/2`: engines that are ready, of a model that has several."""
    replicas = model.get("extra", {}).get("replicas")
    return f" {sum(each['state'] == 'ready' for each in replicas)}/{len(replicas)}" if replicas else ""


def _percent_of(model: dict[str, Any]) -> str:
    """` 40 %`: how far a load has come, where that is known."""
    percent = model.get("extra", {}).get("load_percent")
    return f" {percent} %" if percent is not None else ""


def _doing(requests: list[dict[str, Any]]) -> str:
    parts = []
    for request in requests[:4]:
        if request.get("prompt_tokens"):
            parts.append(f"prefill {100 * request['prefill_tokens'] // request['prompt_tokens']} %")
        else:
            parts.append(f"{request['phase']} {request['age_s']:.0f} s")
    return ", ".join(parts)


def load(
    model: Model,
    anyway: Annotated[bool, typer.Option("--anyway", help="Also where it does not fit, held to what is free.")] = False,
    as_json: Json = False,
) -> None:
    """Load a model now instead of at its first request."""
    params = {"anyway": "true"} if anyway else None
    status = ServerClient().post(f"/admin/models/{model}/load", params=params, timeout_s=None)
    _say(status, as_json)


def unload(model: Model, as_json: Json = False) -> None:
    """Unload a model and give its memory back."""
    status = ServerClient().post(f"/admin/models/{model}/unload", timeout_s=None)
    _say(status, as_json)


def _say(status: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(status)
    else:
        print(f"{printable(status['id'])}: {status['state']}")


def logs(
    model: Model,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come.")] = False,
    replica: Annotated[int, typer.Option("--replica", help="Which engine, of a model that has several.")] = 1,
) -> None:
    """Show what a model's engine wrote."""
    is_empty = True
    for piece in ServerClient().stream_text(
        f"/admin/models/{model}/logs", {"follow": str(follow).lower(), "replica": str(replica)}
    ):
        is_empty = is_empty and not piece
        # an engine writes the texts of a model's file as they are; a file or a program gets every byte
        sys.stdout.write(printable_lines(piece) if sys.stdout.isatty() else piece)
        sys.stdout.flush()
    if is_empty:
        print(f"{printable(model)} has not been loaded, so its engine wrote nothing yet.", file=sys.stderr)
