"""Owns: what of a `/v1/systemone` request this server reads, and in which statuses it tells errors there.

Such a request has a state and typed questions about it, by id. All of that goes to the engine byte for byte, the order
of options included, and the answers come back so; what a question may hold is the engine's to say.
"""

from __future__ import annotations

import msgspec

from laya.errors import InvalidRequest, LayaError, NotSupported, QueueFull

QUESTIONS_LIMIT = 2048  # of one request
_OVERLOADED = 529  # busy, try again later
_UNPROCESSABLE = 422


class DecisionHead(msgspec.Struct):
    """The fields that are read; others pass unread."""

    model: str | None = None
    state: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    questions: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)
    stream: bool | None = None
    user: str | None = None
    keep_alive: float | str | None = None


class _Question(msgspec.Struct):
    instructions: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


def check_decision(head: DecisionHead) -> None:
    """Raise InvalidRequest for what no engine takes."""
    if not bytes(head.state):
        raise InvalidRequest("'state' is missing: what the questions are about.", param="state")
    if len(head.questions) > QUESTIONS_LIMIT:
        raise InvalidRequest(
            f"'questions' has {len(head.questions)}; one request takes {QUESTIONS_LIMIT}.", param="questions"
        )
    if head.stream:
        raise InvalidRequest("'stream' is true: decisions come whole.", param="stream")


def longest_text(head: DecisionHead) -> str:
    """No longer than the longest prompt that the engine makes of it: the state and one question's instructions."""
    asked = ""
    for question in head.questions.values():
        try:
            said = _text(msgspec.json.decode(question, type=_Question).instructions)
        except msgspec.DecodeError:  # the engine says what is wrong with it
            continue
        asked = max(asked, said, key=len)
    return _text(head.state) + asked


def _text(raw: msgspec.Raw) -> str:
    said = bytes(raw)
    try:
        return msgspec.json.decode(said, type=str)
    except msgspec.DecodeError:  # no string; or one that is not UTF-8, which the engine refuses
        return said.decode(errors="replace")


def decision_status(error: LayaError) -> int:
    """The status by which clients of this API know the fault: 422 for what is wrong with a request, 529 for busy."""
    if error.http_status == 400 or isinstance(error, NotSupported):
        return _UNPROCESSABLE
    return _OVERLOADED if isinstance(error, QueueFull) and error.http_status == 503 else error.http_status
