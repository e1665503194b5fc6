"""Owns: the folder of one training run: its recipe, its log, its checkpoint, and at the end the model with its card.

recipe.json, log.jsonl (a line a step, and one a look at held-out text), checkpoint.pt, loss.png, balance.png, model/.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import torch

from laya.modeling.model import LayaForCausalLM
from laya.training.card import card
from laya.training.curves import draw_curves
from laya.training.held_out import HeldOut
from laya.training.recipe import Recipe
from laya.training.tokens import Corpus

if TYPE_CHECKING:
    from laya.training.train import Step


class RunFolder:
    """See the module. One process at a time."""

    def __init__(self, path: Path, n_threads: int) -> None:
        self.path = path
        self.n_threads = n_threads
        self._log: IO[bytes] | None = None
        self._whole_step = 0

    @classmethod
    def open(cls, path: Path, recipe: Recipe, n_threads: int | None) -> RunFolder:
        """A new run's folder, or one whose training goes on. Raises ValueError where it is another's, or done."""
        told = path / "recipe.json"
        if (path / "model").exists():
            raise ValueError(f"{path} holds a model that is trained already; name another --out")
        if not told.is_file():
            if path.exists() and any(path.iterdir()):
                raise ValueError(f"{path} is not empty and no run of `laya train`; name another --out")
            path.mkdir(parents=True, exist_ok=True)
            threads = n_threads or torch.get_num_threads()
            _write(told, msgspec.json.format(msgspec.json.encode({"threads": threads, "recipe": recipe})))
            return cls(path, threads)
        known = msgspec.json.decode(told.read_bytes())
        if known["recipe"] != msgspec.to_builtins(recipe):
            changed = _first_difference(known["recipe"], msgspec.to_builtins(recipe))
            raise ValueError(
                f"{path} was begun with another recipe ({changed}); name another --out, or give it as it was"
            )
        return cls(path, n_threads or known["threads"])

    def restore(self, model: LayaForCausalLM, optimizer: torch.optim.Optimizer) -> int:
        """Gives the number of steps that are done; what the log has beyond them is cut off."""
        kept = self.path / "checkpoint.pt"
        if kept.is_file():
            state: dict[str, Any] = torch.load(kept, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            self._whole_step = state["step"]
        log = self.path / "log.jsonl"
        lines = log.read_bytes().splitlines(keepends=True) if log.is_file() else []
        whole = [
            line for line in lines if line.endswith(b"\n") and msgspec.json.decode(line)["step"] <= self._whole_step
        ]
        _write(log, b"".join(whole))
        self._log = log.open("ab", buffering=0)
        return self._whole_step

    def log(self, line: Step | HeldOut) -> None:
        assert self._log is not None
        self._log.write(msgspec.json.encode(line) + b"\n")

    def keep(self, model: LayaForCausalLM, optimizer: torch.optim.Optimizer, step: int) -> None:
        """A checkpoint after `step` steps."""
        part = self.path / "checkpoint.pt.part"
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, part)
        os.replace(part, self.path / "checkpoint.pt")
        self._whole_step = step

    def finish(self, model: LayaForCausalLM, recipe: Recipe, corpus: Corpus, result: HeldOut) -> None:
        """Curves and card, then the model's folder, which is there when all of it is."""
        steps, looks = self.read_log()
        draw_curves(steps, looks, self.path)
        part = self.path / "model.part"
        shutil.rmtree(part, ignore_errors=True)
        model.eval().save_pretrained(part)
        shutil.copytree(corpus.tokenizer_dir, part, dirs_exist_ok=True)
        (part / "README.md").write_text(card(recipe, corpus, result, model), encoding="utf-8")
        os.replace(part, self.path / "model")

    def read_log(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Steps, and looks at held-out text."""
        lines = [msgspec.json.decode(line) for line in (self.path / "log.jsonl").read_bytes().splitlines()]
        return [line for line in lines if "learning_rate" in line], [line for line in lines if "layers" in line]


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    os.replace(part, path)


def _first_difference(known: Any, asked: Any, where: str = "") -> str:
    if isinstance(known, dict) and isinstance(asked, dict):
        for key in known | asked:
            if known.get(key) != asked.get(key):
                return _first_difference(known.get(key), asked.get(key), f"{where}.{key}" if where else str(key))
    return f"{where}: {known!r} there, {asked!r} now"
