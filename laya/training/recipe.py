"""Owns: a training recipe: which texts, which model, how long; read from YAML, with errors that name the key.

Knows nothing of how texts are fetched (`sources`) or models trained (`train`).
"""

from __future__ import annotations

import difflib
import hashlib
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

BUILT_IN_DIR = Path(__file__).with_name("recipes")
Form = Literal["text", "html", "gzip", "rdb"]


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Documents of one topic, out of one package. Raises ValueError where the package is of no known kind."""

    topic: str
    package: str
    """`debian:NAME`, `pypi:NAME==VERSION` (a wheel) or `folder:PATH`."""
    licence: str
    files: list[str]
    """Shell patterns of paths inside the package; `**/` is any depth."""
    exclude: list[str] = []
    """Patterns of document names that are left out."""
    form: Form = "text"
    remove: str | None = None
    """A regular expression: what it matches is taken out."""
    split_bytes: int | None = None
    """Cut longer documents, between paragraphs, into parts of about so many bytes: each a document of its own."""
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        kind, colon, name = self.package.partition(":")
        if kind not in ("debian", "pypi", "folder") or not colon or not name:
            raise ValueError(f"package is {self.package!r}; expected debian:NAME, pypi:NAME==VERSION or folder:PATH")


class HeldOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Documents that are not trained on: a share, drawn by their names, and those whose name one of `files` matches."""

    share: float = 0.05
    files: list[str] = []


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As in `LayaConfig`."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    router_projection_size: int = 64


class Schedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW; the learning rate rises over `warmup_steps`, then falls as a cosine to a tenth.

    At the end come `balance_steps` in which routers alone learn, at that tenth, with a balance loss of its own weight.
    """

    tokens: int
    sequence_tokens: int = 256
    sequences_per_step: int = 8
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    router_aux_loss_coef: float = 0.02
    router_z_loss_coef: float = 0.001
    balance_steps: int = 0
    balance_aux_loss_coef: float = 1.0
    checkpoint_steps: int = 100
    held_out_steps: int = 200
    """How often the held-out text is looked at, on a part of it; at the end, and before routers learn alone, on all."""
    held_out_tokens: int = 65536
    """At most so many, the same number of each topic."""

    def __post_init__(self) -> None:
        for name in ("tokens", "sequence_tokens", "sequences_per_step", "checkpoint_steps", "held_out_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 1 or more")

    @property
    def step_tokens(self) -> int:
        return self.sequence_tokens * self.sequences_per_step

    @property
    def steps(self) -> int:
        """Those of all weights, and those of routers alone."""
        return self.whole_steps + self.balance_steps

    @property
    def whole_steps(self) -> int:
        return max(1, self.tokens // self.step_tokens)


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module."""

    name: str
    sources: list[Source]
    train: Schedule
    about: str = ""
    held_out: HeldOut = HeldOut()
    model: Model = Model()
    seed: int = 1

    @property
    def topics(self) -> list[str]:
        """In the order of their first source."""
        return list(dict.fromkeys(source.topic for source in self.sources))

    @property
    def data_key(self) -> str:
        """What the tokens depend on, and nothing else."""
        told = msgspec.json.encode([self.sources, self.held_out, self.model.vocab_size])
        return hashlib.sha256(told).hexdigest()[:16]

    def dense_twin(self) -> Recipe:
        """The same active size without experts to choose from: one, as wide as those that a token takes."""
        model = msgspec.structs.replace(
            self.model,
            num_local_experts=1,
            num_experts_per_tok=1,
            intermediate_size=self.model.intermediate_size * self.model.num_experts_per_tok,
        )
        return msgspec.structs.replace(self, name=f"{self.name}-dense", model=model, train=self._unbalanced())

    def without_balance(self) -> Recipe:
        """The router's losses left out."""
        return msgspec.structs.replace(self, name=f"{self.name}-unbalanced", train=self._unbalanced())

    def _unbalanced(self) -> Schedule:
        return msgspec.structs.replace(self.train, router_aux_loss_coef=0.0, router_z_loss_coef=0.0, balance_steps=0)


def built_in() -> list[str]:
    return sorted(path.stem for path in BUILT_IN_DIR.glob("*.yaml"))


def load(name: str) -> Recipe:
    """A built-in recipe's name, or a YAML file. Raises ValueError (what is wrong, and where), FileNotFoundError."""
    path = BUILT_IN_DIR / f"{name}.yaml" if name in built_in() else Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(name, built_in(), n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; built in: {', '.join(built_in())}"
        raise FileNotFoundError(f"no recipe {name!r}: neither a file nor a built-in one{hint}")
    try:
        raw: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        recipe = msgspec.convert(raw, Recipe)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from None
    if not recipe.sources:
        raise ValueError(f"{path}: sources is empty: there is nothing to train on")
    return recipe
