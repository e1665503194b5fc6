"""Owns: the accounts of the machine: one for each device in bytes, one for CPU threads. Pure: no clock, no I/O.

Every load posts here before a byte of it is read, and what it was measured to hold after. The total of an account
moves with the machine (other programs come and go), so what is free may be negative for a while; nothing new is
promised then.
"""

from __future__ import annotations

from typing import Any

import msgspec

from laya.errors import InsufficientMemory
from laya.memory.sizes import size_text

THREADS = "threads"


class Holding(msgspec.Struct, frozen=True):
    """What one owner has of a device: the larger of what was promised and what was measured."""

    promised: int
    measured: int = 0

    @property
    def reserved(self) -> int:
        """Promised and not seen in use yet."""
        return max(0, self.promised - self.measured)

    @property
    def held(self) -> int:
        return max(self.promised, self.measured)


class Account:
    """One device. free + reserved + used == total after every change."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.total = 0
        self.free = 0
        self.by_owner: dict[str, Holding] = {}

    @property
    def reserved(self) -> int:
        return sum(holding.reserved for holding in self.by_owner.values())

    @property
    def used(self) -> int:
        return sum(holding.measured for holding in self.by_owner.values())

    @property
    def held(self) -> int:
        return sum(holding.held for holding in self.by_owner.values())

    def held_by(self, owner: str) -> int:
        holding = self.by_owner.get(owner)
        return holding.held if holding is not None else 0

    def set_total(self, total: int) -> None:
        self.free += total - self.total
        self.total = total
        self._check()

    def put(self, owner: str, holding: Holding) -> None:
        """Set what `owner` holds; nothing removes it."""
        self.free += self.held_by(owner) - holding.held
        self.by_owner.pop(owner, None)
        if holding.held:
            self.by_owner[owner] = holding
        self._check()

    def _check(self) -> None:
        reserved, used = self.reserved, self.used
        assert self.free + reserved + used == self.total, (
            f"{self.device}: {self.free} + {reserved} + {used} != {self.total}"
        )


class Ledger:
    """All accounts. An owner (a model's id) has one holding on each device; a second promise replaces the first."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def set_total(self, device: str, total: int) -> None:
        """What the device has for engines in all, as of now: bytes, or cores for "threads"."""
        self._account(device).set_total(total)

    def reserve(self, owner: str, device: str, amount: int, *, overdraw: bool = False) -> None:
        """Promise `amount` to `owner`. Raises InsufficientMemory, with both figures, where it is not free.

        overdraw: somebody insists: it is promised all the same, and what is free becomes negative.
        """
        assert amount >= 0, f"{owner} asks for {amount}"
        account = self._account(device)
        available = account.free + account.held_by(owner)
        if amount > available and not overdraw:
            text = f"{amount} of {available}" if device == THREADS else f"{size_text(amount)} of {size_text(available)}"
            raise InsufficientMemory(
                f"'{owner}' needs {text} that are free on {device}.",
                need_bytes=amount,
                available_bytes=max(0, available),
                limit=device,
                suggestions=[],
            )
        account.put(owner, Holding(amount))

    def post_measured(self, owner: str, device: str, n_bytes: int) -> None:
        """Note what the owner was measured to hold: promised turns into used, and what is above the promise is no
        longer free. Nothing happens for an owner without a promise: it is gone."""
        account = self._account(device)
        holding = account.by_owner.get(owner)
        if holding is not None:
            account.put(owner, msgspec.structs.replace(holding, measured=n_bytes))

    def release(self, owner: str) -> None:
        """Give back all that `owner` holds, on every device. Nothing happens for an owner without a promise."""
        for account in self._accounts.values():
            account.put(owner, Holding(0))

    def close(self, device: str) -> bool:
        """The device is gone, and its account with it; False where somebody still holds something of it."""
        account = self._accounts.get(device)
        if account is not None and account.by_owner:
            return False
        self._accounts.pop(device, None)
        return True

    def give_back(self, owner: str, device: str) -> None:
        """Give back what `owner` holds on one device."""
        self._account(device).put(owner, Holding(0))

    def total(self, device: str) -> int:
        return self._account(device).total

    def reserved(self, device: str) -> int:
        """Promised, and not measured to be in use."""
        return self._account(device).reserved

    def used(self, device: str) -> int:
        """Measured."""
        return self._account(device).used

    def held(self, device: str) -> int:
        """Reserved and used."""
        return self._account(device).held

    def held_by(self, owner: str, device: str) -> int:
        return self._account(device).held_by(owner)

    def free(self, device: str) -> int:
        """Negative where the machine shrank, an engine outgrew its plan, or somebody insisted."""
        return self._account(device).free

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Device -> total, free, reserved, used, whether it is overdrawn, and owner -> promised and measured."""
        return {
            device: {
                "total": account.total,
                "free": account.free,
                "reserved": account.reserved,
                "used": account.used,
                "overdrawn": account.free < 0,
                "owners": {owner: msgspec.to_builtins(holding) for owner, holding in account.by_owner.items()},
            }
            for device, account in self._accounts.items()
        }

    def _account(self, device: str) -> Account:
        return self._accounts.setdefault(device, Account(device))
