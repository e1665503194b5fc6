"""Owns: the route table in plain Python: what serves where no compiler was, and the oracle of the native one's test.

Same API and same answers as `laya._core.RouteTable` (see csrc/route_table.hpp for why it decides so). Where the native
table is lock-free, this one takes a lock. Knows no engine, no socket, no clock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from laya.routing.feature_twin import FEATURE_VERSION, hash_bytes, name_bytes, require_range, unpack_feature
from laya.routing.session_twin import NO_SESSION_ENDPOINT, Probe, SessionTable

UNKNOWN_MODEL = -1
NO_ENDPOINT = -2
BAD_FEATURE = -3

_MOST_ENDPOINTS = 1 << 16
_MOST_SEQS_ASKED = 65535
_MAX_SEQS = (1 << 24) - 1
_MAX_TOKENS = (1 << 39) - 1


class _Model(NamedTuple):
    name: bytes
    affinity_key: int
    endpoints: tuple[int, ...]


class _Endpoint:
    """One endpoint: what it carries, what it can carry, and whether it may be chosen."""

    __slots__ = ("eligible", "max_seqs", "max_tokens", "n_seqs", "tokens", "window_tokens")

    def __init__(self, window_tokens: int) -> None:
        self.n_seqs = 0
        self.tokens = 0
        self.max_seqs = _MAX_SEQS
        self.max_tokens = _MAX_TOKENS
        self.window_tokens = window_tokens
        self.eligible = False

    def rank(self, n_seqs: int, tokens: int) -> tuple[bool, int, int]:
        """Lower is better: has room first, then fewest reserved tokens, then fewest sequences."""
        is_full = self.n_seqs + n_seqs > self.max_seqs or self.tokens + tokens > self.max_tokens
        return is_full, self.tokens, self.n_seqs


class RouteTable:
    """Model name -> endpoints, what each endpoint has in flight, and the choice between them.

    max_endpoints: endpoint indexes are 0 to max_endpoints - 1, at most 65536 of them. session_bytes: memory of the
    session table, 8 bytes a session. window_tokens: how many more tokens than the least loaded endpoint a session's
    endpoint may hold reserved and keep the session, where it has no kv_pool_tokens; with them it is half of those.
    """

    def __init__(self, *, max_endpoints: int = 1024, session_bytes: int = 1 << 20, window_tokens: int = 8192) -> None:
        require_range("max_endpoints", max_endpoints, 1, _MOST_ENDPOINTS)
        require_range("session_bytes", session_bytes, 0, (1 << 63) - 1)
        self._default_window_tokens = require_range("window_tokens", window_tokens, 0, _MAX_TOKENS)
        self._endpoints = [_Endpoint(window_tokens) for _ in range(max_endpoints)]
        self._sessions = SessionTable(session_bytes)
        self._models: dict[int, _Model] = {}
        self._lock = threading.Lock()

    @property
    def max_endpoints(self) -> int:
        return len(self._endpoints)

    @property
    def session_capacity(self) -> int:
        """How many sessions are remembered at most."""
        return self._sessions.capacity

    def publish(self, models: Iterable[tuple[Iterable[str | bytes], Iterable[int]]]) -> None:
        """Replace the set of models by (names, endpoints) pairs; the first name is the model's own, others are aliases.

        Raises ValueError, with the old set still in force, when a model has no name, a name appears twice, two names
        have one hash, or an endpoint is out of range.
        """
        published: dict[int, _Model] = {}
        for names, endpoints in models:
            encoded = [name_bytes(name) for name in names]
            if not encoded:
                raise ValueError("a model needs a name")
            chosen_from = tuple(sorted(set(endpoints)))
            for endpoint in chosen_from:
                require_range(f"an endpoint of model {encoded[0]!r}", endpoint, 0, self.max_endpoints - 1)
            for name in encoded:
                _add_name(published, name, _Model(name, hash_bytes(encoded[0]), chosen_from))
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
    ) -> int:
        """Endpoint index, UNKNOWN_MODEL or NO_ENDPOINT. On success the endpoint carries n_seqs sequences and tokens
        (of all of them together) until `settle`. Another name with a known name's hash is an unknown model.

        Raises ValueError when a number does not fit its field, TypeError when a name is neither str nor bytes.
        """
        name = name_bytes(model)
        session_id = name_bytes(session) if session is not None else b""
        require_range("kind", kind, 0, 0xFF)
        require_range("flags", flags, 0, 0xFFFF)
        require_range("tokens", tokens, 0, 0xFFFF_FFFF)
        require_range("n_seqs", n_seqs, 1, _MOST_SEQS_ASKED)
        found = self._models.get(hash_bytes(name))
        if found is None or found.name != name:
            return UNKNOWN_MODEL
        return self._place(found, hash_bytes(session_id) if session_id else 0, tokens, n_seqs)

    def choose(self, feature: bytes, n_seqs: int = 1) -> int:
        """Like `route`, from a packed feature whose model hash is trusted; BAD_FEATURE for another version's feature.

        Raises ValueError unless the feature is 32 bytes.
        """
        version, _kind, _flags, tokens, model_hash, session_hash, _prefix = unpack_feature(feature)
        require_range("n_seqs", n_seqs, 1, _MOST_SEQS_ASKED)
        if version != FEATURE_VERSION:
            return BAD_FEATURE
        found = self._models.get(model_hash)
        return UNKNOWN_MODEL if found is None else self._place(found, session_hash, tokens, n_seqs)

    def settle(self, endpoint: int, n_seqs: int, tokens: int) -> None:
        """Take back what a choice added; counters stop at zero. Raises IndexError for an endpoint out of range."""
        at = self._at(endpoint)
        require_range("n_seqs", n_seqs, 0, _MOST_SEQS_ASKED)
        require_range("tokens", tokens, 0, _MAX_TOKENS)
        with self._lock:
            at.n_seqs = max(0, at.n_seqs - n_seqs)
            at.tokens = max(0, at.tokens - tokens)

    def set_eligible(self, endpoint: int, eligible: bool) -> None:
        """Whether the endpoint may be chosen; a fresh one may not."""
        self._at(endpoint).eligible = eligible

    def set_capacity(self, endpoint: int, max_num_seqs: int, kv_pool_tokens: int) -> None:
        """Sequences and KV tokens that the endpoint holds at once; 0 = no limit."""
        at = self._at(endpoint)
        at.max_seqs = require_range("max_num_seqs", max_num_seqs, 0, _MOST_SEQS_ASKED) or _MAX_SEQS
        at.max_tokens = require_range("kv_pool_tokens", kv_pool_tokens, 0, _MAX_TOKENS) or _MAX_TOKENS
        at.window_tokens = kv_pool_tokens // 2 if kv_pool_tokens else self._default_window_tokens

    def load(self, endpoint: int) -> tuple[int, int]:
        """(sequences in flight, KV tokens reserved)."""
        at = self._at(endpoint)
        return at.n_seqs, at.tokens

    def is_eligible(self, endpoint: int) -> bool:
        return self._at(endpoint).eligible

    def _at(self, endpoint: int) -> _Endpoint:
        if not 0 <= endpoint < len(self._endpoints):
            raise IndexError(f"endpoint must be 0 to {len(self._endpoints) - 1}, not {endpoint}")
        return self._endpoints[endpoint]

    def _place(self, model: _Model, session_hash: int, tokens: int, n_seqs: int) -> int:
        with self._lock:
            probe = self._sessions.find(session_hash ^ model.affinity_key) if session_hash else None
            chosen = self._pick(model, probe, tokens, n_seqs)
            if chosen == NO_ENDPOINT:
                return NO_ENDPOINT
            at = self._endpoints[chosen]
            at.n_seqs = min(at.n_seqs + n_seqs, _MAX_SEQS)
            at.tokens = min(at.tokens + tokens, _MAX_TOKENS)
            if probe is not None:
                self._sessions.remember(probe, chosen)
            return chosen

    def _pick(self, model: _Model, probe: Probe | None, tokens: int, n_seqs: int) -> int:
        ranks = {
            endpoint: self._endpoints[endpoint].rank(n_seqs, tokens)
            for endpoint in model.endpoints
            if self._endpoints[endpoint].eligible
        }
        if not ranks:
            return NO_ENDPOINT
        least = min(ranks, key=ranks.__getitem__)  # endpoints are sorted, so of equals the lowest index
        home = probe.endpoint if probe is not None else NO_SESSION_ENDPOINT
        if home in ranks:
            has_equal_room = ranks[home][0] == ranks[least][0]
            if has_equal_room and ranks[home][1] <= ranks[least][1] + self._endpoints[home].window_tokens:
                return home
        return least


def _add_name(published: dict[int, _Model], name: bytes, model: _Model) -> None:
    known = published.setdefault(hash_bytes(name), model)
    if known is model:
        return
    if known.name == name:
        raise ValueError(f"the model name {name!r} is used twice")
    raise ValueError(f"the model names {known.name!r} and {name!r} have the same 64-bit hash; rename one of them")
