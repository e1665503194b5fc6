"""Owns: which engines were stopped at their ceiling, how often in a row, and which are therefore not tried unasked.

Knows names, plans and endings; loads nothing.
"""

from __future__ import annotations

from laya.engines.hooks import Ending
from laya.errors import PROGRAM_ADVICE, EngineOutOfMemory
from laya.memory import what_fits
from laya.types import Plan

HITS_ENOUGH = 2  # the second engine had what was learned of the first


class Outgrown:
    """By the names of engines."""

    def __init__(self) -> None:
        self._anyway: set[str] = set()  # that somebody insists on
        self._n_hits: dict[str, int] = {}
        self._refusals: dict[str, EngineOutOfMemory] = {}

    def insist(self, name: str) -> None:
        """It is loaded also where it does not fit, until that has failed."""
        self._anyway.add(name)

    def is_insisted(self, name: str) -> bool:
        return name in self._anyway

    def check(self, name: str) -> None:
        """Raise EngineOutOfMemory for an engine that is not tried again unasked."""
        if name in self._refusals:
            raise self._refusals[name]

    def ended(self, name: str, plan: Plan, ending: Ending) -> None:
        """An engine of this plan is gone: what could not be is not insisted on."""
        hit = ending.limit_hit
        if hit is None:
            return
        n_hits = self._n_hits[name] = self._n_hits.get(name, 0) + 1
        if n_hits >= HITS_ENOUGH or not plan.fits:
            self._anyway.discard(name)
            flags = [suggestion.flags for suggestion in plan.suggestions]
            advice = what_fits(plan) if plan.settings.is_computed else PROGRAM_ADVICE
            error = EngineOutOfMemory(name, hit.limit_bytes, hit.peak_bytes, flags, advice, on_gpu=hit.on_gpu)
            self._refusals[name] = error

    def forgive(self, name: str) -> None:
        """A person asks for it: it is tried again."""
        self._n_hits.pop(name, None)
        self._refusals.pop(name, None)

    def forget(self, name: str) -> None:
        """There is no such engine any more."""
        self.forgive(name)
        self._anyway.discard(name)
