"""Owns: the accounts of the machine: one for each device in bytes, one for CPU threads. Pure: no clock, no I/O.

Every load posts here before a byte of it is read. The total of an account moves with the machine (other programs come
and go), so what is free may be negative for a while; nothing new is promised then.
"""

from __future__ import annotations

from typing import Any

from laya.errors import InsufficientMemory
from laya.memory.sizes import size_text

THREADS = "threads"


class Account:
    """One device. free + reserved == total after every change."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.total = 0
        self.free = 0
        self.by_owner: dict[str, int] = {}

    @property
    def reserved(self) -> int:
        return sum(self.by_owner.values())

    def set_total(self, total: int) -> None:
        self.free += total - self.total
        self.total = total
        self._check()

    def put(self, owner: str, amount: int) -> None:
        """Set what `owner` holds; 0 removes it."""
        self.free += self.by_owner.pop(owner, 0) - amount
        if amount:
            self.by_owner[owner] = amount
        self._check()

    def _check(self) -> None:
        assert self.free + self.reserved == self.total, f"{self.device}: {self.free} + {self.reserved} != {self.total}"


class Ledger:
    """All accounts. An owner (a model's id) has one reservation on each device; a second replaces the first."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._measured: dict[str, int] = {}

    def set_total(self, device: str, total: int) -> None:
        """What the device has for engines in all, as of now: bytes, or cores for "threads"."""
        self._account(device).set_total(total)

    def reserve(self, owner: str, device: str, amount: int) -> None:
        """Promise `amount` to `owner`. Raises InsufficientMemory, with both figures, where it is not free."""
        assert amount >= 0, f"{owner} asks for {amount}"
        account = self._account(device)
        available = account.free + account.by_owner.get(owner, 0)
        if amount > available:
            text = f"{amount} of {available}" if device == THREADS else f"{size_text(amount)} of {size_text(available)}"
            raise InsufficientMemory(
                f"'{owner}' needs {text} that are free on {device}.",
                need_bytes=amount,
                available_bytes=max(0, available),
                limit=device,
                suggestions=[],
            )
        account.put(owner, amount)

    def post_measured(self, owner: str, n_bytes: int) -> None:
        """Note what the owner was measured to hold; the promise stays what it was."""
        self._measured[owner] = n_bytes

    def release(self, owner: str) -> None:
        """Give back all that `owner` holds, on every device. Nothing happens for an owner without a reservation."""
        for account in self._accounts.values():
            account.put(owner, 0)
        self._measured.pop(owner, None)

    def reserved(self, device: str) -> int:
        return self._account(device).reserved

    def free(self, device: str) -> int:
        return self._account(device).free

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Device -> total, free, reserved and what each owner holds; and "measured" -> owner -> bytes."""
        accounts = {
            device: {
                "total": account.total,
                "free": account.free,
                "reserved": account.reserved,
                "owners": dict(account.by_owner),
            }
            for device, account in self._accounts.items()
        }
        return accounts | {"measured": dict(self._measured)}

    def _account(self, device: str) -> Account:
        return self._accounts.setdefault(device, Account(device))
