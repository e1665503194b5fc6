"""Owns: which of a model's endpoints serves a request, in plain Python, and why. Knows no lock, no clock, no engine.

Choice for choice what `csrc/route_choice.cpp` does. `RequestRouter.explain` tells of the native table's choices with
this module, so what it says is what the tests hold equal to the native core.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import get_args

from laya.routing.endpoint_twin import Endpoint, Rank
from laya.routing.feature_twin import MASK_64, mix64
from laya.types import RoutePolicy

UNKNOWN_MODEL = -1
NO_ENDPOINT = -2
BAD_FEATURE = -3
POLICIES: tuple[RoutePolicy, ...] = get_args(RoutePolicy)
AUTO, SESSION, PREFIX, LEAST_TOKENS, POWER_OF_TWO, WEIGHTED, HASH, ROUND_ROBIN = range(len(POLICIES))
READ_PROMPT = (AUTO, PREFIX, HASH)

_MOST_SCANNED = 8  # endpoints that are all looked at; of more, two
_MOST_SHARE = (17, 16)  # a newcomer's endpoint, by hash or in turn, carries at most this share of the average
_DRAW_STEP = 0x9E3779B97F4A7C15


@dataclasses.dataclass(slots=True, kw_only=True)
class Asked:
    """What the policies choose by."""

    endpoints: Sequence[int]  # sorted
    states: Callable[[int], Endpoint]
    policy: int
    affinity_key: int
    key: int  # of the session, else of the prompt; 0 = neither
    has_session: bool
    blocks: Sequence[int]
    n_seqs: int
    tokens: int
    session_home: int
    find_prefix: Callable[[], tuple[int, int]]  # (endpoint of the turn before or -1, its blocks)
    next_draw: Callable[[], int]
    next_turn: Callable[[int], int]  # of the endpoint that keeps the model's turn

    def rank(self, endpoint: int) -> Rank | None:
        return self.states(endpoint).rank(self.n_seqs, self.tokens)

    def draw(self) -> int:
        return mix64(self.next_draw() * _DRAW_STEP & MASK_64 ^ self.affinity_key)


@dataclasses.dataclass(slots=True)
class Choice:
    """The endpoint or NO_ENDPOINT, the reason in one word, and whether the session's home is now that endpoint."""

    endpoint: int
    why: str
    is_home_kept: bool = True


@dataclasses.dataclass(slots=True)
class _Survey:
    ranks: dict[int, Rank]
    least: int

    @property
    def least_rank(self) -> Rank:
        return self.ranks[self.least]


def choose(asked: Asked) -> Choice:
    """Nothing changes but the draws and turns that were taken."""
    if asked.policy in (AUTO, SESSION, PREFIX):
        return _choose_near(asked)
    if asked.policy == LEAST_TOKENS:
        return Choice(_survey_all(asked).least, "least")
    if asked.policy == POWER_OF_TWO:
        return Choice(_survey_two(asked, asked.draw()).least, "two")
    if asked.policy == WEIGHTED:
        return Choice(_choose_weighted(asked), "weight")
    if asked.policy == HASH:
        return _choose_hashed(asked)
    return Choice(_choose_next(asked), "turn")


def _choose_near(asked: Asked) -> Choice:
    is_few = len(asked.endpoints) <= _MOST_SCANNED
    survey = _survey_all(asked) if is_few else _survey_two(asked, mix64(asked.key) if asked.key else asked.draw())
    choice = Choice(survey.least, "least" if is_few else "two")
    if survey.least == NO_ENDPOINT:
        return choice
    is_released = False
    if asked.session_home in asked.endpoints:
        if asked.rank(asked.session_home) is None:
            choice.is_home_kept = False
        elif _is_within_window(asked, asked.session_home, survey):
            return Choice(asked.session_home, "session")
        else:
            is_released = True
    home = _prefix_home(asked, survey) if asked.policy != SESSION and asked.blocks else NO_ENDPOINT
    if home != NO_ENDPOINT:
        choice.endpoint, choice.why = home, "prefix"
    elif asked.key and is_few and not is_released:
        hashed = _highest_score(asked, needs_room=False) if asked.has_session else _next_light(asked, survey)
        if hashed != NO_ENDPOINT and _is_light(survey, hashed):
            choice.endpoint, choice.why = hashed, "hash" if asked.has_session else "newcomer"
    return choice


