"""config.yaml's versions: what is too new is told, and steps between versions rename keys and leave the rest alone.

There is one version so far, so the steps here are made up: from 1 to 3, on a file that version 1 reads.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from laya.cli.migrate import migrate
from laya.config import load_config
from laya.config.document import read_document
from laya.config.migrate import ANY, NEWEST, STEPS, Renames, check_version, migrated
from laya.errors import ConfigError

OLD = """\
# mine
version: 1   # the form
max_seq_len: 4096
models:
  "small one": {max_seq_len: 2048, pinned: true}   # keep
  other:
    max_seq_len: ${env.LENGTH}
server:
  max_seq_len_is_no_key_here: max_seq_len
"""
STEPS_OF_TEST: dict[int, Renames] = {
    1: {("max_seq_len",): "window", ("models", ANY, "max_seq_len"): "window"},
    2: {("models", ANY, "window"): "context", ("models", ANY, "pinned"): "stays"},
}


def test_steps_lead_to_the_newest() -> None:
    assert sorted(STEPS) == list(range(1, NEWEST))


def test_keys_are_renamed_where_they_stand_and_nothing_else_changes() -> None:
    text, changes = migrated(OLD, 1, STEPS_OF_TEST, 3)
    assert text == (
        OLD.replace("version: 1 ", "version: 3 ")
        .replace("\nmax_seq_len: 4096", "\nwindow: 4096")
        .replace("{max_seq_len: 2048, pinned", "{context: 2048, stays")
        .replace("    max_seq_len: $", "    context: $")
    )
    assert changes[:2] == ["line 3: max_seq_len is window", "line 5: models.small one.max_seq_len is window"]
    assert len(changes) == 6


def test_what_an_anchor_holds_is_renamed_once() -> None:
    old = "version: 1\nmodels:\n  a: &same {max_seq_len: 512}\n  b: *same\n  c: {<<: *same, pinned: true}\n"
    text, _ = migrated(old, 1, STEPS_OF_TEST, 3)
    assert text == old.replace("version: 1", "version: 3").replace("max_seq_len", "context").replace("pinned", "stays")
    assert yaml.safe_load(text)["models"]["c"] == {"context": 512, "stays": True}


def test_a_file_without_a_version_is_version_1_and_gets_one() -> None:
    text, _ = migrated("max_seq_len: 4096\n", 1, STEPS_OF_TEST, 2)
    assert text == "version: 2\nwindow: 4096\n"
    assert yaml.safe_load(migrated("", 1, STEPS_OF_TEST, 3).text) == {"version": 3}


def test_both_names_of_a_key_are_an_error() -> None:
    with pytest.raises(ConfigError, match="line 2: max_seq_len is window now, which is there too"):
        migrated("window: 1\nmax_seq_len: 2\n", 1, STEPS_OF_TEST, 2)


def test_the_file_is_replaced_whole_and_the_old_one_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    text = OLD.replace("${env.LENGTH}", "512")
    file.write_text(text)
    file.chmod(0o600)
    migrate(file, steps=STEPS_OF_TEST, newest=3, dry_run=True)
    assert file.read_text() == text and capsys.readouterr().out == migrated(text, 1, STEPS_OF_TEST, 3).text
    migrate(file, steps=STEPS_OF_TEST, newest=3)
    assert file.read_text() == migrated(text, 1, STEPS_OF_TEST, 3).text
    assert file.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "config.yaml.v1").read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "config.yaml.v1"]
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"config.yaml.v1 is there already"):
        migrate(file, steps=STEPS_OF_TEST, newest=3)
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("version", "newest", "said"),
    [
        ("7", 1, "version: 7: this Laya reads version: 1. The file was written for a newer Laya: update this one"),
        ("1", 2, "version: 1: this Laya reads version: 2. `laya config migrate .*config.yaml` brings the file there"),
        ("0", 1, "version: 0: this Laya reads version: 1$"),
        ("'1'", 1, "version: '1': this Laya reads version: 1$"),
        ("true", 1, "version: true: this Laya reads version: 1$"),
    ],
)
def test_what_this_laya_does_not_read(version: str, newest: int, said: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"version: {version}\n")
    with pytest.raises(ConfigError, match=said) as caught:
        check_version(read_document(file, {}), newest)
    assert caught.value.message.startswith(f"{file}:1: ")
    if newest == NEWEST:
        with pytest.raises(ConfigError, match=said):
            load_config(file, {})
        with pytest.raises(ConfigError, match=said):
            migrate(file)


def test_the_verb(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("version: 1\nmax_seq_len: 4096\n")
    command = [sys.executable, "-m", "laya.cli", "config", "migrate"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "ok: config.yaml has the newest form, version 1\n"
    (tmp_path / "config.yaml").write_text("version: 2\n")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "this Laya reads version: 1" in done.stderr
