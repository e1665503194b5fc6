"""`laya route explain`: which rule, which engines, which one, and faults in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laya.cli.main import main

CONFIG = """
models:
  qwen3-8b: {}
  qwen3-14b: {policy: least_tokens}
  smollm2-135m: {aliases: [small]}
routing:
  pools: {big: [qwen3-8b, qwen3-14b]}
  rules:
    - {name: research, model: auto, headers: {x-team: "re*"}, min_prompt_tokens: 8000, to: big, fallbacks: [small]}
    - {model: auto, to: small}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAYA_HOME", str(tmp_path / "home"))
    return path


def explain(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["route", "explain", *words])
    assert isinstance(end.value.code, int)
    return end.value.code


def test_rule_candidates_scores_and_reason_are_shown(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "auto", "--header", "X-Team: research", "--prompt-tokens", "9000", "--session", "s"]
    assert explain(*words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rule      research: takes it"
    assert lines[1] == "serves    big, policy auto"
    assert sum("0 tokens, 0 sequences" in line for line in lines) == 3, "two candidates, and one to fall back to"
    assert any(line.startswith("chosen    qwen3-") and "hashes to" in line for line in lines)
    assert "else      smollm2-135m, policy auto" in lines
    assert "then      smollm2-135m: it is the only one" in lines


def test_costs_are_shown_where_there_are_any(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain("--model", "small") == 0
    assert "million" not in capsys.readouterr().out
    config.write_text(CONFIG.replace("{aliases: [small]}", "{aliases: [small], cost: {output_per_million: 0.5}}"))
    assert explain("--model", "small") == 0
    out = capsys.readouterr().out
    assert "cost of a million tokens" in out and "0 in, 0.5 out USD" in out


def test_models_of_peers_need_no_file(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(
        "peers: {attic: {url: 'http://attic'}}\n"
        "routing: {pools: {p: [attic/a, attic/b]}, rules: [{model: x, to: p, fallbacks: [attic/c]}]}\n"
    )
    for model, chosen in (("attic/any", "attic/any"), ("x", "attic/a")):
        assert explain("--model", model) == 0
        assert f"->  {chosen} " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["show", "attic/any"])
    assert "'attic/any' is a model of the peer 'attic'" in capsys.readouterr().err


def test_json_tells_the_same(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain("--model", "auto", "--config", str(config), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rule"] == "rule 2" and told["models"] == ["small"]
    assert told["verdicts"][0] == {"rule": "research", "misses": "a prompt of 8000 tokens or more"}
    assert told["tried"][0]["model"] == "smollm2-135m"
    assert [candidate["name"] for candidate in told["tried"][0]["candidates"]] == ["smollm2-135m"]


@pytest.mark.parametrize("words", [["--priority", "bulk"], ["--header", "X-Laya-Priority: bulk"]])
def test_priority_is_that_of_the_option_or_the_header(
    config: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    config.write_text(CONFIG + "    - {model: x, priority: bulk, to: qwen3-8b}\n")
    assert explain("--model", "x", *words) == 0
    assert "rule      rule 3: takes it" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "rule"), [([], "bulk"), (["--priority", "interactive"], "rest")])
def test_key_gives_its_own_priority(
    config: Path, capsys: pytest.CaptureFixture[str], words: list[str], rule: str
) -> None:
    rules = "{name: bulk, model: x, priority: bulk, to: small}, {name: rest, model: x, to: qwen3-8b}"
    config.write_text(
        "models: {smollm2-135m: {aliases: [small]}, qwen3-8b: {}}\n"
        f"routing: {{rules: [{rules}]}}\n"
        f"server: {{api_keys: [{{name: batch, sha256: {'a' * 64}, priority: bulk}}]}}\n"
    )
    assert explain("--model", "x", "--key", "batch", "--config", str(config), *words) == 0
    assert f"rule      {rule}: takes it" in capsys.readouterr().out


def test_request_without_a_rule_goes_to_its_model(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain("--model", "qwen3-14b") == 0
    out = capsys.readouterr().out
    assert "none takes it: the model that it names serves it" in out
    assert "serves    qwen3-14b, policy least_tokens" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "qwen3-8c"], "The model 'qwen3-8c' does not exist"),
        (["--model", "auto", "--header", "x-team"], "--header x-team: expected a name and a value"),
        (["--model", "auto", "--kind", "chats"], "--kind chats: expected chat or completion"),
        (["--model", "auto", "--priority", "high"], "--priority high: expected system or interactive"),
        (["--model", "auto", "-H", "x-laya-priority: high"], "--header x-laya-priority: high: expected system or"),
    ],
)
def test_faults_are_sentences(config: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert explain(*words) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_auto_without_rules_says_what_it_needs(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text("version: 1")
    assert explain("--model", "auto") == 2
    assert "`auto` needs `routing.rules` in config.yaml" in " ".join(capsys.readouterr().err.split())


def test_config_check_knows_what_rules_lead_to(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text("routing:\n  rules:\n  - model: x\n    to: qwen3-8c\n")
    with pytest.raises(SystemExit) as end:
        main(["config", "check", str(config)])
    assert end.value.code == 2
    assert "config.yaml:4: routing.rules.0.to: The model 'qwen3-8c' does not exist" in capsys.readouterr().err
