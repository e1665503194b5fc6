"""Owns: what a model is worth on text it was not trained on: its loss, and how evenly each layer uses its experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor

from laya.modeling.balance import Balance, expert_counts
from laya.modeling.model import LayaForCausalLM
from laya.training.tokens import Corpus

_SEQUENCES_AT_ONCE = 16


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """loss: nats a token, the mean over topics' tokens. layers: empty for a model with one expert."""

    step: int
    tokens: int
    loss: float
    topic_loss: dict[str, float]
    layers: list[Balance]

    @property
    def worst(self) -> Balance | None:
        return max(self.layers, key=lambda layer: layer.max_vio, default=None)


def measure(model: LayaForCausalLM, corpus: Corpus, *, step: int, sequence_tokens: int, most_tokens: int) -> HeldOut:
    """The first windows of each topic's held-out text, as many of each. Leaves the model in the mode it was in."""
    windows = {topic: _windows(corpus, topic, sequence_tokens) for topic in corpus.topics}
    n_windows = max(1, min(most_tokens // sequence_tokens // len(windows), *(len(rows) for rows in windows.values())))
    was_training = model.training
    model.eval()
    losses: dict[str, float] = {}
    n_experts = model.config.num_local_experts
    with torch.inference_mode(), _counting(model) as counts:
        for topic, rows in windows.items():
            total = 0.0
            for start in range(0, n_windows, _SEQUENCES_AT_ONCE):
                batch = rows[start : min(n_windows, start + _SEQUENCES_AT_ONCE)]
                total += float(model(input_ids=batch, labels=batch).loss) * len(batch)
            losses[topic] = total / n_windows
    model.train(was_training)
    return HeldOut(
        step=step,
        tokens=n_windows * sequence_tokens * len(windows),
        loss=sum(losses.values()) / len(losses),
        topic_loss=losses,
        layers=[Balance.of(layer) for layer in counts] if n_experts > 1 else [],
    )


def _windows(corpus: Corpus, topic: str, sequence_tokens: int) -> Tensor:
    """[n, sequence_tokens] int64."""
    tokens = torch.from_numpy(corpus.tokens(topic, "held_out").astype("int64"))
    n_windows = len(tokens) // sequence_tokens
    return tokens[: n_windows * sequence_tokens].view(n_windows, sequence_tokens)


@contextmanager
def _counting(model: LayaForCausalLM) -> Iterator[list[Tensor]]:
    """A layer's assignments each, [n_experts], of all that runs inside."""
    n_experts = model.config.num_local_experts
    counts = [torch.zeros(n_experts) for _ in range(model.config.num_hidden_layers)]
    hooks = []
    for index, layer in enumerate(model.model.layers):

        def count(_gate: Any, _inputs: Any, routed: Any, index: int = index) -> None:
            counts[index] += expert_counts(routed.expert_ids, n_experts)

        hooks.append(layer.mlp.gate.register_forward_hook(count))  # type: ignore[union-attr]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()
