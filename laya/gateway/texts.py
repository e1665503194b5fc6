"""Owns: a list of texts to embed or to rank, of which an engine gets a few at a time.

llama.cpp reads a list whole before it turns to whoever comes next, which may take an hour. So it goes in turns, as a
completion's prompts do (`prompts.py`), each about as long as one request of somebody else; its answer is put together
here. It also passes over `dimensions`, so embeddings are cut here. Other engines have their own order for what they
hold, and get lists as they come.
"""

from __future__ import annotations

import base64
import math
import time
from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from laya.errors import InvalidRequest, LayaError
from laya.gateway.assemble import encode
from laya.gateway.limits import bodies_full
from laya.gateway.prompts import InTurns, PromptTurns, TurnsUsage
from laya.gateway.relay import Relay
from laya.types import KIB, EndpointKind

if TYPE_CHECKING:
    from laya.gateway.exchange import Exchange

TURN_BYTES = 4 * KIB  # about 1000 tokens
LEAST_BYTES = 64  # of a text: a short one takes an engine a step all the same
_Fields = dict[str, msgspec.Raw]


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0


_ANSWER = msgspec.json.Decoder(_Fields)
_ITEMS = msgspec.json.Decoder(list[_Fields])
_USAGE = msgspec.json.Decoder(_Usage)
_INDEX = msgspec.json.Decoder(int)


class TextTurns(PromptTurns):
    """The texts of one exchange."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange)
        assert exchange.parsed is not None
        self.n_prompts = exchange.parsed.n_texts
        self.field = "documents" if exchange.kind == EndpointKind.RERANK else "input"
        self.dimensions: int | None = getattr(exchange.parsed.head, "dimensions", None)

    @property
    def is_rewritten(self) -> bool:
        return self.is_split or self.dimensions is not None

    def prompts(self) -> list[msgspec.Raw]:
        if self.n_prompts > 1:
            return super().prompts()
        assert self.exchange.parsed is not None
        return [self.exchange.parsed.fields[self.field]]  # however it is written

    @classmethod
    def take_next(cls, exchange: Exchange) -> None:
        """As many as are about `TURN_BYTES` together, one at least, are let in now."""
        turns = exchange.turns = exchange.turns or cls(exchange)
        n_bytes, n_texts = 0, 0
        for text in turns.prompts()[turns.n_answered :]:
            n_bytes += max(len(bytes(text)), LEAST_BYTES)
            if n_texts and n_bytes > TURN_BYTES:
                break
            n_texts += 1
        turns.take(n_texts)

    def relay(self, *, streams: bool, own_name: str | None) -> Relay:
        self._relay = self._relay or TextsInTurns(self.exchange, self)
        return self._relay


class TextsInTurns(InTurns):
    """Whole answers in, one whole answer out."""

    turns: TextTurns

    def __init__(self, exchange: Exchange, turns: TextTurns) -> None:
        super().__init__(exchange)
        self.turns = turns
        self.usage = TurnsUsage(1)
        self._came: list[bytes] = []
        self._name = "results" if turns.field == "documents" else "data"
        self._items: list[_Fields] = []

    def on_good_data(self, data: bytes) -> None:
        self._came.append(data)

    def on_good_end(self) -> None:
        exchange = self.exchange
        if exchange.outcome is not None:
            return
        try:
            said = b"".join(self._came)
            answer = _ANSWER.decode(said)
            self._add(answer)
            if self.turns.has_more:
                self._hold(len(said))
        except LayaError as error:
            exchange.fail(error)
            return
        except (msgspec.MsgspecError, ValueError, KeyError):
            exchange.fail(self._engine_said({"message": f"what it said has no {self._name}"}))
            return
        self._came = []
        if self.turns.has_more:
            self.turns.end_turn()
            return
        self.turns.restore()
        exchange.first_token_s = time.monotonic()
        exchange.respond(200, encode(self._whole(answer)), "served")

    def _add(self, answer: _Fields) -> None:
        for item in _ITEMS.decode(answer[self._name]):
            if self.turns.dimensions is not None:
                item["embedding"] = _cut(item["embedding"], self.turns.dimensions)
            item["index"] = msgspec.Raw(b"%d" % (_INDEX.decode(item["index"]) + self.turns.n_answered))
            self._items.append(item)
        if "usage" in answer:
            self.usage.prompt_tokens += _USAGE.decode(answer["usage"]).prompt_tokens

    def _hold(self, n_bytes: int) -> None:
        """What waits for the turns to come is held as the request's body is, with the same limit for all together."""
        bodies = self.exchange.protocol.limits.bodies
        if not bodies.try_take(n_bytes):
            raise bodies_full(bodies.limit_bytes)
        self.exchange.held_bytes += n_bytes

    def _whole(self, last: _Fields) -> dict[str, Any]:
        """The last turn's answer with the items of all."""
        n_tokens, items = self.usage.prompt_tokens, self._items
        if self._name == "results":
            items.sort(key=lambda item: -msgspec.json.decode(item["relevance_score"]))
            parsed = self.exchange.parsed
            assert parsed is not None
            items = items[: getattr(parsed.head, "top_n", None)]
        return last | {"usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens}, self._name: items}


def _cut(raw: msgspec.Raw, dimensions: int) -> msgspec.Raw:
    """The first numbers of an embedding, as a vector of length 1, written as it came. Raises InvalidRequest."""
    said = msgspec.json.decode(raw)
    vector = array("f", base64.b64decode(said)) if isinstance(said, str) else array("f", said)
    if dimensions > len(vector):
        text = f"'dimensions' is {dimensions}: embeddings of this model have {len(vector)}."
        raise InvalidRequest(text, param="dimensions")
    if dimensions == len(vector):
        return raw
    vector = vector[:dimensions]
    length = math.sqrt(sum(each * each for each in vector)) or 1.0
    cut = array("f", [each / length for each in vector])
    return msgspec.Raw(msgspec.json.encode(base64.b64encode(cut).decode() if isinstance(said, str) else cut.tolist()))
