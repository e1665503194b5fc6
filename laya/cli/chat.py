"""Owns: `laya chat`: the screen, the prompt and its commands. What is said and kept is the session's.

Ctrl-C stops an answer and not the program. At the prompt, Ctrl-C right after a stopped answer or a second time in a
row, and Ctrl-D, leave. One question, as a word behind the model or piped, gets its answer on stdout and nothing else.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.status import Status

from laya.cli.chat_answer import Answer, PieceKind
from laya.cli.chat_kept import list_kept_conversations, open_store
from laya.cli.chat_session import Session
from laya.cli.client import ServerClient
from laya.cli.output import drop_stdout, well_formed
from laya.errors import InvalidRequest, LayaError, ModelNotFound, nearest

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a model's answer must not drive the terminal
_QUOTES = '"""'

Model = Annotated[str | None, typer.Argument(help="Model to speak with; default: one that is loaded.")]
Question = Annotated[str | None, typer.Argument(help="Answer this and leave; default: what is piped in, or typed.")]


def chat(
    model: Model = None,
    question: Question = None,
    model_option: Annotated[str | None, typer.Option("--model", hidden=True)] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    resume: Annotated[str | None, typer.Option(help="Go on with a kept conversation: its number, or latest.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 = the likeliest token.")] = None,
    list_kept: Annotated[bool, typer.Option("--list", help="Show the kept conversations and leave.")] = False,
    no_store: Annotated[bool, typer.Option("--no-store", help="Keep nothing on disk.")] = False,
) -> None:
    """Chat with a model of the running server; with a question, or piped, answer that one.

    laya chat smollm2 'Name three colours.'
    """
    if model_option is not None:  # as `laya connect` takes it; then the first word is the question
        if question is not None:
            raise InvalidRequest("--model and MODEL are the same: give one of them.")
        model, question = model_option, model
    if resume and no_store:
        raise InvalidRequest("--resume reads what --no-store would not keep: leave one out.")
    if list_kept:
        list_kept_conversations()
        return
    asked = {"max_tokens": max_tokens, "temperature": temperature}
    sampling = {name: value for name, value in asked.items() if value is not None}
    try:
        chat_with(ServerClient(), model, question, system=system, resume=resume, sampling=sampling, keep=not no_store)
    except LayaError as error:
        if error.code == ModelNotFound.code and model and question is None and not error.details.get("nearest"):
            error.message += f" A question comes after the model: laya chat MODEL {shlex.quote(model)}"
        raise


def chat_with(
    client: ServerClient,
    model: str | None,
    question: str | None = None,
    *,
    system: str | None = None,
    resume: str | None = None,
    sampling: dict[str, Any] | None = None,
    keep: bool = True,
) -> None:
    """Chat over this client until the user leaves. Raises LayaError; exits with 130 when left by Ctrl-C."""
    store = open_store() if keep else None
    with contextlib.ExitStack() as stack:
        stack.callback(client.close)
        if store:
            stack.callback(store.close)
        session = Session(client, store, sampling or {})
        kept = session.resume(resume) if resume else None
        session.use_model(model or (kept.model if kept else None))
        if system is not None:
            session.set_system(system)
        if question is not None:
            _answer(session, question)
        elif not (sys.stdin.isatty() and sys.stdout.isatty()):
            _answer(session, sys.stdin.buffer.read().decode("utf-8", "replace").strip())
        else:
            _Screen(session).run(f"{kept.id}: {kept.title}" if kept else None)


