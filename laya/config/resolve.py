"""Owns: the built-in defaults of a model's settings and how the levels of the config are merged. Knows no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET

from laya.config.cost import Cost
from laya.config.model_limits import ModelLimits
from laya.config.peers import read_peer, split_name
from laya.config.program import Program, read_program
from laya.config.quantization import split_kind
from laya.config.remote import Remote, read_remote
from laya.config.schema import Config, ModelConfig
from laya.config.settings import EngineName, ModelSettings, SamplingDefaults
from laya.config.vllm import INSTEAD, VLLM_KEYS, VLLM_QUANTIZATIONS, Vllm, not_vllms, read_vllm
from laya.errors import ConfigError
from laya.types import ALL_LAYERS, AskedSettings, RoutePolicy, Task

_Level = TypeVar("_Level", bound=ModelSettings)


SILENT_PROGRESS_S = 600.0  # a program or another server tells no progress before its first byte
CHAT_ANSWERS = 2  # a chat in a pool of tokens is as long as so many answers


class ResolvedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one model, every field decided; None means auto (or none, where there is nothing to choose)."""

    id: str
    source: str | None = None
    aliases: tuple[str, ...] = ()
    engine: EngineName = "llamacpp"
    program: Program | None = None  # engine: command
    remote: Remote | None = None  # engine: remote
    ray_address: str | None = None  # of the cluster that this server uses
    vllm: Vllm | None = None  # engine: vllm
    cost: Cost | None = None
    peer: str | None = None  # the other Laya whose model it is
    engine_path: Path | None = None
    task: Task = "chat"
    max_seq_len: int | None = None  # tokens per sequence
    max_num_seqs: int | None = None
    kv_cache_dtype: str = "f16"
    kv_pool_tokens: int | None = None
    kv_pool_auto: bool = False  # kv_pool_tokens: auto
    prompt_cache_bytes: int | None = 0  # None: auto
    default_max_tokens: int = 1024
    enable_streaming: bool = True
    quantization: str | None = None  # auto, none, or a kind; None: the file as it is named
    memory_limit_bytes: int | None = None  # of RAM; None: the budget alone bounds it
    n_threads: int | None = None
    gpu_layers: int | None = None
    experts_on_cpu: int | None = None
    gpus: tuple[int, ...] = ()
    tensor_split: tuple[float, ...] = ()
    replicas: int = 1
    policy: RoutePolicy = "auto"
    weight: int = 1
    mmap: bool = True
    mmproj: Path | None = None
    draft: Path | None = None
    lora: tuple[Path, ...] = ()
    chat_template: str | None = None  # the template itself, never a file name
    ttl_s: float | None = None  # None: never unloaded for being idle
    pinned: bool = False
    preload: bool = False
    overflow: Literal["refuse", "trim"] = "refuse"
    queue_size: int = 64
    queue_timeout_s: float = 60
    limits: ModelLimits = ModelLimits()
    load_timeout_s: float = 300
    progress_timeout_s: float = 120  # longer than one batch of a slow prefill
    args: dict[str, Any] = {}
    defaults: dict[str, Any] = {}  # sampling values, named as in a request body
    fixed: frozenset[str] = frozenset()  # what the user decided; the fit may change anything else

    def asked(self) -> AskedSettings:
        """What the planner is asked for: the settings the user decided, None for the rest."""
        return AskedSettings(
            max_seq_len=self.max_seq_len,
            max_num_seqs=self.max_num_seqs,
            kv_cache_dtype=self.kv_cache_dtype if "kv_cache_dtype" in self.fixed else None,
            kv_pool_tokens=self.kv_pool_tokens,
            kv_pool_chat_tokens=CHAT_ANSWERS * self.default_max_tokens if self.kv_pool_auto else None,
            prompt_cache_bytes=self.prompt_cache_bytes,
            memory_limit_bytes=self.memory_limit_bytes,
            n_threads=self.n_threads,
            task=self.task,
            mmap=self.mmap,
            mmproj_path=self.mmproj,
            draft_path=self.draft,
            gpu_layers=self.gpu_layers,
            experts_on_cpu=self.experts_on_cpu,
            gpus=self.gpus,
            tensor_split=self.tensor_split,
        )


SETTING_NAMES = tuple(field.name for field in msgspec.structs.fields(ModelSettings))
RESOLVED_NAMES = {
    "ttl": "ttl_s",
    "memory_limit": "memory_limit_bytes",
    "prompt_cache": "prompt_cache_bytes",
}  # a setting's name here, where it has a unit
_PATHS = frozenset({"engine_path", "mmproj", "draft"})
_AUTO_IS_SAID = frozenset({"prompt_cache"})  # auto is another thing than the default
# What the peer decides of its models, or what would stand for something else here.
_PEERS_OWN = frozenset({"max_seq_len", "max_num_seqs", "ttl", "pinned", "preload", "overflow", "task", "replicas"})
_MERGED = frozenset({"args", "defaults"})  # their members are merged one by one; every other setting as a whole


