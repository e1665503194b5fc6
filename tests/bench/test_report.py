"""The report has a row for every claim, says why where there is no figure, and leaves no half-written file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from laya.bench.report import command, measure_speed, render
from laya.bench.report.bench_desk import Desk, Said
from laya.bench.report.claims import CLAIMS, Claim
from laya.bench.report.finding import VERDICTS, Finding, NotRun
from laya.errors import ConfigError
from tests.conftest import ROOT

IDS = [f"A{n}" for n in range(1, 26)] + [f"B{n}" for n in range(1, 17)] + [f"F{n}" for n in range(1, 8)]


def _row(claim: Claim, **fields: object) -> render.Row:
    return render.Row(claim, Finding(**{"verdict": "holds", "here": "1 | 2 <b>"} | fields), 0.1)  # type: ignore[arg-type]


def _report(rows: list[render.Row]) -> dict[str, object]:
    return render.as_json(rows, command.machine(), 1.0)


def test_every_claim_has_a_row_and_a_measure() -> None:
    assert [claim.id for claim in CLAIMS] == IDS
    assert all(claim.says and claim.article and claim.layer and callable(claim.measure) for claim in CLAIMS)


def test_what_its_tests_left_out_here_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "SKIPPED [2] tests/gateway/test_openai_js.py:28: no npm here\n1 passed, 2 skipped in 3.2s"
    monkeypatch.setattr(Desk, "_once", lambda *_: Said(0, said, ""))
    assert Desk().tests("tests/bench") == "1 passed, 2 left out here: no npm here"


def test_tests_that_rows_name_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their names alone: nothing is run."""
    named: list[str] = []

    def only_named(self: Desk, *nodes: str) -> str:
        named.extend(nodes)
        return "1 passed"

    def nothing(self: Desk, *words: str) -> None:
        raise NotRun("nothing is run")

    monkeypatch.setattr(Desk, "tests", only_named)
    monkeypatch.setattr(Desk, "laya", nothing)
    monkeypatch.setattr(Desk, "tool", nothing)
    for claim in CLAIMS:
        try:
            claim.measure(Desk())
        except NotRun:
            continue
    assert len(named) > 10
    for node in named:
        path, _, name = node.partition("::")
        assert f"def {name}" in (ROOT / path).read_text(), node


def test_rows_of_the_planner_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--only", "F5", "--out", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (row,) = report["rows"]
    assert (row["verdict"], row["ratios"]) == ("false", {"counted/held": 4.0})
    assert report["verdicts"] == dict.fromkeys(VERDICTS, 0) | {"false": 1}
    assert {path.name for path in tmp_path.iterdir()} >= {"report.html", "report.md", "report.json"}
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert command.main(["--only", "F5", "--against", str(tmp_path / "report.json"), "--json"]) == 0


def test_row_that_cannot_be_measured_says_why() -> None:
    finding = command.measured(CLAIMS[:1], Desk(deadline_s=0), Console(quiet=True))[0].finding
    assert finding.verdict == "not run"
    assert "torch" in finding.here or "time of the whole report" in finding.here


def test_pages_are_whole_and_need_nothing_else() -> None:
    rows = [_row(CLAIMS[0], ratios={"eager/fused": 3.0}), _row(CLAIMS[1], verdict="not run", here="no GPU")]
    report = _report(rows)
    html = render.html(report, ["<svg></svg>"])
    assert "1 | 2 &lt;b&gt;" in html
    assert "<script" not in html and "<link" not in html and "src=" not in html
    table = [line for line in render.markdown(report, []).splitlines() if line.startswith("| A")]
    assert table[0].count(" | ") == table[1].count(" | ") == 6


def test_interrupted_report_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [_row(CLAIMS[0])]
    monkeypatch.setattr(render, "plots", lambda rows: {})
    render.write(tmp_path, _report(rows), rows)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}

    def interrupted(*args: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(render, "markdown", interrupted)
    with pytest.raises(KeyboardInterrupt):
        render.write(tmp_path, _report([_row(CLAIMS[1])]), rows)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_ratios_of_two_runs_are_held_together() -> None:
    before = [{"id": "A1", "ratios": {"x": 2.0, "y": 1.0}}]
    assert command.moved([{"id": "A1", "ratios": {"x": 2.2, "y": 1.2, "new": 9.0}}], before) == {"A1 y": 1.2}


def test_what_could_not_be_written_or_compared_is_told_before_the_minutes(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    for words, said in (
        (["--against", tmp_path / "none.json"], "--against .*none.json: No such file"),
        (["--against", tmp_path / "file"], "expected the report.json of an earlier report"),
        (["--out", tmp_path / "file"], "no folder can be made there"),
    ):
        with pytest.raises(ConfigError, match=said):
            command.main([*map(str, words), "--only", "A17"])


@pytest.mark.parametrize(
    ("points", "verdict"), [([[0, 0.1, 0.3], [0.1, None, 0.2]], "holds"), ([[0, 0.4, 0.3]], "false"), ([], None)]
)
def test_cache_that_nobody_told_of_is_no_cache_that_held(points: list[object], verdict: str | None) -> None:
    desk = Desk()
    desk.laya = lambda *words: {"engines": [{"rows": [{"sessions": 1, "kv_use": points}]}]}  # type: ignore[method-assign]
    if verdict is None:
        with pytest.raises(NotRun, match="was not told"):
            measure_speed.long_run(desk)
    else:
        assert measure_speed.long_run(desk).verdict == verdict
