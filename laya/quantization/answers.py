"""Owns: having a server of OpenAI's API answer a set of tasks, and counting what was right. Knows no engine.

Nothing is sampled: temperature 0. A model with a chat template is asked as a chat; another one goes on with
"Question: ... Answer:". Choices are asked by letters here; by likelihood they are `likelihood`'s.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from laya.errors import ConfigError, EngineFailed, nearest
from laya.quantization.statistics import Interval, sign_test, wilson
from laya.quantization.tasks import KINDS, Task, chosen, is_right, normal

ATTEMPTS, MOST_WAIT_S = 4, 30.0
ANSWER_S = 600.0
N_EXAMPLES = 6
_BUSY = frozenset({429, 500, 502, 503, 504})


class Server(msgspec.Struct, kw_only=True):
    """A model at an address. name: as it is told of. is_chat: False = it goes on with a text."""

    name: str
    base_url: str  # with /v1
    model: str
    key: str | None = None
    is_chat: bool = True


class Answered(msgspec.Struct, kw_only=True):
    """What a model said to each task, and whether it was right."""

    texts: dict[str, str]
    right: dict[str, bool]


class Accuracy(msgspec.Struct, kw_only=True):
    """Right answers: all, and by kind."""

    n: int
    n_right: int
    share: Interval
    kinds: dict[str, tuple[int, int]]  # kind -> right, asked
    same_answers_share: float | None = None  # as the reference's, word by word


class Difference(msgspec.Struct, kw_only=True):
    """A task that two models answered differently."""

    id: str
    prompt: str
    ours: str
    theirs: str
    is_ours_right: bool
    is_theirs_right: bool


class Against(msgspec.Struct, kw_only=True):
    """Two models on the same tasks. Wins are tasks that only ours had right; p_value is of the sign test on them."""

    ours: str
    theirs: str
    n: int
    our_accuracy: Accuracy
    their_accuracy: Accuracy
    same_answers_share: Interval
    same_verdict_share: Interval
    n_wins: int
    n_losses: int
    p_value: float
    examples: list[Difference]
    note: str = "perplexity is not compared: two tokenizers cut a text into other tokens, and an API tells none of them"


def check_there(server: Server) -> None:
    """Raises EngineFailed where nobody answers or the key is not taken, ConfigError where it has not that model."""
    with _client(server) as client:
        try:
            response = client.get(f"{server.base_url}/models", timeout=MOST_WAIT_S)
            if response.status_code in (401, 403):
                raise EngineFailed(f"{server.base_url} answered {response.status_code}: {response.text[:300]}")
            known = _models(response)
            if not known or server.model in known:
                return
            # an alias may be no item of the list
            own = client.get(f"{server.base_url}/models/{quote(server.model, safe='')}", timeout=MOST_WAIT_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineFailed(f"{server.base_url} did not answer: {error or type(error).__name__}") from None
    if own.status_code == 404:
        close = nearest(server.model, known)
        hint = f"did you mean {close}?" if close else f"it has {', '.join(known[:8])}"
        raise ConfigError(f"{server.base_url} has no model {server.model}; {hint}", param="against")


def _models(response: httpx.Response) -> list[str]:
    try:
        return [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return []  # not every server tells its models


def _client(server: Server) -> httpx.Client:
    headers = {"authorization": f"Bearer {server.key}"} if server.key else {}
    # the addresses of Laya's own models are not for a proxy
    is_here = httpx.URL(server.base_url).host in ("127.0.0.1", "localhost", "::1")
    return httpx.Client(headers=headers, timeout=ANSWER_S, trust_env=not is_here)


def ask_all(server: Server, tasks: Iterable[Task]) -> Answered:
    """Every task, one after the other. Raises EngineFailed naming the server and what it said."""
    texts: dict[str, str] = {}
    right: dict[str, bool] = {}
    with _client(server) as client:
        for task in tasks:
            texts[task.id] = text = _ask(client, server, task)
            right[task.id] = is_right(task, text)
    return Answered(texts=texts, right=right)


def accuracy(tasks: Sequence[Task], answered: Answered, reference: Answered | None = None) -> Accuracy:
    kinds: dict[str, tuple[int, int]] = {
        kind: (sum(answered.right[task.id] for task in of_kind), len(of_kind))
        for kind in KINDS
        if (of_kind := [task for task in tasks if task.kind == kind])
    }
    n_right = sum(answered.right[task.id] for task in tasks)
    n_same = (
        sum(normal(answered.texts[task.id]) == normal(reference.texts[task.id]) for task in tasks) if reference else 0
    )
    return Accuracy(
        n=len(tasks),
        n_right=n_right,
        share=wilson(n_right, len(tasks)),
        kinds=kinds,
        same_answers_share=n_same / len(tasks) if reference else None,
    )


def against(tasks: Sequence[Task], ours: tuple[str, Answered], theirs: tuple[str, Answered]) -> Against:
    (our_name, we), (their_name, they) = ours, theirs
    n_same = sum(_said(task, we) == _said(task, they) for task in tasks)
    n_verdict = sum(we.right[task.id] == they.right[task.id] for task in tasks)
    wins = [task for task in tasks if we.right[task.id] and not they.right[task.id]]
    losses = [task for task in tasks if they.right[task.id] and not we.right[task.id]]
    others = [task for task in tasks if task not in wins + losses and _said(task, we) != _said(task, they)]
    # of each sort some: what they disagree on says more than how often
    shown = [*losses[: N_EXAMPLES // 2], *wins[: N_EXAMPLES // 2]]
    shown += [task for task in losses + wins + others if task not in shown][: N_EXAMPLES - len(shown)]
    return Against(
        ours=our_name,
        theirs=their_name,
        n=len(tasks),
        our_accuracy=accuracy(tasks, we),
        their_accuracy=accuracy(tasks, they),
        same_answers_share=wilson(n_same, len(tasks)),
        same_verdict_share=wilson(n_verdict, len(tasks)),
        n_wins=len(wins),
        n_losses=len(losses),
        p_value=sign_test(len(wins), len(losses)),
        examples=[
            Difference(
                id=task.id,
                prompt=task.prompt,
                ours=we.texts[task.id],
                theirs=they.texts[task.id],
                is_ours_right=we.right[task.id],
                is_theirs_right=they.right[task.id],
            )
            for task in shown
        ],
    )


def _said(task: Task, answered: Answered) -> str:
    """What counts of an answer: of a choice which one it is, however it was said."""
    text = answered.texts[task.id]
    return (task.kind == "choice" and chosen(task, text)) or normal(text)


def _ask(client: httpx.Client, server: Server, task: Task) -> str:
    body: dict[str, Any] = {"model": server.model, "temperature": 0, "max_tokens": task.max_tokens}
    if server.is_chat:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": task.asked}]
        if task.schema is not None:
            schema = {"name": "answer", "schema": task.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
    else:
        path, body["prompt"] = "completions", f"Question: {task.asked}\nAnswer:"
        body |= {"json_schema": task.schema} if task.schema is not None else {"stop": ["\n"]}
    answer = _posted(client, server, path, body)
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] if server.is_chat else choice["text"]
    except (KeyError, IndexError, TypeError):
        raise EngineFailed(f"{server.name} answered without a choice: {str(answer)[:300]}") from None
    return str(text or "").strip()


def _posted(client: httpx.Client, server: Server, path: str, body: dict[str, Any]) -> Any:
    url = f"{server.base_url.rstrip('/')}/{path}"
    for attempt in range(1, ATTEMPTS + 1):
        try:
            response = client.post(url, json=body)
        except httpx.HTTPError as error:
            raise EngineFailed(
                f"{server.name} at {server.base_url} did not answer: {error or type(error).__name__}"
            ) from None
        if response.status_code == 200:
            try:
                return response.json()
            except ValueError:
                raise EngineFailed(f"{server.name} at {server.base_url} answered what is no JSON.") from None
        if response.status_code == 400 and "response_format" in body:
            body = {name: value for name, value in body.items() if name != "response_format"}  # it may not know that
            continue
        if response.status_code not in _BUSY or attempt == ATTEMPTS:
            break
        wait = response.headers.get("retry-after", "")
        time.sleep(min(MOST_WAIT_S, float(wait) if wait.isdecimal() else 2.0**attempt))
    raise EngineFailed(f"{server.name} at {server.base_url} answered {response.status_code}: {response.text[:300]}")
