"""Owns: how the use of experts is shown on a terminal: a row for each layer, all of the text and each topic."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from laya.cli.output import print_table, shown
from laya.experts.balance import BAND, Balance
from laya.experts.use import ExpertUse

_MOST_COLUMNS = 16  # experts that have a column each
_MOST_ROWS = 80  # of layers and topics: beyond, topics are in the files alone


def print_use(use: ExpertUse, model_id: str, engine: str) -> None:
    """On stdout: the table, who is specialised, and the verdict."""
    console = Console(highlight=False)
    console.print(
        f"[bold]{shown(model_id)}[/]   {use.n_experts} experts, {use.top_k} a token, {len(use.layers)} layers with "
        f"experts; {use.n_tokens} tokens in windows of {use.counted.window_tokens}, by {engine}",
        soft_wrap=True,
    )
    has_topics = len(use.parts) * len(use.layers) <= _MOST_ROWS
    print_table(console, _table(use, has_topics=has_topics))
    if not has_topics:
        console.print("[dim]Each topic by itself: --csv, --png or --json.[/]")
    for topic in use.counted.topics:
        named = ", ".join(
            f"layer {one.layer} expert {one.expert} {100 * one.share:.1f} % ({one.lift:.1f}x)"
            for one in use.specialists(topic)
        )
        if named:
            console.print(f" {shown(topic.topic)}: {named}", soft_wrap=True)
    console.print(f"[{'green' if use.is_even else 'yellow'}]{shown(use.verdict())}[/]", soft_wrap=True)


def _table(use: ExpertUse, *, has_topics: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    is_wide = use.n_experts <= _MOST_COLUMNS
    table.add_column("TOPIC", no_wrap=True)
    for title in ("LAYER", *(map(str, range(use.n_experts)) if is_wide else ("LEAST %", "MOST %"))):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("MAXVIO", "CV", "ENTROPY", "GINI", "DEAD"):
        table.add_column(title, justify="right", no_wrap=True)
    for part in use.parts if has_topics else use.parts[:1]:
        for layer in use.layers:
            balance = Balance.of(part.layers[layer])
            shares = _each(balance) if is_wide else _ends(balance)
            measures = (f"{value:.3f}" for value in (balance.max_vio, balance.cv, balance.entropy, balance.gini))
            dead = f"[red]{balance.n_dead}[/]" if balance.n_dead else "0"
            table.add_row(shown(part.topic), str(layer), *shares, *measures, dead)
        table.add_section()
    return table


def _each(balance: Balance) -> Iterator[str]:
    outside = set(balance.outside)
    for expert, share in enumerate(balance.share):
        text = f"{100 * share:.1f}"
        is_more = share * len(balance.share) > BAND[1]
        yield f"[{'red' if is_more else 'blue'}]{text}[/]" if expert in outside else text


def _ends(balance: Balance) -> Iterator[str]:
    for share in (min(balance.share), max(balance.share)):
        yield f"{100 * share:.2f} (expert {balance.share.index(share)})"
