"""`laya import` of files with something wrong at any place: an answer or a refusal in words, no fault."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_import_litellm
import test_import_llama_swap
import test_import_ollama
import yaml

from laya.cli.importing import text_of
from laya.cli.imports.draft import Draft
from laya.cli.imports.litellm import read_litellm
from laya.cli.imports.llama_swap import read_llama_swap
from laya.cli.imports.ollama import read_ollama
from laya.config.document import read_document
from laya.errors import LayaError

JUNK: list[Any] = [None, True, -1, 2**70, 1.5, float("nan"), "", "${x", "${env.NOT_THERE}", "os.environ/NONE", "\x00",
                   "http://[", "*", [], [None], [{"a": []}], {}, {"a": [1]}, {"": {}}, "-m", "x" * 5000]  # fmt: skip


def spoilt(value: Any, dice: random.Random) -> Any:
    """A copy with one place of it, at any depth, replaced by what does not belong there."""
    if not isinstance(value, (dict, list)) or not value or dice.random() < 0.15:
        return dice.choice(JUNK)
    copy: Any = value.copy()
    key = dice.choice(list(value)) if isinstance(value, dict) else dice.randrange(len(value))
    copy[key] = spoilt(value[key], dice)
    return copy


@pytest.mark.parametrize(
    ("read", "example"),
    [(read_llama_swap, test_import_llama_swap.EXAMPLE), (read_litellm, test_import_litellm.EXAMPLE)],
)
def test_junk_in_any_place_of_a_file(read: Callable[[Path], Draft], example: str, tmp_path: Path) -> None:
    dice = random.Random(7)
    file = tmp_path / "config.yaml"
    whole = yaml.safe_load(example)
    refused = 0
    for _ in range(int(os.environ.get("LAYA_JUNK", "80"))):
        file.write_text(yaml.safe_dump(spoilt(spoilt(whole, dice), dice) or {}))
        try:
            text = text_of(read(file), "junk")
        except LayaError:
            refused += 1
            continue
        made = tmp_path / "laya.yaml"
        made.write_text(text)
        read_document(made, None)  # whatever it holds, it is YAML that Laya reads
    assert refused


def test_junk_in_any_place_of_a_modelfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dice = random.Random(7)
    refused = 0
    for example in (test_import_ollama.MODELFILE, test_import_ollama.OVERRIDE):
        for _ in range(60):
            place = dice.randrange(len(example))
            junk = dice.choice(['"', '"""', "\n", "\x00", "=", "FROM ", " ", "é", "${x}", "9" * 500, "-"])
            Path("Modelfile").write_text(example[:place] + junk + example[place + dice.randrange(3) :])
            try:
                text_of(read_ollama([Path("Modelfile")], None), "junk")
            except LayaError:
                refused += 1
    assert refused
