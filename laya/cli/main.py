"""Owns: the `laya` command: its verbs and how a fault becomes one sentence and an exit code.

Exit codes: 0 ok, 1 failed, 2 usage or config, 3 does not fit, 4 no server there, 130 interrupted.
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.markup import escape

from laya.cli.bench import bench
from laya.cli.chat import chat
from laya.cli.config import config_app
from laya.cli.doctor import doctor
from laya.cli.models import list_models, pull, rm, show
from laya.cli.plan import plan
from laya.cli.running import load, logs, ps, unload
from laya.cli.serve import run, serve
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
app.command()(plan)
app.command()(ps)
app.command()(load)
app.command()(unload)
app.command()(logs)
app.command()(doctor)
app.command(rich_help_panel=_MORE)(smoke)
app.command(rich_help_panel=_MORE, context_settings=_FLAGS_PASS)(bench)
app.add_typer(config_app, name="config", rich_help_panel=_MORE)


def main(argv: list[str] | None = None) -> None:
    """The console script."""
    sys.exit(_run(argv))


def _run(argv: list[str] | None) -> int:
    try:
        code = app(args=argv, standalone_mode=False)
    except LayaError as error:
        _say(error.message)
        return error.exit_code
    except typer.TyperException as error:  # a word that is no verb, option or value
        _say(f"{error.format_message()} `laya --help` lists what there is.")
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return 130
    return code if isinstance(code, int) else 0


def _say(message: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]laya:[/] {escape(message)}")
