"""Owns: one model as it would be loaded: what every memory term is computed from. Knows no formula."""

from __future__ import annotations

import msgspec

from laya.memory.engine_facts import EngineFacts
from laya.memory.facts import ModelFacts
from laya.types import PlannedSettings


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One model as it would be loaded."""

    facts: ModelFacts
    settings: PlannedSettings
    engine: EngineFacts
    draft: ModelFacts | None = None
    projector_bytes: int = 0  # of the projector's file

    @property
    def n_streams(self) -> int:
        """Separate caches: one a sequence, or one for all when they share a pool."""
        return 1 if self.settings.kv_unified else self.settings.max_num_seqs

    @property
    def cells(self) -> int:
        """Tokens of cache the engine allocates in all."""
        return self.settings.slot_tokens * self.n_streams

    @property
    def output_rows(self) -> int:
        """Rows of logits computed at once: one a sequence, or the whole batch where embeddings are asked for."""
        if not self.facts.shape.is_causal:
            return 0
        return self.settings.max_num_seqs if self.settings.task == "chat" else self.settings.n_batch
