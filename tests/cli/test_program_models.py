"""Models that a program serves, on the command line: `laya plan`, `laya config check` and `show`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from laya.cli.config import config_app

CONFIG = """
models:
  own: {engine: command, cmd: "python -m serve --port ${PORT}", memory: 64MiB, env: {MY_KEY: "abcdef"}}
  learned: {engine: command, cmd: "python -m serve --port ${PORT}", max_seq_len: 4096, max_num_seqs: 8}
"""
Plan = Callable[..., tuple[int, str]]


@pytest.fixture
def config(tmp_path: Path, laya_plan: Plan) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def test_plan_is_what_was_declared(config: Path, laya_plan: Plan) -> None:
    code, out = laya_plan("own", "--config", config, "--memory-budget", "1GiB", "--json")
    plan = json.loads(out)
    assert (code, plan["fits"]) == (0, True)
    assert plan["devices"][0]["terms"] == {"declared": 64 << 20}
    code, out = laya_plan("own", "--config", config, "--memory-budget", "32MiB")
    assert code == 3
    assert "declared" in out


def test_plan_of_a_program_of_which_nothing_is_known_takes_what_is_free(config: Path, laya_plan: Plan) -> None:
    code, out = laya_plan("learned", "--config", config, "--memory-budget", "1GiB")
    assert code == 0
    assert "not_known" in out or "not known" in out
    assert "declare it with memory" in out


def test_plan_of_the_whole_config(config: Path, laya_plan: Plan) -> None:
    code, out = laya_plan("--config", config, "--memory-budget", "1GiB")
    assert code == 0
    assert "2 x any length" in out and "8 x 4096" in out


def test_check_knows_programs_and_names_the_nearest(config: Path) -> None:
    run = CliRunner().invoke(config_app, ["check", str(config)])
    assert run.exit_code == 0, run.output
    assert "models.learned: no memory is declared" in run.output
    config.write_text(CONFIG.replace("python -m serve", "pythn -m serve", 1))
    run = CliRunner().invoke(config_app, ["check", str(config)])
    assert "PATH has no program pythn. Did you mean python" in str(run.exception or run.output)


def test_show_hides_what_may_be_a_key(config: Path) -> None:
    run = CliRunner().invoke(config_app, ["show", str(config)])
    assert "abcdef" not in run.output
    assert "cmd: python -m serve --port ${PORT}" in run.output
