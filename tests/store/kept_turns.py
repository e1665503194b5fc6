"""Small turns for the tests of stores."""

from __future__ import annotations

from laya.store import KeptTurn

MOST = 10**6


def turn(name: str, after: str | None = None, root: str = "a", owner: str = "ann", at_s: float = 1.0) -> KeptTurn:
    return KeptTurn(
        id=name,
        owner=owner,
        previous_id=after,
        root_id=root,
        created_s=at_s,
        document=f'{{"id": "{name}"}}',
        input="[]",
    )
