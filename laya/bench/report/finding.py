"""Owns: what a row of the report says: one verdict of four, the figure, under which load, by which command."""

from __future__ import annotations

from typing import Literal

import msgspec

Verdict = Literal["holds", "differs", "false", "not run"]
VERDICTS: dict[Verdict, str] = {
    "holds": "what the row says is so here; a figure lies within a factor of 1.5 of the article's",
    "differs": "it was measured, and the figure here is another one",
    "false": "it was measured, and is not so",
    "not run": "this machine or this run could not; the row says why",
}
NEAR = 1.5


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """here: the figure, or why there is none. ratios: of two things measured in one run, which a second run should
    find again within 15 %. spread: how far a figure's own rounds lay apart."""

    verdict: Verdict
    here: str
    load: str = "-"
    command: str = ""
    ratios: dict[str, float] = {}
    spread: str = ""


class NotRun(Exception):
    """Why a row has no figure."""


def near(here: float, article: float) -> Verdict:
    return "holds" if 1 / NEAR <= here / article <= NEAR else "differs"
