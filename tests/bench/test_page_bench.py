"""The bench of the page loads it in a real browser, cold, again and on a slow phone, and says where there is none."""

from __future__ import annotations

import json

import pytest

from laya.bench import page


@pytest.mark.skipif(page.chromium() is None, reason="NOT TESTED: no Chromium here")
@pytest.mark.engine
def test_bench_prints_one_json_line_last(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("playwright")
    assert page.main(["--loads", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    first, again, phone = report["rows"]
    for row in (first, again, phone):
        assert 0 < row["dom_interactive_ms"] <= row["scripts_run_ms"] < row["state_shown_ms"]
        assert row["loads"] == 1
    assert again["bytes"] < first["bytes"] / 4, "what did not change is not sent again"
    assert first["bytes"] == pytest.approx(phone["bytes"], rel=0.05)


def test_where_there_is_no_browser_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "chromium", lambda: None)
    assert page.main([]) == 2
    assert "apt install chromium" in capsys.readouterr().err
