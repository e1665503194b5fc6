"""Owns: one frame of `laya top`: what the server told, as lines as wide as a terminal. Asks nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from laya.cli.output import printable
from laya.memory import size_text
from laya.types import ANY_LENGTH

KEYS = "q quit  up/down select  l load  u unload  c cancel  p pause all"
_STATE_STYLES = {"ready": "green", "failed": "red", "degraded": "red", "unloaded": "dim"}
_FIXED_LINES = 8  # headings, empty lines, the message and the keys


@dataclass(frozen=True)
class Selectable:
    """A row that keys act on. kind: "model" or "request"."""

    kind: str
    id: str


@dataclass
class View:
    """What is shown: the answers of /admin/state, /v1/requests and /admin/events, and where the user is in them."""

    url: str
    state: dict[str, Any]
    requests: list[dict[str, Any]]
    events: list[dict[str, Any]]
    selected: Selectable | None = None
    message: str = ""
    rows: list[Selectable] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = [Selectable("model", each["id"]) for each in self.models()]
        self.rows += [Selectable("request", each["id"]) for each in self.requests]

    def models(self) -> list[dict[str, Any]]:
        """Loaded ones first, each kind as the server orders them."""
        return sorted(self.state["models"], key=lambda model: model["state"] == "unloaded")

    def moved(self, step: int) -> Selectable | None:
        """The row `step` further, from the one that is selected; the first where none is."""
        if not self.rows:
            return None
        if self.selected not in self.rows:
            return self.rows[0]
        return self.rows[max(0, min(len(self.rows) - 1, self.rows.index(self.selected) + step))]


def frame(view: View, width: int, height: int | None, *, is_unicode: bool, has_keys: bool) -> Group:
    """The whole frame. height: lines that there are room for; None: all are shown."""
    state = view.state
    n_devices = len(state["devices"])
    n_fixed = _FIXED_LINES + 2 * n_devices + len(view.message) // max(1, width)
    room = None if height is None else max(3, height - n_fixed)
    n_models, n_requests, n_events = _shares(room, len(state["models"]), len(view.requests), len(view.events))
    counts = f"{state['in_flight']} live, {state['arrivals']} requests so far"
    title = Text(f"laya {state['version']}  {view.url}  {counts}", overflow="ellipsis", no_wrap=True)
    title.append("  PAUSED" if state.get("is_paused") else "", "bold red")
    parts: list[RenderableType] = [title]
    for device in state["devices"]:
        parts += _device(device, width, is_unicode)
    parts += [Text(), _models(view, n_models)]
    parts += [Text(), _requests(view, n_requests)]
    if view.events:
        parts += [Text(), *_events(view.events[len(view.events) - n_events :])]
    if view.message:
        parts.append(Text(printable(view.message), "bold yellow"))
    if has_keys:
        parts.append(Text(KEYS, "dim", overflow="ellipsis", no_wrap=True))
    return Group(*parts)


def _shares(room: int | None, n_models: int, n_requests: int, n_events: int) -> tuple[int, int, int]:
    """How many rows of each there is room for: models first, then requests, then the newest events."""
    if room is None:
        return n_models, n_requests, n_events
    models = min(n_models, max(1, room // 2))
    requests = min(n_requests, max(1, (room - models) * 2 // 3))
    return models, requests, max(0, min(n_events, room - models - requests))


# ---------------------------------------------------------------- devices


def _device(device: dict[str, Any], width: int, is_unicode: bool) -> list[RenderableType]:
    """The bar, and its figures in words."""
    others, budget = device["others_bytes"], device["budget_bytes"]
    measured, reserved = device["measured_bytes"], device["reserved_bytes"]
    name = Text(f"{device['name']:<6.6} ", "bold")
    name.append_text(_bar(device, max(10, width - 8), is_unicode))
    words = (
        f"       {size_text(reserved)} of {size_text(budget)} promised, {size_text(measured)} measured, "
        f"{size_text(others)} others"
    )
    return [name, Text(words, "dim", overflow="ellipsis", no_wrap=True)]


def _bar(device: dict[str, Any], cells: int, is_unicode: bool) -> Text:
    """Others, then what is measured, then what is promised and not used yet; the mark is the ceiling of all engines."""
    marks = "░█▒·┃" if is_unicode else "o#=.|"
    styles = ("bright_black", "green", "yellow", "dim", "bold red")
    total = max(1, device["total_bytes"])
    others, measured = device["others_bytes"], device["measured_bytes"]
    ends = [others, others + measured, others + max(measured, device["reserved_bytes"]), total]
    bar = Text(no_wrap=True)
    ceiling = min(cells - 1, int(cells * (others + device["budget_bytes"]) / total))
    for cell in range(cells):
        kind = 4 if cell == ceiling else next(i for i, end in enumerate(ends) if i == 3 or end * cells > cell * total)
        bar.append(marks[kind], styles[kind])
    return bar


# ---------------------------------------------------------------- rows


def _table(*columns: tuple[str, str]) -> Table:
    """Columns of (title, "left", "right" or "rest"); the one that takes the rest gives way on a narrow screen."""
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    for title, kind in columns:
        if kind == "rest":
            table.add_column(title, ratio=1, no_wrap=True, overflow="ellipsis")
        else:
            table.add_column(title, justify=kind, no_wrap=True)  # type: ignore[arg-type]
    return table


def _window(n_rows: int, n_shown: int, selected: int | None) -> range:
    """The rows shown, the selected one among them."""
    first = 0 if selected is None else max(0, min(selected - n_shown // 2, n_rows - n_shown))
    return range(first, min(n_rows, first + n_shown))


def _index(view: View, kind: str, ids: list[str]) -> int | None:
    is_here = view.selected is not None and view.selected.kind == kind and view.selected.id in ids
    return ids.index(view.selected.id) if is_here and view.selected is not None else None


def _models(view: View, n_shown: int) -> RenderableType:
    table = _table(
        ("MODEL", "rest"), ("STATE", "left"), ("PLANNED", "right"), ("MEASURED", "right"), ("CONTEXT", "right"),
        ("RUN", "right"), ("QUEUE", "right"), ("IDLE", "right"),
    )  # fmt: skip
    models = view.models()
    selected = _index(view, "model", [each["id"] for each in models])
    for index in _window(len(models), n_shown, selected):
        model = models[index]
        plan, idle_s = model["plan"], model["idle_s"]
        percent = model.get("extra", {}).get("load_percent")
        table.add_row(
            Text(printable(model["id"]) + (" (pinned)" if model.get("pinned") else "")),
            Text(model["state"] + _percent(percent), _STATE_STYLES.get(model["state"], "yellow")),
            size_text(sum(device["total_bytes"] for device in plan["devices"])) if plan else "-",
            size_text(model["measured_bytes"]) if model["measured_bytes"] else "-",
            _context(plan["settings"]) if plan else "-",
            str(model["running"]),
            str(model["queued"]),
            f"{idle_s:.0f} s" if idle_s is not None else "-",
            style="reverse" if index == selected else "",
        )
    return table


def _percent(percent: int | None) -> str:
    return "" if percent is None else f" {percent} %"


def _context(settings: dict[str, Any]) -> str:
    length = settings["max_seq_len"]
    return f"{settings['max_num_seqs']} x {'any' if length == ANY_LENGTH else length}"


def _requests(view: View, n_shown: int) -> RenderableType:
    if not view.requests:
        return Text("no live requests", "dim")
    table = _table(("REQUEST", "left"), ("MODEL", "left"), ("FROM", "left"), ("AGE", "right"), ("DOES", "rest"))
    selected = _index(view, "request", [each["id"] for each in view.requests])
    for index in _window(len(view.requests), n_shown, selected):
        request = view.requests[index]
        table.add_row(
            Text(printable(request["id"])[:12]),
            Text(printable(request["model"] or "-")[:20]),
            Text(printable(request["key"] or request["client"] or "-")[:15]),
            f"{request['age_s']:.0f} s",
            Text(_does(request)),
            style="reverse" if index == selected else "",
        )
    return table


def _does(request: dict[str, Any]) -> str:
    if request.get("waits_for"):
        return f"waits for {printable(request['waits_for'])}"
    if request.get("prompt_tokens"):
        return f"prefill {100 * request['prefill_tokens'] // request['prompt_tokens']} %"
    if request.get("tokens_per_s") is not None:
        return f"{request['phase']} {request['tokens']} tokens, {request['tokens_per_s']} tok/s"
    return str(request["phase"])


def _events(events: list[dict[str, Any]]) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for event in events:
        at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
        style = "yellow" if event["level"] == "warning" else "dim"
        lines.append(Text(f"{at}  {printable(event['text'])}", style, overflow="ellipsis", no_wrap=True))
    return lines
