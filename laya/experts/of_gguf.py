"""Owns: which experts llama.cpp chooses, read from its own graph while it computes. Run: see `counting`.

Needs neither torch nor numpy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from laya.errors import EngineFailed
from laya.experts.counting import Job, serve
from laya.quantization.llama_api import Evaluator


class GgufRouter:
    """See `counting.Router`."""

    def __init__(self, job: Job) -> None:
        """job.n_experts: as the file's header has it. Raises EngineFailed where the file cannot be run."""
        assert job.n_experts is not None, "who asks has read the file's header"
        self.n_experts = job.n_experts
        self.window_tokens = job.window_tokens
        self._path = Path(job.path)
        self._evaluator = Evaluator(
            self._path, n_ctx=job.window_tokens, n_threads=job.n_threads, exact=True, collects_experts=True
        )
        self.first_token = self._evaluator.first_token

    def tokens_of(self, text: str) -> list[int]:
        return self._evaluator.tokens_of(text)

    def expert_ids(self, tokens: Sequence[int]) -> dict[int, list[list[int]]]:
        """Raises EngineFailed where the graph of this architecture names no choice of experts."""
        self._evaluator.logits(tokens)  # of every token: for the last alone, the last layer would compute only that one
        chosen = self._evaluator.expert_ids()
        if not chosen:
            raise EngineFailed(
                f"{self._path} says that it has {self.n_experts} experts, but llama.cpp's graph of it has no tensor "
                "that tells which ones were chosen (ffn_moe_topk); its Hugging Face folder may tell, in torch."
            )
        return chosen


if __name__ == "__main__":
    sys.exit(serve(GgufRouter))
