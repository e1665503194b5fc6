"""Owns: a completion's list of prompts: as many go to the engine at once as have a place, the others in later turns.

Between two turns its places are free and it waits in line like everyone, so a long list shuts nobody out. For the
client, the books and the key's limits it stays one request. What one turn takes whole goes the usual way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from laya.gateway.assemble import UsageSum
from laya.gateway.relay import AssembledAnswer, Relay, StreamRelay
from laya.gateway.sse import AnswerReader, StreamFilter, event_bytes

if TYPE_CHECKING:
    from laya.gateway.exchange import Exchange

_PROMPTS = msgspec.json.Decoder(list[msgspec.Raw])


class PromptTurns:
    """The prompts of one exchange: `n_answered`, then `n_now` that are let in, then those that wait."""

    field = "prompt"  # of the body

    def __init__(self, exchange: Exchange) -> None:
        parsed = exchange.parsed
        assert parsed is not None
        self.exchange = exchange
        self.n_choices = parsed.n_choices
        self.n_prompts = parsed.n_seqs // parsed.n_choices
        self.n_now = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """Nothing was answered: another engine gets it from the first prompt on."""
        self.n_answered = 0
        self._first_s: tuple[float, float] | None = None  # read_s and sent_s of the first turn
        self._prompts: list[msgspec.Raw] | None = None
        self._relay: InTurns | None = None
        self._meta: dict[str, Any] = {}

    @property
    def n_left(self) -> int:
        return self.n_prompts - self.n_answered

    @property
    def has_more(self) -> bool:
        """Whether prompts wait behind those that are let in."""
        return self.n_left > self.n_now

    @property
    def is_split(self) -> bool:
        return self.n_now < self.n_prompts

    @property
    def is_rewritten(self) -> bool:
        """Whether the engine's answer is not the client's."""
        return self.is_split

    def take(self, n_prompts: int) -> None:
        """So many are let in now."""
        self.n_now, self.exchange.upstream_body = n_prompts, b""

    def prompts(self) -> list[msgspec.Raw]:
        if self._prompts is None:
            assert self.exchange.parsed is not None
            self._prompts = _PROMPTS.decode(self.exchange.parsed.fields[self.field])
        return self._prompts

    def prompts_now(self) -> list[msgspec.Raw]:
        return self.prompts()[self.n_answered : self.n_answered + self.n_now]

    def relay(self, *, streams: bool, own_name: str | None) -> Relay:
        """The way of the answers: one for all turns."""
        if self._relay is None:
            make = StreamInTurns if streams else AnswerInTurns
            self._relay = make(self.exchange, self, own_name)
        self._relay.usage.n_prompts = self.n_now
        return self._relay

    def let_go(self) -> None:
        """The engine has the last of them."""
        self._prompts = None

    def end_turn(self) -> None:
        """Those that were let in are answered, and it waits in line for the next."""
        exchange = self.exchange
        assert exchange.endpoint is not None
        self._first_s = self._first_s or (exchange.read_s, exchange.sent_s)
        self.n_answered += self.n_now
        self.n_now = 0
        exchange.dispatcher.sending.next_turn(exchange, exchange.endpoint)

    def in_its_place(self, event: dict[str, Any]) -> dict[str, Any]:
        """An event of a turn as one of the whole answer: with its index among all, under the first turn's id."""
        self._meta = self._meta or {name: event[name] for name in ("id", "created", "model") if name in event}
        for choice in event.get("choices") or ():
            choice["index"] = int(choice.get("index") or 0) + self.n_answered * self.n_choices
        return event | self._meta

    def restore(self) -> None:
        """It ends: its times are those of one request, its tokens those of all its turns."""
        exchange = self.exchange
        if self._first_s is not None:
            if exchange.endpoint is not None and not exchange.sent_s:
                exchange.endpoint.queue.discard(exchange)
            exchange.read_s, exchange.sent_s = self._first_s
        if self._relay is not None:
            usage = self._relay.usage
            exchange.prompt_tokens = usage.as_dict()["prompt_tokens"] or exchange.prompt_tokens
            exchange.n_tokens_out = usage.completion_tokens or exchange.n_tokens_out


