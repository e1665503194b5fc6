"""Models that a program serves, on the command line: `laya plan`, `laya config check` and `show`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from laya.cli.config import config_app
from laya.cli.models import list_models, show
from laya.errors import InvalidRequest

CONFIG = """
models:
  own: {engine: command, cmd: "python -m serve --port ${PORT}", memory: 64MiB, env: {MY_KEY: "abcdef"}}
  learned: {engine: command, cmd: "python -m serve --port ${PORT}", max_seq_len: 4096, max_num_seqs: 8}
"""
Plan = Callable[..., tuple[int, str]]
REMOTE = "  far: {engine: remote, urls: ['https://a.example/v1', 'https://b.example/v1'], key_env: MY_KEY}\n"


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


def test_remote_takes_nothing_here_and_its_settings_are_checked(config: Path, laya_plan: Plan) -> None:
    config.write_text(CONFIG + REMOTE)
    code, out = laya_plan("far", "--config", config)
    assert code == 0
    assert "another server holds it" in out
    assert "https://a.example/v1" in out and "https://b.example/v1" in out
    run = CliRunner().invoke(config_app, ["check", str(config)])
    assert run.exit_code == 0
    assert "models.far: the environment has no MY_KEY (key_env)" in run.output
    with pytest.raises(InvalidRequest, match="laya plan far"):
        show("far", config_file=config)
    config.write_text(
        CONFIG + REMOTE.replace("https://b", "http://b").replace("https://a.example", "http://127.0.0.1:9")
    )
    run = CliRunner().invoke(config_app, ["check", str(config)])
    assert "models.far: whoever is on the way to http://b.example/v1 reads the key" in run.output
    assert "127.0.0.1" not in run.output


def test_list_shows_what_the_configuration_names(
    config: Path, laya_plan: Plan, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    more = '  gone: {engine: command, cmd: "pythn -m serve --port ${PORT}"}\n  nowhere: {source: ./no.gguf}\n'
    config.write_text(CONFIG.replace("64MiB", "900GiB") + REMOTE + more)
    list_models(found=False, as_json=True, config_file=config)
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert [rows[name]["origin"] for name in ("own", "far", "gone", "nowhere")] == [
        "program",
        "remote",
        "program",
        "config",
    ]
    assert [rows[name]["fits"] for name in ("own", "learned", "far", "gone")] == [False, True, True, None]
    assert (rows["learned"]["max_num_seqs"], rows["learned"]["max_seq_len"], rows["far"]["max_seq_len"]) == (
        8,
        4096,
        None,
    )
    assert "no program pythn" in rows["gone"]["error"] and "no such file" in rows["nowhere"]["error"]
    list_models(found=False, as_json=False, config_file=config)
    assert "32 x any" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("'https://a.example/v1'", "'https://me:secret@a.example/v1'", "holds no user and no password"),
        ("key_env: MY_KEY", "headers: {Authorization: x}", "use key_env or key_file"),
        ("key_env: MY_KEY", "memory: 6GiB", "goes with engine: command"),
        ("'https://a.example/v1'", "'ftp://a'", "is no address: write https://host/v1"),
        ("urls: ['https://a.example/v1', 'https://b.example/v1'], ", "", "needs url: https://host/v1"),
        ("'https://a.example/v1'", "'https://a.example:0/v1'", "is no address: write https://host/v1"),
        ("'https://a.example/v1'", "'https://b.example/v1'", "stands there twice"),
    ],
)
def test_remote_that_cannot_be_is_refused(config: Path, right: str, wrong: str, words: str) -> None:
    config.write_text(CONFIG + REMOTE.replace(right, wrong))
    run = CliRunner().invoke(config_app, ["check", str(config)])
    assert words in str(run.exception)
    assert "secret" not in str(run.exception)


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
