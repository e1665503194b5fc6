"""Owns: reading what was measured of this machine's speed. Where the memory room's rates and the store meet."""

from __future__ import annotations

from pathlib import Path

import msgspec

from laya.errors import StoreError
from laya.memory.machine import Machine
from laya.memory.rates import MachineRates, hardware_key
from laya.store import Store


def kept_rates(path: Path) -> MachineRates | None:
    """What was measured on this hardware with this engine build, or None; blocks.

    path: the database. One that is not there, cannot be read, or holds another Laya's form holds nothing.
    """
    if not path.is_file():
        return None
    try:
        with Store(path) as store:
            document = store.rates(hardware_key(Machine()))
        return msgspec.json.decode(document, type=MachineRates) if document else None
    except (StoreError, msgspec.MsgspecError):
        return None
