"""Owns: how the router's figures look in a terminal. Measures nothing."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

PUBLISHED_MEAN_MS = 0.302  # the figure that an article gave for `--requests 10000 --threads 8`
COLUMNS = {"mean": "mean_us", "p50": "p50_us", "p99": "p99_us", "p99.9": "p999_us", "max": "max_us"}


def print_report(report: dict[str, Any], console: Console | None = None) -> None:
    """The published figure beside ours of a decision, then one row a layer, then what it was measured on."""
    console = console or Console(highlight=False, soft_wrap=True)
    layers = report["layers"]
    decisions = [name for name in layers if name != "gateway"]
    if decisions:
        ours = ", ".join(f"{layers[name]['mean_us'] / 1000:.6f} ms {name}" for name in decisions)
        console.print(f"mean of one decision   published [bold]{PUBLISHED_MEAN_MS} ms[/]   Laya [bold]{ours}[/]\n")
    console.print(_table(layers))
    for name, layer in layers.items():
        console.print(_check_line(name, layer), style="" if layer["wrong"] == 0 else "bold red")
    load, machine = report["load"], report["hardware"]
    console.print(
        f"load      {load['requests']:,} requests, {load['threads']} threads, {load['models']:,} models, "
        f"{load['endpoints']:,} endpoints, {load['sessions']:,} sessions"
        + (f", prompts of {load['prompt_bytes']:,} bytes in the python layer" if load["prompt_bytes"] else "")
    )
    versions = f"Python {machine['python']}, Laya {machine['laya']}, {machine['compiler'] or 'no native core'}"
    console.print(
        f"hardware  {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"Linux {machine['kernel']}; {versions}"
    )


def _table(layers: dict[str, Any]) -> Table:
    table = Table("layer, µs", box=None, pad_edge=False, header_style="bold")
    table.add_column("what", no_wrap=True)
    for title in (*COLUMNS, "per second"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, layer in layers.items():
        layer_name = "twin" if layer["implementation"] == "twin" else name
        figures = [_figure(layer.get(key)) for key in COLUMNS.values()]
        table.add_row(layer_name, layer["measures"], *figures, f"{layer['per_s']:,.0f}")
    return table


def _figure(us: float | None) -> str:
    if us is None:
        return "-"
    return f"{us:,.3f}" if us < 100 else f"{us:,.0f}"


def _check_line(name: str, layer: dict[str, Any]) -> str:
    wrong = f"{name:8}  {layer['wrong']:,} wrong answers"
    if name == "gateway":
        return f"{wrong}; {_hop(layer)}"
    moved = f", {layer['sessions_moved']:,} away from the session's endpoint" if "sessions_moved" in layer else ""
    return (
        f"{wrong}{moved}; preempted {layer['preempted_share']:.3%}; "
        f"each figure contains {layer['timer_us']:.3f} µs for reading the clock"
    )


def _hop(layer: dict[str, Any]) -> str:
    direct, through, alone = layer["direct"], layer["through"], layer["alone"]
    lines = (
        f"{layer['requests']:,} whole answers over {layer['connections']} connections of this process, "
        f"{layer['models']} models on {layer['endpoints']} engines, {layer['rounds']} alternating rounds",
        f"direct p50 {direct['p50_us']:,.0f} µs and {direct['per_s']:,.0f}/s, "
        f"through Laya {through['p50_us']:,.0f} µs and {through['per_s']:,.0f}/s",
        f"over one connection, all on one core: p50 +{alone['p50_us']:,.0f} µs, p99 +{alone['p99_us']:,.0f} µs; "
        f"of that the router itself takes {layer['route_mean_us']:.3f} µs (mean)",
    )
    return ("\n" + 10 * " ").join(lines)