def _next_light(asked: Asked, survey: _Survey) -> int:
    n = len(asked.endpoints)
    place = asked.next_turn(asked.endpoints[0]) % n
    turns = (asked.endpoints[(place + step) % n] for step in range(n))
    light = (endpoint for endpoint in turns if endpoint in survey.ranks and _is_light(survey, endpoint))
    return next(light, NO_ENDPOINT)


def _prefix_home(asked: Asked, survey: _Survey) -> int:
    home, _ = asked.find_prefix()
    return home if home in asked.endpoints and _is_within_window(asked, home, survey) else NO_ENDPOINT


def _is_within_window(asked: Asked, home: int, survey: _Survey) -> bool:
    rank = asked.rank(home)
    if rank is None or rank[0] != survey.least_rank[0]:
        return False
    return rank[1] <= survey.least_rank[1] + asked.states(home).window_tokens


def _is_light(survey: _Survey, endpoint: int) -> bool:
    rank = survey.ranks[endpoint]
    numerator, denominator = _MOST_SHARE
    sum_tokens = sum(tokens for _, tokens, _ in survey.ranks.values())
    return rank[0] == survey.least_rank[0] and rank[1] * len(survey.ranks) * denominator <= sum_tokens * numerator


def _survey_all(asked: Asked) -> _Survey:
    ranks = {endpoint: rank for endpoint in asked.endpoints if (rank := asked.rank(endpoint)) is not None}
    least = min(ranks, key=ranks.__getitem__, default=NO_ENDPOINT)  # sorted, so of equals the lowest index
    return _Survey(ranks, least)


def _survey_two(asked: Asked, draw: int) -> _Survey:
    """The better of two places, each moved on to the next eligible endpoint; all when neither has room."""
    n = len(asked.endpoints)
    if n < 2:
        return _survey_all(asked)
    first = _below(draw, n)
    second = _below(draw >> 32, n - 1)
    second += second >= first
    ranks: dict[int, Rank] = {}
    for place in (first, second):
        for step in range(n):
            endpoint = asked.endpoints[(place + step) % n]
            rank = asked.rank(endpoint)
            if rank is not None:
                ranks[endpoint] = rank
                break
    least = min(ranks, key=ranks.__getitem__, default=NO_ENDPOINT)
    return _Survey(ranks, least) if ranks and not ranks[least][0] else _survey_all(asked)


def _below(draw: int, n: int) -> int:
    return (draw & 0xFFFF_FFFF) * n >> 32


def _highest_score(asked: Asked, needs_room: bool) -> int:
    scored = [
        (score(asked.key, asked.states(endpoint)), -at, endpoint)
        for at, endpoint in enumerate(asked.endpoints)
        if (rank := asked.rank(endpoint)) is not None and not (needs_room and rank[0])
    ]
    return max(scored)[2] if scored else NO_ENDPOINT


def score(key: int, endpoint: Endpoint) -> int:
    """Rendezvous: the endpoint with the highest score of a key is the key's, so a loss moves only its own keys."""
    return mix64(key ^ endpoint.seed)


def _choose_hashed(asked: Asked) -> Choice:
    if not asked.key:
        return Choice(_survey_all(asked).least, "least")
    with_room = _highest_score(asked, needs_room=True)
    return Choice(with_room if with_room >= 0 else _highest_score(asked, needs_room=False), "hash")


def _choose_weighted(asked: Asked) -> int:
    survey = _survey_all(asked)
    if survey.least == NO_ENDPOINT:
        return NO_ENDPOINT
    weights = {
        endpoint: asked.states(endpoint).weight
        for endpoint, rank in survey.ranks.items()
        if rank[0] == survey.least_rank[0]
    }
    drawn = (asked.draw() >> 32) * sum(weights.values()) >> 32
    for endpoint, weight in weights.items():
        if drawn < weight:
            return endpoint
        drawn -= weight
    return survey.least


def _choose_next(asked: Asked) -> int:
    survey = _survey_all(asked)
    if survey.least == NO_ENDPOINT:
        return NO_ENDPOINT
    n = len(asked.endpoints)
    place = asked.next_turn(asked.endpoints[0]) % n
    turns = (asked.endpoints[(place + step) % n] for step in range(n))
    return next(
        endpoint for endpoint in turns if endpoint in survey.ranks and survey.ranks[endpoint][0] == survey.least_rank[0]
    )
