"""A file that a user named for a result: whole or not at all, never in place of what is no file."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from laya.errors import InvalidRequest
from laya.result_file import check_result_file, write_result_file
from tests.conftest import ROOT


def test_a_link_stays_and_its_file_is_written(tmp_path: Path) -> None:
    target, link = tmp_path / "kept.csv", tmp_path / "link.csv"
    target.write_text("before")
    link.symlink_to(target)
    write_result_file(link, b"after")
    assert link.is_symlink() and target.read_bytes() == b"after"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.csv", "link.csv"]


def test_a_pipe_gets_it_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    check_result_file("--csv", pipe)
    write_result_file(pipe, b"all of it")
    reader.join(10)
    assert got == [b"all of it"] and pipe.is_fifo()


def test_standard_output_is_a_file_like_any_other() -> None:
    program = "from pathlib import Path; from laya.result_file import *; out = Path('/dev/stdout'); "
    program += "check_result_file('--csv', out); write_result_file(out, b'all of it')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout == b"all of it"


def test_a_device_that_takes_nothing_is_told_and_stays() -> None:
    with pytest.raises(InvalidRequest, match=r"/dev/full: cannot be written \(No space left on device\)"):
        write_result_file(Path("/dev/full"), b"x")
    assert Path("/dev/full").is_char_device()


def test_what_cannot_be_written_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, why in ((tmp_path, "that is a folder"), (tmp_path / "no" / "a.csv", "there is no folder")):
        with pytest.raises(InvalidRequest, match=why):
            check_result_file("--csv", path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere, but not where nobody may
    with pytest.raises(InvalidRequest, match=r"--csv .*a\.csv: it cannot be written there"):
        check_result_file("--csv", tmp_path / "a.csv")
