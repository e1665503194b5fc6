"""The figures of `laya eval` against formulas written another way, and what makes an answer right."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from laya.errors import ConfigError, InsufficientMemory
from laya.quantization.divergence import nll_of, token_figures
from laya.quantization.inspection import Flag
from laya.quantization.likelihood import Subject, windows_of
from laya.quantization.measuring import groups_of
from laya.quantization.report import NO_INTERVALS, Variant, definitions, quality_rows, scored_words
from laya.quantization.statistics import Interval, bootstrap, sign_test, wilson
from laya.quantization.tasks import KINDS, SETS, Task, chosen, is_right, load_set
from laya.quantization.verdict import Likelihood, flags_of, limit_of, worse_than_fewer_bits

INVALID_LINES = [
    ("{", "line 1"),
    ('{"id": "a", "kind": "exact", "prompt": "p"}', "exact needs an answer"),
    ('{"id": "a", "kind": "choice", "prompt": "p", "choices": ["x", "y"], "answer": "z"}', "one of them"),
    ('{"id": "a", "kind": "regex", "prompt": "p", "pattern": "("}', "line 1"),
    ('{"id": "a", "kind": "json_schema", "prompt": "p", "schema": {"type": "nothing"}}', "line 1"),
    ('{"id": "a", "kind": "guess", "prompt": "p"}', "guess"),
    ('{"id": "a", "kind": "exact", "prompt": "p", "anwser": "x"}', "anwser"),
    ("", "no text in it"),
    (" \n\n", "no text in it"),
]


def test_divergence_is_torchs() -> None:
    random = np.random.default_rng(1)
    ours = (random.standard_normal((150, 300)) * 4).astype(np.float32)
    theirs = ours + (random.standard_normal(ours.shape) * 0.3).astype(np.float32)
    following = random.integers(300, size=150)
    found = token_figures(ours, theirs, following)
    p, q = torch.from_numpy(ours).double().log_softmax(-1), torch.from_numpy(theirs).double().log_softmax(-1)
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    np.testing.assert_allclose(found.kl, kl.numpy(), atol=1e-6)
    nll = torch.nn.functional.nll_loss(q, torch.from_numpy(following), reduction="none")
    np.testing.assert_allclose(found.nll, nll.numpy(), atol=1e-5)
    np.testing.assert_allclose(nll_of(theirs, following), nll.numpy(), atol=1e-5)
    assert found.same_top.mean() == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    change = (q.exp() - p.exp()).gather(1, torch.from_numpy(following)[:, None])[:, 0]
    np.testing.assert_allclose(found.p_change, change.numpy(), atol=1e-6)
    assert token_figures(ours, ours, following).kl.max() == 0


def test_wilson_is_the_root_of_its_equation() -> None:
    for n_right, n in ((0, 10), (7, 10), (10, 10), (480, 500)):
        found = wilson(n_right, n)
        for bound in (found.low, found.high):
            if 1e-9 < bound < 1 - 1e-9:
                assert abs(n_right / n - bound) == pytest.approx(
                    1.959964 * math.sqrt(bound * (1 - bound) / n), rel=1e-4
                )
        assert 0 <= found.low <= found.value <= found.high <= 1
    assert wilson(8, 10).low == pytest.approx(0.4902, abs=1e-4) and wilson(0, 0).high == 1


def test_bootstrap_draws_windows() -> None:
    random = np.random.default_rng(2)
    windows = np.repeat(np.arange(40), 25)
    values = np.repeat(random.standard_normal(40), 25)  # tokens of one window say the same
    found = bootstrap(values, windows)
    error = values.reshape(40, 25).mean(1).std() / math.sqrt(40)
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.15)
    ratio = bootstrap(values, windows, np.exp)
    assert (ratio.low, ratio.high) == pytest.approx((math.exp(found.low), math.exp(found.high)))
    alone = bootstrap(values, np.zeros_like(windows), np.exp)
    assert (alone.low, alone.high) == (None, None) and alone.least == alone.most == alone.value


def test_sign_test_is_the_binomial() -> None:
    assert sign_test(0, 0) == sign_test(3, 3) == 1
    assert sign_test(5, 0) == sign_test(0, 5) == pytest.approx(2 / 32)
    assert sign_test(8, 2) == pytest.approx(2 * (45 + 10 + 1) / 1024)


def test_windows_are_whole_and_never_none() -> None:
    assert windows_of(range(100), 62, 32) == [list(range(32)), list(range(32, 64))]  # 31 are scored of each
    assert len(windows_of(range(100), 63, 32)) == len(windows_of(range(100), 900, 32)) == 3
    assert windows_of(range(10), 64, 32) == [list(range(10))]
    with pytest.raises(Exception, match="nothing to score"):
        windows_of([1], 64, 32)


def test_variants_share_a_child_where_memory_allows() -> None:
    subjects = [Subject(name=name, path=Path(name)) for name in ("f16", "q8_0", "q4_0")]
    gib = 1 << 30
    assert [len(group) for group in groups_of(subjects, [2 * gib, gib, gib], 8 * gib)] == [3]
    groups = groups_of(subjects, [2 * gib, gib, gib], int(3.5 * gib))
    assert [[each.name for each in group] for group in groups] == [["f16", "q8_0"], ["f16", "q4_0"]]
    with pytest.raises(InsufficientMemory, match=r"'q8_0' beside 'f16' takes 3\.2 GiB; 3\.0 GiB may be used"):
        groups_of(subjects, [2 * gib, gib, gib], 3 * gib)


@pytest.mark.parametrize(
    ("task", "right", "wrong"),
    [
        ({"kind": "exact", "answer": ["5", "five"]}, [" Five.", "5"], ["5 apples", ""]),
        ({"kind": "contains", "answer": "Rome"}, ["It is rome, of course"], ["Paris"]),
        ({"kind": "regex", "pattern": r"\b\d{4}\b"}, ["in 1999"], ["in 19999"]),
        (
            {"kind": "choice", "choices": [" ice", " fire"], "answer": " ice"},
            ["A", "A) ice", "(A)", "ice"],
            ["B", "Any"],
        ),
        (
            {"kind": "json_schema", "schema": {"type": "object", "required": ["n"]}, "answer": {"n": 3}},
            ['{"n": 3}'],
            ['{"n": 4}', "{}", "n = 3", "[3]"],
        ),
    ],
)
def test_answers_that_are_right(task: dict[str, object], right: list[str], wrong: list[str]) -> None:
    made = Task(id="a", prompt="p", **task)  # type: ignore[arg-type]
    assert [text for text in right if not is_right(made, text)] == []
    assert [text for text in wrong if is_right(made, text)] == []


def test_choice_that_is_named_twice_is_none() -> None:
    task = Task(id="a", kind="choice", prompt="p", choices=["ice", "fire"], answer="ice")
    assert chosen(task, "ice or fire") is None and "A) ice\nB) fire" in task.asked


@pytest.mark.parametrize(("line", "told"), INVALID_LINES)
def test_item_that_is_wrong_is_told_with_its_line(line: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=told):
        load_set(str(path))


def test_built_in_set_is_whole() -> None:
    with pytest.raises(ConfigError, match="did you mean basic"):
        load_set("basik")
    for name in SETS:
        tasks = load_set(name)
        assert 30 <= len(tasks) <= 60 and {task.kind for task in tasks} == set(KINDS)
        for task in tasks:
            if task.kind in ("exact", "contains", "choice"):
                answer = task.answer[0] if isinstance(task.answer, list) else task.answer
                assert is_right(task, answer), task.id
            if task.kind == "json_schema":
                assert is_right(task, json.dumps(task.answer)), task.id


def found(kl: float, same_top: float, ratio: float, experts: float | None = None) -> Likelihood:
    def exact(value: float) -> Interval:
        return Interval(value, value, value)

    return Likelihood(
        n_tokens=100, n_windows=4, perplexity=exact(10), mean_kl=exact(kl), same_top_share=exact(same_top),
        ppl_ratio=exact(ratio), same_experts_share=experts,
    )  # fmt: skip


def test_figures_beyond_a_type_are_flagged() -> None:
    assert flags_of(found(0.004, 0.96, 1.002, 0.97), limit_of(8.5)) == []
    assert flags_of(found(0.2, 0.75, 1.247), limit_of(4.5)) == []  # what 4 bits do to a small model
    told = [flag.what for flag in flags_of(found(0.2, 0.75, 1.247, 0.5), limit_of(8.5))]
    assert len(told) == 4 and told[0] == "mean KL divergence 0.2; at most 0.02 is usual at 8 bits"
    assert flags_of(found(math.nan, 1, math.nan), limit_of(16))[0] == Flag(
        what="mean KL divergence nan; at most 0.01 is usual at 16 bits"
    )
    assert limit_of(16, 4.5) == limit_of(4.5) != limit_of(16)
    rows = [("q8_0", 8.5, found(0.3, 0.9, 1.1)), ("q4_0", 4.5, found(0.2, 0.8, 1.2)), ("f16", 16.0, found(0, 1, 1))]
    assert list(worse_than_fewer_bits(rows)) == ["q8_0"]


def test_how_much_of_a_text_was_scored_is_said() -> None:
    assert scored_words(511, 1, 100) == "511 tokens scored in 1 window (100 were asked for; windows are whole)"
    assert scored_words(1022, 2, 8192).endswith("(8192 were asked for; the text has no more whole windows)")
    exact = Interval(1.5, None, None)
    one = Likelihood(n_tokens=511, n_windows=1, perplexity=exact, ppl_ratio=exact, mean_kl=exact)
    assert NO_INTERVALS in definitions([one])
    row = Variant(name="a", path=Path("a"), kv_cache_dtype="f16", file_bytes=1, bits=4.0, types={}, likelihood=one)
    assert quality_rows([row])[1][:3] == ["a", "1.50", "1.5000"]
