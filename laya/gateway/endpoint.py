"""Owns: one place that can serve a model: its queue, its reservations, its connections, what it is doing right now.

An endpoint exists as soon as its model is known; `open` and `close` follow the engine behind it. Knows neither how a
request is chosen for it nor how an engine is started.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from laya.config import ResolvedModel
from laya.errors import InvalidRequest, LayaError, ModelLoading, QueueFull, QueueTimeout
from laya.gateway.plain import PlainLane
from laya.gateway.pool import UpstreamPool
from laya.gateway.upstream import UpstreamConnection
from laya.memory import Admission
from laya.metrics import ModelStats
from laya.types import EndpointKind, EngineAddress, Plan, PlannedSettings, Task

if TYPE_CHECKING:
    from laya.gateway.exchange import Exchange
    from laya.gateway.slots import Slots

KINDS_OF: dict[Task, frozenset[EndpointKind]] = {
    "chat": frozenset({EndpointKind.CHAT, EndpointKind.COMPLETION}),
    "embed": frozenset({EndpointKind.EMBEDDING}),
    "rerank": frozenset({EndpointKind.RERANK}),
}
ENGINE_STARTS = {
    EndpointKind.CHAT: b"POST /v1/chat/completions",
    EndpointKind.COMPLETION: b"POST /v1/completions",
    EndpointKind.EMBEDDING: b"POST /v1/embeddings",
    EndpointKind.RERANK: b"POST /v1/rerank",
}
DRAIN_LOOK_EVERY_S = 0.05
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
        self.is_replica = settings.replicas > 1
        self.kinds = KINDS_OF[settings.task]
        self.stats = stats
        self._lane = lane
        self.pool: UpstreamPool | None = None
        self.planned: PlannedSettings | None = None
        self.admission: Admission | None = None
        self.slots: Slots | None = None  # the engine's sequences, where keys are kept apart in them
        self.queue: deque[Exchange] = deque()
        self.has_failed = False  # its last engine ended by itself
        self.stuck: str | None = None  # what its engine does not do any more, in words
        self.is_troubled = False  # its engine failed a request and has not served one since
        self.failed_s = 0.0  # when it last did
        self.is_pumping = False  # its queue is being let in; each that ends meanwhile need not begin it again
        self.live: set[Exchange] = set()
        self.template_bytes = 0
        self.passes_plain = False  # the engine may get a plain body as it came
        self.n_counting = 0  # requests whose tokens are being counted, before they are admitted or queued
        self.mean_service_s = 1.0
        self.mean_load_s = 5.0
        self.last_used_s = time.monotonic()
        self.held_back: str | None = None  # why nothing is let in for now
        self.no_room: LayaError | None = None  # why its load has to wait for other models
        self.on_busy: Callable[[Endpoint], None] = _ignore  # it got its first request, or its last one has ended

    @property
    def model_id(self) -> str:
        return self.settings.id

    @property
    def is_busy(self) -> bool:
        return bool(self.live or self.queue)

    @property
    def is_serving(self) -> bool:
        """Whether an engine that works is behind it."""
        return self.pool is not None and self.stuck is None

    @property
    def may_leave(self) -> bool:
        """Whether its engine may be stopped for the sake of another model."""
        return self.pool is not None and not self.is_busy and not self.settings.pinned

    @property
    def tokens_promised(self) -> int:
        """Tokens of the KV pool that live requests may come to hold."""
        return sum(exchange.reserved_tokens for exchange in self.live)

    def open(self, address: EngineAddress, plan: Plan, template_bytes: int) -> None:
        """An engine is ready: from now on sequences can be reserved."""
        self.close()
        self.has_failed = False
        self.stuck = None
        self.pool = UpstreamPool(address)
        self.planned = plan.settings
        self.template_bytes = template_bytes
        planned, settings = plan.settings, self.settings
        self.passes_plain = address.cancels_whole and not planned.kv_unified and not settings.defaults
        self.passes_plain &= settings.overflow == "refuse"
        is_chat, is_padded = EndpointKind.CHAT in self.kinds, planned.slot_tokens != planned.max_seq_len
        if self._lane is not None and self.passes_plain and is_chat and not is_padded:
            head = self.pool.head(ENGINE_STARTS[EndpointKind.CHAT])
            takes_streams = settings.enable_streaming
            self._lane.open(self.index, self.model_id, head, template_bytes, planned.max_seq_len, takes_streams)
        self.last_used_s = time.monotonic()  # a ttl counts from here, however long ago the last request was
        # one batch of the pool stays free: the engine fills cells a batch at a time
        pool_tokens = plan.settings.kv_pool_tokens - plan.settings.n_batch if plan.settings.kv_unified else None
        self.admission = Admission(plan.settings.max_num_seqs, pool_tokens)

    def close(self) -> None:
        """The engine is gone; what still runs on it fails by its own broken connection."""
        if self.pool is not None:
            self.pool.close()
        if self._lane is not None:
            self._lane.close(self.index)
        self.pool = self.planned = self.admission = self.slots = None

    async def drained(self) -> None:
        """Return when no request is in flight; whoever waits for that sets the deadline."""
        while self.live:
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
            n_seqs, tokens = 1, self.promised_tokens(exchange)
        else:
            n_seqs, tokens = self._needs(exchange, admission)
        if not admission.try_reserve(n_seqs, tokens):
            return False
        exchange.admission, exchange.reserved_seqs, exchange.reserved_tokens = admission, n_seqs, tokens
        self.live.add(exchange)
        if len(self.live) == 1:
            self.on_busy(self)
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
        self.live.add(exchange)
        if len(self.live) == 1:
            self.on_busy(self)
        return connection

    def _needs(self, exchange: Exchange, admission: Admission) -> tuple[int, int]:
        """Sequences, and the tokens of all of them. Raises InvalidRequest where that is more than there is."""
        parsed = exchange.parsed
        assert parsed is not None
        n_seqs = parsed.n_seqs
        if parsed.n_choices <= admission.max_num_seqs:  # the choices of a prompt run together, prompts take turns
            n_seqs = min(n_seqs, admission.max_num_seqs)
        tokens = self.promised_tokens(exchange) * n_seqs
        if not admission.can_ever_fit(n_seqs, tokens):
            raise self._never(n_seqs, tokens)
        return n_seqs, tokens

    def promised_tokens(self, exchange: Exchange) -> int:
        """Tokens one sequence of this request may come to hold: its prompt's bound and its ceiling."""
        parsed, planned = exchange.parsed, self.planned
        assert parsed is not None and planned is not None
        prompt_tokens = exchange.prompt_tokens or parsed.prompt_bound_tokens + self.template_bytes
        if parsed.max_tokens is None and not planned.kv_unified:
            return planned.max_seq_len
        return min(prompt_tokens + (parsed.max_tokens or self.settings.default_max_tokens), planned.max_seq_len)

    def _never(self, n_seqs: int, tokens: int) -> LayaError:
        planned = self.planned
        assert planned is not None
        if n_seqs > planned.max_num_seqs:
            return InvalidRequest(
                f"This request asks for {n_seqs} sequences at once; '{self.model_id}' runs {planned.max_num_seqs} "
                f"(max_num_seqs).",
                param="n",
            )
        return InvalidRequest(
            f"This request may come to hold {tokens} tokens; the pool of '{self.model_id}' holds "
            f"{planned.kv_pool_tokens - planned.n_batch} (kv_pool_tokens). Lower max_tokens or shorten the prompt.",
            param="max_tokens",
        )

    def release(self, exchange: Exchange) -> None:
        """Give back what the exchange reserved, to the admission it came from."""
        if exchange.admission is not None:
            exchange.admission.release(exchange.reserved_seqs, exchange.reserved_tokens)
            exchange.admission = None
        if exchange.slot is not None:
            exchange.slot.release(exchange)
        if exchange in self.live:
            self.live.remove(exchange)
            if not self.live:
                self.on_busy(self)
        self.last_used_s = time.monotonic()
        if not exchange.sent_s:
            self.drop_ended()
        elif exchange.outcome == "served":
            self.mean_service_s += _SMOOTHING * (self.last_used_s - exchange.sent_s - self.mean_service_s)

    # the queue
    def enqueue(self, exchange: Exchange, *, first: bool = False) -> None:
        """Wait in line; `first`: it was the first in line before. Raises QueueFull, and what `try_reserve` raises."""
        if first:
            self.queue.appendleft(exchange)
            return
        if self.admission is not None:
            self._needs(exchange, self.admission)  # what can never run need not wait
        self.check_queue()
        limit_s = self.settings.queue_timeout_s
        if self.pool is None:
            limit_s += self.settings.load_timeout_s
        exchange.deadline_s = time.monotonic() + limit_s
        self.queue.append(exchange)

    def check_queue(self) -> None:
        """Raise QueueFull, or ModelLoading, where no more may wait."""
        self.drop_ended()
        if len(self.queue) + self.n_counting >= self.settings.queue_size:
            error = ModelLoading if self.pool is None else QueueFull
            raise error(
                f"{len(self.queue) + self.n_counting} requests wait for '{self.model_id}' already (queue_size).",
                self.expected_wait_s(),
            )

    def drop_ended(self) -> None:
        """Forget waiting requests whose clients have left."""
        if any(exchange.outcome is not None for exchange in self.queue):
            self.queue = deque(exchange for exchange in self.queue if exchange.outcome is None)

    def is_waited_for(self) -> bool:
        """Whether the engine would have something to do."""
        self.drop_ended()
        return bool(self.queue)

    def expected_wait_s(self) -> float:
        """When a place will be free for one more, by what requests took lately."""
        lanes = self.planned.max_num_seqs if self.planned is not None else 1
        loading_s = self.mean_load_s if self.pool is None else 0.0
        return loading_s + self.mean_service_s * (len(self.queue) + 1) / lanes

    def expire(self, now_s: float) -> None:
        """Refuse what has waited past its deadline. While no load has begun, the time it may take does not count."""
        longest_s = self.settings.queue_timeout_s if self.no_room is not None else float("inf")
        for exchange in list(self.queue):
            if min(exchange.deadline_s, exchange.arrived_s + longest_s) > now_s:
                continue
            if exchange not in self.queue:
                continue  # let in by the end of the one before it
            self.queue.remove(exchange)
            waited_s = now_s - exchange.arrived_s
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
        waiting, self.queue = self.queue, deque()
        for exchange in waiting:
            exchange.fail(error)

    def fail_all(self, error: LayaError) -> None:
        """Nobody is served here any more. One that ends may bring up the next one of its connection."""
        while self.queue or self.live:
            self.fail_waiting(error)
            for exchange in list(self.live):
                exchange.fail(error)


def _ignore(endpoint: Endpoint) -> None:
    """Nobody minds."""
