"""Owns: what the router's benches ask, and which answers are right: the same list for the same load.

Knows neither who is asked nor how long that takes.
"""

from __future__ import annotations

import dataclasses
import random


@dataclasses.dataclass(frozen=True)
class RouterLoad:
    """What is asked. Models share the endpoints evenly; sessions = 0 asks without a session.

    prompt_bytes: of each request's prompt, hashed and routed by as well; the python layer only, 0 = no prompt.
    """

    requests: int = 10_000
    threads: int = 8
    models: int = 10
    endpoints: int = 30
    sessions: int = 1000
    prompt_bytes: int = 0

    def endpoints_of(self, model: int) -> range:
        """The endpoints of a model: the only right answers to a request for it."""
        if self.endpoints < self.models:
            first = model % self.endpoints
            return range(first, first + 1)
        each = self.endpoints // self.models
        return range(model * each, (model + 1) * each)


@dataclasses.dataclass(frozen=True)
class Question:
    """One request that the load picks from, and its right answers."""

    model: str
    session: str | None
    answers: range
    prompt: str = ""


def questions(load: RouterLoad) -> list[Question]:
    """Every session and every model asked at least once; the same list for the same load."""
    dice = random.Random(0)
    found = []
    for i in range(max(load.sessions, load.models)):
        model = i if i < load.models else dice.randrange(load.models)
        session = f"session-{i % load.sessions}" if load.sessions else None
        prompt = f"{session or i} ".ljust(load.prompt_bytes, "x")[: load.prompt_bytes]
        found.append(Question(f"model-{model}", session, load.endpoints_of(model), prompt))
    dice.shuffle(found)
    return found
