"""Owns: the end of a wait that was too long, and what clients of streams hear of it before: comments, which they skip.

Comments keep clients and proxies from giving up. With the first of them the head is sent, so what refuses the request
later comes as an error event of a stream with status 200; that is why the first seconds pass in silence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.fleet import Fleet

NOTE_EVERY_S = 3.0


def sweep_waiting(fleet: Fleet, now_s: float) -> None:
    """Called a few times a second: refuse what has waited too long, and tell the others that they wait."""
    silent_s = fleet.config.server.waiting_note_s
    for endpoint in fleet.endpoints.values():
        if endpoint.queue:
            endpoint.expire(now_s)
            if silent_s:
                _tell(fleet, endpoint, silent_s, now_s)


def _tell(fleet: Fleet, endpoint: Endpoint, silent_s: float, now_s: float) -> None:
    what = b"waiting"
    if endpoint.pool is None:
        percent = fleet.supervisor.load_percent(endpoint.name)
        what = b"loading" if percent is None else b"loading %d %%" % percent
    for exchange in endpoint.queue:
        parsed, waited_s = exchange.parsed, now_s - exchange.read_s
        if parsed is None or not parsed.wants_stream or waited_s < silent_s or now_s - exchange.noted_s < NOTE_EVERY_S:
            continue
        exchange.noted_s = now_s
        exchange.write(b": %b, %d s\n\n" % (what, waited_s))
