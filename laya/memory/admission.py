"""Owns: how many sequences and KV tokens one engine has promised. Pure arithmetic: no queue, no clock, no I/O.

A request is promised before it is sent on, and its promise is released once, however it ends. Without a token pool
each sequence has a slot of its own and only sequences are counted.
"""

from __future__ import annotations


class Admission:
    """Sequences and tokens of one engine; free + reserved == total after every call."""

    def __init__(self, max_num_seqs: int, kv_pool_tokens: int | None = None) -> None:
        assert max_num_seqs > 0, "an engine runs at least one sequence"
        assert kv_pool_tokens is None or kv_pool_tokens > 0, "a pool holds at least one token"
        self.max_num_seqs = max_num_seqs
        self.kv_pool_tokens = kv_pool_tokens
        self.reserved_seqs = 0
        self.reserved_tokens = 0
        self._free_seqs = max_num_seqs
        self._free_tokens = kv_pool_tokens or 0

    @property
    def free_seqs(self) -> int:
        return self._free_seqs

    @property
    def free_tokens(self) -> int | None:
        """Tokens that can still be promised; None where there is no shared pool."""
        return self._free_tokens if self.kv_pool_tokens is not None else None

    def can_ever_fit(self, n_seqs: int, tokens: int) -> bool:
        """Whether an idle engine could take it; what cannot is refused at once instead of queued."""
        return n_seqs <= self.max_num_seqs and (self.kv_pool_tokens is None or tokens <= self.kv_pool_tokens)

    def try_reserve(self, n_seqs: int, tokens: int) -> bool:
        """Promise `n_seqs` sequences that hold `tokens` in all; False, and nothing changed, where they are not free."""
        assert n_seqs > 0, f"{n_seqs} sequences asked"
        assert tokens >= 0, f"{tokens} tokens asked"
        if n_seqs > self._free_seqs or (self.kv_pool_tokens is not None and tokens > self._free_tokens):
            return False
        self._move(n_seqs, tokens)
        return True

    def release(self, n_seqs: int, tokens: int) -> None:
        """Give back what `try_reserve` promised, with the same figures."""
        self._move(-n_seqs, -tokens)

    def _move(self, n_seqs: int, tokens: int) -> None:
        self.reserved_seqs += n_seqs
        self._free_seqs -= n_seqs
        if self.kv_pool_tokens is not None:
            self.reserved_tokens += tokens
            self._free_tokens -= tokens
        assert self._free_seqs >= 0 <= self.reserved_seqs, "sequences were released that were not reserved"
        assert self._free_seqs + self.reserved_seqs == self.max_num_seqs
        if self.kv_pool_tokens is not None:
            assert self._free_tokens >= 0 <= self.reserved_tokens, "tokens were released that were not reserved"
            assert self._free_tokens + self.reserved_tokens == self.kv_pool_tokens
