"""Owns: `laya import`: another program's file in, a config.yaml out, and a line for each thing that is not in it.

The configuration goes to stdout or, whole or not at all, into a file; what is told goes to stderr.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
import yaml

from laya.cli.config import checked
from laya.cli.imports.draft import Draft
from laya.cli.imports.litellm import read_litellm
from laya.cli.imports.llama_swap import read_llama_swap
from laya.cli.imports.ollama import read_ollama
from laya.cli.output import printable
from laya.errors import ConfigError, LayaError

import_app = typer.Typer(help="Turn another program's configuration into Laya's.", no_args_is_help=True)

Out = Annotated[Path | None, typer.Option("--out", "-o", help="Write it here instead of to stdout.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the file of --out where it is there.")]


@import_app.command("llama-swap")
def llama_swap(
    file: Annotated[Path, typer.Argument(help="Its config.yaml.")], out: Out = None, force: Force = False
) -> None:
    """Models of llama-swap: llama-server becomes Laya's own engine, any other program engine: command."""
    _give(read_llama_swap(file), f"llama-swap's {file.name}", out, force)


@import_app.command()
def ollama(
    files: Annotated[list[Path], typer.Argument(help="Modelfiles, env files, folders of them, or ~/.ollama/models.")],
    out: Out = None,
    force: Force = False,
    name: Annotated[str | None, typer.Option(help="What to call the model of one Modelfile.")] = None,
) -> None:
    """Models of Ollama, from Modelfiles or its store, and its environment."""
    _give(read_ollama(files, name), "Ollama's " + ", ".join(file.name for file in files), out, force)


@import_app.command()
def litellm(
    file: Annotated[Path, typer.Argument(help="The config.yaml of its proxy.")], out: Out = None, force: Force = False
) -> None:
    """Models of LiteLLM's proxy whose servers speak OpenAI's API, as engine: remote, with fallbacks as rules."""
    _give(read_litellm(file), f"LiteLLM's {file.name}", out, force)


def text_of(draft: Draft, origin: str) -> str:
    """The config.yaml: settings of all models first, then the sections, then the models."""
    keys = sorted(
        draft.config, key=lambda key: (key != "version", isinstance(draft.config[key], dict), key == "models")
    )
    body = yaml.safe_dump(
        {key: draft.config[key] for key in keys},
        sort_keys=False,
        allow_unicode=True,
        width=110,
        default_flow_style=False,
    )
    return f"# from {printable(origin)}, by `laya import`\n{body}"


def _give(draft: Draft, origin: str, out: Path | None, force: bool) -> None:
    text = text_of(draft, origin)
    with tempfile.TemporaryDirectory() as elsewhere:
        target = Path(elsewhere, "config.yaml") if out is None else out.resolve()
        if target.exists() and not force:
            raise _there_already(out)
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            _write(part, text)
            for line in (*draft.told, *_verdict(part, "config.yaml" if out is None else str(out))):
                print(printable(line), file=sys.stderr)
            if out is not None:
                _move(part, target, force)
        except FileExistsError:
            raise _there_already(out) from None
        except OSError as error:
            raise LayaError(f"{target}: cannot be written ({error.strerror}).") from None
        finally:
            part.unlink(missing_ok=True)
    if out is None:
        print(text, end="")
    else:
        n_models = len(draft.config.get("models", {}))
        print(f"wrote {printable(str(out))}: {n_models} model{'' if n_models == 1 else 's'}", file=sys.stderr)


def _there_already(out: Path | None) -> ConfigError:
    return ConfigError(f"{out} is there already: --force replaces it, --out names another file", param="--out")


def _write(part: Path, text: str) -> None:
    """Beside where it will be, so that a rename is all that is left to do."""
    with part.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _move(part: Path, target: Path, force: bool) -> None:
    """Raises FileExistsError for a file that came meanwhile, which a rename would replace."""
    if not force:
        try:
            os.link(part, target)
            return
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            target.open("x").close()
    part.replace(target)


def _verdict(part: Path, name: str) -> list[str]:
    """What `laya config check` says of it."""
    try:
        _, _, warnings = checked(part)
    except ConfigError as error:
        return [f"to do: {error.message.replace(str(part), name)}"]
    return [f"warning: {warning}" for warning in warnings]
