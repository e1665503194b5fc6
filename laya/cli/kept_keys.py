"""Owns: how many API keys this machine's store has, for verbs that only ask whether an address may be open."""

from __future__ import annotations

from laya.config.places import DATABASE
from laya.models import home_path


def n_kept_keys() -> int:
    """Keys that `laya key` made. Raises StoreError where there is a store that cannot be read."""
    from laya.gateway.live_keys import read_keys  # a database's library, which most verbs start without

    return len(read_keys(home_path() / DATABASE))
