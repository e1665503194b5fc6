"""Owns: the count of chosen experts over documents, and the words between the command line and the process that counts.

That process reads a `Job` as JSON from stdin and prints lines of JSON: `{"done": ..., "of": ...}` tokens, and last a
`Counted`, or `{"error": ...}`. Knows no engine: whoever counts gives a `Router`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from laya.engines.child_start import die_with_parent, enter_group, step_back
from laya.errors import InvalidRequest, LayaError
from laya.texts import Document

WINDOW_TOKENS = 512
"""At most, unless asked otherwise: the logits of a window are kept, and a large vocabulary makes that gigabytes."""


class Job(msgspec.Struct, kw_only=True):
    """What is to be counted."""

    path: str
    documents: list[Document]
    window_tokens: int
    """Of the model's context, at most; a document is cut into as many windows as it needs."""
    n_threads: int
    n_experts: int | None = None
    """Where the file's header told; else the engine tells."""
    group: str | None = None
    """The entrance of the control group that limits the process's memory."""
    nice: int | None = None
    """How far it steps back behind its parent; None: not at all."""
    oom_score_adj: int = 0


class TopicCounts(msgspec.Struct, kw_only=True):
    """Of all documents of one topic."""

    topic: str
    n_tokens: int = 0
    n_windows: int = 0
    layers: dict[int, list[int]] = {}
    """Layer -> assignments of each expert: n_tokens * top_k in all."""


class Counted(msgspec.Struct, kw_only=True):
    """What the process found."""

    n_experts: int
    top_k: int
    window_tokens: int
    topics: list[TopicCounts]


class Router(Protocol):
    """A model that tells which experts it chose."""

    n_experts: int
    window_tokens: int
    first_token: int | None  # with which the model wants each text to begin

    def tokens_of(self, text: str) -> list[int]:
        """By the model's own tokenizer, nothing added."""

    def expert_ids(self, tokens: Sequence[int]) -> dict[int, list[list[int]]]:
        """Layer -> the experts of each token. Raises where the model does not tell."""


def count(router: Router, documents: Sequence[Document], on_progress: Callable[[int, int], None]) -> Counted:
    """Each document alone, in windows; the token with which a model begins every text is not counted.

    on_progress: tokens done, and of how many. Raises ValueError for a text without a token.
    """
    texts = [(document.topic, router.tokens_of(document.text)) for document in documents]
    n_all = sum(len(tokens) for _, tokens in texts)
    start = [] if router.first_token is None else [router.first_token]
    step = router.window_tokens - len(start)
    if step < 1:
        raise InvalidRequest(f"a window of {router.window_tokens} tokens has no room for a text")
    topics: dict[str, TopicCounts] = {}
    n_done, top_k = 0, 0
    for topic, tokens in texts:
        if not tokens:
            raise InvalidRequest(f"a text of the topic '{topic}' has not one token")
        of_topic = topics.setdefault(topic, TopicCounts(topic=topic))
        for at in range(0, len(tokens), step):
            window = tokens[at : at + step]
            chosen = router.expert_ids([*start, *window])
            for layer, rows in chosen.items():
                counts = of_topic.layers.setdefault(layer, [0] * router.n_experts)
                if len(rows) != len(start) + len(window):
                    raise ValueError(f"layer {layer} told the experts of {len(rows)} tokens of {len(start + window)}")
                top_k = max(top_k, len(rows[-1]))
                for row in rows[len(start) :]:
                    for expert in row:
                        if not 0 <= expert < router.n_experts:
                            raise ValueError(f"layer {layer} chose expert {expert}; there are {router.n_experts}")
                        counts[expert] += 1
            of_topic.n_tokens += len(window)
            of_topic.n_windows += 1
            n_done += len(window)
            on_progress(n_done, n_all)
    return Counted(
        n_experts=router.n_experts,
        top_k=top_k,
        window_tokens=router.window_tokens,
        topics=list(topics.values()),
    )


def serve(open_router: Callable[[Job], Router]) -> int:
    """The whole of a process that counts: its exit code. Raises what nobody foresaw."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    if job.nice is not None:
        die_with_parent()
        step_back(job.nice, job.oom_score_adj)
    try:
        enter_group(job.group)
        counted = count(open_router(job), job.documents, lambda done, of: _say({"done": done, "of": of}))
    except (LayaError, OSError, ValueError) as error:
        is_asked = isinstance(error, LayaError) and error.exit_code == InvalidRequest.exit_code
        _say({"error": error.message if isinstance(error, LayaError) else str(error), "is_asked": is_asked})
        return 1
    _say(counted)
    return 0


def _say(value: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()
