"""Owns: which models this server knows, by which names, and where their files are; what came and went on the disk.

An exact name wins over one that matches in another case only: names of the second kind are learned as they are asked
for, and given up as soon as a model comes that is called so. Knows no endpoint, engine or router.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from laya.config import Config
from laya.config.quantization import split_kind
from laya.errors import ConfigError, ModelNotFound, ModelNotPulled
from laya.gateway.entries import Entries
from laya.gateway.variants import is_choosing
from laya.models import available, resolve
from laya.types import ModelFile

RESCAN_EVERY_S = 1.0
NAMES_LEARNED_LIMIT = 32
_MISSES_LIMIT = 256


class Roster:
    """Names and files by model id."""

    def __init__(self, config: Config, home: Path) -> None:
        self.files: dict[str, ModelFile] = {}
        self.entries = Entries(config, home)
        self._config = config
        self.home = home
        self._models_dir = Path(config.models_dir)
        self._id_of: dict[str, str] = {}
        self._learned: set[str] = set()
        self._misses: dict[str, float] = {}
        self._scanned_s = float("-inf")
        self._stamp_ns: int | None = None

    # names
    def id_of(self, name: str) -> str | None:
        """The id of the model that is called so, as far as is known without a look at the disk."""
        return self._id_of.get(name)

    def aliases(self, model_id: str) -> list[str]:
        return [name for name, owner in self._id_of.items() if owner == model_id and name != model_id]

    def claim(self, file: ModelFile) -> tuple[ModelFile, set[str]]:
        """Make a model known by its names, as far as they are free; gives it with its id, and who lost a name by it.

        Where another model is called as this one's id, its first free name becomes its id.
        """
        names = [name for name in dict.fromkeys((file.id, *file.aliases)) if self._is_free(name)]
        losers = {self._id_of[name] for name in names if name in self._id_of}
        self._learned.difference_update(names)
        if not names:
            raise ConfigError(f"Every name of {file.path} belongs to another model: {file.id}.")
        file = msgspec.structs.replace(file, id=names[0])
        self.files[file.id] = file
        self._id_of |= dict.fromkeys(names, file.id)
        return file, losers

    def _is_free(self, name: str) -> bool:
        return name not in self.entries.faults and (name not in self._id_of or name in self._learned)

    def learn(self, model_id: str, name: str) -> bool:
        """The model was found by a name of another case; gives whether that is new. Raises ModelNotFound when it has
        too many names already."""
        if self._id_of.get(name) == model_id:
            return False
        if len(self.aliases(model_id)) >= NAMES_LEARNED_LIMIT:
            raise ModelNotFound(name, self._id_of)
        self._id_of[name] = model_id
        self._learned.add(name)
        return True

    def forget(self, model_id: str) -> None:
        names = [*self.aliases(model_id), model_id]
        for name in names:
            self._id_of.pop(name, None)
        self._learned.difference_update(names)
        del self.files[model_id]

    # files
    def look_up(self, name: str) -> ModelFile:
        """The file that a name means, from the disk; a name that was missed is not looked up again for a while.

        Raises: ModelNotFound, what is wrong with the entry of the config that is called so, and what the models room
        says of a file that is there but broken.
        """
        self.entries.check(name)
        now_s = time.monotonic()
        if self._misses.get(name, 0.0) > now_s - RESCAN_EVERY_S or len(self._misses) > _MISSES_LIMIT:
            self._misses = {missed: at_s for missed, at_s in self._misses.items() if at_s > now_s - RESCAN_EVERY_S}
            if name in self._misses or len(self._misses) > _MISSES_LIMIT:
                raise ModelNotFound(name, self._id_of)
        try:
            return resolve(name, models_dir=self._models_dir, home=self.home, allow_path=False)
        except ModelNotPulled:
            raise
        except ModelNotFound:
            self._misses[name] = now_s
            raise ModelNotFound(name, self._id_of) from None

    def id_of_file(self, file: ModelFile) -> str | None:
        """The model that this file is, whatever it is called."""
        known = self.files.get(file.id)
        if known is not None and known.path == file.path:
            return file.id
        same = (model_id for model_id, other in self.files.items() if other.path == file.path)
        return next((each for each in same if not self._is_one_of(file, each)), None)

    def _is_one_of(self, file: ModelFile, model_id: str) -> bool:
        """Whether it is called as one variant is, and the model runs as any of them."""
        return split_kind(file.id)[1] is not None and is_choosing(self._config.for_model(model_id))

    def on_disk(self) -> list[ModelFile]:
        """What is in the store and in models_dir now. Reads the disk: not on the loop once it runs."""
        return available(models_dir=self._models_dir, home=self.home)

    def is_scan_due(self) -> bool:
        """Whether the disk should be read again; who is told so reads it."""
        now_s = time.monotonic()
        if now_s - self._scanned_s < RESCAN_EVERY_S:
            return False
        self._scanned_s, self._stamp_ns = now_s, self._folder_stamp_ns()
        return True

    def has_folder_changed(self) -> bool:
        """Whether a file came to, or left, models_dir since the last scan; as cheap as one stat."""
        return time.monotonic() - self._scanned_s >= RESCAN_EVERY_S and self._folder_stamp_ns() != self._stamp_ns

    def _folder_stamp_ns(self) -> int | None:
        try:
            return self._models_dir.stat().st_mtime_ns
        except OSError:
            return None  # no such folder yet

    def compare(self, found: list[ModelFile]) -> tuple[list[str], list[ModelFile]]:
        """Compare with a scan: (ids of models that are gone, files that are new). Forgets and claims nothing.

        A model of the config stays: its owner has named it. So does what was found by name elsewhere and is there.
        """
        pulled = {file.path for file in found if file.origin == "pulled"}
        gone = []
        for model_id, file in self.files.items():
            if file.origin == "peer":  # on no disk of this machine
                continue
            is_there = file.path in pulled if file.origin == "pulled" else file.path.exists()
            if model_id not in self._config.models and not is_there:
                gone.append(model_id)
        return gone, [file for file in found if self.id_of_file(file) is None]
