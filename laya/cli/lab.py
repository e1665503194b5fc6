"""Owns: the verbs of the lab: each becomes a program of its own, as it needs torch, which `laya` never loads.

The program takes this one's place, so that Ctrl-C and signals are its own, and it can clear away what is half done.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from laya.errors import ConfigError
from laya.lab_verb import says_what_is_left, stop_code, stopped_by_signals

_NEEDED = ("torch", "transformers", "safetensors", "gguf")
_EVAL_NEEDED = ("numpy", "gguf", "matplotlib", "jsonschema")


def export(context: typer.Context) -> None:
    """Write a Laya model as GGUF (llama.cpp) or in Mixtral's form, checked against the torch model."""
    _run("laya.modeling.export", context)


def upcycle(context: typer.Context) -> None:
    """Make a Mixture of Experts of a dense llama-family model: its block as experts, routers trained here."""
    _run("laya.training.upcycle", context)


def evaluate(context: typer.Context) -> None:
    """Variants of a model in one table: memory, speed, and what is left of its quality; or two models on a task set."""
    _run("laya.quantization.evaluate", context, _EVAL_NEEDED)


def train(context: typer.Context) -> None:
    """Train a small Mixture of Experts on this processor from a recipe of texts; goes on where it was stopped."""
    _run("laya.training.train", context)


def check_torch(verb: str, needed: tuple[str, ...] = _NEEDED) -> None:
    """Raises ConfigError naming what this Python lacks of what the lab needs."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"`laya {verb}` needs {', '.join(missing)}, which this Python does not have: pip install 'laya-llm[torch]'"
        )


@contextmanager
def interruptible(verb: str, left: str) -> Iterator[None]:
    """Of a verb that stays in this process: what a signal leaves is said, and told by the exit code."""
    try:
        with says_what_is_left(verb, left), stopped_by_signals():
            yield
    except KeyboardInterrupt as stopped:
        raise typer.Exit(stop_code(stopped)) from None


def _run(module: str, context: typer.Context, needed: tuple[str, ...] = _NEEDED) -> None:
    check_torch(context.info_name or "", needed)
    os.execv(sys.executable, [sys.executable, "-m", "laya.lab_verb", module, *context.args])
