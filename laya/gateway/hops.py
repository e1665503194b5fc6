"""Owns: the way of a request through servers that send it on: it never comes back to one that it has passed.

A remote model may be another Laya's, whose model is remote too, and so on to this very server. Each says itself in the
request's id, and refuses what it has said already.
"""

from __future__ import annotations

import secrets

from laya.errors import LoopDetected

_PREFIX = b"laya-hop:"
_MOST_HOPS = 8
INSTANCE = secrets.token_hex(6)  # of this start of this server
_OURS = INSTANCE.encode()


def check_hops(request_id: bytes) -> None:
    """Raise LoopDetected for a request that has been here, or has come a long way."""
    if not request_id.startswith(_PREFIX):
        return
    hops = request_id[len(_PREFIX) :].split(b":")
    if _OURS in hops:
        raise LoopDetected("This request came back to the server that sent it out: a remote model leads to itself.")
    if len(hops) >= _MOST_HOPS:
        raise LoopDetected(f"This request was sent on {len(hops)} times; no chain of servers is that long.")


def hop_line(request_id: bytes) -> bytes:
    """The line of its head that tells the next server."""
    so_far = request_id if request_id.startswith(_PREFIX) else _PREFIX[:-1]
    return b"x-request-id: %b:%b\r\n" % (so_far, _OURS)
