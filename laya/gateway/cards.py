"""Owns: the accounts of GPUs: what engines may use of each, and what each engine was measured to hold there.

What others take and give back is read for each decision. Makes no plan.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from laya.engines.held_memory import family
from laya.memory import GpuMeter, Ledger
from laya.memory.placement import gpu_name

if TYPE_CHECKING:
    from laya.engines.supervisor import Supervisor
    from laya.memory.gpu import GpuMemory
    from laya.types import Plan

MEASURED_BACK_S = 2.0  # a driver has the memory of a process back a little after its end
MEASURED_BACK_SHARE = 0.9  # of it: other programs take and give meanwhile
LOOK_EVERY_S = 0.05
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class Cards:
    """The GPUs of this machine, in its ledger."""

    def __init__(
        self, ledger: Ledger, supervisor: Supervisor, limits: Mapping[str, int], meter: GpuMeter | None = None
    ) -> None:
        """limits: memory.gpu of the config."""
        self._ledger = ledger
        self._supervisor = supervisor
        self._limits = limits
        self.meter = meter or GpuMeter()
        self._n_cards = 0
        self._uuids: dict[int, str] = {}  # of each card that was ever seen

    def read(self) -> list[GpuMemory]:
        """Each card as it is now, with the accounts brought up to it."""
        engines = {status.id: family(status.pid) for status in self._supervisor.status() if status.pid is not None}
        cards = self.meter.read({pid for pids in engines.values() for pid in pids})
        seen = {card.index: card for card in cards}
        self._uuids |= {card.index: card.uuid for card in cards}
        self._n_cards = max(self._n_cards, *(number + 1 for number in seen), 0) if seen else self._n_cards
        for number in range(self._n_cards):
            card = seen.get(number)
            if card is None:  # it fell off the bus
                self._ledger.set_total(gpu_name(number), 0)
                continue
            for name, pids in engines.items():
                n_bytes = sum(card.process_bytes.get(pid, 0) for pid in pids)
                if n_bytes:
                    self._ledger.post_measured(name, gpu_name(number), n_bytes)
            self._ledger.set_total(gpu_name(number), self._total_bytes(card))
        return cards

    def _total_bytes(self, card: GpuMemory) -> int:
        """What all engines together may hold of it."""
        used_bytes = card.total_bytes - card.free_bytes
        # Where NVML can't say whose a process is (in a container), what was promised is taken to be in use.
        own_bytes = card.own_bytes or min(used_bytes, self._ledger.held(gpu_name(card.index)))
        return usable_bytes(card, own_bytes, self._limits)

    @property
    def why_none(self) -> str:
        """Why no engine may use any, where none may."""
        return why_hidden(self._uuids) or self.meter.why_none

    def total_bytes(self) -> tuple[int, ...]:
        """Of each card, by its number, as last read."""
        return tuple(self._ledger.total(gpu_name(number)) for number in range(self._n_cards))

    def free_bytes(self) -> tuple[int, ...]:
        """Of each card what is not promised and not used, as last read; negative where others took it since."""
        return tuple(self._ledger.free(gpu_name(number)) for number in range(self._n_cards))

    def held_bytes(self, name: str) -> tuple[int, ...]:
        """What one engine has of each."""
        return tuple(self._ledger.held_by(name, gpu_name(number)) for number in range(self._n_cards))

    def less(self, n_bytes: tuple[int, ...], names: list[str]) -> tuple[int, ...]:
        """The same without what these engines hold."""
        return tuple(
            max(0, each - sum(self._ledger.held_by(name, gpu_name(number)) for name in names))
            for number, each in enumerate(n_bytes)
        )

    async def until_back(self, held_bytes: tuple[int, ...], before: list[GpuMemory]) -> None:
        """Wait until the cards show what an engine held that is gone, or a little while."""
        wanted = {
            card.index: card.free_bytes + int(MEASURED_BACK_SHARE * held_bytes[card.index])
            for card in before
            if card.index < len(held_bytes) and held_bytes[card.index]
        }
        end_s = time.monotonic() + MEASURED_BACK_S
        while wanted and time.monotonic() < end_s:
            now = {card.index: card.free_bytes for card in self.meter.read()}
            if all(now.get(number, n_bytes) >= n_bytes for number, n_bytes in wanted.items()):
                return
            await asyncio.sleep(LOOK_EVERY_S)


def usable_bytes(card: GpuMemory, own_bytes: int, limits: Mapping[str, int]) -> int:
    """What all engines together may hold of it, who hold so much now. limits: memory.gpu of the config."""
    if not is_visible(card.index, card.uuid):
        return 0
    n_bytes = max(0, card.free_bytes + own_bytes - card.kept_free_bytes)
    return min(n_bytes, limits.get(str(card.index), n_bytes))


def is_visible(number: int, uuid: str = "") -> bool:
    """Whether who started Laya left this card to it, by its number or, as CUDA lets it, by a beginning of its UUID."""
    said = [os.environ[name] for name in VISIBLE if name in os.environ]
    return all(any(_names(word.strip(), number, uuid) for word in each.split(",")) for each in said)


def _names(word: str, number: int, uuid: str) -> bool:
    return word == str(number) or (word.startswith("GPU-") and uuid.startswith(word))


def why_hidden(uuids: Mapping[int, str]) -> str | None:
    """Which variable leaves none of these cards, by their numbers, to Laya; None: one is left, or there is none."""
    if not uuids or any(is_visible(number, uuid) for number, uuid in uuids.items()):
        return None
    said = ", ".join(f"{name}={os.environ[name]}" for name in VISIBLE if name in os.environ)
    there = ", ".join(f"{number} {uuid}".rstrip() for number, uuid in uuids.items())
    return f"{said} names none of the GPUs here by its number or UUID ({there})"


def share_on_gpus(plan: Plan) -> tuple[bool, int, int]:
    """The larger, the more of the model lies on GPUs."""
    settings = plan.settings
    return plan.fits and not settings.spills, settings.gpu_layers, -settings.experts_on_cpu
