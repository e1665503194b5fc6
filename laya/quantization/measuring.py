"""Owns: having variants score a text, in children that hold as many at once as memory allows, and summing up.

The reference is computed again in each child. Knows no table.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from laya.engines.child_start import die_with_parent
from laya.errors import EngineFailed, InsufficientMemory
from laya.memory import Machine, plan_file, size_text
from laya.quantization.likelihood import Experts, Found, Question, Request, Subject
from laya.quantization.statistics import bootstrap
from laya.quantization.verdict import Likelihood
from laya.texts import load_set
from laya.types import AskedSettings

PIECE_CHARACTERS = 2000
_PROCESS_BYTES = 160 << 20  # Python, numpy and the engine's library


class Measured(msgspec.Struct, kw_only=True):
    """By variant."""

    likelihood: dict[str, Likelihood]
    choices: dict[str, list[int]]


def mixed_text(name: str) -> str:
    """A built-in set, its topics in turn by pieces, so that any part of it has of all."""
    texts = [document.text for document in load_set(name)]
    longest = max(map(len, texts))
    pieces = [
        text[at : at + PIECE_CHARACTERS]
        for at in range(0, longest, PIECE_CHARACTERS)
        for text in texts
        if at < len(text)
    ]
    return "\n\n".join(pieces)


def need_bytes(subject: Subject, window_tokens: int, n_vocab: int, n_threads: int) -> int:
    """What a child holds for one subject: the plan of a window's context, and the logits of all its tokens twice."""
    kv = subject.kv_cache_dtype or "f16"
    asked = AskedSettings(
        max_num_seqs=1, max_seq_len=window_tokens + 1, kv_cache_dtype=kv, n_threads=n_threads, gpu_layers=0
    )
    plan = plan_file(subject.path, asked, Machine().budget(), model_id=subject.name)
    return plan.need_bytes + 2 * 4 * (window_tokens + 1) * n_vocab


def groups_of(subjects: Sequence[Subject], needs: Sequence[int], budget_bytes: int) -> list[list[Subject]]:
    """The reference with as many others as fit beside it, until all were in one. Raises InsufficientMemory."""
    first, rest = subjects[0], list(zip(subjects[1:], needs[1:], strict=True))
    held = _PROCESS_BYTES + needs[0]
    for name, need in ((first.name, held), *((each.name, held + need) for each, need in rest)):
        if need > budget_bytes:
            words = f"Scoring a text by '{name}'{' beside ' + repr(first.name) if name != first.name else ''} takes"
            raise InsufficientMemory(
                f"{words} {size_text(need)}; {size_text(budget_bytes)} may be used.",
                need_bytes=need,
                available_bytes=budget_bytes,
                limit="memory available",
                suggestions=[],
            )
    groups: list[list[Subject]] = [[first]]
    used = held
    for subject, need in rest:
        if used + need > budget_bytes:
            groups.append([first])
            used = held
        groups[-1].append(subject)
        used += need
    return groups


def measure(
    subjects: Sequence[Subject],
    *,
    text: Path | None,
    n_tokens: int,
    window_tokens: int,
    n_vocab: int,
    n_threads: int,
    questions: list[Question],
    folder: Path,
    tell: Callable[[str], None],
    exact: bool = False,
) -> Measured:
    """subjects: the reference first. Raises InsufficientMemory, and EngineFailed with what the child said."""
    needs = [need_bytes(each, window_tokens, n_vocab, n_threads) for each in subjects]
    measured = Measured(likelihood={}, choices={})
    for number, group in enumerate(groups_of(subjects, needs, Machine().budget().bytes)):
        out = folder / f"tokens-{number}.npz"
        request = Request(
            subjects=group,
            text=text,
            n_tokens=n_tokens,
            out=out,
            n_threads=n_threads,
            window_tokens=window_tokens,
            exact=exact,
            questions=questions,
        )
        found = _child(request, tell)
        names = [each.name for each in group]
        measured.choices |= found.choices
        if text is not None:
            with np.load(out) as columns:
                figures = {name: columns[name] for name in columns.files}
            told = (_summary(figures, name, names[0], found) for name in names)
            measured.likelihood |= dict(zip(names, told, strict=True))
        out.unlink()
    return measured


def _child(request: Request, tell: Callable[[str], None]) -> Found:
    words = ", ".join(each.name for each in request.subjects)
    tell(f"text: {words}")
    child = subprocess.Popen(
        [sys.executable, "-m", "laya.quantization.likelihood"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=die_with_parent,
    )
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    found: Found | None = None
    try:
        child.stdin.write(msgspec.json.encode(request, enc_hook=str))
        child.stdin.close()
        for line in child.stdout:
            said = msgspec.json.decode(line)
            if "found" in said:
                found = msgspec.convert(said["found"], Found)
            else:
                tell(f"text: window {said['window']} of {said['of']}, {words}")
        errors = child.stderr.read().decode(errors="replace").strip()
        code = child.wait()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        child.stderr.close()
    if found is None:
        last = errors.rpartition("\n")[2]
        raise EngineFailed(f"The evaluation of {words} ended with {code}: {last or 'it said nothing'}")
    return found


def _summary(figures: dict[str, np.ndarray], name: str, reference: str, found: Found) -> Likelihood:
    windows, nll = figures["window"], figures[f"nll/{name}"]
    told = Likelihood(n_tokens=found.n_tokens, n_windows=found.n_windows, perplexity=bootstrap(nll, windows, np.exp))
    if name == reference:
        return told
    kl, change = figures[f"kl/{name}"], figures[f"p_change/{name}"]
    told.ppl_ratio = bootstrap(nll - figures[f"nll/{reference}"], windows, np.exp)
    told.mean_kl = bootstrap(kl, windows)
    told.kl_p99, told.max_kl = float(np.quantile(kl, 0.99)), float(kl.max())
    told.same_top_share = bootstrap(figures[f"same_top/{name}"].astype(np.float64), windows)
    told.rms_p_change = float(np.sqrt(np.mean(change**2)))
    experts: Experts | None = found.experts.get(name)
    if experts is not None:
        told.same_experts_share, told.expert_overlap = experts.same_set_share, experts.overlap
        told.least_experts_layer, told.least_experts_share = experts.least_layer, experts.least_layer_share
    return told
