"""Owns: the verbs of the lab: they run in a process of their own, as they need torch, which `laya` never loads."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import typer

from laya.errors import ConfigError

_NEEDED = ("torch", "transformers", "safetensors", "gguf")
_EVAL_NEEDED = ("numpy", "gguf", "matplotlib", "jsonschema")


def export(context: typer.Context) -> None:
    """Write a Laya model as GGUF (llama.cpp) or in Mixtral's form, checked against the torch model."""
    _run("laya.modeling.export", context)


def evaluate(context: typer.Context) -> None:
    """Variants of a model in one table: memory, speed, and what is left of its quality; or two models on a task set."""
    _run("laya.quantization.evaluate", context, _EVAL_NEEDED)


def check_torch(verb: str, needed: tuple[str, ...] = _NEEDED) -> None:
    """Raises ConfigError naming what this Python lacks of what the lab needs."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"`laya {verb}` needs {', '.join(missing)}, which this Python does not have: pip install 'laya-llm[torch]'"
        )


def _run(module: str, context: typer.Context, needed: tuple[str, ...] = _NEEDED) -> None:
    check_torch(context.info_name or "", needed)
    raise typer.Exit(subprocess.run([sys.executable, "-m", module, *context.args], check=False).returncode)
