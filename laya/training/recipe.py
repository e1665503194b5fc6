"""Owns: a training recipe: which texts, which model, how long; read from YAML, with errors that name the key.

Knows nothing of how texts are fetched (`sources`) or models trained (`train`).
"""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

from laya.config.convert import to_struct
from laya.config.document import read_document
from laya.errors import ConfigError, nearest

BUILT_IN_DIR = Path(__file__).with_name("recipes")
Form = Literal["text", "html", "gzip", "rdb"]
_PACKAGE = re.compile(r"debian:[a-z0-9][a-z0-9+.:~=-]+|pypi:[A-Za-z0-9][\w.-]*==\w[\w.+!-]*|folder:.+")
_FILE_NAME = re.compile(r"[\w-][\w.-]*")
_LEAST_POSITIVE = 1e-9


def _check(numbers: msgspec.Struct, least: float, *names: str) -> None:
    """Raises ValueError for the first that is less, or no number."""
    for name in names:
        value = getattr(numbers, name)
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"{name} is {value}; expected {least:g} or more")


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Documents of one topic, out of one package. Raises ValueError for what no package or file could match."""

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
        if not _PACKAGE.fullmatch(self.package):
            raise ValueError(f"package is {self.package!r}; expected debian:NAME, pypi:NAME==VERSION or folder:PATH")
        if not _FILE_NAME.fullmatch(self.topic):
            raise ValueError(f"topic is {self.topic!r}; files are named by it: expected letters, digits, '_', '-', '.'")
        if not self.files:
            raise ValueError("files is empty: nothing is read of the package")
        for pattern in self.files:
            parts = PurePosixPath(pattern).parts
            if not parts or parts[0] == "/" or ".." in parts:
                raise ValueError(f"files has {pattern!r}; expected a path inside the package, such as **/*.txt")
            if any("**" in part and part != "**" for part in parts):
                raise ValueError(f"files has {pattern!r}; ** stands alone between slashes, such as **/*.txt")
        try:
            re.compile(self.remove or "")
        except re.error as error:
            raise ValueError(f"remove is {self.remove!r}, which is no regular expression: {error}") from None
        _check(self, 1, "split_bytes", "max_bytes")


class HeldOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Documents that are not trained on: a share, drawn by their names, and those whose name one of `files` matches."""

    share: float = 0.05
    files: list[str] = []

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"share is {self.share}; expected 0 or more, and less than 1")


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

    def __post_init__(self) -> None:
        _check(self, 1, *(name for name in self.__struct_fields__ if name != "rope_theta"))
        _check(self, _LEAST_POSITIVE, "rope_theta")
        if not 257 <= self.vocab_size <= 65536:
            raise ValueError(f"vocab_size is {self.vocab_size}; expected 257 to 65536")
        for number, divisor in (
            ("hidden_size", "num_attention_heads"),
            ("num_attention_heads", "num_key_value_heads"),
        ):
            value, of = getattr(self, number), getattr(self, divisor)
            if value % of:
                raise ValueError(f"{number} is {value}, no multiple of {divisor} {of}")
        head_dim = self.hidden_size // self.num_attention_heads
        if head_dim % 2:
            raise ValueError(
                f"hidden_size / num_attention_heads is {head_dim}; expected an even number, as positions turn pairs"
            )
        if self.hidden_size % 4:  # torch's kernel of the experts takes rows of whole 16 bytes
            raise ValueError(f"hidden_size is {self.hidden_size}; expected a multiple of 4")
        if self.intermediate_size % 4:
            raise ValueError(f"intermediate_size is {self.intermediate_size}; expected a multiple of 4")
        if self.num_experts_per_tok > self.num_local_experts:
            raise ValueError(f"num_experts_per_tok is {self.num_experts_per_tok}; there are {self.num_local_experts}")


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
        _check(self, 1, "tokens", "sequences_per_step", "checkpoint_steps", "held_out_steps", "held_out_tokens")
        _check(self, 2, "sequence_tokens")
        _check(self, _LEAST_POSITIVE, "learning_rate", "max_grad_norm")
        _check(self, 0, "warmup_steps", "balance_steps", "weight_decay")
        _check(self, 0, "router_aux_loss_coef", "router_z_loss_coef", "balance_aux_loss_coef")

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

    def __post_init__(self) -> None:
        if not _FILE_NAME.fullmatch(self.name):
            raise ValueError(f"name is {self.name!r}; files are named by it: expected letters, digits, '_', '-', '.'")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed is {self.seed}; expected 0 to {(1 << 32) - 1}")
        if not self.sources:
            raise ValueError("sources is empty: there is nothing to train on")
        if self.train.sequence_tokens > self.model.max_position_embeddings:
            raise ValueError(
                f"train.sequence_tokens is {self.train.sequence_tokens}, more than model.max_position_embeddings "
                f"{self.model.max_position_embeddings}"
            )

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
    """A built-in recipe's name, or a YAML file. Raises ConfigError: what is wrong, in which line, and what is meant."""
    path = BUILT_IN_DIR / f"{name}.yaml" if name in built_in() else Path(name)
    if not path.is_file():
        near = nearest(name, built_in())
        hint = f"did you mean {near}?" if near else f"built in: {', '.join(built_in())}"
        raise ConfigError(f"no recipe {name!r}: neither a file nor a built-in one; {hint}")
    return to_struct(Recipe, read_document(path, None))
