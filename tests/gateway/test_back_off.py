"""Requests while an engine that died is left alone for a while: a short while is waited for, a long one refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from laya.errors import EngineFailed
from laya.types import EngineAddress

from .front import StandingEngines, chat, front

pytestmark = pytest.mark.anyio


async def answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back_offs_s: list[float | None]
) -> tuple[int, str | None, int]:
    """(status, retry-after, back-offs left) of a request whose engine is refused once for each of `back_offs_s`."""
    ready = StandingEngines.ensure_ready

    async def ensure_ready(self: StandingEngines, model_id: str) -> EngineAddress:
        if not back_offs_s:
            return await ready(self, model_id)
        error = EngineFailed("It died.")
        error.retry_after_s = back_offs_s.pop(0)
        raise error

    monkeypatch.setattr(StandingEngines, "ensure_ready", ensure_ready)
    async with front(tmp_path, loaded=False) as gate:
        answer = await gate.ask(chat())
        await gate.settled()
        return answer.status, answer.headers.get("retry-after"), len(back_offs_s)


@pytest.mark.parametrize(
    ("back_offs_s", "seen"),
    [
        ([0.02], (200, None, 0)),
        ([0.02, 0.02], (503, "1", 0)),  # waited for once only
        ([8.0], (503, "8", 0)),
        ([None, 0.02], (503, None, 1)),  # a failure that no wait mends
    ],
)
async def test_short_back_off_is_waited_for_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    back_offs_s: list[float | None],
    seen: tuple[int, str | None, int],
) -> None:
    assert await answers(tmp_path, monkeypatch, list(back_offs_s)) == seen
