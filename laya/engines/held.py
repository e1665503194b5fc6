"""Owns: the memory that is promised to one engine, from its plan to its end: what it held, and who is told.

The gateway's hooks are called here and nowhere else; their faults are logged, so that a transition always goes on.
"""

from __future__ import annotations

import logging

from laya.engines.held_memory import MemoryReading
from laya.engines.hooks import Ending, Engine, ModelHooks

logger = logging.getLogger(__name__)


class Held:
    """The promise of one model; there is one at a time."""

    def __init__(self, model_id: str) -> None:
        self._model_id = model_id
        self._hooks: ModelHooks | None = None  # set while memory is reserved for an engine
        self._peak_bytes = 0

    def begin(self, hooks: ModelHooks) -> None:
        """Memory was reserved by these hooks."""
        self._hooks, self._peak_bytes = hooks, 0

    def note(self, engine: Engine | None) -> MemoryReading | None:
        """What the engine holds now, remembered for its end."""
        reading = engine.measure() if engine is not None else None
        if reading is not None:
            self._peak_bytes = reading.peak_bytes
        return reading

    def end(self, engine: Engine | None) -> None:
        """The engine is gone, or never came: tell what it held, then give back. Once for each `begin`."""
        hooks, self._hooks = self._hooks, None
        if hooks is None:
            return
        try:
            if engine is not None and hooks.ended is not None:
                hooks.ended(Ending(peak_bytes=self._peak_bytes, limit_hit=engine.limit_hit))
        except Exception:  # the memory is given back, whatever was made of what it held
            logger.exception("what %s held could not be noted", self._model_id)
        try:
            hooks.release()
        except Exception:  # the transition goes on, whatever the ledger says
            logger.exception("releasing the memory of %s failed", self._model_id)
