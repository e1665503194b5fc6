"""Owns: what differs between the configuration that runs and the one in the file, and what each difference takes.

Pure: knows neither the fleet nor the disk. Three kinds: in force at once, with the model's next load (which a reload
brings about), and with the server's next start (told, never applied).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from laya.config import Config, ResolvedModel
from laya.config.resolve import RESOLVED_NAMES

SECTIONS = ("server", "memory", "routing", "store", "request_log", "traces", "ray")
WITH_SERVER = frozenset(
    {"server.host", "server.port", "server.cors_origins", "server.share_prompt_cache", "store.url", "ray.address"}
)  # what listens, what was handed out, and what engines were all started with
_WATCH = "server.watch_config"  # turned on at once; off with the next start, or a file half written would do it
_AT_ONCE = frozenset(
    (
        "aliases",
        "cost",
        "default_max_tokens",
        "defaults",
        "enable_streaming",
        "id",
        "limits",
        "load_timeout_s",
        "overflow",
        "pinned",
        "policy",
        "preload",
        "progress_timeout_s",
        "queue_size",
        "queue_timeout_s",
        "replicas",
        "source",
        "ttl_s",
        "weight",
    )
)
_DERIVED = frozenset({"fixed", "id", "source"})  # not a setting of its own, or seen by the file that it leads to
_UNSHOWN = frozenset(
    {"args", "chat_template", "defaults", "program", "remote", "routing.rules", "store.url"}
)  # long, or may hold a secret
_WRITTEN = {resolved: written for written, resolved in RESOLVED_NAMES.items()}


class Setting(msgspec.Struct, frozen=True):
    """One key: what it was and what it is. Both None where the values are long or may be secret."""

    name: str
    was: Any = None
    now: Any = None


class ModelChange(msgspec.Struct, frozen=True):
    """A model that stays. restarts: its engine, where there is one, is drained and loaded anew."""

    id: str
    settings: tuple[Setting, ...]
    restarts: bool
    is_rolling: bool = False  # its engines are loaded anew one after another, and one of them always serves
    at_once: str | None = None  # why its engines, where there are several, are all loaded anew at once


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a reload changes. A dry run gives the same one."""

    dry_run: bool
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[ModelChange, ...] = ()
    settings: tuple[Setting, ...] = ()
    needs_server_restart: tuple[Setting, ...] = ()
    not_served: dict[str, str] = {}  # entries of the file whose model is not there, with the reason

    @property
    def has_changes(self) -> bool:
        """Whether anything is another than before; what waits for a restart of the server is not."""
        return bool(self.added or self.removed or self.changed or self.settings)


def settings_changed(old: Config, new: Config) -> tuple[tuple[Setting, ...], tuple[Setting, ...]]:
    """Keys outside of models that differ: (in force at once, with the server's next start)."""
    found = list(_sections(old, new))
    if old.models_dir != new.models_dir:
        found.append(Setting("models_dir", old.models_dir, new.models_dir))
    if old.peers != new.peers:
        found.append(Setting("peers"))
    live = tuple(each for each in found if not _waits(each.name, each.was))
    return live, tuple(each for each in found if _waits(each.name, each.was))


def adopt(running: Config, new: Config) -> None:
    """Make the running configuration, which every room holds, say what the new one says; but what needs a new start."""
    for name in Config.__struct_fields__:
        if name not in SECTIONS:
            setattr(running, name, getattr(new, name))
    for section in SECTIONS:
        mine, its = getattr(running, section), getattr(new, section)
        for name in mine.__struct_fields__:
            if not _waits(f"{section}.{name}", getattr(mine, name)):
                setattr(mine, name, getattr(its, name))


def _waits(name: str, was: Any) -> bool:
    """Whether a key stays as it was until the server's next start."""
    return name in WITH_SERVER or (name == _WATCH and was is True)


def model_changed(old: ResolvedModel, new: ResolvedModel, *, is_other_file: bool) -> ModelChange | None:
    """How a model's settings differ; None where they do not."""
    names = [name for name in ResolvedModel.__struct_fields__ if getattr(old, name) != getattr(new, name)]
    settings = [_shown(_WRITTEN.get(name, name), old, new, name) for name in names if name not in _DERIVED]
    if is_other_file:
        settings.append(_shown("source", old, new, "source"))
    restarts = is_other_file or needs_restart(old, new)
    if not settings and restarts:  # a default that is now said: the fit may not change it any more
        settings = [Setting(name) for name in sorted(old.fixed ^ new.fixed)]
    return ModelChange(new.id, tuple(settings), restarts) if settings else None


def needs_restart(old: ResolvedModel, new: ResolvedModel) -> bool:
    """Whether an engine that was started with the old settings is another than one of the new."""
    if old.asked() != new.asked():
        return True
    names = (name for name in ResolvedModel.__struct_fields__ if name not in _AT_ONCE and name != "fixed")
    return any(getattr(old, name) != getattr(new, name) for name in names)


def _sections(old: Config, new: Config) -> Iterator[Setting]:
    for section in SECTIONS:
        was, now = getattr(old, section), getattr(new, section)
        for field in was.__struct_fields__:
            if getattr(was, field) != getattr(now, field):
                yield _shown(f"{section}.{field}", was, now, field)


def _shown(name: str, was: Any, now: Any, field: str) -> Setting:
    if name in _UNSHOWN:
        return Setting(name)
    values = [getattr(each, field) for each in (was, now)]
    if name == "server.api_keys":  # by name; never a digest
        values = [[key.name for key in keys] for keys in values]
    return Setting(name, *msgspec.to_builtins(values, enc_hook=str))
