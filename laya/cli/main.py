"""Owns: the `laya` command: its verbs and how a fault becomes one sentence and an exit code.

LAYA_DEBUG=1 shows the traceback of a fault that no verb foresaw.
Exit codes: 0 ok, 1 failed, 2 usage or config, 3 does not fit, 4 no server there, 130 interrupted.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from contextlib import suppress

import typer
from rich.console import Console
from typer.main import get_command

from laya.cli.output import OUTPUT_ERRORS, drop_stdout, prepare_streams, shown
from laya.cli.verbs import VERBS, app_for
from laya.errors import LayaError

_SERVES = ("serve", "run")
_WRONG_VALUE = re.compile(
    r"Invalid value for '(?P<name>--[\w-]+)': Input should be "
    r"((?P<sign>greater|less) than or equal to (?P<bound>\S+)|a valid (integer|number))"
)
_ASKS_FOR_HELP = {"-h", "--help"}


def app(*, args: list[str] | None, standalone_mode: bool) -> object:
    """Parse and run."""
    return app_for(sys.argv[1:] if args is None else args)(args=args, standalone_mode=standalone_mode)


def main(argv: list[str] | None = None) -> None:
    """The console script."""
    prepare_streams()
    sys.exit(_run(argv))


def _run(argv: list[str] | None) -> int:
    try:
        _check_room(sys.argv[1:] if argv is None else argv)
        code = app(args=argv, standalone_mode=False)
        sys.stdout.flush()  # a disk that is full says so here, not after the exit code is settled
    except LayaError as error:
        _say(error.message)
        return error.exit_code
    except typer.TyperException as error:  # a word that is no verb, option or value
        _say(f"{_in_our_words(error, argv)} {_help_of(error, argv)}{_where_help_is(argv)}")
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # the reader has enough
        drop_stdout()
        return 1
    except Exception as error:
        return _unforeseen(error)
    return code if isinstance(code, int) else 0


def _check_room(words: list[str]) -> None:
    """Refuse to serve where the server alone would be killed, before its modules are read into memory."""
    if words and words[0] in _SERVES and not _ASKS_FOR_HELP & set(words):
        from laya.memory import Machine  # other verbs start without it

        Machine().check_gateway()


def _in_our_words(error: typer.TyperException, argv: list[str] | None) -> str:
    """A value that an option does not take is told as that of any other flag: its name, what it takes, what it got."""
    message, words = error.format_message(), sys.argv[1:] if argv is None else argv
    found = _WRONG_VALUE.match(message)
    if found is None:
        return message
    name, bound = found["name"], found["bound"]
    after = (words[index + 1] for index, word in enumerate(words[:-1]) if word == name)
    value = next((word[len(name) + 1 :] for word in words if word.startswith(f"{name}=")), None) or next(after, "")
    expected = f"a number {'>=' if found['sign'] == 'greater' else '<='} {bound}" if bound else "a number"
    return f"{name}: expected {expected}, got {value or 'nothing'}."


def _where_help_is(argv: list[str] | None) -> str:
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in VERBS:
        return f"`laya {words[0]} --help` lists what it takes."
    return "`laya --help` lists what there is."


def _help_of(error: typer.TyperException, argv: list[str] | None) -> str:
    """What the option that was used wrongly takes."""
    name, words = getattr(error, "option_name", None), sys.argv[1:] if argv is None else argv
    verbs = getattr(get_command(app_for(words)), "commands", {})
    options = verbs[words[0]].params if words and words[0] in verbs else []
    about = next((getattr(option, "help", None) for option in options if name in option.opts), None)
    return f"{about} " if about else ""


def _unforeseen(error: Exception) -> int:
    """One sentence for what no verb expected; where it came from is for whoever asks."""
    if os.environ.get("LAYA_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, OSError) and error.filename is None and error.errno in OUTPUT_ERRORS:
        drop_stdout()
        _say(f"The output cannot be written: {error.strerror}.")
        return 1
    what = " ".join(str(error).split()) or "no more is known"
    _say(f"{type(error).__name__}: {what}; LAYA_DEBUG=1 shows where.", "laya failed:")
    return 1


def _say(message: str, prefix: str = "laya:") -> None:
    with suppress(OSError):  # a stderr that takes nothing leaves the exit code to speak
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"[bold red]{prefix}[/] {shown(message.replace(chr(10), ' '))}")
