"""Every command and program of the pages runs as pasted, is run by another test, or says why it is not."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import msgspec
import pytest
import yaml

from laya.cli.main import main
from laya.config.reference import json_schema
from tests.conftest import RunningServer
from tests.docs.pages import PAGES, ROOT, blocks, commands, name_of
from tests.docs.runs import ALONE, ELSEWHERE, NOT_RUN, SERVED

DEFAULT_URL = "http://127.0.0.1:8000"
ALL = {command.words: command.where for page in PAGES for command in commands(page)}
CURLS = sorted({words for words in ALL if words.startswith("curl") and "/chat/completions" in words})
PROGRAMS = ("README.md", "docs/api.md", "docs/python.md")  # pasted in this order, one after another
OTHER_PROGRAMS = {"docs/modeling.md": "tests/modeling/test_checkpoint.py", "examples/": "tests"}
LLAMA_SWAP = "models:\n  small:\n    cmd: llama-server --port ${{PORT}} -m {path} -c 2048\n    ttl: 60\n"
OTHER_SETTINGS = {"dataset_path"}  # a key by which another program's file is known: lm-eval's
SECRET = re.compile(r"\$\{env\.\w+\}")


def tables_of(words: str) -> list[str]:
    exact = [words] if words in ALONE or words in SERVED else []
    return exact or [begin for begin in ELSEWHERE | NOT_RUN if words.startswith(begin)]


def test_each_command_is_run_or_says_why_not() -> None:
    unknown = {words: where for words, where in ALL.items() if not tables_of(words)}
    assert not unknown, "run it, or say in tests/docs/runs.py why not"
    used = {entry for words in ALL for entry in tables_of(words)}
    assert not (ALONE | SERVED | ELSEWHERE | NOT_RUN).keys() - used, "on no page any more"


def test_tests_that_run_commands_elsewhere_are_there() -> None:
    for begin, test in (ELSEWHERE | OTHER_PROGRAMS).items():
        assert (ROOT / test).exists(), begin


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, laya_home: Path, smollm2_path: Path) -> Path:
    """Where a reader is: beside `examples`, with the files that the pages tell of."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "config.yaml").write_text(LLAMA_SWAP.format(path=smollm2_path))
    (tmp_path / "mario").mkdir()
    (tmp_path / "mario" / "Modelfile").write_text(f"FROM {smollm2_path}\nPARAMETER num_ctx 2048\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAYA_HOME", str(laya_home))
    return tmp_path


def run(words: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(words.replace(" [--user]", " --user"))[1:])
    return ended.value.code


@pytest.mark.engine
def test_commands_without_a_server_run_as_pasted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {words: run(words) for words in ALONE if "laya.yaml" in words or "import" in words} == {
        words: code for words, code in ALONE.items() if "laya.yaml" in words or "import" in words
    }, capsys.readouterr().err
    (folder / "config.yaml").unlink()  # llama-swap's
    rest = {words: code for words, code in ALONE.items() if "laya.yaml" not in words and "import" not in words}
    assert {words: run(words) for words in rest} == rest, capsys.readouterr().err


def test_false_claims_are_counted_as_the_page_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.yaml").unlink()
    said = {}
    for words in (words for words in ALONE if "--params" in words and "--table" not in words):
        assert run(words + " --json") == 0
        plan = msgspec.json.decode(capsys.readouterr().out)
        mib = dict.fromkeys(("weights", "kv_cache"), 0.0)
        for name in mib:
            mib[name] = sum(device["terms"].get(name, 0) for device in plan["devices"]) / 2**20
        said[words.split()[3].removeprefix("examples/plans/") + (" q8_0" if "q8_0" in words else "")] = mib
    text = re.sub(r"\s+", " ", (ROOT / "docs" / "faq.md").read_text())
    figures = {name: {term: round(mib) for term, mib in terms.items()} for name, terms in said.items()}
    dense, four_bits = figures["dense-7b.json"], figures["dense-7b-q4.json"]
    assert f"Weights: {figures['experts-26b.json']['weights']} MiB" in text
    assert f"Weights of {dense['weights']} and {four_bits['weights']} MiB, a cache of {dense['kv_cache']} MiB" in text
    assert dense["kv_cache"] == four_bits["kv_cache"]
    assert f"the cache smaller: {figures['dense-7b-q4.json q8_0']['kv_cache']} MiB" in text
    assert f"{figures['grouped-7b.json']['kv_cache']} MiB where 32 had {dense['kv_cache']}" in text


@pytest.mark.engine
def test_commands_that_ask_a_server_run_as_pasted(
    server: RunningServer, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.yaml").unlink()
    monkeypatch.setenv("LAYA_URL", server.url)
    try:
        assert {words: run(words) for words in SERVED} == SERVED, capsys.readouterr().err
    finally:
        assert run("laya unload laya-nano") == 0


@pytest.mark.engine
@pytest.mark.parametrize("command", CURLS)
def test_curl_works_as_pasted(command: str, server: RunningServer) -> None:
    done = subprocess.run(
        ["bash", "-c", command.replace(DEFAULT_URL, server.url)], capture_output=True, text=True, check=True
    )
    assert '"content":' in done.stdout, done.stdout


@pytest.mark.engine
def test_programs_work_as_pasted_one_after_another(server: RunningServer, folder: Path, laya_home: Path) -> None:
    pasted = [
        block for name in PROGRAMS for block in blocks(ROOT / name) if block.language == "python"
    ]
    program = "\n".join(f"print({block.where!r})\n{block.text}" for block in pasted)
    done = subprocess.run(
        [sys.executable, "-c", program.replace(DEFAULT_URL, server.url)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "LAYA_HOME": str(laya_home)},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    starts = [lines.index(block.where) for block in pasted]
    assert all(end - start > 1 for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)), done.stdout


def test_each_program_is_run() -> None:
    for page in PAGES:
        if any(block.language == "python" for block in blocks(page)):
            known = name_of(page) in (*PROGRAMS, "README.zh.md") or name_of(page).startswith(tuple(OTHER_PROGRAMS))
            assert known, f"{name_of(page)} has a program that no test runs"


def test_settings_are_as_config_yaml_takes_them() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    for page in PAGES:
        if name_of(page).startswith("examples/"):
            continue  # of clients
        for block in blocks(page):
            if block.language == "yaml":
                text = SECRET.sub(lambda found: "a" * 64 if "SHA256" in found[0] else "x", block.text)
                settings = yaml.safe_load(text)
                if OTHER_SETTINGS & settings.keys():
                    continue
                faults = [fault.message for fault in validator.iter_errors(settings)]
                assert not faults, (block.where, faults)
