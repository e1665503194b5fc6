"""Owns: metadata of one architecture, read by key with every value checked. Knows no meaning of a key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from laya.errors import BadModelFile

N = TypeVar("N", int, float)

MAX_LAYERS = 4096
MAX_WIDTH = 1 << 24  # elements of one row; also bounds every product of them


class Keys:
    """Metadata with its architecture prefix; every fault names the file and the key."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self.metadata = metadata
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            self.fail("has no general.architecture: it is no language model, or its metadata is lost")
        self.architecture: str = architecture

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def has(self, *keys: str) -> bool:
        return any(self.get(key) is not None for key in keys)

    def number(self, key: str, default: N | None = None, *, least: int = 0, most: int = MAX_WIDTH) -> int | N:
        """A count from the metadata, the largest where it is one per layer; what is told must be at least `least`."""
        value = self.get(key)
        if isinstance(value, tuple):
            value = max(value, default=None)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            right = f"it must be a whole number from {least} to {most}"
            said = "is missing" if value is None else f"is {value!r}; {right}"
            self.fail(f"is corrupt: {self.architecture}.{key} {said}")
        return value

    def optional(self, key: str) -> int | None:
        """A count, or None where the key is absent."""
        return self.number(key) if self.has(key) else None

    def per_layer(self, key: str, n_layer: int, default: tuple[int, ...]) -> tuple[int, ...]:
        """One count for each layer, from one number for all or an array."""
        value = self.get(key)
        if value is None:
            return default
        values = value if isinstance(value, tuple) else (value,) * n_layer
        if len(values) < n_layer or not all(isinstance(each, int) and 0 <= each <= MAX_WIDTH for each in values):
            self.fail(f"is corrupt: {self.architecture}.{key} is not a count for each of {n_layer} layers")
        return tuple(int(each) for each in values[:n_layer])

    def fail(self, what: str) -> NoReturn:
        raise BadModelFile(f"{self.path} {what}.", param="model")
