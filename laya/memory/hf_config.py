"""Owns: reading a config.json by key, under all the names a figure has, with every value checked.

Models that see or hear keep the language model's figures in an object of their own (text_config, llm_config, ...);
those win over the ones outside. Knows no meaning of a figure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from laya.errors import BadModelFile, nearest

MAX_LAYERS = 4096
MAX_WIDTH = 1 << 24  # elements of one row
_NESTED = ("text_config", "llm_config", "language_config", "text_model_config", "language_model", "decoder",
           "thinker_config", "llm", "text_model")  # fmt: skip
# Families that nest figures of a part of the model.
_PARTS = ("attn_config", "ffn_config", "ssm_cfg")
_NO_LANGUAGE = re.compile(
    r"vision|image|audio|diffus|unet|vae|clip|siglip|whisper|wav2vec|vit$|dino|sam", re.IGNORECASE
)


class HfConfig:
    """The figures of one config.json; every fault names the model and the key."""

    def __init__(self, name: str, text: bytes) -> None:
        self.name = name
        try:
            outer = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            self.fail(f"is no JSON ({error})")
        if not isinstance(outer, dict):
            self.fail(f"is {_kind(outer)}, not an object")
        self.outer: dict[str, Any] = outer
        self.values = _innermost(outer)
        for part in _PARTS:
            self.values = {**_dict(self.values.get(part)), **self.values}
        self.model_type = self._model_type()

    def _model_type(self) -> str:
        inner, outer = self.values.get("model_type"), self.outer.get("model_type")
        found = inner if isinstance(inner, str) else outer
        if isinstance(found, str) and found:
            return found
        if not self.architectures:
            self.fail("names no model: neither `architectures` nor `model_type` is there")
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", re.sub("For.*|LMHead.*", "", self.architectures[0])).lower()

    @property
    def architectures(self) -> tuple[str, ...]:
        """The classes that the config names, e.g. LlamaForCausalLM."""
        found = self.outer.get("architectures") or self.values.get("architectures")
        return tuple(name for name in found if isinstance(name, str)) if isinstance(found, list) else ()

    def get(self, *names: str) -> Any:
        """The first of these keys that is there and not null."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def has(self, *names: str) -> bool:
        return self.get(*names) is not None

    def number(
        self,
        *names: str,
        default: int | None = None,
        least: int = 0,
        most: int = MAX_WIDTH,
        is_per_layer: bool = False,
    ) -> int:
        """A count under any of these keys; where a family has one per layer, the largest."""
        value = self.get(*names)
        if is_per_layer and isinstance(value, list) and value:
            value = max(value) if all(_is_count(each, most) for each in value) else value
        if value is None and default is not None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not _is_count(value, most) or value < least:
            lists = ", or a list of such" if is_per_layer else ""
            self._bad(names, value, f"it must be a whole number from {least} to {most}{lists}")
        return int(value)

    def numbers(self, *names: str) -> tuple[int, ...] | None:
        """A list of counts, or None where it is absent or one number."""
        value = self.get(*names)
        if not isinstance(value, list):
            return None
        if not all(_is_count(each, MAX_WIDTH) for each in value):
            self._bad(names, value, f"each must be a whole number from 0 to {MAX_WIDTH}")
        return tuple(int(each) for each in value)

    def texts(self, *names: str) -> tuple[str, ...] | None:
        """A list of words, one for each layer, or None."""
        value = self.get(*names)
        return tuple(str(each) for each in value) if isinstance(value, list) and value else None

    def flag(self, *names: str, default: bool = False) -> bool:
        value = self.get(*names)
        return value if isinstance(value, bool) else default

    def part(self, *names: str) -> Mapping[str, Any]:
        """An object within the config; empty where there is none."""
        return _dict(self.get(*names))

    def refuse(self, names: Sequence[str], right: str) -> NoReturn:
        """Fail by the first of these keys that is there, its value and what would be right."""
        self._bad(names, self.get(*names), right)

    def _bad(self, names: Sequence[str], value: Any, right: str) -> NoReturn:
        if value is None and _NO_LANGUAGE.search(str(self.outer.get("model_type", ""))):
            self.fail(f"is of a {self.outer['model_type']!r}, which is no language model")
        if value is not None:
            key = next(name for name in names if self.values.get(name) is not None)
            shown = repr(value)
            self.fail(f"is corrupt: {key} is {shown if len(shown) < 80 else shown[:77] + '...'}; {right}")
        null = next((name for name in names if name in self.values), None)
        if null is not None:
            self.fail(f"is corrupt: {null} is null")
        close = nearest(names[0], self.values)
        self.fail(f"lacks {names[0]}" + (f"; it has {close}, which is not read" if close else ""))

    def fail(self, what: str) -> NoReturn:
        raise BadModelFile(f"{self.name}: config.json {what}.", param="model")


def _innermost(values: dict[str, Any]) -> dict[str, Any]:
    """The figures of the language model over those around it."""
    for _ in range(3):  # no known config nests deeper
        inner = next((values[key] for key in _NESTED if isinstance(values.get(key), dict) and values[key]), None)
        if inner is None:
            break
        values = {**{key: value for key, value in values.items() if key not in _NESTED}, **inner}
    return values


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "a truth value"}
    return names.get(type(value), "null")
