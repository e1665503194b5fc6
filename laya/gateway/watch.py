"""Owns: whether engines still do anything. One that answers nothing, or holds requests and gives nothing, is stuck.

Two questions, asked of each engine a few times a second at no cost to requests. Does it live? It is asked for its slots
now and then (a program for its health), which llama.cpp answers between two batches, so a slow prefill is no silence.
Does it get on? A stream that was sent and has no first token must show prefill progress, where the engine tells it;
where it does not, every request must be heard of now and then (silence.py).
An engine that gets little of a busy machine is slow, not stuck: while it computes it is waited for, until it has
computed for as long as all its threads could in that time and given nothing. Time counts only while this process itself
runs, and from the start again after it was stopped: engines are mostly stopped with it, and may go on a little later.
What is stuck is stopped, by force if need be, and loaded again.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from laya.errors import EngineStuck, LayaError
from laya.gateway.endpoint import Endpoint
from laya.gateway.silence import Silence
from laya.routing.health import ProgressWatch

if TYPE_CHECKING:
    from laya.gateway.exchange import Exchange
    from laya.gateway.fleet import Fleet

ASK_EVERY_S = 5.0
IDLE_LIMIT_S = 20.0  # an engine without work answers at once, or it is not there
LONGEST_STEP_S = 1.0  # between two sweeps; what is longer, this process was stopped for
LOOK_AFTER_SHARE = 0.25  # of the limit: what is quiet for less is not asked for what it computes
LEAST_CPU_SHARE = 0.01  # of one core; what an engine takes to answer questions is less


@dataclasses.dataclass(slots=True)
class _Work:
    """What an engine has computed since it is quiet."""

    began_cpu_s: float
    seen_cpu_s: float
    seen_s: float  # when it had last computed, by the watch's clock


class Watch:
    """The engines of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._clock_s = 0.0  # of this process at work
        self._swept_s: float | None = None
        self._life = ProgressWatch()
        self._progress = ProgressWatch()
        self._silence = Silence()
        self._work: dict[Endpoint, _Work] = {}
        self._n_answers: dict[Endpoint, int] = {}
        self._asked_s: dict[Endpoint, float] = {}  # by our clock; infinite while the answer is awaited

    def sweep(self, now_s: float) -> None:
        """Look at every engine that should be at work."""
        step_s = now_s - self._swept_s if self._swept_s is not None else 0.0
        self._swept_s = now_s
        self._clock_s += min(max(step_s, 0.0), LONGEST_STEP_S)
        if step_s > ASK_EVERY_S:  # stopped for so long that a question is missing
            self._life, self._progress, self._silence = ProgressWatch(), ProgressWatch(), Silence()
        for endpoint in list(self._fleet.endpoints.values()):
            if endpoint.is_serving:
                self._look(endpoint)

    def is_asking(self, endpoint: Endpoint) -> bool:
        """Whether its answer is awaited."""
        return self._asked_s.get(endpoint) == float("inf")

    def forget(self, endpoint: Endpoint) -> None:
        """Its engine is a new one, or gone."""
        self._life.forget(endpoint.index)
        self._progress.forget(endpoint.index)
        self._silence.forget(endpoint)
        self._work.pop(endpoint, None)
        self._asked_s.pop(endpoint, None)
        self._n_answers.pop(endpoint, None)

    def _look(self, endpoint: Endpoint) -> None:
        limit_s = endpoint.settings.progress_timeout_s
        if endpoint.pool is None or (not endpoint.is_llamacpp and self._is_silent(endpoint, limit_s)):
            return
        if endpoint.pool.address.alive_path is None:
            return  # there is nothing to ask it for
        ask_every_s = min(ASK_EVERY_S, limit_s / 4)
        if self._clock_s - self._asked_s.setdefault(endpoint, self._clock_s) >= ask_every_s:
            self._asked_s[endpoint] = float("inf")
            self._fleet.spawn(self._ask(endpoint))
        waiting = [exchange for exchange in endpoint.live if _waits_for_first_token(exchange, endpoint)]
        done = endpoint.last_used_s, sum(exchange.prefill_done for exchange in endpoint.live)
        begun = sum(exchange.first_token_s > 0 for exchange in endpoint.live)
        still_s = self._progress.look(endpoint.index, (*done, begun) if waiting else None, self._clock_s)
        answers = self._n_answers.get(endpoint, 0)
        silent_s = self._life.look(endpoint.index, (*done, begun, answers), self._clock_s)
        life_limit_s = limit_s if endpoint.live else min(limit_s, IDLE_LIMIT_S)
        if self._computes(endpoint, max(silent_s, still_s), limit_s if waiting else life_limit_s):
            return
        if silent_s > life_limit_s:
            self._give_up(endpoint, f"it has not answered for {silent_s:.0f} s")
        elif still_s > limit_s:
            n = len(waiting)
            held = "1 request" if n == 1 else f"{n} requests"
            self._give_up(endpoint, f"it has held {held} for {still_s:.0f} s without any progress")

    def _computes(self, endpoint: Endpoint, quiet_s: float, limit_s: float) -> bool:
        """Whether it is only slow: it has computed within the limit, and less than all its threads could in it."""
        if quiet_s < LOOK_AFTER_SHARE * limit_s:
            self._work.pop(endpoint, None)
            return False
        cpu_s = self._fleet.supervisor.cpu_s(endpoint.name)
        if cpu_s is None:
            return False
        work = self._work.setdefault(endpoint, _Work(cpu_s, cpu_s, self._clock_s - quiet_s))
        if cpu_s - work.seen_cpu_s >= LEAST_CPU_SHARE * limit_s:
            work.seen_cpu_s, work.seen_s = cpu_s, self._clock_s
        n_threads = endpoint.planned.n_threads if endpoint.planned is not None else 1
        is_spinning = cpu_s - work.began_cpu_s > limit_s * max(n_threads, 1)
        return self._clock_s - work.seen_s <= limit_s and not is_spinning

    def _is_silent(self, endpoint: Endpoint, limit_s: float) -> bool:
        """End requests of which nothing is heard any more, or have them served elsewhere. Another server is not ours to
        stop; a program that has said nothing to any request meanwhile is stuck, and all of its requests end then."""
        who = f"The {'server' if endpoint.is_remote else 'engine'} of '{endpoint.name}'"
        for exchange, silent_s in self._silence.look(endpoint, self._clock_s).items():
            if silent_s <= limit_s:
                continue
            if not endpoint.is_remote and self._silence.of_all(endpoint, self._clock_s) >= silent_s:
                self._give_up(endpoint, f"it has said nothing to a request for {silent_s:.0f} s (progress_timeout_s)")
                return True
            text = f"{who} has said nothing to a request for {silent_s:.0f} s (progress_timeout_s)"
            self._fleet.events.add("request_stuck", text, model=endpoint.model_id)
            exchange.fail(EngineStuck(f"{text}."))
        return False

    async def _ask(self, endpoint: Endpoint) -> None:
        pool = endpoint.pool
        if pool is None or pool.address.alive_path is None:
            return
        try:
            with contextlib.suppress(OSError):  # silence is what is watched for
                await pool.fetch("GET", pool.address.alive_path, deadline_s=endpoint.settings.progress_timeout_s)
                if endpoint.pool is pool:
                    self._n_answers[endpoint] = self._n_answers.get(endpoint, 0) + 1
        finally:
            if endpoint.pool is pool:
                self._asked_s[endpoint] = self._clock_s

    def _give_up(self, endpoint: Endpoint, what: str) -> None:
        """Nothing goes to it any more; what waits there may go elsewhere, what runs ends, and a new engine comes."""
        fleet = self._fleet
        self.forget(endpoint)
        endpoint.stuck = f"The engine of '{endpoint.name}' is stuck: {what}; it is stopped and started again."
        fleet.stats.count_unload(endpoint.model_id, "stuck")
        fleet.events.add("engine_stuck", f"the engine of '{endpoint.name}' is stuck: {what}", model=endpoint.model_id)
        endpoint.close()
        fleet.together.choose_eligible(endpoint)
        fleet.together.leave_to_others(endpoint)
        for exchange in list(endpoint.live):
            exchange.fail(EngineStuck(endpoint.stuck, retry_after_s=endpoint.mean_load_s))
        fleet.spawn(self._restart(endpoint))

    async def _restart(self, endpoint: Endpoint) -> None:
        try:
            await self._fleet.unload(endpoint, deadline_s=0.0)
            if self._fleet.is_wanted(endpoint):
                await self._fleet.ready(endpoint)
        except LayaError as error:
            self._fleet.events.add("engine_lost", f"no new engine of '{endpoint.name}': {error.message}")
        finally:
            endpoint.stuck = None


def _waits_for_first_token(exchange: Exchange, endpoint: Endpoint) -> bool:
    """Whether an engine that tells how far it is with a prompt has nothing else to tell of it so far."""
    parsed, pool = exchange.parsed, endpoint.pool
    if exchange.connection is None or exchange.first_token_s or exchange.upstream_paused:
        return False
    tells = pool is not None and endpoint.is_llamacpp and not pool.address.cancels_whole
    return tells and parsed is not None and parsed.generates
