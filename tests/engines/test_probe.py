"""Ready means that a token, an embedding, a score or a decision came back, not that something answered."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from laya.engines.probe import check
from laya.errors import EngineFailed
from laya.types import Task

GOOD: dict[Task, dict[str, Any]] = {
    "chat": {"choices": [{"text": ""}], "usage": {"completion_tokens": 1}},
    "embed": {"data": [{"embedding": [0.5, -1]}]},
    "rerank": {"results": [{"index": 0, "relevance_score": -1.5}]},
    "decide": {"answers": {"q": {"type": "noul", "noul": 0.5}}},
}


@pytest.mark.parametrize("task", GOOD)
def test_real_answer_is_ready(task: Task) -> None:
    check(task, httpx.Response(200, json=GOOD[task]))


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("chat", {"choices": [], "usage": {"completion_tokens": 1}}),
        ("chat", {"choices": [{"text": ""}], "usage": {"completion_tokens": 0}}),
        ("chat", {"choices": [{"text": ""}]}),
        ("chat", {"choices": "x"}),
        ("chat", [1]),
        ("embed", {"data": []}),
        ("embed", {"data": [{"embedding": [None, None]}]}),
        ("rerank", {"results": [{"relevance_score": None}]}),
        ("decide", {"answers": {}}),
        ("decide", {"answers": {"q": {"type": "noul", "noul": None}}}),
    ],
)
def test_answer_without_its_thing_is_not_ready(task: Task, answer: Any) -> None:
    with pytest.raises(EngineFailed, match=r"its first answer has no (token|embedding|score|answer)"):
        check(task, httpx.Response(200, json=answer))


def test_error_answer_is_told_in_the_engines_words() -> None:
    answer = {"error": {"code": 500, "message": "kernel missing", "type": "server_error"}}
    with pytest.raises(EngineFailed, match="an error: kernel missing"):
        check("chat", httpx.Response(500, json=answer))


def test_program_that_does_not_know_the_name_is_told_where_to_say_it() -> None:
    answer = httpx.Response(404, json={"error": {"message": "The model `own` does not exist."}})
    with pytest.raises(EngineFailed, match=r"does not exist. It was asked for 'own': served_model_name says"):
        check("chat", answer, asked_for="own")


def test_answer_that_is_not_json_is_not_ready() -> None:
    with pytest.raises(EngineFailed, match="not JSON: '<html>'"):
        check("chat", httpx.Response(200, text="<html>"))
