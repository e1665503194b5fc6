"""Owns: what is told of an upcycled model: as JSON, as lines for people, and as the card that lies beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import torch
import transformers

import laya
from laya.modeling.balance import Balance
from laya.types import GIB

LEAST_SHARE, MOST_SHARE, MOST_VIO = 0.8, 1.2, 0.20
"""The band of an expert's share, over the fair one; of MaxVio."""


class Report(msgspec.Struct, kw_only=True):
    """Losses are nats a token, on the held-out text."""

    model: str
    parent: str
    parent_sha256: str
    licence: str | None
    n_experts: int
    top_k: int
    n_parameters: int
    n_active_parameters: int
    dtype: str
    perturb: float
    router_steps: int
    expert_steps: int
    seed: int
    training_text: str
    n_training_tokens: int
    held_out_text: str
    n_held_out_tokens: int
    max_kl_before: float
    """Of the model's distribution from the parent's at any token, its routers untrained."""
    parent_perplexity: float
    perplexity: float
    layers: list[Balance]
    seconds: float
    peak_rss_bytes: int

    @property
    def perplexity_ratio(self) -> float:
        return self.perplexity / self.parent_perplexity

    @property
    def outside(self) -> list[int]:
        """Layers whose use of experts is outside the band."""
        fair = 1 / self.n_experts
        return [
            number
            for number, layer in enumerate(self.layers)
            if min(layer.share) < LEAST_SHARE * fair
            or max(layer.share) > MOST_SHARE * fair
            or layer.max_vio > MOST_VIO
            or layer.n_dead
        ]

    def fields(self) -> dict[str, object]:
        """As JSON has it."""
        own: dict[str, object] = msgspec.to_builtins(self)
        return own | {
            "perplexity_ratio": self.perplexity_ratio,
            "least_share": min(min(layer.share) for layer in self.layers),
            "most_share": max(max(layer.share) for layer in self.layers),
            "max_vio": max(layer.max_vio for layer in self.layers),
            "n_dead": sum(layer.n_dead for layer in self.layers),
            "layers_outside_band": self.outside,
        }

    def lines(self) -> Iterator[str]:
        worst = max(self.layers, key=lambda layer: layer.max_vio)
        n_dead = sum(layer.n_dead for layer in self.layers)
        size, active = (count / 1e6 for count in (self.n_parameters, self.n_active_parameters))
        yield f"{self.model}: {size:.1f} M parameters, {active:.1f} M a token"
        yield f"  before training   max KL from the parent {self.max_kl_before:.1e}"
        yield f"  perplexity        {self.perplexity:.3f}, the parent's {self.parent_perplexity:.3f}"
        yield f"  balance           worst layer {self.layers.index(worst)}: {_balance_text(worst)}; {n_dead} dead"
        if self.outside:
            yield f"  outside the band  layers {', '.join(map(str, self.outside))}: more --text or --steps may help"
        yield f"  took              {self.seconds:.0f} s, {self.peak_rss_bytes / GIB:.1f} GiB at most"

    def card(self) -> str:
        """README.md, with the head that hubs read."""
        head = ["library_name: transformers", "tags: [moe, laya, upcycled]"]
        head += [f"license: {self.licence}"] if self.licence else []
        return "\n".join(["---", *head, "---", "", f"# {self.model}", "", *self._card_lines()]) + "\n"

    def _card_lines(self) -> Iterator[str]:
        yield f"A Mixture of Experts made of the dense model **{self.parent}** by `laya upcycle`:"
        yield f"{self.n_experts} experts a layer, {self.top_k} of them for a token; {self.n_parameters:,} parameters,"
        yield f"{self.n_active_parameters:,} of them for a token."
        yield ""
        yield self._of_experts()
        yield ""
        yield "| | |\n|---|---|"
        for title, text in self._card_table():
            yield f"| {title} | {text} |"
        yield ""
        yield f"Share of the assignments on the held-out text, by layer. Fair is {1 / self.n_experts:.1%}; MaxVio is"
        yield "the largest share over the fair one, less 1."
        yield ""
        yield "| layer | an expert | MaxVio | dead |\n|---|---|---|---|"
        for number, layer in enumerate(self.layers):
            share = f"{min(layer.share):.1%} to {max(layer.share):.1%}"
            yield f"| {number} | {share} | {layer.max_vio:.3f} | {layer.n_dead} |"

    def _card_table(self) -> Iterator[tuple[str, str]]:
        steps = f"{self.router_steps} steps a layer"
        yield "parent, SHA-256", f"`{self.parent_sha256}`"
        yield "routers trained on", f"{self.training_text}: {self.n_training_tokens} tokens, {steps}"
        yield "measured on", f"{self.held_out_text}: {self.n_held_out_tokens} tokens"
        yield "max KL from the parent before training", f"{self.max_kl_before:.1e}"
        yield "perplexity, the parent's", f"{self.perplexity:.3f}, {self.parent_perplexity:.3f}"
        yield "seed", str(self.seed)
        versions = {"laya": laya.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        yield "made with", ", ".join(f"{name} {number}" for name, number in versions.items())

    def _of_experts(self) -> str:
        noise = f"noise of {self.perturb:g} of its standard deviation"
        if self.expert_steps:
            start = f"with {noise}" if self.perturb else "equal to it"
            steps = f"{self.expert_steps} windows of text"
            return f"Each expert began as the parent's feed-forward block, {start}, and was trained on {steps}."
        if self.perturb:
            return (
                f"Each expert is the parent's feed-forward block with {noise}. No expert was trained: they have learnt "
                "nothing that the parent had not."
            )
        return (
            "Every expert is equal to the parent's feed-forward block: the model answers as its parent does, and which "
            "experts a token gets makes no difference until they are trained."
        )


def _balance_text(layer: Balance) -> str:
    return f"{min(layer.share):.1%} to {max(layer.share):.1%} an expert, MaxVio {layer.max_vio:.3f}"


def perplexity(loss: float) -> float:
    return math.exp(loss)
