"""What the tests of `laya import` share: running it in a folder of its own, and what it said and wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import yaml
from typer.testing import CliRunner

from laya.cli.config import config_app
from laya.cli.importing import import_app

runner = CliRunner()


class Imported(NamedTuple):
    config: dict[str, Any]
    text: str
    told: list[str]

    def about(self, key: str) -> str:
        """The one line told of a key."""
        lines = [line for line in self.told if line.split(": ", 1)[-1].startswith(f"{key} (")]
        assert len(lines) == 1, (key, self.told)
        return lines[0]


def imported(*words: str) -> Imported:
    """`laya import WORDS --out laya.yaml`, which then passes `laya config check`."""
    result = runner.invoke(import_app, [*words, "--out", "laya.yaml", "--force"])
    assert result.exception is None, result.exception
    text = Path("laya.yaml").read_text()
    assert not any(line.startswith("to do:") for line in result.stderr.splitlines()), result.stderr
    assert runner.invoke(config_app, ["check", "laya.yaml"]).exit_code == 0
    return Imported(yaml.safe_load(text), text, result.stderr.splitlines())


def refusal(*words: str) -> str:
    """The message that such an import ends with."""
    error = runner.invoke(import_app, list(words)).exception
    assert error is not None
    return str(getattr(error, "message", error))
