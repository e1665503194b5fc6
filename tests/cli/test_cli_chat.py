"""`laya chat` against a stub server on a real socket; interactive under a real pseudo-terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_stub import StubServer

from laya.cli.chat_session import Session
from laya.cli.client import ServerClient
from laya.errors import InvalidRequest, LayaError, NotFound
from laya.store import Store

CHAT = "import sys; from laya.cli.main import main; main(['chat', *sys.argv[1:]])"
DEADLINE_S = 20.0


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer() as server:
        yield server


@pytest.fixture
def session(stub: StubServer, tmp_path: Path) -> Iterator[Session]:
    client = ServerClient(stub.url)
    with Store(tmp_path / "laya.db") as store:
        yield Session(client, store, {})
    client.close()


def silent(kind: str, piece: str) -> None:
    return


def environment(stub: StubServer, home: Path) -> dict[str, str]:
    return os.environ | {"LAYA_URL": stub.url, "LAYA_HOME": str(home), "TERM": "dumb", "COLUMNS": "200"}


def piped(stub: StubServer, home: Path, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHAT, *flags],
        input=text,
        capture_output=True,
        text=True,
        env=environment(stub, home),
        timeout=DEADLINE_S,
    )


class Terminal:
    """A chat under a pseudo-terminal; `until` waits for what it shows."""

    def __init__(self, stub: StubServer, home: Path, *flags: str) -> None:
        self._master, slave = pty.openpty()
        command = [sys.executable, "-c", CHAT, *flags]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment(stub, home), start_new_session=True
        )
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        os.kill(self.process.pid, signal.SIGINT)

    def interrupt_at_prompt(self) -> None:
        """Until it shows: a signal between showing a prompt and waiting for input acts only at the next signal."""
        self.interrupt()
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s and not select.select([self._master], [], [], 1.0)[0]:
            self.interrupt()

    def until(self, words: str) -> str:
        """What was shown up to and with these words; it is forgotten."""
        deadline_s = time.monotonic() + DEADLINE_S
        while words not in self.shown:
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"never showed {words!r}, but: {self.shown!r}"
            self.shown += self._read()
        before, _, self.shown = self.shown.partition(words)
        return before + words

    def _read(self) -> str:
        try:
            piece = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            piece = b""
        assert piece, f"ended, having shown: {self.shown!r}"
        return piece.decode("utf-8", "replace")

    def ended(self) -> int:
        try:
            return self.process.wait(DEADLINE_S)
        finally:
            os.close(self._master)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def test_chat_piped_prints_just_the_answer(stub: StubServer, tmp_path: Path) -> None:
    done = piped(stub, tmp_path, "hi\n", "--temperature", "0", "--max-tokens", "9", "--system", "Be kind.")
    assert (done.stdout, done.stderr, done.returncode) == ("You said: hi\n", "", 0)
    (body,) = stub.bodies
    assert body["messages"] == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    assert (body["model"], body["temperature"], body["max_tokens"], body["stream"]) == ("awake", 0, 9, True)


def test_chat_answers_a_question_that_is_a_word_of_the_command(stub: StubServer, tmp_path: Path) -> None:
    for words in (("sleeping", "hi"), ("--model", "sleeping", "hi")):
        assert piped(stub, tmp_path, "not read", *words).stdout == "You said: hi\n"
    assert [body["model"] for body in stub.bodies] == ["sleeping", "sleeping"]
    alone = piped(stub, tmp_path, "", "Say hi.")
    assert alone.returncode == 2 and alone.stderr.strip().endswith("after the model: laya chat MODEL 'Say hi.'")
    assert "laya chat MODEL 'a question'" in piped(stub, tmp_path, "", "sleeping", " ").stderr


def test_chat_piped_goes_on_with_the_latest_conversation(stub: StubServer, tmp_path: Path) -> None:
    piped(stub, tmp_path, "one", "sleeping", "--system", "S")
    assert piped(stub, tmp_path, "two", "--resume", "latest").stdout == "You said: two\n"
    assert [said["content"] for said in stub.bodies[1]["messages"]] == ["S", "one", "You said: one", "two"]
    assert stub.bodies[1]["model"] == "sleeping"
    assert piped(stub, tmp_path, "three", "--resume", "1").stdout == "You said: three\n"
    assert len(stub.bodies[2]["messages"]) == 6


def test_chat_no_store_keeps_nothing(stub: StubServer, tmp_path: Path) -> None:
    assert piped(stub, tmp_path, "hi", "--no-store").stdout == "You said: hi\n"
    assert list(tmp_path.iterdir()) == []


def test_chat_piped_into_a_reader_that_has_enough_ends_quietly(stub: StubServer, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHAT, "--no-store"]
    chat = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(stub, tmp_path)
    )
    assert chat.stdin is not None
    assert chat.stdout is not None
    assert chat.stderr is not None
    chat.stdin.write(b"forever")
    chat.stdin.close()
    chat.stdout.read(5)
    chat.stdout.close()
    assert chat.stderr.read() == b""
    chat.stderr.close()
    assert chat.wait(DEADLINE_S) == 0
    assert stub.client_left.wait(DEADLINE_S)


def test_chat_shows_the_answer_and_its_figures(stub: StubServer, tmp_path: Path) -> None:
    terminal = Terminal(stub, tmp_path)
    try:
        greeting = terminal.until("> ")
        assert "awake" in greeting
        assert "1000 tokens of context" in greeting
        terminal.type("hello\n")
        terminal.until("You said: hello")
        figures = terminal.until("(10 %)")
        assert "10 tokens, 55.5 tok/s, first after" in figures
        assert "context 100 of 1000" in figures
        terminal.type("odd\n")
        assert "\x1b[2J" not in terminal.until("b[2J \u00e9")
        terminal.until("> ")
        terminal.type("\x04")
        terminal.until("kept: laya chat --resume 1")
        assert terminal.ended() == 0
    finally:
        terminal.end()


def test_ctrl_c_stops_the_answer_and_not_the_program(stub: StubServer, tmp_path: Path) -> None:
    terminal = Terminal(stub, tmp_path)
    try:
        terminal.until("> ")
        terminal.type("forever\n")
        terminal.until("word20 ")
        terminal.interrupt()
        terminal.until("stopped")
        assert stub.client_left.wait(DEADLINE_S), "the connection was not closed"
        terminal.until("> ")
        terminal.type("hello\n")
        terminal.until("You said: hello")
        terminal.until("> ")
        assert "word20 " in stub.bodies[1]["messages"][1]["content"]
        terminal.interrupt_at_prompt()
        terminal.until("Ctrl-C again")
        terminal.until("> ")
        terminal.interrupt_at_prompt()
        assert terminal.ended() == 130
    finally:
        terminal.end()
    with Store(tmp_path / "laya.db") as store:
        assert [message.finish_reason for message in store.messages(1)] == [None, "stopped", None, "stop"]


def test_ctrl_c_after_a_stopped_answer_leaves(stub: StubServer, tmp_path: Path) -> None:
    terminal = Terminal(stub, tmp_path, "--no-store")
    try:
        terminal.until("> ")
        terminal.type("forever\n")
        terminal.until("word3 ")
        terminal.interrupt()
        terminal.until("stopped")
        terminal.until("> ")
        terminal.interrupt_at_prompt()
        assert terminal.ended() == 130
    finally:
        terminal.end()


def test_commands_of_the_prompt(stub: StubServer, tmp_path: Path) -> None:
    terminal = Terminal(stub, tmp_path)
    try:
        terminal.until("> ")
        for typed, shown in (
            ("/help", "/save    FILE"),
            ("/system Be brief.", "system prompt: Be brief."),
            ("/model", "* awake  loaded"),
            ("/model nope", "The model does not exist."),
            ("/model sleeping", "speaking with sleeping now"),
            ("/mdl", "/mdl is not a command. Did you mean /model?"),
            ("one", "You said: one"),
            ('"""two\nlines"""', "You said: two"),
            (f"/save {tmp_path}/talk.md", "saved"),
            (f"/save {tmp_path}/talk.md", "is there already"),
            ("/save", "/save needs one file name"),
            ("refuse", "Too long."),
            ("break", "The engine crashed."),
            ("cut", "The connection ended before the answer did."),
            ("/new", "a new conversation"),
            ("three", "You said: three"),
        ):
            terminal.type(typed + "\n")
            terminal.until(shown)
            terminal.until("> ")
        terminal.type("/quit\n")
        assert "resume 2" in terminal.until("resume 2")
        assert terminal.ended() == 0
    finally:
        terminal.end()
    saved = (tmp_path / "talk.md").read_text()
    assert saved.startswith("**system**\n\nBe brief.\n")
    assert "**assistant**\n\nYou said: two\nlines\n" in saved
    assert stub.bodies[-1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "three"},
    ]
    assert stub.bodies[-1]["model"] == "sleeping"


def test_session_leaves_out_a_question_without_an_answer(stub: StubServer, session: Session) -> None:
    session.use_model(None)
    assert (session.model, session.window_tokens) == ("awake", 1000)
    for text in ("one", "refuse", "two"):
        session.say(text, silent)
    assert [said["content"] for said in session.messages()] == ["one", "You said: one", "two", "You said: two"]
    assert session.store is not None
    assert [message.content for message in session.store.messages(1)].count("refuse") == 1
    again = Session(session.client, session.store, {})
    assert again.resume("latest").title == "one"
    assert again.messages() == session.messages()


@pytest.mark.parametrize(("asked", "code"), [("break", "engine_crashed"), ("cut", "internal_error")])
def test_session_keeps_what_came_before_the_break(session: Session, asked: str, code: str) -> None:
    session.use_model("awake")
    answer = session.say(asked, silent)
    assert answer.error is not None
    assert (answer.text, answer.finish_reason, answer.error.code) == ("half", None, code)
    assert session.store is not None
    assert session.store.messages(1)[-1].finish_reason == "error"


def test_session_resumes_by_number_and_names_the_others(session: Session) -> None:
    with pytest.raises(NotFound, match="No conversation is kept yet"):
        session.resume("latest")
    session.use_model("awake")
    session.say("first words", silent)
    with pytest.raises(NotFound, match=r"no conversation 9\. The last ones: 1 \(first words\)"):
        session.resume("9")
    with pytest.raises(InvalidRequest, match="expected `latest` or the number"):
        session.resume("nine")


def test_session_says_where_models_come_from(stub: StubServer, session: Session) -> None:
    stub.models = [model for model in stub.models if model["task"] != "chat"]
    with pytest.raises(LayaError, match="laya pull smollm2"):
        session.use_model(None)


def test_session_saves_json(session: Session, tmp_path: Path) -> None:
    session.use_model("awake")
    session.say("hi", silent)
    session.save(tmp_path / "talk.json")
    assert '"content": "You said: hi"' in (tmp_path / "talk.json").read_text()
    with pytest.raises(LayaError, match="No such file or directory"):
        session.save(tmp_path / "none" / "talk.md")
