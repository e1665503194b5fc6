"""Owns: one place that can serve a model: its queue, its reservations, its connections, what it is doing right now.

An endpoint exists as soon as its model is known; `open` and `close` follow the engine behind it. Knows neither how a
request is chosen for it nor how an engine is started.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from laya.config import ResolvedModel
from laya.errors import LayaError, ModelLoading, QueueFull, QueueTimeout
from laya.gateway.heads import origin_lines
from laya.gateway.plain import PlainLane
from laya.gateway.pool import UpstreamPool
from laya.gateway.promises import needs_of, promised_tokens
from laya.gateway.prompts import PromptTurns
from laya.gateway.queueing import WaitingLine, priority_for
from laya.gateway.texts import TextTurns
from laya.gateway.upstream import UpstreamConnection
from laya.memory import Admission
from laya.metrics import ModelStats
from laya.types import EndpointKind, EngineAddress, Plan, PlannedSettings, Task

if TYPE_CHECKING:
    from laya.gateway.exchange import Exchange
    from laya.gateway.metering import Metered
    from laya.gateway.slots import Slots

KINDS_OF: dict[Task, frozenset[EndpointKind]] = {
    "chat": frozenset({EndpointKind.CHAT, EndpointKind.COMPLETION}),
    "embed": frozenset({EndpointKind.EMBEDDING}),
    "rerank": frozenset({EndpointKind.RERANK}),
    "decide": frozenset({EndpointKind.DECISION}),
}
ENGINE_STARTS = {
    EndpointKind.CHAT: b"POST /v1/chat/completions",
    EndpointKind.COMPLETION: b"POST /v1/completions",
    EndpointKind.EMBEDDING: b"POST /v1/embeddings",
    EndpointKind.RERANK: b"POST /v1/rerank",
    EndpointKind.DECISION: b"POST /v1/systemone",
}
DRAIN_LOOK_EVERY_S = 0.05
TURN_S = 10.0  # how long a model that is used keeps its memory while another one waits for it
LINGER_S = 0.5  # within its turn, one that was just used is not idle yet: its client may only be about to go on
_SMOOTHING = 0.2  # weight of the newest request in the running mean of service times


class Endpoint:
    """See the module. `pool` is None while no engine is ready behind it."""

    def __init__(
        self, index: int, settings: ResolvedModel, stats: ModelStats, lane: PlainLane | None = None, *, name: str = ""
    ) -> None:
        """name: of the engine, where its model has several: `smollm2#1`."""
        self.index = index
        self.name = name or settings.id
        self.settings = settings
        self.is_remote = settings.engine == "remote"
        self.origin = self._origin()  # of an answer, as it stands in its head
        self.node: str | None = None  # of a cluster, that its engine is on; None: this machine, or nowhere yet
        self.is_replica = settings.replicas > 1
        self.kinds = KINDS_OF[settings.task]
        self.stats = stats
        self._lane = lane
        self.pool: UpstreamPool | None = None
        self.planned: PlannedSettings | None = None
        self.admission: Admission | None = None
        self.use: Metered | None = None  # where its model has limits; one for all its engines
        self.slots: Slots | None = None  # the engine's sequences, where keys are kept apart in them
        self.queue = WaitingLine(settings.queue_timeout_s)
        self.has_failed = False  # its last engine ended by itself
        self.is_drained = False  # it takes nothing new until a person loads it again
        self.stuck: str | None = None  # what its engine does not do any more, in words
        self.is_troubled = False  # its engine failed a request and has not served one since
        self.failed_s = 0.0  # when it last did
        self.is_pumping = False  # its queue is being let in; each that ends meanwhile need not begin it again
        self._live: set[Exchange] = set()
        self.n_express = 0  # requests that are with its engine by the express lane, and no exchange yet
        self.recall: Callable[[Endpoint], None] = _ignore  # have those as exchanges, and its connections back
        self.template_tokens = 0  # a bound of what its chat template adds, whatever a request says
        self.plain_template_tokens = 0  # the same without tools and without options of the template
        self.passes_plain = False  # the engine may get a plain body as it came
        self.is_llamacpp = True  # it counts tokens, tells progress and holds answers to a schema, as llama.cpp does
        self.n_counting = 0  # requests whose tokens are being counted, before they are admitted or queued
        self.mean_service_s = 1.0
        self.mean_load_s = 5.0
        self.last_used_s = time.monotonic()
        self.keep_alive_s: float | None = None  # instead of its ttl, until its engine goes; inf: while there is room
        self.held_back: str | None = None  # why nothing is let in for now
        self._holds: dict[str, str] = {}  # the same, by who holds it back
        self.opened_s = 0.0  # its engine became ready
        self.yields_to: str | None = None  # the model that gets its memory when what runs here is done
        self.no_room: LayaError | None = None  # why its load has to wait for other models
        self.load_error: LayaError | None = None  # why its last load failed, while others are chosen for that
        self.on_busy: Callable[[Endpoint], None] = _ignore  # it got its first request, or its last one has ended

    @property
    def model_id(self) -> str:
        return self.settings.id

    @property
    def is_here(self) -> bool:
        """Whether what its engine holds is this machine's."""
        return not self.is_remote and self.node is None

    @property
    def ttl_s(self) -> float | None:
        """How long it stays loaded without a request; None: for as long as there is room."""
        if self.keep_alive_s is None:
            return self.settings.ttl_s
        return None if self.keep_alive_s == float("inf") else self.keep_alive_s

    @property
    def is_busy(self) -> bool:
        return bool(self.is_running or self.queue or self.n_counting)

    @property
    def is_running(self) -> bool:
        return bool(self._live or self.n_express)

    @property
    def live(self) -> set[Exchange]:
        """What its engine has, for who looks at them."""
        if self.n_express:
            self.recall(self)
        return self._live

    @property
    def is_serving(self) -> bool:
        """Whether an engine that works is behind it."""
        return self.pool is not None and self.stuck is None

    @property
    def takes_new(self) -> bool:
        """Whether requests should be given to it where its model has others."""
        return self.is_serving and self.yields_to is None and not self.is_drained

    @property
    def may_leave(self) -> bool:
        """Whether its engine may be stopped for the sake of another model. Who waits here while it yields its turn
        does not keep it; who was let in, or is about to be, does."""
        is_left = self.yields_to is not None or not self.queue
        return self.pool is not None and is_left and not (self.is_running or self.n_counting or self.settings.pinned)

    def lingers(self, now_s: float) -> bool:
        """Whether it was used a moment ago, in its turn: who asks one thing after another is about to come back."""
        is_fresh = now_s - self.last_used_s < LINGER_S and now_s - self.opened_s < TURN_S
        return is_fresh and self.yields_to is None and self.last_used_s > self.opened_s

    def hold(self, by: str, why: str | None) -> None:
        """Let nothing in for this reason of `by`, until it is called again without one. What runs goes on."""
        self._holds.pop(by, None)
        if why is not None:
            self._holds[by] = why
        self.held_back = next(iter(self._holds.values()), None)

    @property
    def tokens_promised(self) -> int:
        """Tokens of the KV pool that live requests may come to hold."""
        return sum(exchange.reserved_tokens for exchange in self.live)

    def _origin(self) -> bytes:
        return origin_lines(self.model_id, f"remote:{self.name}" if self.is_remote else self.name)

    def apply(self, settings: ResolvedModel) -> None:
        """Other settings from now on; those that an engine is started with count from its next start.

        Where plain bodies pass as they are and may not any more, they go the full way until then.
        """
        was, self.settings = self.settings, settings
        if was.ttl_s != settings.ttl_s:
            self.keep_alive_s = None
        self.kinds, self.is_replica = KINDS_OF[settings.task], settings.replicas > 1
        self.is_remote = settings.engine == "remote"
        self.origin = self._origin()
        for_bodies = (was.defaults, was.overflow, was.enable_streaming)
        if for_bodies != (settings.defaults, settings.overflow, settings.enable_streaming):
            self.passes_plain = False
        if self._lane is not None and (not self.passes_plain or self.use is not None):
            self._lane.close(self.index)
        if not self.queue:
            self.queue = WaitingLine(settings.queue_timeout_s)

    def open(self, address: EngineAddress, plan: Plan, template_tokens: int) -> None:
        """An engine is ready: from now on sequences can be reserved."""
        self.close()
        self.has_failed = False
        self.stuck = None
        self.pool = UpstreamPool(address)
        planned, settings = plan.settings, self.settings
        self.planned = planned
        self.template_tokens = template_tokens
        measured = address.template_tokens
        self.plain_template_tokens = template_tokens if measured is None else min(measured, template_tokens)
        self.is_llamacpp = address.dialect == "llamacpp"
        self.passes_plain = address.cancels_whole and not planned.is_pool_short and not settings.defaults
        self.passes_plain &= not address.renames and not address.is_remote
        self.passes_plain &= settings.overflow == "refuse"
        is_chat, is_padded = EndpointKind.CHAT in self.kinds, planned.slot_tokens != planned.max_seq_len
        if self._lane is not None and self.passes_plain and is_chat and not is_padded and self.use is None:
            head = self.pool.head(ENGINE_STARTS[EndpointKind.CHAT])
            takes_streams = settings.enable_streaming and self.is_llamacpp  # the lane asks for progress
            template = self.plain_template_tokens
            self._lane.open(self.index, self.model_id, head, template, planned.max_seq_len, takes_streams)
        self.last_used_s = self.opened_s = time.monotonic()  # a ttl counts from here, whenever the last request was
        # one batch of the pool stays free: the engine fills cells a batch at a time
        pool_tokens = planned.kv_pool_tokens - planned.n_batch if planned.is_pool_short else None
        self.admission = Admission(planned.max_num_seqs, pool_tokens)

    def close(self) -> None:
        """The engine is gone; what still runs on it fails by its own broken connection."""
        self.recall(self)
        if self.pool is not None:
            self.pool.close()
        if self._lane is not None:
            self._lane.close(self.index)
        self.pool = self.planned = self.admission = self.slots = None

    async def drained(self) -> None:
        """Return when no request is in flight; whoever waits for that sets the deadline."""
        while self.is_running:
            await asyncio.sleep(DRAIN_LOOK_EVERY_S)

    # 3 admit
    def try_reserve(self, exchange: Exchange) -> bool:
        """Reserve sequences and tokens for the exchange. Raises InvalidRequest for what can never be held."""
        admission = self.admission
        if admission is None or self.held_back is not None:
            return False
        parsed = exchange.parsed
        assert parsed is not None
        if parsed.n_seqs == 1 and admission.kv_pool_tokens is None:  # always fits, if not now
            n_seqs, tokens = 1, promised_tokens(exchange, self)
        else:
            n_seqs, tokens = needs_of(exchange, self, admission)
        if not admission.try_reserve(n_seqs, tokens):
            return False
        exchange.admission, exchange.reserved_seqs, exchange.reserved_tokens = admission, n_seqs, tokens
        if parsed.n_seqs > parsed.n_choices:
            exchange.turns = exchange.turns or PromptTurns(exchange)
            exchange.turns.take(n_seqs // parsed.n_choices)
        elif parsed.takes_turns and self.is_llamacpp:
            TextTurns.take_next(exchange)
        self._add_live(exchange)
        return True

    def take_straight(self, exchange: Exchange, tokens: int) -> UpstreamConnection | None:
        """A kept connection with a sequence reserved, where both are there at once and nobody waits; else None."""
        admission, pool = self.admission, self.pool
        if self.queue or self.held_back is not None or admission is None or pool is None:
            return None
        if not admission.try_reserve(1, tokens):
            return None
        connection = pool.take()
        if connection is None:
            admission.release(1, tokens)
            return None
        exchange.admission, exchange.reserved_seqs, exchange.reserved_tokens = admission, 1, tokens
        self._add_live(exchange)
        return connection

    def _add_live(self, exchange: Exchange) -> None:
        self._live.add(exchange)
        if len(self._live) == 1 and not self.n_express:
            self.on_busy(self)

    # the express lane
    def reserve_express(self, tokens: int) -> bool:
        """Reserve a sequence for a request that is no exchange, where nobody waits."""
        admission = self.admission
        if self.queue or self.held_back is not None or admission is None or not admission.try_reserve(1, tokens):
            return False
        self.n_express += 1
        if self.n_express == 1 and not self._live:
            self.on_busy(self)
        return True

    def end_express(self, tokens: int, sent_s: float, answered_s: float) -> None:
        """Such a request was served; whoever ends several says so to `on_busy` after all of them."""
        assert self.admission is not None
        self.admission.release(1, tokens)
        self.n_express -= 1
        self.last_used_s = answered_s
        self.mean_service_s += _SMOOTHING * (answered_s - sent_s - self.mean_service_s)

    def make_live(self, exchange: Exchange, tokens: int) -> None:
        """Such a request is an exchange from now on."""
        exchange.endpoint = self
        exchange.admission, exchange.reserved_seqs, exchange.reserved_tokens = self.admission, 1, tokens
        self.n_express -= 1
        self._live.add(exchange)

    def release(self, exchange: Exchange) -> None:
        """Give back what the exchange reserved, to the admission it came from."""
        if exchange.admission is not None:
            exchange.admission.release(exchange.reserved_seqs, exchange.reserved_tokens)
            exchange.admission = None
        if exchange.slot is not None:
            exchange.slot.release(exchange)
        if exchange in self._live:
            self._live.remove(exchange)
            if not self._live and not self.n_express:
                self.on_busy(self)
        self.last_used_s = time.monotonic()
        if not exchange.sent_s:
            self.queue.discard(exchange)
        elif exchange.outcome == "served":
            self.mean_service_s += _SMOOTHING * (self.last_used_s - exchange.sent_s - self.mean_service_s)

    # the queue
    def enqueue(self, exchange: Exchange, *, first: bool = False) -> None:
        """Wait in line; `first`: it was its turn before. Raises QueueFull, and what `try_reserve` raises."""
        if first:
            self.queue.put_back(exchange)
            return
        if self.admission is not None:
            needs_of(exchange, self, self.admission)  # what can never run need not wait
        self.check_queue()
        self.rejoin(exchange)

    def rejoin(self, exchange: Exchange) -> None:
        """Wait in line; also for a later turn of what was let in before, so that `queue_size` does not ask about it."""
        limit_s = self.settings.queue_timeout_s
        if self.pool is None:
            limit_s += self.settings.load_timeout_s
        exchange.deadline_s = time.monotonic() + limit_s
        self.queue.add(exchange, priority_for(exchange))

    def check_queue(self, *, is_counted: bool = True) -> None:
        """Raise QueueFull, or ModelLoading, where no more may wait. One always waits for an engine to come.

        is_counted: the request is about to wait; else its tokens are to be counted, and it may run at once then.
        """
        n_free = 0
        if self.admission is not None and not self.queue and self.held_back is None:
            n_free = self.admission.free_seqs
        n_waiting, n_counting = len(self.queue) + is_counted, self.n_counting + (not is_counted)
        n_waiting += max(0, n_counting - n_free)  # with it
        allowed = self.settings.queue_size if self.pool is not None else max(self.settings.queue_size, 1)
        if n_waiting > allowed:
            error = ModelLoading if self.pool is None else QueueFull
            wait = f"{n_waiting - 1} requests wait for" if n_waiting > 1 else "No request may wait for"
            already = " already" if n_waiting > 1 else ", which is busy"
            raise error(f"{wait} '{self.model_id}'{already} (queue_size).", self.expected_wait_s())

    def expected_wait_s(self) -> float:
        """When a place will be free for one more, by what requests took lately."""
        lanes = self.planned.max_num_seqs if self.planned is not None else 1
        loading_s = self.mean_load_s if self.pool is None else 0.0
        return loading_s + self.mean_service_s * (len(self.queue) + 1) / lanes

    def expire(self, now_s: float) -> None:
        """Refuse what has waited past its deadline. While no load has begun, the time it may take does not count."""
        longest_s = self.settings.queue_timeout_s if self.no_room is not None else float("inf")
        for exchange in list(self.queue):
            if min(exchange.deadline_s, exchange.read_s + longest_s) > now_s:
                continue
            if not self.queue.discard(exchange):
                continue  # let in by the end of the one before it
            waited_s = now_s - exchange.read_s  # of a list of prompts: since its last ones were answered
            exchange.fail(
                self.no_room
                or QueueTimeout(
                    f"Waited {waited_s:.0f} s for '{self.model_id}' and no place became free (queue_timeout_s)"
                    + (f"; new requests are held back: {self.held_back}." if self.held_back else "."),
                    self.expected_wait_s(),
                )
            )

    def fail_waiting(self, error: LayaError) -> None:
        """The engine these requests wait for will not come."""
        for exchange in self.queue.take_all():
            exchange.fail(error)

    def fail_all(self, error: LayaError) -> None:
        """Nobody is served here any more. One that ends may bring up the next one of its connection."""
        while self.queue or self.live:
            self.fail_waiting(error)
            for exchange in list(self.live):
                exchange.fail(error)


def _ignore(endpoint: Endpoint) -> None:
    """Nobody minds."""
