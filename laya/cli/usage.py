"""Owns: `laya usage`: what was used, by model, key or day: of the server that runs, else of this machine's store."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from laya.cli.client import ServerClient
from laya.cli.output import print_json, print_table, shown
from laya.config import parse_duration
from laya.config.places import DATABASE
from laya.errors import ConfigError, NoServer
from laya.gateway.usage import grouped
from laya.models import home_path
from laya.store import Store

_BY = ("model", "key", "day")


def usage(
    by: Annotated[str, typer.Option(help="model, key or day.")] = "model",
    since: Annotated[str | None, typer.Option(help="A day such as 2026-01-31 (UTC), or 7d back from now.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show requests, tokens, time to the first token and between tokens, summed."""
    if by not in _BY:
        raise ConfigError(f"--by {by}: expected {', '.join(_BY)}.", param="by")
    rows = _rows(by, _day(since) if since else "")
    if as_json:
        print_json({"by": by, "usage": rows})
    elif not rows:
        print("nothing was used yet")
    else:
        _print(by, rows)


def _rows(by: str, since: str) -> list[dict[str, Any]]:
    params = {"by": by} | ({"since": since} if since else {})
    try:
        found: list[dict[str, Any]] = ServerClient().get("/admin/usage", params)["usage"]
    except NoServer:
        path = home_path() / DATABASE
        if os.environ.get("LAYA_URL"):  # a server was meant, not this machine's store
            raise
        if not path.exists():
            return []
        with Store(path) as store:
            found = msgspec.to_builtins(grouped(store.usage(since), by))
    return found


def _day(text: str) -> str:
    """2026-01-31 as it is; 7d: the day a week ago. Raises ConfigError."""
    try:
        time.strptime(text, "%Y-%m-%d")
    except ValueError:
        try:
            return time.strftime("%Y-%m-%d", time.gmtime(time.time() - parse_duration(text)))
        except (ConfigError, OverflowError, OSError):
            raise ConfigError(f"--since {text}: expected a day such as 2026-01-31, or 7d.", param="since") from None
    return text


def _print(by: str, rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(by.upper())
    has_costs = any(row.get("costs") for row in rows)
    columns = ("REQUESTS", "SERVED", "REFUSED", "FAILED", "CANCELLED", "TOKENS IN", "OUT", "TTFT", "TOK/S")
    for column in (*columns, *(("COST",) if has_costs else ())):
        table.add_column(column, justify="right")
    for row in rows:
        counts = [row[name] for name in ("requests", "served", "refused", "failed", "cancelled")]
        tokens = [row["prompt_tokens"], row["generated_tokens"]]
        ttft = f"{row['ttft_sum_s'] / row['n_first_tokens']:.2f} s" if row["n_first_tokens"] else "-"
        speed = f"{row['n_gaps'] / row['gaps_sum_s']:.1f}" if row["gaps_sum_s"] else "-"
        costs = [_costs(row)] if has_costs else []
        table.add_row(shown(row[by] or "(none)"), *map(str, [*counts, *tokens]), ttft, speed, *costs)
    print_table(Console(highlight=False), table)


def _costs(row: dict[str, Any]) -> str:
    """`1.25 USD`; of several currencies, each."""
    return ", ".join(f"{_amount(each)} {currency}" for currency, each in row.get("costs", {}).items()) or "-"


def _amount(amount: float) -> str:
    """Cents from 1 on; millionths below, where the prices of few tokens are."""
    if amount == 0 or amount >= 1:
        return f"{amount:.2f}"
    return f"{amount:.6f}".rstrip("0") if amount >= 1e-6 else "< 0.000001"
