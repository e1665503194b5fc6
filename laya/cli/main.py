"""Owns: the `laya` command: its verbs and how a fault becomes one sentence and an exit code.

LAYA_DEBUG=1 shows the traceback of a fault that no verb foresaw.
Exit codes: 0 ok, 1 failed, 2 usage or config, 3 does not fit, 4 no server there, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress

import typer
from rich.console import Console
from typer.main import get_command

from laya.cli.bench import bench
from laya.cli.chat import chat
from laya.cli.config import config_app
from laya.cli.doctor import doctor
from laya.cli.models import list_models, pull, rm, show
from laya.cli.output import OUTPUT_ERRORS, drop_stdout, prepare_streams, shown
from laya.cli.plan import plan
from laya.cli.running import load, logs, ps, unload
from laya.cli.serve import run, serve
from laya.cli.service import service_app
from laya.cli.smoke import smoke
from laya.errors import LayaError

app = typer.Typer(
    name="laya",
    help="Serve open-weight language models on your own machine: planned memory, OpenAI API.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_FLAGS_PASS = {"allow_extra_args": True, "ignore_unknown_options": True}
_MORE = "More"

app.command(context_settings=_FLAGS_PASS)(serve)
app.command(context_settings=_FLAGS_PASS)(run)
app.command()(chat)
app.command()(pull)
app.command("list")(list_models)
app.command()(rm)
app.command()(show)
app.command(context_settings=_FLAGS_PASS)(plan)
app.command()(ps)
app.command()(load)
app.command()(unload)
app.command()(logs)
app.command()(doctor)
app.command(rich_help_panel=_MORE)(smoke)
app.command(rich_help_panel=_MORE, context_settings=_FLAGS_PASS)(bench)
app.add_typer(config_app, name="config", rich_help_panel=_MORE)
app.add_typer(service_app, name="service", rich_help_panel=_MORE)


def main(argv: list[str] | None = None) -> None:
    """The console script."""
    prepare_streams()
    sys.exit(_run(argv))


def _run(argv: list[str] | None) -> int:
    try:
        code = app(args=argv, standalone_mode=False)
        sys.stdout.flush()  # a disk that is full says so here, not after the exit code is settled
    except LayaError as error:
        _say(error.message)
        return error.exit_code
    except typer.TyperException as error:  # a word that is no verb, option or value
        _say(f"{error.format_message()} {_help_of(error, argv)}`laya --help` lists what there is.")
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # the reader has enough
        drop_stdout()
        return 1
    except Exception as error:
        return _unforeseen(error)
    return code if isinstance(code, int) else 0


def _help_of(error: typer.TyperException, argv: list[str] | None) -> str:
    """What the option that was used wrongly takes."""
    name, words = getattr(error, "option_name", None), sys.argv[1:] if argv is None else argv
    verbs = getattr(get_command(app), "commands", {})
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
