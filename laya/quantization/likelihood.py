"""Owns: what a text's tokens cost each variant of a model, beside the reference, window by window.

Run: `python -m laya.quantization.likelihood < REQUEST.json`; each line it prints is JSON, progress first and the result
last. A process of its own, since llama.cpp ends it where it does not like something. All variants of a request compute
the same window before the next, so that no more than a window of the reference's logits is ever held.

A window is so many tokens of the text; every token but the first of it is scored (where the model wants a token of its
own to begin a text, that one stands before each window, and all are scored).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from laya.errors import EngineFailed, LayaError
from laya.quantization.divergence import Vector, nll_of, token_figures
from laya.quantization.llama_api import Evaluator

WINDOW_TOKENS = 512


class Subject(msgspec.Struct, kw_only=True):
    """A file, and the type of its KV cache; None = the engine's own."""

    name: str
    path: Path
    kv_cache_dtype: str | None = None


class Question(msgspec.Struct, kw_only=True):
    """Which of its choices a model finds likeliest after a prompt."""

    prompt: str
    choices: list[str]


class Request(msgspec.Struct, kw_only=True):
    """subjects: the reference first. out: where figures of each token go, as .npz."""

    subjects: list[Subject]
    text: Path | None
    n_tokens: int
    out: Path
    n_threads: int
    window_tokens: int = WINDOW_TOKENS
    exact: bool = False
    questions: list[Question] = []


class Experts(msgspec.Struct, kw_only=True):
    """Of all tokens in all layers with experts."""

    same_set_share: float
    """How often the same experts were chosen as in the reference."""
    overlap: float
    """Of the chosen experts, how many the reference chose too."""
    least_layer: int
    least_layer_share: float


class Found(msgspec.Struct, kw_only=True):
    """What is not told token by token, by the subject's name."""

    n_tokens: int
    n_windows: int
    experts: dict[str, Experts]
    choices: dict[str, list[int]]  # of each question, the likeliest choice


class _Agreement:
    """Experts of one subject against the reference's, layer by layer."""

    def __init__(self) -> None:
        self.same: dict[int, int] = {}
        self.both: dict[int, int] = {}
        self.rows: dict[int, int] = {}
        self.chosen: dict[int, int] = {}

    def add(self, ours: dict[int, list[list[int]]], theirs: dict[int, list[list[int]]]) -> None:
        if ours.keys() != theirs.keys():
            raise EngineFailed("The variants do not have experts in the same layers: they are not of one model.")
        for layer, rows in ours.items():
            for one, other in zip(rows, theirs[layer], strict=True):
                n_both = len(set(one) & set(other))
                self.same[layer] = self.same.get(layer, 0) + (n_both == len(one) == len(other))
                self.both[layer] = self.both.get(layer, 0) + n_both
                self.chosen[layer] = self.chosen.get(layer, 0) + len(one)
            self.rows[layer] = self.rows.get(layer, 0) + len(rows)

    def told(self) -> Experts:
        shares = {layer: self.same[layer] / self.rows[layer] for layer in self.rows}
        least = min(shares, key=lambda layer: shares[layer])
        return Experts(
            same_set_share=sum(self.same.values()) / sum(self.rows.values()),
            overlap=sum(self.both.values()) / sum(self.chosen.values()),
            least_layer=least,
            least_layer_share=shares[least],
        )


