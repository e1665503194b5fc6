"""Owns: whether anything listens at the head of a Ray cluster: Ray itself would try for a long time."""

from __future__ import annotations

import asyncio

KNOCK_S = 5.0


async def why_unreachable(address: str) -> str | None:
    """Why no connection to HOST:PORT can be made; None where one can, and for `auto`, which only Ray can find."""
    host, _, port = address.rpartition(":")
    if not host:
        return None
    try:
        connecting = asyncio.open_connection(host.strip("[]"), int(port))
        _, writer = await asyncio.wait_for(connecting, KNOCK_S)
    except asyncio.TimeoutError:
        return f"no connection within {KNOCK_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    return None
