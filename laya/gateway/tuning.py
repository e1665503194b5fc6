"""Owns: settings of a model that a person tries or changes while the server runs, written as flags of the command line.

Changed are those that a plan suggests, and whether it is pinned. They hold until the configuration is read again.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import msgspec

from laya.config import ResolvedModel, parse_engine_flags, with_settings
from laya.config.resolve import RESOLVED_NAMES
from laya.errors import ConfigError, InvalidRequest, LayaError
from laya.gateway.shelf import settings_for
from laya.memory import refusal

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.fleet import Fleet

# What a plan weighs. None of them names a file or a program: who may load a model may not start another one.
TUNABLE = (
    "max_seq_len", "max_num_seqs", "kv_cache_dtype", "kv_pool_tokens", "mmap", "prompt_cache", "gpu_layers",
    "experts_on_cpu", "gpus",
)  # fmt: skip
_FLAGS_MOST = 300  # characters


class WrongFlags(InvalidRequest):
    """Flags that are none, or none of a model's plan. 422: a string they are."""

    http_status = 422


def tuned(fleet: Fleet, endpoint: Endpoint, flags: str) -> ResolvedModel:
    """Its settings as configured, with these flags. Raises WrongFlags naming the one that is not right."""
    file = fleet.files[endpoint.model_id]
    settings = settings_for(file, tuned_entry(fleet, endpoint.model_id, flags))
    return msgspec.structs.replace(settings, pinned=endpoint.settings.pinned)


def tuned_entry(fleet: Fleet, model_id: str, flags: str) -> ResolvedModel:
    """The same for a model that may not be here."""
    if len(flags) > _FLAGS_MOST:  # what is left of them would be other flags
        raise WrongFlags(f"'flags' has {len(flags)} characters: expected {_FLAGS_MOST} or fewer.", param="flags")
    try:
        said = parse_engine_flags(shlex.split(flags))
        strange = next((name for name in said if name not in TUNABLE), None)
        if strange is not None:
            raise ConfigError(f"'{strange}' is set in config.yaml; here are {', '.join(TUNABLE)}")
        return with_settings(fleet.config, said, model_id).for_model(model_id)
    except (ConfigError, ValueError) as error:
        raise WrongFlags(f"'flags' is '{flags}': {error}", param="flags") from None


def tune(fleet: Fleet, endpoint: Endpoint, settings: ResolvedModel) -> None:
    """All engines of its model have these from now on; those that are read at a start, from the next start."""
    for each in fleet.replicas(endpoint):
        each.apply(settings)


def pin(fleet: Fleet, endpoint: Endpoint, *, is_pinned: bool) -> None:
    """Its engines never leave to make room, or may again."""
    tune(fleet, endpoint, msgspec.structs.replace(endpoint.settings, pinned=is_pinned))
    fleet.room.changed()


def is_tunable(flags: str) -> bool:
    """Whether all of them are for one model, and none for the server."""
    return all(RESOLVED_NAMES.get(key, key) in _RESOLVED for key in map(_key, _by_flag(flags)))


def together(flags: str, more: str) -> str:
    """Both, the later where both say the same."""
    return " ".join(f"{name} {value}".strip() for name, value in (_by_flag(flags) | _by_flag(more)).items())


_RESOLVED = frozenset(RESOLVED_NAMES.get(name, name) for name in TUNABLE)


def _key(flag: str) -> str:
    return flag.removeprefix("--no-").removeprefix("--").replace("-", "_")


def _by_flag(flags: str) -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    for word in flags.split():
        if word.startswith("--"):
            name = word
            found[name] = ""
        elif name:
            found[name] = word
    return found


async def load_tuned(fleet: Fleet, endpoint: Endpoint, flags: str, *, anyway: bool) -> None:
    """Load its model with these flags, instead of the engine it may have. Raises what refuses it, and all is as it was.

    Of an engine that is there it is known first that the other one would fit.
    """
    was, settings, file = endpoint.settings, tuned(fleet, endpoint, flags), fleet.files[endpoint.model_id]
    is_loaded = any(each.pool is not None for each in fleet.replicas(endpoint))
    try:
        if is_loaded and not anyway:
            plan = await fleet.loading.plan_in_place(endpoint, settings, file)
            if not plan.fits:
                raise refusal(plan, fleet.budget())
        if is_loaded:
            await fleet.unload_model(endpoint, "requested")
        tune(fleet, endpoint, settings)
        await fleet.load(endpoint, anyway=anyway)
    except LayaError as error:
        tune(fleet, endpoint, was)
        if "suggestions" in error.details:  # which are changes of what was asked for with the flags
            error.details["suggestions"] = [together(flags, each) for each in error.details["suggestions"]]
        raise
    text = f"'{endpoint.model_id}' is loaded with {flags}, until the configuration is read again"
    fleet.events.add("tuned", text, level="info", model=endpoint.model_id)
