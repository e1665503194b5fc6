"""`laya connect`: lines alone on stdout, with what the server says of itself. That they work: tests/clients."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
from typing import Any

import httpx
import pytest
import yaml

from laya.cli.main import main
from laya.connect import PLACEHOLDER_KEY, names, snippet
from laya.errors import ConfigError

ODD = 'it\'s "odd" $HOME'


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`connect(words...)` -> (exit code, stdout, stderr)."""

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["connect", *words])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    monkeypatch.delenv("LAYA_API_KEY", raising=False)
    return run


@pytest.mark.parametrize("name", names())
def test_lines_are_well_formed_whatever_the_names_hold(name: str) -> None:
    for window in (None, 4096):
        found = snippet(name, "http://host:8000", ODD, api_key=ODD, context_length=window)
        if found.syntax == "python":
            ast.parse(found.text)
        elif found.syntax == "yaml":
            assert yaml.safe_load(found.text)["models"][0]["model"] == ODD
        else:
            subprocess.run(["sh", "-n"], input=found.text, text=True, check=True)
        assert "http://host:8000/v1" in found.text and "/v1/v1" not in found.text
        assert "None" not in found.text and "null" not in found.text


def test_a_container_is_told_how_it_reaches_a_server_on_loopback() -> None:
    here = snippet("open-webui", "http://127.0.0.1:8000", "m").text
    there = snippet("open-webui", "http://10.0.0.2:8000/v1", "m").text
    assert "--network=host" in here and "laya serve --lan" in here
    assert "--network=host" not in there and "--lan" not in there


def test_open_webui_is_told_not_to_send_tools_of_its_own() -> None:
    """Some 7000 tokens with each message, which models whose template knows no tools refuse."""
    words = shlex.split(snippet("open-webui", "http://10.0.0.2:8000", "m").text, comments=True)
    (said,) = [word for word in words if word.startswith("DEFAULT_MODEL_PARAMS=")]
    assert json.loads(said.partition("=")[2]) == {"function_calling": "legacy"}


def test_an_unknown_client_is_refused_with_the_nearest(connect: Any) -> None:
    with pytest.raises(ConfigError, match="langchain"):
        snippet("langchian", "http://h", "m")
    code, out, err = connect("langchian")
    assert (code, out) == (2, "") and "langchain" in err


def test_without_a_name_the_clients_are_listed_and_no_server_is_needed(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYA_URL", "http://127.0.0.1:9")
    code, out, _ = connect()
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == names() and len(names()) == 8
    assert connect("llm")[0] == 4


@pytest.mark.engine
def test_lines_hold_the_servers_address_model_and_window(
    connect: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYA_URL", server.url)
    served = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"]
    loaded = next(each for each in served if each["loaded"])
    code, out, err = connect("continue")
    (model,) = yaml.safe_load(out)["models"]
    assert code == 0 and err
    assert (model["model"], model["apiBase"]) == (loaded["id"], f"{server.url}/v1")
    assert model["defaultCompletionOptions"]["contextLength"] == loaded["context_length"]
    assert model["apiKey"] == PLACEHOLDER_KEY
    _, out, _ = connect("continue", "--model", "smollm2", "--key", "mine", "--json")
    (model,) = yaml.safe_load(json.loads(out)["text"])["models"]
    assert (model["model"], model["apiKey"]) == ("smollm2", "mine")
    code, out, err = connect("continue", "--model", "smolm2")
    assert (code, out) == (2, "") and "smollm2" in err
