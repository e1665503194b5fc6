"""Owns: what a count of chosen experts says: shares per layer and topic, who is specialised, a verdict in a line."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from laya.experts.balance import BAND, Balance
from laya.experts.counting import Counted, TopicCounts

ALL = "(all)"
N_SPECIALISTS = 3
_NOISY = 0.05  # chance that moves a share by more than this is told


class Specialist(NamedTuple):
    """An expert that a topic uses more than the others do."""

    layer: int
    expert: int
    share: float
    """Of the topic's assignments in that layer."""
    lift: float
    """Over the mean of all topics' shares, each topic counting the same."""


class ExpertUse:
    """Of one model on one text."""

    def __init__(self, counted: Counted) -> None:
        self.counted = counted
        self.n_experts, self.top_k = counted.n_experts, counted.top_k
        self.n_tokens = sum(topic.n_tokens for topic in counted.topics)
        self.layers = sorted({layer for topic in counted.topics for layer in topic.layers})
        self.overall = TopicCounts(
            topic=ALL,
            n_tokens=self.n_tokens,
            n_windows=sum(topic.n_windows for topic in counted.topics),
            layers={
                layer: [sum(of) for of in zip(*(topic.layers[layer] for topic in counted.topics), strict=True)]
                for layer in self.layers
            },
        )
        self.balance = {layer: Balance.of(counts) for layer, counts in self.overall.layers.items()}

    @property
    def parts(self) -> list[TopicCounts]:
        """All of the text, and, where there are several, each topic."""
        return [self.overall, *(self.counted.topics if len(self.counted.topics) > 1 else [])]

    @property
    def chance(self) -> float:
        """How far, as a part of itself, a fair share moves when tokens choose by chance; they depend on each other, so
        at least."""
        fair = 1 / self.n_experts
        return math.sqrt((1 - fair) / (self.n_tokens * self.top_k * fair))

    @property
    def is_even(self) -> bool:
        """Whether every expert of every layer is within the band on this text."""
        return not any(balance.outside for balance in self.balance.values())

    def verdict(self) -> str:
        """One line. Says nothing about texts other than this one."""
        low, high = (f"{100 * bound / self.n_experts:.3g}" for bound in BAND)
        band = f"{low}-{high} % ({BAND[0]} to {BAND[1]} of the fair share)"
        if self.is_even:
            shares = [share for balance in self.balance.values() for share in balance.share]
            text = f"Even: every expert of every layer gets {_percent(min(shares))} to {_percent(max(shares))}; {band}."
        else:
            worst = max(self.layers, key=lambda layer: self.balance[layer].max_vio)
            share = self.balance[worst].share
            most, least = share.index(max(share)), share.index(min(share))
            n_outside = sum(len(balance.outside) for balance in self.balance.values())
            n_all = self.n_experts * len(self.layers)
            text = (
                f"Uneven: {n_outside} of {n_all} experts (all layers) are outside {band}. "
                f"Worst is layer {worst}: expert {most} gets {_percent(share[most])}, expert {least} "
                f"{_percent(share[least])} (MaxVio {self.balance[worst].max_vio:.2f})."
            )
        n_dead = sum(balance.n_dead for balance in self.balance.values())
        if n_dead:
            text += f" {n_dead} {'is' if n_dead == 1 else 'are'} dead on this text, in {_layers(self._dead_layers())}."
        if self.chance > _NOISY:
            text += f" The text is short: chance alone moves a share by about {_percent(self.chance)} of itself."
        return text

    def _dead_layers(self) -> list[int]:
        return [layer for layer, balance in self.balance.items() if balance.n_dead]

    def specialists(self, topic: TopicCounts) -> list[Specialist]:
        """The experts that this topic uses more than the other topics do, by how much; none where it is alone.

        Those that even this topic seldom uses are left out: of few tokens, any ratio comes.
        """
        found: list[Specialist] = []
        if len(self.counted.topics) < 2:
            return found
        for layer in self.layers:
            shares = [Balance.of(each.layers[layer]).share for each in self.counted.topics]
            own = Balance.of(topic.layers[layer]).share
            for expert, share in enumerate(own):
                mean = sum(of[expert] for of in shares) / len(shares)
                if share >= 0.5 / self.n_experts and share > mean:
                    found.append(Specialist(layer, expert, share, share / mean))
        return sorted(found, key=lambda one: (-one.lift, one.layer, one.expert))[:N_SPECIALISTS]

    def as_json(self) -> dict[str, Any]:
        """Shares rounded to 6 digits."""
        return {
            "n_tokens": self.n_tokens,
            "n_experts": self.n_experts,
            "top_k": self.top_k,
            "window_tokens": self.counted.window_tokens,
            "band": [bound / self.n_experts for bound in BAND],
            "is_even": self.is_even,
            "verdict": self.verdict(),
            "layers": list(_layers_as_json(self.overall)),
            "topics": [
                {
                    "topic": topic.topic,
                    "n_tokens": topic.n_tokens,
                    "layers": list(_layers_as_json(topic)),
                    "specialists": [one._asdict() for one in self.specialists(topic)],
                }
                for topic in self.counted.topics
            ],
        }

    def as_csv(self) -> str:
        """A row for each expert of each layer, of all of the text (topic `(all)`) and of each topic."""
        lines = io.StringIO()
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(("topic", "layer", "expert", "assignments", "share"))
        for part in self.parts:
            for layer in self.layers:
                share = Balance.of(part.layers[layer]).share
                for expert, n_assigned in enumerate(part.layers[layer]):
                    writer.writerow((part.topic, layer, expert, n_assigned, f"{share[expert]:.6f}"))
        return lines.getvalue()


def _layers_as_json(part: TopicCounts) -> Iterator[dict[str, Any]]:
    for layer, counts in sorted(part.layers.items()):
        balance = Balance.of(counts)
        fields = msgspec.to_builtins(balance)
        rounded = {name: round(value, 6) for name, value in fields.items() if isinstance(value, float)}
        dead = [expert for expert, n_assigned in enumerate(counts) if not n_assigned]
        share = [round(value, 6) for value in balance.share]
        yield {"layer": layer, "share": share, "assignments": counts, **rounded, "dead": dead}


def _percent(part: float) -> str:
    return f"{100 * part:.3g} %"


def _layers(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"layer{'s' if len(numbers) > 1 else ''} {shown}{more}"