def resolve(config: Config, model_id: str) -> ResolvedModel:
    """See `Config.for_model`."""
    canonical_id, entry = _find(config, model_id)
    said = _said(config)
    for name, value in _said(entry).items():
        said[name] = said.get(name, {}) | value if name in _MERGED else value
    peered = split_name(config.peers, canonical_id)
    if peered is not None:
        said = {name: value for name, value in said.items() if name not in _PEERS_OWN}
    decided = {name: value for name, value in said.items() if value not in ("auto", None) or name in _AUTO_IS_SAID}
    if said.get("quantization") is not None:
        decided["quantization"] = said["quantization"].lower()
    is_of_all, own_kind = _said(entry).get("quantization") is None, split_kind(canonical_id)[1]
    if is_of_all and own_kind is not None and decided.get("quantization") not in VLLM_QUANTIZATIONS:
        decided.pop("quantization", None)  # said for all models, and this name says its own
    if decided.get("engine") == "vllm":
        _check_vllm(config, entry, canonical_id)
    ttl_s = decided.pop("ttl", None)
    remote = read_remote(entry) if entry.engine == "remote" else None
    if peered is not None:
        decided["engine"], remote = "remote", read_peer(config.peers[peered[0]], peered[1])
    if remote is not None:  # each address is an engine of its own: what one fails another serves
        decided["replicas"] = len(remote.urls)
    if remote is not None or entry.cmd is not None:
        decided.setdefault("progress_timeout_s", SILENT_PROGRESS_S)
    return ResolvedModel(
        id=canonical_id,
        source=entry.source,
        aliases=tuple(entry.aliases),
        program=read_program(entry) if entry.cmd is not None else None,
        remote=remote,
        ray_address=config.ray.address,
        vllm=read_vllm(entry) if decided.get("engine") == "vllm" else None,
        cost=entry.cost,
        peer=peered[0] if peered is not None else None,
        kv_pool_auto=said.get("kv_pool_tokens") == "auto",
        ttl_s=None if ttl_s is None or ttl_s < 0 else ttl_s,
        fixed=frozenset(decided),
        **{RESOLVED_NAMES.get(name, name): _shape(name, value) for name, value in decided.items()},
    )


def with_settings(config: Config, settings: dict[str, Any], model_id: str | None = None) -> Config:
    """A copy in which these checked settings win: for one model, or for every model when no id is given.

    `settings` is what `parse_engine_flags` returns or `parse_settings` accepts.
    """
    changed = _said_entry(settings)
    models = dict(config.models)
    if model_id is not None:
        canonical_id, entry = _find(config, model_id)
        models[canonical_id] = _with(entry, changed)
        return msgspec.structs.replace(config, models=models)
    shared = {name: value for name, value in changed.items() if name in SETTING_NAMES}
    of_entries = shared | {name: value for name, value in changed.items() if name in VLLM_KEYS}
    models = {name: _with(entry, of_entries) for name, entry in models.items()}
    return msgspec.structs.replace(_with(config, shared), models=models)


def _with(level: _Level, changed: dict[str, Any]) -> _Level:
    """A copy of one level of the config with these settings; members of `args` and `defaults` are added."""
    said = _said(level)
    merged = {name: said.get(name, {}) | value for name, value in changed.items() if name in _MERGED}
    if "defaults" in merged:
        merged["defaults"] = msgspec.convert(merged["defaults"], SamplingDefaults)
    return msgspec.structs.replace(level, **(changed | merged))


def _check_vllm(config: Config, entry: ModelConfig, model_id: str) -> None:
    """Raise ConfigError for a key of llama.cpp's beside the choice of vLLM, which a command line may make over a file.

    Where one model chooses vLLM, what is said for all models is for those that llama.cpp runs.
    """
    levels = [(entry, f"models.{model_id}."), *([(config, "")] if config.engine == "vllm" else [])]
    for level, where in levels:
        strange = not_vllms({name: getattr(level, name) for name in INSTEAD})
        if strange is not None:
            words = f"{where}{strange} is llama.cpp's; leave it out with engine: vllm. {INSTEAD[strange]}"
            raise ConfigError(words, param=strange)


def _find(config: Config, name: str) -> tuple[str, ModelConfig]:
    if name in config.models:
        return name, config.models[name]
    for model_id, entry in config.models.items():
        if name in entry.aliases:
            return model_id, entry
    return name, ModelConfig()


def _said_entry(settings: dict[str, Any]) -> dict[str, Any]:
    entry = msgspec.convert(settings, ModelConfig)
    own = {name: getattr(entry, name) for name in ("source", "aliases", "cost", *VLLM_KEYS) if name in settings}
    return own | _said(entry)


def _said(settings: ModelSettings) -> dict[str, Any]:
    """The settings that are set at this level; sampling defaults as a dict."""
    said = {name: getattr(settings, name) for name in SETTING_NAMES if getattr(settings, name) is not UNSET}
    if "defaults" in said:
        said["defaults"] = msgspec.to_builtins(said["defaults"])
    return said


def _shape(name: str, value: Any) -> Any:
    if name in _PATHS:
        return Path(value)
    if name == "lora":
        return tuple(Path(path) for path in value)
    if name in _AUTO_IS_SAID and value == "auto":
        return None
    if name in ("gpu_layers", "experts_on_cpu") and value == "all":
        return ALL_LAYERS
    return tuple(value) if name in ("gpus", "tensor_split") else value
