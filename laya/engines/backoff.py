"""Owns: how long a model that keeps failing is left alone. Pure; the caller brings the clock."""

from __future__ import annotations

BACK_OFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # after the first, second, ... failure in a row
STABLE_S = 60.0  # an engine that was ready this long starts the row anew


class BackOff:
    """The failures of one model in a row. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.failures = 0
        self._not_before_s = 0.0

    def failed(self, now_s: float, *, ready_for_s: float = 0.0) -> None:
        """Count a failure; `ready_for_s` is how long the engine had been ready."""
        self.failures = 1 if ready_for_s >= STABLE_S else self.failures + 1
        self._not_before_s = now_s + BACK_OFF_S[min(self.failures, len(BACK_OFF_S)) - 1]

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next try is due; 0 when it is."""
        return max(0.0, self._not_before_s - now_s)

    def reset(self) -> None:
        self.failures = 0
        self._not_before_s = 0.0
