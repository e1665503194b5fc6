"""Owns: the verbs of the lab: they run in a process of their own, as they need torch, which `laya` never loads."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import typer

from laya.errors import ConfigError

_NEEDED = ("torch", "transformers", "safetensors", "gguf")


def export(context: typer.Context) -> None:
    """Write a Laya model as GGUF (llama.cpp) or in Mixtral's form, checked against the torch model."""
    _run("laya.modeling.export", context)


def check_torch(verb: str) -> None:
    """Raises ConfigError naming what this Python lacks of what the lab needs."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"`laya {verb}` needs {', '.join(missing)}, which this Python does not have: pip install 'laya-llm[torch]'"
        )


def _run(module: str, context: typer.Context) -> None:
    check_torch(context.info_name or "")
    raise typer.Exit(subprocess.run([sys.executable, "-m", module, *context.args], check=False).returncode)
