"""Owns: the models that the config names: their files, and which of them are not there or broken, until they are.

One wrong entry costs that model and no other: its reason is told to whoever asks for it and shown beside the others.
Knows no endpoint, engine or router.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from laya.config import Config
from laya.config.quantization import split_kind
from laya.errors import ConfigError, LayaError, ModelMisconfigured
from laya.gateway.kinds import kind_of
from laya.gateway.variants import is_choosing
from laya.types import ModelFile, ModelStatus

TRY_EVERY_S = 1.0


class Entries:
    """Each entry under `models`; `faults` says what is wrong with those that are not served."""

    def __init__(self, config: Config, home: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.faults: dict[str, LayaError] = {}
        self._config = config
        self._home = home
        self._clock = clock
        self._failed_s: dict[str, float] = {}
        self._tried_s = float("-inf")

    def found(self) -> Iterator[ModelFile]:
        """The model of each entry that has one; the fault of each other one is kept."""
        self._tried_s = self._clock()
        for model_id in self._config.models:
            file = self._file(model_id)
            if file is not None:
                yield file

    def mended(self) -> list[ModelFile]:
        """The models of entries that were wrong and are right now. Looks at the disk at most once in TRY_EVERY_S."""
        if not self.faults or self._clock() - self._tried_s < TRY_EVERY_S:
            return []
        self._tried_s = self._clock()
        return [file for model_id in list(self.faults) if (file := self._file(model_id)) is not None]

    def check(self, name: str) -> None:
        """Raise what is wrong with the entry that is called so."""
        for model_id, fault in self.faults.items():
            if name == model_id or name in self._config.for_model(model_id).aliases:
                raise ModelMisconfigured(model_id, fault) if isinstance(fault, ConfigError) else fault

    def check_any(self, n_servable: int) -> None:
        """Raise ConfigError that names the first wrong entry, where there is nothing else to serve."""
        for model_id, fault in self.faults.items():
            if not n_servable:
                raise ConfigError(f"models.{model_id}: {fault.message}", param="models") from fault

    def statuses(self) -> list[ModelStatus]:
        """Those that are not served, as `laya ps` shows them."""
        now_s = self._clock()
        return [
            ModelStatus(
                id=model_id,
                state="failed",
                task=self._config.for_model(model_id).task,
                since_s=now_s - self._failed_s[model_id],
                error=fault.message,
            )
            for model_id, fault in self.faults.items()
        ]

    def _file(self, model_id: str) -> ModelFile | None:
        settings = self._config.for_model(model_id)
        try:
            file = kind_of(settings).find(settings, models_dir=Path(self._config.models_dir), home=self._home)
        except LayaError as error:
            self.faults[model_id] = error
            self._failed_s.setdefault(model_id, self._clock())
            return None
        self.faults.pop(model_id, None)
        self._failed_s.pop(model_id, None)
        names = (file.id, *file.aliases)
        if is_choosing(settings):  # the name of one variant is not that of all
            names = tuple(name for name in names if split_kind(name)[1] is None)
        return msgspec.structs.replace(file, id=model_id, aliases=(*settings.aliases, *names))
