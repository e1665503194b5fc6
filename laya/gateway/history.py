"""Owns: the memory of each device over the last minutes, sampled while the server runs, for the page's curve.

Bytes only; what happened meanwhile is in the events. Knows no model.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

import msgspec

from laya.gateway.gauge import DeviceGauge

logger = logging.getLogger(__name__)

EVERY_S = 2.0
KEPT_S = 600.0


class Sample(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One device at one moment, in bytes; `at` in Unix seconds."""

    at: float
    measured_bytes: int
    reserved_bytes: int
    others_bytes: int
    budget_bytes: int


class History:
    """The samples of every device."""

    def __init__(self, look: Callable[[], list[DeviceGauge]], clock: Callable[[], float] = time.time) -> None:
        self._look = look
        self._clock = clock
        self._kept: dict[str, deque[Sample]] = {}

    async def run(self) -> None:
        """For as long as the server runs."""
        while True:
            try:
                self.take()
            except Exception:  # a curve that ends after one fault shows nothing of what came then
                logger.exception("no sample of the devices' memory could be taken")
            await asyncio.sleep(EVERY_S)

    def take(self) -> None:
        """One sample of each device now."""
        at = round(self._clock(), 3)
        for device in self._look():
            kept = self._kept.setdefault(device.device, deque(maxlen=int(KEPT_S / EVERY_S)))
            kept.append(
                Sample(
                    at=at,
                    measured_bytes=device.measured_bytes,
                    reserved_bytes=device.reserved_bytes,
                    others_bytes=device.others_bytes,
                    budget_bytes=device.budget_bytes,
                )
            )

    def after(self, at: float) -> dict[str, list[Sample]]:
        """Device -> its samples that are younger, oldest first."""
        return {device: [each for each in kept if each.at > at] for device, kept in self._kept.items()}