def windows_of(tokens: Sequence[int], n_tokens: int, window_tokens: int) -> list[list[int]]:
    """Whole windows from the start of a text, as many as `n_tokens` are, at least one."""
    wanted = -(-n_tokens // max(1, window_tokens - 1))  # the first token of a window is not predicted
    n_windows = max(1, min(wanted, len(tokens) // window_tokens))
    cut = [list(tokens[at * window_tokens : (at + 1) * window_tokens]) for at in range(n_windows)]
    if len(cut[0]) < 2:
        raise EngineFailed(f"The text has {len(tokens)} tokens: there is nothing to score.")
    return cut


def run(request: Request) -> Found:
    """Raises EngineFailed where a file cannot be loaded or its vocabulary is not the reference's."""
    first = _opened(request, request.subjects[0])
    evaluators = [first]
    try:
        for subject in request.subjects[1:]:
            evaluators.append(_opened(request, subject))
            if evaluators[-1].n_vocab != first.n_vocab:
                raise EngineFailed(
                    f"{subject.name} has {evaluators[-1].n_vocab} tokens, {request.subjects[0].name} {first.n_vocab}: "
                    "what they say of a text cannot be compared token by token."
                )
        names = [subject.name for subject in request.subjects]
        columns, experts, n_windows = _score_text(request, names, evaluators)
        choices = {
            name: [_likeliest(evaluator, each) for each in request.questions]
            for name, evaluator in zip(names, evaluators, strict=True)
        }
        np.savez(request.out, **columns)  # type: ignore[arg-type]
        n_tokens = len(columns.get("window", ()))
        return Found(n_tokens=n_tokens, n_windows=n_windows, experts=experts, choices=choices)
    finally:
        for evaluator in evaluators:
            evaluator.close()


def _opened(request: Request, subject: Subject) -> Evaluator:
    return Evaluator(
        subject.path,
        n_ctx=request.window_tokens + 1,
        n_threads=request.n_threads,
        exact=request.exact,
        collects_experts=True,
        kv_cache_dtype=subject.kv_cache_dtype,
    )


def _score_text(
    request: Request, names: list[str], evaluators: list[Evaluator]
) -> tuple[dict[str, Vector], dict[str, Experts], int]:
    """Figures of each token by `kind/name`, the experts' agreement, and how many windows there were."""
    if request.text is None:
        return {}, {}, 0
    first = evaluators[0]
    tokens = first.tokens_of(request.text.read_text(encoding="utf-8"))
    start = [] if first.first_token is None else [first.first_token]
    windows = windows_of(tokens, request.n_tokens, request.window_tokens)
    agreements = {name: _Agreement() for name in names[1:]}
    parts: dict[str, list[Vector]] = {}
    for number, window in enumerate(windows):
        asked = start + window
        following = np.array(asked[1:], dtype=np.int64)
        reference = _logits(first, asked)[:-1]
        experts = first.expert_ids()
        parts.setdefault("window", []).append(np.full(len(following), number))
        parts.setdefault(f"nll/{names[0]}", []).append(nll_of(reference, following))
        for name, evaluator in zip(names[1:], evaluators[1:], strict=True):
            figures = token_figures(reference, _logits(evaluator, asked)[:-1], following)
            for kind in ("nll", "kl", "same_top", "p_change"):
                parts.setdefault(f"{kind}/{name}", []).append(getattr(figures, kind))
            if experts:
                agreements[name].add(experts, evaluator.expert_ids())
        print(msgspec.json.encode({"window": number + 1, "of": len(windows)}).decode(), flush=True)
    told = {name: agreement.told() for name, agreement in agreements.items() if agreement.rows}
    return {name: np.concatenate(each) for name, each in parts.items()}, told, len(windows)


def _logits(evaluator: Evaluator, tokens: Sequence[int]) -> Any:
    return np.frombuffer(evaluator.logits(tokens), dtype=np.float32).reshape(len(tokens), evaluator.n_vocab)


def _likeliest(evaluator: Evaluator, question: Question) -> int:
    """The choice whose bytes are likeliest after the prompt, per byte: a long one is not worse for its length."""
    start = [] if evaluator.first_token is None else [evaluator.first_token]
    prompt = start + evaluator.tokens_of(question.prompt)
    scores = []
    for choice in question.choices:
        tokens = start + evaluator.tokens_of(question.prompt + choice)
        n_shared = next(
            (at for at, pair in enumerate(zip(prompt, tokens, strict=False)) if pair[0] != pair[1]), len(prompt)
        )
        first = max(1, min(n_shared, len(tokens) - 1))
        following = np.array(tokens[first:], dtype=np.int64)
        nll = nll_of(_logits(evaluator, tokens)[first - 1 : -1], following)
        scores.append(-float(nll.sum()) / max(1, len(choice.strip().encode())))
    return int(np.argmax(scores))


def main() -> int:
    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request, dec_hook=lambda kind, value: kind(value))
        print(msgspec.json.encode({"found": run(request)}).decode(), flush=True)
    except LayaError as error:
        print(error.message, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
