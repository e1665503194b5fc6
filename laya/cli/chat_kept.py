"""Owns: where `laya chat` keeps conversations, and the list of them. Knows no server."""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import datetime

from rich.console import Console
from rich.table import Table

from laya.cli.output import print_table, shown
from laya.config import data_dir
from laya.config.places import DATABASE
from laya.errors import StoreError
from laya.store import Store

MAX_LISTED = 50


def open_store() -> Store:
    """The store of this user. Raises StoreError that says how to do without."""
    try:
        return Store(data_dir(os.environ) / DATABASE)
    except StoreError as error:
        raise StoreError(f"{error.message}. `laya chat --no-store` keeps nothing and needs no file.") from error


def list_kept_conversations() -> None:
    """The kept conversations, the one spoken in last first."""
    with contextlib.closing(open_store()) as store:
        kept = store.conversations(MAX_LISTED)
    if not kept:
        print("No conversation is kept yet.", file=sys.stderr)
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("NUMBER", "LAST", "MODEL", "BEGINS"):
        table.add_column(title, no_wrap=True)
    for one in kept:
        said_at = datetime.fromtimestamp(one.updated_s).strftime("%Y-%m-%d %H:%M")
        table.add_row(str(one.id), said_at, shown(one.model), shown(one.title))
    print_table(Console(highlight=False), table)
    print("laya chat --resume NUMBER goes on with one.", file=sys.stderr)
