"""Owns: `keep_alive` of a request, in any API: how long a model stays loaded without one, until its engine goes.

It stands in for the model's `ttl`. Who may do as they like with the server's memory are admins, and anybody where no
key is needed: their last word counts, also `0`, unload when idle, and below 0, stay while there is room. A user's key
may only lengthen what holds, up to `server.max_keep_alive`, since the model is others' too. Knows no body.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from laya.errors import InvalidRequest
from laya.gateway.fields import shown

if TYPE_CHECKING:
    from laya.gateway.account import Key
    from laya.gateway.endpoint import Endpoint

FOREVER_S = float("inf")
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)", re.ASCII)


def seconds_of(keep_alive: float | str) -> float:
    """A `keep_alive` in seconds: a number, or Go's way to write durations ("5m", "1h30m"); below 0: `FOREVER_S`."""
    if isinstance(keep_alive, str):
        text = keep_alive.strip()
        sign = -1.0 if text.startswith("-") else 1.0
        rest = text[1:] if text[:1] in ("+", "-") else text
        if re.fullmatch(r"[0-9]+(\.[0-9]*)?", rest):
            seconds = sign * float(rest)
        elif rest and not _DURATION.sub("", rest):
            seconds = sign * sum(float(number) * _UNIT_S[unit] for number, unit in _DURATION.findall(rest))
        else:
            raise InvalidRequest(
                f"'keep_alive' is {shown(keep_alive)}: expected seconds or a duration such as 5m, 1h30m, 0 or -1.",
                param="keep_alive",
            )
    else:
        seconds = float(keep_alive)
    return FOREVER_S if seconds < 0 else seconds


def keep(group: Iterable[Endpoint], seconds: float | None, key: Key | None, most_s: float | None) -> None:
    """From now on these engines of one model stay so long without a request; None: for their `ttl` again.

    most_s: what a user's key may ask for; None or below 0: as long as it likes. What is pinned stays.
    """
    for each in group:
        if each.settings.pinned:
            continue
        if key is None or key.role == "admin":
            each.keep_alive_s = seconds
        elif seconds is not None and each.ttl_s is not None:
            allowed_s = seconds if most_s is None or most_s < 0 else min(seconds, most_s)
            each.keep_alive_s = max(allowed_s, each.ttl_s)
