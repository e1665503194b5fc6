"""The verbs are all there, and only the one that is asked for is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.main import get_command

from laya.cli.bench import BENCHES
from laya.cli.main import main
from laya.cli.verbs import VERBS, app_for


def commands(*words: str) -> list[str]:
    return list(getattr(get_command(app_for(words)), "commands", {}))


def test_help_and_unknown_words_know_every_verb_in_its_order() -> None:
    assert sorted(commands()) == sorted(commands("--help")) == sorted(commands("nosuchverb")) == sorted(VERBS)
    assert [name for name in commands() if not VERBS[name].is_group] == [
        name for name in VERBS if not VERBS[name].is_group
    ]


def test_verb_is_loaded_alone() -> None:
    for name in VERBS:
        assert commands(name) == [name]


def test_plan_loads_neither_a_server_nor_a_client() -> None:
    script = (
        "import sys\n"
        "from laya.cli.verbs import app_for\n"
        "app_for(['plan'])\n"
        "heavy = {'uvicorn', 'httpx', 'xllamacpp', 'huggingface_hub', 'starlette'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", BENCHES)
def test_help_of_a_bench_is_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", name, "--help"])
    said = capsys.readouterr().out
    assert (ended.value.code, said.startswith("usage: ")) == (0, True)
    assert name in said and "Owns:" not in said


@pytest.mark.parametrize("words", [("--help",), ("-h",)])
def test_help_of_all_benches_names_them(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *words])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(name in said for name in BENCHES)


def test_value_that_an_option_does_not_take_is_said_with_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (["serve", "--port=-1"], "--port: expected a number >= 0, got -1."),
        (["key", "create", "x", "--max-concurrent", "0"], "--max-concurrent: expected a number >= 1, got 0."),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2 and told in " ".join(capsys.readouterr().err.split())
