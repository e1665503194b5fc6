"""Owns: the route table in plain Python: what serves where no compiler was, and the oracle of the native one's test.

Same API and same answers as `laya._core.RouteTable` (see csrc/route_table.hpp for why it decides so). Where the native
table is lock-free, this one takes a lock. Knows no engine, no socket, no clock.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from laya.routing.affinity_twin import NO_HOME, AffinityTable
from laya.routing.choice_twin import (
    AUTO,
    BAD_FEATURE,
    NO_ENDPOINT,
    POLICIES,
    PREFIX,
    SESSION,
    UNKNOWN_MODEL,
    Asked,
    choose,
)
from laya.routing.endpoint_twin import MAX_SEQS, MAX_TOKENS, TRIP_AFTER, Endpoint, EndpointFields
from laya.routing.feature_twin import (
    FEATURE_VERSION,
    hash_bytes,
    mix64,
    name_bytes,
    require_range,
    unpack_blocks,
    unpack_feature,
)

_MOST_ENDPOINTS = 1 << 16
_MOST_SEQS_ASKED = 65535


class _Model(NamedTuple):
    name: bytes
    affinity_key: int
    endpoints: tuple[int, ...]
    policy: int


class RouteTable:
    """Model name -> endpoints, what each endpoint has in flight, and the choice between them.

    max_endpoints: endpoint indexes are 0 to max_endpoints - 1, at most 65536 of them. session_bytes: memory of the
    session table, 8 bytes a session; prefix_bytes: of the table of prompts, 8 bytes a prompt. window_tokens: how
    many more tokens than the least loaded endpoint a session's endpoint may hold reserved and keep the session, where
    it has no kv_pool_tokens; with them it is half of those.
    """

    def __init__(
        self,
        *,
        max_endpoints: int = 1024,
        session_bytes: int = 1 << 20,
        prefix_bytes: int = 1 << 20,
        window_tokens: int = 8192,
    ) -> None:
        require_range("max_endpoints", max_endpoints, 1, _MOST_ENDPOINTS)
        require_range("session_bytes", session_bytes, 0, (1 << 63) - 1)
        require_range("prefix_bytes", prefix_bytes, 0, (1 << 63) - 1)
        self._default_window_tokens = require_range("window_tokens", window_tokens, 0, MAX_TOKENS)
        self._endpoints = [
            Endpoint(window_tokens=window_tokens, seed=mix64(endpoint + 1)) for endpoint in range(max_endpoints)
        ]
        self._sessions = AffinityTable(session_bytes)
        self._prefixes = AffinityTable(prefix_bytes)
        self._models: dict[int, _Model] = {}
        self._n_draws = 0
        self._lock = threading.Lock()

    @property
    def max_endpoints(self) -> int:
        return len(self._endpoints)

    @property
    def session_capacity(self) -> int:
        """How many sessions are remembered at most."""
        return self._sessions.capacity

    @property
    def prefix_capacity(self) -> int:
        """How many prompts are remembered at most."""
        return self._prefixes.capacity

    @property
    def n_draws(self) -> int:
        """How often a choice was drawn at random; the next draw is made from it."""
        return self._n_draws

    def publish(self, models: Iterable[tuple[Iterable[str | bytes], Iterable[int], int]]) -> None:
        """Replace the set of models by (names, endpoints, policy); the first name is the model's own, others are
        aliases; the policy is its place in `POLICIES`.

        Raises ValueError, with the old set still in force, when a model has no name, a name appears twice, two names
        have one hash, or an endpoint or a policy is out of range.
        """
        published: dict[int, _Model] = {}
        for names, endpoints, policy in models:
            require_range("policy", policy, 0, len(POLICIES) - 1)
            encoded = [name_bytes(name) for name in names]
            if not encoded:
                raise ValueError("a model needs a name")
            chosen_from = tuple(sorted(set(endpoints)))
            for endpoint in chosen_from:
                require_range(f"an endpoint of model {encoded[0]!r}", endpoint, 0, self.max_endpoints - 1)
            for name in encoded:
                _add_name(published, name, _Model(name, hash_bytes(encoded[0]), chosen_from, policy))
        self._models = published

    def route(
        self,
        model: str | bytes,
        session: str | bytes | None,
        kind: int,
        flags: int,
        prefix_hash: int,
        tokens: int,
        n_seqs: int,
        prefix_blocks: bytes = b"",
    ) -> int:
        """Endpoint index, UNKNOWN_MODEL or NO_ENDPOINT. On success the endpoint carries n_seqs sequences and tokens
        (of all of them together) until `settle`. Another name with a known name's hash is an unknown model. Without
        prefix_blocks, prefix_hash (0 = none) stands for the whole prompt.

        Raises ValueError when a number does not fit its field, TypeError when a name is neither str nor bytes.
        """
        name = name_bytes(model)
        session_id = name_bytes(session) if session is not None else b""
        require_range("kind", kind, 0, 0xFF)
        require_range("flags", flags, 0, 0xFFFF)
        require_range("tokens", tokens, 0, 0xFFFF_FFFF)
        require_range("n_seqs", n_seqs, 1, _MOST_SEQS_ASKED)
        blocks = unpack_blocks(prefix_blocks) or ((prefix_hash,) if prefix_hash else ())
        found = self._models.get(hash_bytes(name))
        if found is None or found.name != name:
            return UNKNOWN_MODEL
        return self._place(found, hash_bytes(session_id) if session_id else 0, blocks, tokens, n_seqs)

    def choose(self, feature: bytes, n_seqs: int = 1) -> int:
        """Like `route`, from a packed feature whose model hash is trusted; BAD_FEATURE for another version's feature.

        Raises ValueError unless the feature is 32 bytes.
        """
        version, _kind, _flags, tokens, model_hash, session_hash, prefix_hash = unpack_feature(feature)
        require_range("n_seqs", n_seqs, 1, _MOST_SEQS_ASKED)
        if version != FEATURE_VERSION:
            return BAD_FEATURE
        found = self._models.get(model_hash)
        if found is None:
            return UNKNOWN_MODEL
        return self._place(found, session_hash, (prefix_hash,) if prefix_hash else (), tokens, n_seqs)

    def settle(self, endpoint: int, n_seqs: int, tokens: int) -> None:
        """Take back what a choice added; counters stop at zero. Raises IndexError for an endpoint out of range."""
        require_range("n_seqs", n_seqs, 0, _MOST_SEQS_ASKED)
        require_range("tokens", tokens, 0, MAX_TOKENS)
        with self._lock:
            self._at(endpoint).settle(n_seqs, tokens)

    def reset(self, endpoint: int) -> None:
        """As a fresh one: not ready, no limits, weight 1, a closed breaker, no history. Its load stays."""
        at = self._at(endpoint)
        fresh = Endpoint(window_tokens=self._default_window_tokens, seed=mix64(endpoint + 1))
        self._endpoints[endpoint] = dataclasses.replace(fresh, n_seqs=at.n_seqs, tokens=at.tokens)

    def set_eligible(self, endpoint: int, eligible: bool) -> None:
        """Whether the endpoint may be chosen, as far as its breaker lets it; a fresh one may not."""
        self._at(endpoint).ready = eligible

    def set_capacity(self, endpoint: int, max_num_seqs: int, kv_pool_tokens: int) -> None:
        """Sequences and KV tokens that the endpoint holds at once; 0 = no limit."""
        at = self._at(endpoint)
        at.max_seqs = require_range("max_num_seqs", max_num_seqs, 0, _MOST_SEQS_ASKED) or MAX_SEQS
        at.max_tokens = require_range("kv_pool_tokens", kv_pool_tokens, 0, MAX_TOKENS) or MAX_TOKENS
        at.window_tokens = kv_pool_tokens // 2 if kv_pool_tokens else self._default_window_tokens

    def set_weight(self, endpoint: int, weight: int) -> None:
        """Its share under the policy `weighted`, 0 to 65535; 1 unless said."""
        self._at(endpoint).weight = require_range("weight", weight, 0, 0xFFFF)

    def set_seed(self, endpoint: int, seed: int) -> None:
        """What its rendezvous scores are made from: the same after a restart keeps the same sessions."""
        self._at(endpoint).seed = seed

    def served(self, endpoint: int) -> None:
        """It answered: errors in a row end, and a half-open breaker closes. An open one waits for its trial."""
        with self._lock:
            self._at(endpoint).served()

    def failed(self, endpoint: int, trip_after: int = TRIP_AFTER) -> bool:
        """It failed a request; True when that opened its breaker."""
        require_range("trip_after", trip_after, 1, 0xFFFF_FFFF)
        with self._lock:
            return self._at(endpoint).failed(trip_after)

    def dropped(self, endpoint: int) -> None:
        """A request ended without a verdict, its client gone: a trial is given back."""
        with self._lock:
            self._at(endpoint).dropped()

    def half_open(self, endpoint: int) -> bool:
        """Let one trial through an open breaker, or one whose trial never came back. False when it was neither."""
        with self._lock:
            return self._at(endpoint).half_open()

    def first_token(self, endpoint: int, ttft_us: int) -> None:
        """A time to first token in µs; the average moves by an eighth of the difference."""
        require_range("ttft_us", ttft_us, 0, 0xFFFF_FFFF)
        with self._lock:
            self._at(endpoint).first_token(ttft_us)

    def inspect(self, endpoint: int) -> EndpointFields:
        """The fields of `endpoint_twin.Endpoint`, in its order."""
        return self._at(endpoint).fields()

    def load(self, endpoint: int) -> tuple[int, int]:
        """(sequences in flight, KV tokens reserved)."""
        at = self._at(endpoint)
        return at.n_seqs, at.tokens

    def is_eligible(self, endpoint: int) -> bool:
        return self._at(endpoint).is_eligible()

    def homes(
        self, model: str | bytes, session: str | bytes | None, prefix_blocks: bytes = b""
    ) -> tuple[int, int, int]:
        """What is remembered: (the session's endpoint or -1, that of the prompt's turn before or -1, its blocks)."""
        name = name_bytes(model)
        blocks = unpack_blocks(prefix_blocks)
        found = self._models.get(hash_bytes(name))
        if found is None or found.name != name:
            return NO_HOME, NO_HOME, 0
        session_id = name_bytes(session) if session is not None else b""
        home = self._sessions.find(hash_bytes(session_id) ^ found.affinity_key).endpoint if session_id else NO_HOME
        return home, *self._find_prefix(blocks, found.affinity_key)

    def _at(self, endpoint: int) -> Endpoint:
        if not 0 <= endpoint < len(self._endpoints):
            raise IndexError(f"endpoint must be 0 to {len(self._endpoints) - 1}, not {endpoint}")
        return self._endpoints[endpoint]

    def _place(self, model: _Model, session_hash: int, blocks: Sequence[int], tokens: int, n_seqs: int) -> int:
        keeps_session = session_hash != 0 and model.policy in (AUTO, SESSION)
        session_key = session_hash ^ model.affinity_key
        with self._lock:
            probe = self._sessions.find(session_key) if keeps_session else None
            asked = Asked(
                endpoints=model.endpoints,
                states=self._endpoints.__getitem__,
                policy=model.policy,
                affinity_key=model.affinity_key,
                key=session_key if session_hash else blocks[-1] ^ model.affinity_key if blocks else 0,
                has_session=session_hash != 0,
                blocks=blocks,
                n_seqs=n_seqs,
                tokens=tokens,
                session_home=probe.endpoint if probe is not None else NO_HOME,
                find_prefix=lambda: self._find_prefix(blocks, model.affinity_key),
                next_draw=self._next_draw,
                next_turn=lambda endpoint: self._endpoints[endpoint].take_turn(),
            )
            choice = choose(asked)
            if choice.endpoint == NO_ENDPOINT:
                return NO_ENDPOINT
            self._endpoints[choice.endpoint].carry(n_seqs, tokens)
            if probe is not None and choice.is_home_kept:
                self._sessions.remember(probe, choice.endpoint)
            if blocks and model.policy in (AUTO, PREFIX):
                self._prefixes.remember(self._prefixes.find(blocks[-1] ^ model.affinity_key), choice.endpoint)
            return choice.endpoint

    def _next_draw(self) -> int:
        self._n_draws += 1
        return self._n_draws - 1

    def _find_prefix(self, blocks: Sequence[int], affinity_key: int) -> tuple[int, int]:
        """The longest beginning that was once a whole prompt, as (endpoint or -1, its blocks)."""
        for n in range(len(blocks), 0, -1):
            home = self._prefixes.find(blocks[n - 1] ^ affinity_key).endpoint
            if home != NO_HOME:
                return home, n
        return NO_HOME, 0


def _add_name(published: dict[int, _Model], name: bytes, model: _Model) -> None:
    known = published.setdefault(hash_bytes(name), model)
    if known is model:
        return
    if known.name == name:
        raise ValueError(f"the model name {name!r} is used twice")
    raise ValueError(f"the model names {known.name!r} and {name!r} have the same 64-bit hash; rename one of them")
