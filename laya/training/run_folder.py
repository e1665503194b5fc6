"""Owns: the folder of one training run: its recipe, its log, its checkpoint, and at the end the model with its card.

recipe.json, log.jsonl (a line a step, and one a look at held-out text), checkpoint.pt, loss.png, balance.png, model/.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import torch
from safetensors import SafetensorError

from laya.errors import BadModelFile, Conflict, InvalidRequest
from laya.modeling.model import LayaForCausalLM
from laya.result_file import as_umask_says
from laya.training.card import card
from laya.training.curves import draw_curves
from laya.training.held_out import HeldOut
from laya.training.recipe import Recipe
from laya.training.tokens import Corpus

if TYPE_CHECKING:
    from laya.training.train import Step


class _Begun(msgspec.Struct):
    """recipe.json."""

    threads: int
    recipe: dict[str, Any]


class RunFolder:
    """See the module. One process at a time: it is locked until it is closed, as a context manager does."""

    def __init__(self, path: Path, descriptor: int, n_threads: int, begun_threads: int) -> None:
        self.path = path
        self.n_threads = n_threads
        self.begun_threads = begun_threads
        self._descriptor = descriptor
        self._log: IO[bytes] | None = None
        self._whole_step = 0
        self._data = ""

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            self._log.close()
        os.close(self._descriptor)

    @classmethod
    def open(cls, path: Path, recipe: Recipe, n_threads: int | None) -> RunFolder:
        """A new run's folder, or one whose training goes on. Raises Conflict where it is another's, or done.

        Before its first checkpoint a run may still be given another recipe.
        """
        told = path / "recipe.json"
        if path.exists() and not path.is_dir():
            raise InvalidRequest(f"--out {path}: that is a file; name a folder.")
        if (path / "model").exists():
            raise Conflict(f"{path} holds a model that is trained already; name another --out")
        if not told.is_file() and path.exists() and any(path.iterdir()):
            raise Conflict(f"{path} is not empty and no run of `laya train`; name another --out")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(f"--out {path}: {error.strerror}") from None
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (path / "checkpoint.pt").is_file():
                known = _begun(told, recipe)
                return cls(path, descriptor, n_threads or known.threads, known.threads)
            threads = n_threads or torch.get_num_threads()
            begun = _Begun(threads=threads, recipe=msgspec.to_builtins(recipe))
            _write(told, msgspec.json.format(msgspec.json.encode(begun)))
            return cls(path, descriptor, threads, threads)
        except BlockingIOError:
            os.close(descriptor)
            raise Conflict(f"{path}: another process trains there") from None
        except BaseException:
            os.close(descriptor)
            raise

    def restore(self, model: LayaForCausalLM, optimizer: torch.optim.Optimizer, corpus: Corpus) -> int:
        """Gives the number of steps that are done; what the log has beyond them, or cannot be read, is cut out.

        Raises BadModelFile where the checkpoint cannot be read, Conflict where its texts were others.
        """
        kept, self._data = self.path / "checkpoint.pt", Path(corpus.folder).name
        if kept.is_file():
            try:
                state: dict[str, Any] = torch.load(kept, weights_only=True)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
                self._whole_step = int(state["step"])
            except (RuntimeError, EOFError, OSError, LookupError, TypeError, ValueError, pickle.PickleError) as error:
                why = type(error).__name__  # torch's own words go on for lines, and advise to run what is in the file
                raise BadModelFile(f"{kept} cannot be read ({why}); without it training begins anew") from None
            if state.get("data", self._data) != self._data:
                raise Conflict(f"{self.path} was begun with other texts (a folder has changed); name another --out")
        log = self.path / "log.jsonl"
        lines = log.read_bytes().splitlines(keepends=True) if log.is_file() else []
        _write(log, b"".join(line for line in lines if _step_of(line) <= self._whole_step))
        self._log = log.open("ab", buffering=0)
        return self._whole_step

    def log(self, line: Step | HeldOut) -> None:
        assert self._log is not None
        self._log.write(msgspec.json.encode(line) + b"\n")

    def keep(self, model: LayaForCausalLM, optimizer: torch.optim.Optimizer, step: int) -> None:
        """A checkpoint after `step` steps."""
        part = self.path / "checkpoint.pt.part"
        state = {"step": step, "data": self._data, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        try:
            with part.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self.path / "checkpoint.pt")
        except (RuntimeError, OSError) as error:  # torch tells a full disk as RuntimeError
            part.unlink(missing_ok=True)
            raise OSError(_not_written(part, error)) from None
        self._whole_step = step

    def finish(self, model: LayaForCausalLM, recipe: Recipe, corpus: Corpus, result: HeldOut) -> None:
        """Curves and card, then the model's folder, which is there when all of it is."""
        steps, looks = self.read_log()
        draw_curves(steps, looks, self.path)
        part = self.path / "model.part"
        shutil.rmtree(part, ignore_errors=True)
        try:
            model.eval().save_pretrained(part)
            shutil.copytree(corpus.tokenizer_dir, part, dirs_exist_ok=True)
            settings = part / "tokenizer_config.json"
            told = json.loads(settings.read_text()) | {"model_max_length": recipe.model.max_position_embeddings}
            settings.write_text(json.dumps(told, indent=2) + "\n")
            (part / "README.md").write_text(card(recipe, corpus, result, model), encoding="utf-8")
            as_umask_says(part)
            os.replace(part, self.path / "model")
        except (SafetensorError, OSError) as error:
            raise OSError(_not_written(part, error)) from None
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def read_log(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Steps, and looks at held-out text."""
        lines = [msgspec.json.decode(line) for line in (self.path / "log.jsonl").read_bytes().splitlines()]
        return [line for line in lines if "learning_rate" in line], [line for line in lines if "layers" in line]


def _begun(told: Path, recipe: Recipe) -> _Begun:
    """Raises Conflict where a run was begun with another recipe, BadModelFile where that cannot be read."""
    try:
        known = msgspec.json.decode(told.read_bytes(), type=_Begun)
    except msgspec.DecodeError as error:
        raise BadModelFile(f"{told} cannot be read: {error}") from None
    asked = msgspec.to_builtins(recipe)
    if known.recipe != asked:
        changed = _first_difference(known.recipe, asked)
        raise Conflict(
            f"{told.parent} was begun with another recipe ({changed}); name another --out, or give it as it was"
        )
    return known


def _step_of(line: bytes) -> float:
    """Of a whole line of the log; beyond all steps where it is none."""
    try:
        step = msgspec.json.decode(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return float("inf")
    return step if isinstance(step, int) else float("inf")


def _not_written(path: Path, error: Exception) -> str:
    return f"{path} could not be written: {str(error).partition(chr(10))[0]}"


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