def _answer(session: Session, text: str) -> None:
    if not text.strip():
        raise InvalidRequest("There is nothing to answer: laya chat MODEL 'a question', or pipe one in.")
    try:
        answer = session.say(text, _write_text)
        sys.stdout.write("" if answer.text.endswith("\n") else "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has enough
        drop_stdout()
        return
    if answer.error:
        raise answer.error
    if answer.finish_reason == "stopped":
        raise typer.Exit(130)


def _write_text(kind: PieceKind, piece: str) -> None:
    if kind == "text":
        sys.stdout.write(piece)
        sys.stdout.flush()


class _Leave(Exception):
    """The user is done; carries the exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class _Screen:
    """The interactive chat."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._console = Console(highlight=False, soft_wrap=True)
        self._is_coloured = self._console.color_system is not None and not self._console.no_color
        self._was_reasoning = False
        self._n_interrupts = 0  # Ctrl-C since something was last entered
        self._commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "/help": ("", self._help),
            "/new": ("start a new conversation", self._new),
            "/model": ("[NAME]  show the models, or speak with another one", self._model),
            "/system": ("[TEXT]  show, set or (with -) drop the system prompt", self._system),
            "/save": ("FILE  write the conversation to a file (.md or .json)", self._save),
            "/quit": ("leave; so does Ctrl-D", self._quit),
        }

    def run(self, resumed: str | None) -> None:
        _use_line_editing()
        self._console.print(f"[bold]{_plain(self._session.model)}[/]  [dim]{self._greeting(resumed)}[/]")
        try:
            while True:
                self._step()
        except (_Leave, KeyboardInterrupt) as leave:
            if self._session.conversation_id is not None:
                self._dim(f"kept: laya chat --resume {self._session.conversation_id}")
            if isinstance(leave, KeyboardInterrupt) or leave.exit_code:
                raise typer.Exit(130) from None

    def _greeting(self, resumed: str | None) -> str:
        window = f"{self._session.window_tokens} tokens of context. " if self._session.window_tokens else ""
        went_on = f"Going on with {_plain(resumed)} ({len(self._session.turns)} messages). " if resumed else ""
        return f"{went_on}{window}Ctrl-C stops an answer, Ctrl-D leaves, /help helps."

    def _step(self) -> None:
        text = self._read()
        if not text.strip():
            return
        try:
            if text.startswith("/"):
                self._command(text)
            else:
                self._say(text.strip())
        except LayaError as error:
            self._red(error)

    def _read(self) -> str:
        try:
            text = input(self._prompt("> "))
            if text.startswith(_QUOTES):
                text = self._read_block(text.removeprefix(_QUOTES))
        except EOFError:
            self._console.print()
            raise _Leave(0) from None
        except KeyboardInterrupt:
            self._console.print()
            self._n_interrupts += 1
            if self._n_interrupts > 1:
                raise _Leave(130) from None
            self._dim("Ctrl-C again, or Ctrl-D, leaves")
            return ""
        self._n_interrupts = 0
        return well_formed(text)

    def _read_block(self, text: str) -> str:
        while not text.rstrip().endswith(_QUOTES):
            text += "\n" + input(self._prompt(". "))
        return text.rstrip().removesuffix(_QUOTES)

    def _prompt(self, mark: str) -> str:
        """The marks around the colour tell readline that it takes no room."""
        return f"\x01\x1b[1;36m\x02{mark}\x01\x1b[0m\x02" if self._is_coloured else mark

    def _say(self, text: str) -> None:
        self._was_reasoning = False
        with self._console.status("[dim]...[/]", spinner="dots") as status:
            answer = self._session.say(text, lambda kind, piece: self._show(status, kind, piece))
        self._console.print()
        if answer.finish_reason == "stopped":
            self._n_interrupts = 1
        if answer.error:
            self._red(answer.error)
        self._dim(self._figures(answer))

    def _show(self, status: Status, kind: PieceKind, piece: str) -> None:
        if kind == "progress":
            status.update(f"[dim]{_plain(piece)}[/]")
            return
        status.stop()
        if kind == "text" and self._was_reasoning:
            self._console.print("\n")
        self._was_reasoning = kind == "reasoning"
        style = "dim italic" if kind == "reasoning" else None
        self._console.out(_CONTROL.sub("", piece), end="", highlight=False, style=style)

    def _figures(self, answer: Answer) -> str:
        parts = []
        if "completion_tokens" in answer.usage:
            parts.append(f"{answer.usage['completion_tokens']} tokens")
        if answer.tokens_per_s:
            parts.append(f"{answer.tokens_per_s:.1f} tok/s")
        if answer.first_token_s is not None:
            parts.append(f"first after {answer.first_token_s:.2f} s")
        used, window = answer.context_tokens, self._session.window_tokens
        if used is not None:
            parts.append(f"context {used} of {window} ({100 * used // window} %)" if window else f"context {used}")
        if answer.finish_reason in ("length", "stopped"):
            parts.append("cut at the limit" if answer.finish_reason == "length" else "stopped")
        return ", ".join(parts)

    def _command(self, text: str) -> None:
        name, _, rest = text.strip().partition(" ")
        if name not in self._commands:
            close = nearest(name, self._commands)
            hint = f"Did you mean {close}?" if close else "/help shows what there is."
            raise InvalidRequest(f"{name} is not a command. {hint} A space in front sends it as text.")
        self._commands[name][1](rest.strip())

    def _help(self, _: str) -> None:
        for name, (about, _act) in self._commands.items():
            if about:
                self._dim(f"{name:8} {about}")
        self._dim(f"{_QUOTES}      begins and ends a message of several lines")

    def _new(self, _: str) -> None:
        self._session.restart()
        self._dim("a new conversation")

    def _model(self, name: str) -> None:
        if name:
            self._session.use_model(name)
            self._dim(f"speaking with {self._session.model} now")
            return
        for model in self._session.models():
            mark = "*" if model["id"] == self._session.model else " "
            self._dim(f"{mark} {model['id']}{'  loaded' if model.get('loaded') else ''}")

    def _system(self, text: str) -> None:
        if text:
            self._session.set_system(None if text == "-" else text)
        self._dim(f"system prompt: {self._session.system or 'none'}")

    def _save(self, rest: str) -> None:
        try:
            (name,) = shlex.split(rest)
        except ValueError:
            raise InvalidRequest("/save needs one file name, such as /save talk.md") from None
        self._session.save(Path(name))
        self._dim(f"saved: {name}")

    def _quit(self, _: str) -> None:
        raise _Leave(0)

    def _dim(self, text: str) -> None:
        if text:
            self._console.print(f"[dim]{_plain(text)}[/]")

    def _red(self, error: LayaError) -> None:
        self._console.print(f"[red]{_plain(error.message)}[/]")


def _plain(text: str) -> str:
    """Text that is no markup and drives no terminal."""
    return _CONTROL.sub("", text).replace("[", "\\[")


def _use_line_editing() -> None:
    """Arrow keys and history in `input`, where this Python was built with readline."""
    with contextlib.suppress(ImportError):
        __import__("readline")
