"""Owns: which engine computes with how many threads now, so that together they never outnumber the cores.

Only engines with requests compute. One that is busy alone has all cores; as soon as another becomes busy they are
shared out, and again when it is done. The ledger's thread account holds the shares. An engine whose threads are fixed
at load (a binary of the user's own, no native library) holds them while it is busy, and the others share the rest.
"""

from __future__ import annotations

from collections.abc import Callable

from laya.engines.thread_share import ThreadShare, can_follow
from laya.gateway.endpoint import Endpoint
from laya.memory import THREADS, Ledger


class Threads:
    """Shares of the cores by engine."""

    def __init__(self, ledger: Ledger, cores: Callable[[], int]) -> None:
        self._ledger = ledger
        self._cores = cores
        self._most: dict[Endpoint, int] = {}  # loaded engines -> threads they were started with
        self._shares: dict[Endpoint, ThreadShare] = {}

    def fixed_for(self, endpoint: Endpoint) -> int | None:
        """Threads for an engine that cannot change them, where the user says none; None: it can, and starts with all.

        It gets what no other such engine holds, and leaves one to those that follow.
        """
        if self._can_follow(endpoint):
            return None
        taken = sum(most for other, most in self._most.items() if other is not endpoint and other not in self._shares)
        return max(1, self._cores() - taken)

    def admit(self, endpoint: Endpoint, n_threads: int) -> str | None:
        """An engine is about to start with so many threads; gives the file where it reads its share."""
        self._most[endpoint] = n_threads
        path = None
        if self._can_follow(endpoint):
            share = self._shares[endpoint] = ThreadShare()
            path = share.path
        self._share_out()
        return path

    def leave(self, endpoint: Endpoint) -> None:
        """Its engine is gone."""
        if self._most.pop(endpoint, None) is None:
            return
        share = self._shares.pop(endpoint, None)
        if share is not None:
            share.close()
        self._ledger.give_back(endpoint.name, THREADS)
        self._share_out()

    def share_out(self, endpoint: Endpoint) -> None:
        """The endpoint got its first request, or its last one has ended."""
        if len(self._most) > 1:
            self._share_out()

    def stop_sharing(self) -> None:
        """Engines that run now keep what they were started with, however many that is (for comparison)."""
        for share in self._shares.values():
            share.set(0)
        self._shares.clear()

    def _share_out(self) -> None:
        cores = self._cores()
        self._ledger.set_total(THREADS, cores)
        is_alone = len(self._most) == 1
        busy = [endpoint for endpoint in self._most if is_alone or endpoint.is_running]
        fixed = sum(self._most[endpoint] for endpoint in busy if endpoint not in self._shares)
        sharing = [endpoint for endpoint in busy if endpoint in self._shares]
        shares = dict(zip(sharing, parts(cores - fixed, [self._most[each] for each in sharing]), strict=True))
        for endpoint, most in self._most.items():
            n_threads = shares.get(endpoint, most) if endpoint in busy else 0
            # more busy engines than cores: one thread each, which waits for nobody at a barrier
            self._ledger.reserve(endpoint.name, THREADS, n_threads, overdraw=True)
            if endpoint in self._shares:
                self._shares[endpoint].set(n_threads or max(1, (cores - fixed) // (len(sharing) + 1)))

    @staticmethod
    def _can_follow(endpoint: Endpoint) -> bool:
        settings = endpoint.settings
        return settings.engine == "llamacpp" and settings.engine_path is None and can_follow()


def parts(n_cores: int, wanted: list[int]) -> list[int]:
    """The cores in shares as equal as they can be: at least one each, none above what it wants.

    >>> parts(8, [8, 8, 2])
    [3, 3, 2]
    """
    out = [1] * len(wanted)
    left = n_cores - len(wanted)
    while left > 0 and any(part < most for part, most in zip(out, wanted, strict=True)):
        for index, most in enumerate(wanted):
            if left > 0 and out[index] < most:
                out[index] += 1
                left -= 1
    return out
