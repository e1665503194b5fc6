"""`laya` where a stream, a name or a character is not what a verb expects: a sentence, never a traceback."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_stub import StubServer

from laya.cli.main import main
from laya.cli.output import printable, printable_lines, well_formed

ROOT = Path(__file__).parents[2]
NOT_UTF8 = b"a\xff\x1b[31m\nb"


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An empty folder and an empty store."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("LAYA_HOME", str(tmp_path / "home")), ("PYTHONPATH", str(ROOT)), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LAYA_URL", raising=False)
    return dict(os.environ)


def shell(words: str, environ: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    """`laya` in a shell, which opens and closes streams as users do."""
    command = ["sh", "-c", words.replace("laya ", f"{sys.executable} -m laya.cli ")]
    return subprocess.run(command, capture_output=True, env=environ, timeout=60)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("laya list >/dev/full", b"laya: The output cannot be written: No space left on device.\n"),
        ("laya config schema >/dev/full", b"laya: The output cannot be written: No space left on device.\n"),
        ("laya list >&-", b"laya: The output cannot be written: Bad file descriptor.\n"),
    ],
)
def test_output_that_cannot_be_written_is_one_sentence(environ: dict[str, str], words: str, said: bytes) -> None:
    done = shell(words, environ)
    assert (done.stderr, done.returncode) == (said, 1)


def test_a_reader_that_has_enough_ends_the_verb_quietly(environ: dict[str, str]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "laya.cli", "config", "schema"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=environ, timeout=60)
    os.close(write)
    assert (done.stderr, done.returncode) == (b"", 1)


def test_closed_streams_that_are_not_needed_do_not_matter(environ: dict[str, str]) -> None:
    done = shell("laya list <&- 2>&-", environ)
    assert done.returncode == 0
    assert b"smollm2" in done.stdout


def test_a_terminal_without_unicode_gets_plain_bars(environ: dict[str, str]) -> None:
    done = shell("laya plan smollm2", environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.stderr, done.returncode) == (b"", 0)
    assert b"####" in done.stdout


def test_names_of_any_bytes_are_shown_escaped(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path / "models") + b"/" + NOT_UTF8 + b".gguf")).write_bytes(b"GGUF\x03")
    escaped = rb"a\udcff\x1b[31m\nb"
    for words in ("laya list", "laya list --json", 'laya plan "$NAME"', 'laya pull "models/$NAME.gguf"'):
        done = shell(words, environ | {"NAME": os.fsdecode(NOT_UTF8)})
        assert b"Traceback" not in done.stderr
        assert b"\x1b" not in done.stdout + done.stderr
        assert b"\xff" not in done.stdout + done.stderr
    assert escaped in shell("laya list", environ).stdout


def test_lines_over_a_pipe_do_not_end_in_spaces(environ: dict[str, str]) -> None:
    lines = shell("laya list", environ).stdout.splitlines()
    assert len(lines) > 5
    assert [line for line in lines if line != line.rstrip()] == []


def test_the_unforeseen_is_one_sentence_and_a_traceback_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(**_: object) -> None:
        raise KeyError("a\nb")

    monkeypatch.setattr("laya.cli.main.app", broken)
    monkeypatch.delenv("LAYA_DEBUG", raising=False)
    for debug in (False, True):
        if debug:
            monkeypatch.setenv("LAYA_DEBUG", "1")
        with pytest.raises(SystemExit) as ended:
            main([])
        said = capsys.readouterr().err
        assert ended.value.code == 1
        assert said.endswith("laya failed: KeyError: 'a\\nb'; LAYA_DEBUG=1 shows where.\n")
        assert ("Traceback" in said) == debug


def test_chat_takes_bytes_that_are_no_text(environ: dict[str, str]) -> None:
    with StubServer() as stub:
        ours, theirs = pty.openpty()
        environ = environ | {"LAYA_URL": stub.url}
        command = [sys.executable, "-m", "laya.cli", "chat", "--system", os.fsdecode(b"be\xff")]
        chat = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
        os.close(theirs)
        shown = b""
        while b"> " not in shown:
            shown += os.read(ours, 65536)
        os.write(ours, b"\xff\xfe\n")
        while b"You said" not in shown or not shown.rstrip(b" ").endswith(b">"):
            shown += os.read(ours, 65536)
        os.write(ours, b"\x04")
        while b"kept: laya chat" not in shown:
            shown += os.read(ours, 65536)
        assert chat.wait(60) == 0
        os.close(ours)
        assert [message["role"] for message in stub.bodies[0]["messages"]] == ["system", "user"]
    listed = shell("laya chat --list", environ).stdout
    assert b"awake" in listed


def test_chat_resume_without_a_value_says_what_it_takes(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["chat", "--resume"])
    assert ended.value.code == 2
    assert "its number, or latest" in capsys.readouterr().err


def test_chat_list_without_conversations_says_so(environ: dict[str, str]) -> None:
    done = shell("laya chat --list", environ)
    assert (done.stdout, done.stderr) == (b"", b"No conversation is kept yet.\n")


def test_plan_explains_a_flag_as_serve_does(environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "smollm2", "--gpu-memory-utilization", "0.9"])
    assert ended.value.code == 2
    assert "--memory-budget 80%" in capsys.readouterr().err


def test_ps_gives_the_error_of_a_failed_model_a_line_of_its_own(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "The engine ended while loading, " + "word " * 60 + "\x1b[2J"
    model: dict[str, Any] = {
        "id": "m",
        "state": "failed",
        "plan": None,
        "measured_bytes": None,
        "anonymous_bytes": 0,
        "running": 0,
        "queued": 0,
    }
    model |= {"gpu_layers": None, "idle_s": None, "requests": [], "error": reason}
    with StubServer() as stub:
        stub.state = {"models": [model], "memory": {"reserved_bytes": 0, "budget_bytes": 1 << 30, "limit": "x"}}
        monkeypatch.setenv("LAYA_URL", stub.url)
        with pytest.raises(SystemExit) as ended:
            main(["ps"])
    assert ended.value.code == 0
    assert f"m: {printable(reason)}" in capsys.readouterr().out.splitlines()


def test_printable_text_drives_no_terminal() -> None:
    assert printable("a\x1b[2J\n\u202e\udcff\u00e9") == "a\\x1b[2J\\n\\u202e\\udcff\u00e9"
    assert printable_lines("a\x1b\tb\nc") == "a\\x1b\tb\nc"


@pytest.mark.parametrize(
    ("text", "whole"),
    [("a\udcff", "a\ufffd"), ("\ud83d", "\ufffd"), ("\ud83d\ude00", "\U0001f600"), ("\u00e9", "\u00e9")],
)
def test_well_formed_replaces_halves_of_characters_only(text: str, whole: str) -> None:
    assert well_formed(text) == whole
