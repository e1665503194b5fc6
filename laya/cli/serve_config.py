"""Owns: what `laya serve` runs with: config.yaml, the command line over it, and where to listen. Read at the start and
again at each reload, in the same way, so that what starts can be reloaded.

A file that was in use stays the one that is read: gone or emptied, as a file is while it is being written, it is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from laya.cli.config import check_engine_arguments
from laya.config import ApiKey, Config, ModelConfig, parse_budget, parse_engine_flags, with_settings
from laya.config.document import read_document
from laya.config.hosts import is_loopback
from laya.config.keys import hash_key, new_key
from laya.config.load import config_from
from laya.config.places import DATABASE, config_path
from laya.config.ray import RayConfig, address_fault
from laya.errors import ConfigError, LayaError, ModelNotFound
from laya.gateway.kinds import kind_of
from laya.gateway.live_keys import lasts, read_keys
from laya.models import home_path, resolve
from laya.models.variants import variants_named


class Served(NamedTuple):
    """names: the models that the command line names. lan_key: the key made for --lan."""

    names: list[str]
    config: Config
    lan_key: str | None


class ServedConfig:
    """See the module. words: names of models, then flags of engines. beside: flags that the verb has itself."""

    def __init__(
        self,
        words: list[str],
        *,
        home: Path,
        beside: Sequence[str] = (),
        file: Path | None = None,
        memory_budget: str | None = None,
        anyway: bool = False,
        ray_address: str | None = None,
        host: str | None = None,
        port: int | None = None,
        lan: bool = False,
    ) -> None:
        self._words, self._beside = words, beside
        self._home = home
        self._file = file
        self._memory_budget = memory_budget
        self._anyway = anyway
        self._ray_address = ray_address
        self._host, self._port, self._lan = host, port, lan
        self._says_something = False
        self._host_place = ""  # where the file says what to listen on, as messages begin with it

    def path(self) -> Path | None:
        """The file: the one named or in use, else what stands in one of its places now."""
        return self._file or config_path(os.environ)

    def read(self) -> Served:
        """Raises ConfigError."""
        config = self._in_file()
        names, config = _with_flags(config, self._words, self._beside)
        memory = config.memory
        if self._memory_budget is not None:
            try:
                parse_budget(self._memory_budget)
            except ConfigError as error:
                raise ConfigError(f"--memory-budget {error.message}", param="--memory-budget") from None
            memory = msgspec.structs.replace(memory, budget=self._memory_budget)
        memory = msgspec.structs.replace(memory, anyway=memory.anyway or self._anyway)
        config = msgspec.structs.replace(config, memory=memory)
        if self._ray_address is not None:
            fault = address_fault(self._ray_address)
            if fault is not None:
                raise ConfigError(f"--ray {self._ray_address}: {fault}", param="--ray")
            config = msgspec.structs.replace(config, ray=RayConfig(address=self._ray_address))
        check_engine_arguments(config)
        try:
            config, lan_key = _with_address(config, self._host, self._port, self._lan, self._home)
        except ConfigError as error:  # an address of the file is told with its line
            raise ConfigError(("" if self._host else self._host_place) + error.message, param="server.host") from None
        return Served(names, config, lan_key)

    def _in_file(self) -> Config:
        path = self.path()
        if path is None:
            return Config()
        document = read_document(path, os.environ)
        if self._says_something and not document.data:
            raise ConfigError(
                f"{path}: it is empty, and was not before, so it counts as half written; "
                f"`version: 1` alone stands for the defaults"
            )
        config = config_from(document)
        self._file, self._says_something = path, bool(document.data)
        self._host_place = document.place(("server", "host"))
        return config


def _with_flags(config: Config, words: list[str], beside: Sequence[str]) -> tuple[list[str], Config]:
    """Flags are for the models named, or for all when none is."""
    first_flag = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    names, settings = words[:first_flag], parse_engine_flags(words[first_flag:], beside)
    names, config = _with_names(config, names, settings)
    if settings:
        for name in names or [None]:  # type: ignore[list-item]
            config = with_settings(config, settings, name)
    return names, config


def _with_names(config: Config, words: list[str], settings: dict[str, Any]) -> tuple[list[str], Config]:
    """The ids of the models that the command line names, each once, and the config with them.

    llama.cpp's `-m PATH` names a model too: by its file, or by the word that stands before the flags.
    """
    source = settings.pop("source", None)
    if source is not None and len(words) > 1:
        raise ConfigError(f"-m {source} is one model, and {len(words)} are named: {', '.join(words)}.", param="source")
    if source is not None and words:
        return words, with_settings(config, {"source": source}, words[0])
    names = []
    for word in words or ([source] if source is not None else []):
        name, config = _named(config, word, settings.get("quantization"))
        names.append(name)
    if settings.get("aliases") and not names:
        raise ConfigError("An alias is of a model that is named with it: laya serve MODEL --served-model-name NAME")
    return list(dict.fromkeys(names)), config


def _named(config: Config, name: str, quantization: str | None = None) -> tuple[str, Config]:
    """The id of a model that is named on the command line, and the config with it when the name is a path.

    Raises what is wrong with the name or the file.
    """
    asked = config.for_model(name)
    if asked.peer is not None:
        there = name.removeprefix(f"{asked.peer}/")
        raise ConfigError(
            f"{name} is a model of the peer '{asked.peer}': it is served without being named here, and loaded there, "
            f"at its first request or by `laya load {there}` with LAYA_URL={config.peers[asked.peer].url}."
        )
    known = asked.id
    if known in config.models:
        try:
            settings = config.for_model(known)
            settings = msgspec.structs.replace(settings, quantization=quantization or settings.quantization)
            kind_of(settings).find(settings, models_dir=Path(config.models_dir), home=home_path())
        except LayaError as error:  # other models are served without it, but this one was asked for
            raise ConfigError(f"models.{known}: {error.message}", param="models") from error
        return known, config
    models_dir, home = Path(config.models_dir), home_path()
    try:
        file = resolve(name, models_dir=models_dir, home=home)
    except ModelNotFound:
        if quantization is None or not variants_named(name, models_dir=models_dir, home=home):
            raise
        return name, msgspec.structs.replace(config, models=config.models | {name: ModelConfig()})
    if not Path(name).exists():
        return file.id, config
    entry = ModelConfig(source=str(file.path.absolute()))
    return file.id, msgspec.structs.replace(config, models=config.models | {file.id: entry})


def _with_address(
    config: Config, host: str | None, port: int | None, lan: bool, home: Path
) -> tuple[Config, str | None]:
    """Where to listen, and the key made for --lan. Raises ConfigError for an open address without a key."""
    server = config.server
    kept, key = read_keys(home / DATABASE), None
    if lan:
        host = host or "0.0.0.0"
        if not server.api_keys and not any(map(lasts, kept)):
            key = _lan_key(home)
            made = ApiKey(name="lan", sha256=hash_key(key))
            server = msgspec.structs.replace(server, api_keys=[made])
    server = msgspec.structs.replace(server, host=host or server.host, port=server.port if port is None else port)
    if not is_loopback(server.host) and not server.api_keys and not kept:
        raise ConfigError(
            f"Listening on {server.host} without an API key would open this machine to its network. "
            f"`laya serve --lan` makes a key, and so does `laya key create NAME`."
        )
    return msgspec.structs.replace(config, server=server), key


def _lan_key(home: Path) -> str:
    """The key of --lan, kept so that clients keep working; readable by this user only."""
    path = home / "lan_key"
    if path.is_file():
        return path.read_text().strip()
    home.mkdir(parents=True, exist_ok=True)
    key = new_key()
    part = path.with_suffix(".part")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(key + "\n")
    part.rename(path)
    return key