class TurnsUsage(UsageSum):
    """Usage of all turns, each summed as if it were all."""

    __slots__ = ("_cached_before", "_prompt_before")

    def __init__(self, n_choices: int) -> None:
        super().__init__(n_choices=n_choices)
        self._prompt_before = self._cached_before = 0

    def end_turn(self) -> None:
        so_far = self.as_dict()
        self._prompt_before, self._cached_before = so_far["prompt_tokens"], _cached(so_far)
        self.prompt_tokens = self.cached_tokens = self.n_events = 0

    def as_dict(self) -> dict[str, Any]:
        now = super().as_dict()
        prompt_tokens = self._prompt_before + now["prompt_tokens"]
        total = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + self.completion_tokens}
        return now | total | {"prompt_tokens_details": {"cached_tokens": self._cached_before + _cached(now)}}


def _cached(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


class InTurns(Relay):
    """What both ways share: an engine's answer that is whole may be but one turn's."""

    turns: PromptTurns
    usage: TurnsUsage

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        if status == 200 and self.turns.has_more:
            self._status = status  # the body is for the turns to come
            return
        self.turns.let_go()
        super().on_head(status, headers)

    def on_good_end(self) -> None:
        if self.exchange.outcome is None and self.is_whole:
            if self.turns.has_more:
                self.usage.end_turn()
                self.begin_turn()
                self.turns.end_turn()
                return
            self.turns.restore()
        super().on_good_end()

    def begin_turn(self) -> None:
        raise AssertionError("each way says what it forgets")


class StreamInTurns(InTurns, StreamRelay):
    """Stream in, stream out."""

    def __init__(self, exchange: Exchange, turns: PromptTurns, own_name: str | None) -> None:
        self.turns, self.usage = turns, TurnsUsage(turns.n_choices)
        StreamRelay.__init__(self, exchange, _TurnsFilter(turns, self.usage, own_name))

    def begin_turn(self) -> None:
        self._filter.done = False


class AnswerInTurns(InTurns, AssembledAnswer):
    """Stream in, whole answer out."""

    def __init__(self, exchange: Exchange, turns: PromptTurns, own_name: str | None) -> None:
        self.turns, self.usage = turns, TurnsUsage(turns.n_choices)
        AssembledAnswer.__init__(self, exchange, own_name)
        self._reader = _TurnsReader(turns, self.usage)

    def begin_turn(self) -> None:
        self._reader.done = False


class _TurnsFilter(StreamFilter):
    """Every event is rewritten, as it bears the index that it has in its turn."""

    passes_events = False

    def __init__(self, turns: PromptTurns, usage: UsageSum, own_name: str | None) -> None:
        parsed = turns.exchange.parsed
        assert parsed is not None
        n_top = parsed.n_top_logprobs if own_name is None else None
        super().__init__(usage, wants_usage=parsed.wants_usage_event, n_top_logprobs=n_top, own_name=own_name)
        self._turns = turns

    def feed(self, data: bytes) -> bytes:
        out = []
        for raw in self._cut(data).split(b"\n\n"):
            event = self._take(raw)
            if self.error is not None:
                break
            if event is not None:
                out.append(self._said(event))
        return b"".join(out)

    def _said(self, event: dict[str, Any]) -> bytes:
        event = self._turns.in_its_place(event)
        if self._n_top_logprobs is not None:
            self._rewrite_logprobs(event, self._n_top_logprobs)
        if self._own_name is not None:
            event["model"] = self._own_name
        return event_bytes(event)

    def end(self) -> bytes:
        if self.usage_event is not None:
            self.usage_event = self._turns.in_its_place(self.usage_event | {"choices": []})
        return super().end()


class _TurnsReader(AnswerReader):
    def __init__(self, turns: PromptTurns, usage: UsageSum) -> None:
        super().__init__(usage)
        self._turns = turns

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        return [self._turns.in_its_place(event) for event in super().feed(data)]
