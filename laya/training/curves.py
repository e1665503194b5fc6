"""Owns: pictures of a training run: loss and learning rate, and how evenly the experts are used, over its steps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

_SMOOTHED_STEPS = 25


def draw_curves(steps: Sequence[dict[str, Any]], looks: Sequence[dict[str, Any]], folder: Path) -> None:
    """loss.png, and balance.png where there are experts to choose from. steps, looks: lines of a run's log."""
    _save(loss_figure(steps, looks), folder / "loss.png")
    if looks and looks[0]["layers"]:
        _save(balance_figure(looks), folder / "balance.png")


def loss_figure(steps: Sequence[dict[str, Any]], looks: Sequence[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    numbers = [line["step"] for line in steps]
    losses = [line["loss"] for line in steps]
    axes.plot(numbers, losses, color="0.8", linewidth=0.6)
    axes.plot(numbers, _smoothed(losses), color="black", label="trained on")
    for topic in looks[0]["topic_loss"] if looks else ():
        axes.plot([look["step"] for look in looks], [look["topic_loss"][topic] for look in looks], ".-", label=topic)
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.legend(title="held out")
    return figure


def balance_figure(looks: Sequence[dict[str, Any]]) -> Figure:
    n_layers = len(looks[0]["layers"])
    figure = Figure(figsize=(2.2 + 2.2 * n_layers, 3), layout="constrained")
    numbers = [look["step"] for look in looks]
    for index, axes in enumerate(figure.subplots(1, n_layers, sharey=True, squeeze=False)[0]):
        shares = [look["layers"][index]["share"] for look in looks]
        fair = 1 / len(shares[0])
        axes.axhspan(0.8 * fair, 1.2 * fair, color="0.92")
        for expert in range(len(shares[0])):
            axes.plot(numbers, [share[expert] for share in shares], linewidth=1)
        axes.set(title=f"layer {index}", xlabel="step", ylim=(0, None))
    figure.axes[0].set_ylabel("share of the assignments")
    return figure


def _smoothed(values: Sequence[float]) -> list[float]:
    return [
        sum(part) / len(part) for end in range(len(values)) if (part := values[max(0, end - _SMOOTHED_STEPS) : end + 1])
    ]


def _save(figure: Figure, path: Path) -> None:
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format="png", dpi=120)
    os.replace(part, path)
