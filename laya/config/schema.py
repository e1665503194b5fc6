"""Owns: config.yaml as a whole: its sections, and the entry of one model. Knows no file, no message, no room.

The structs are the single truth: the JSON schema, config.example.yaml, the table of docs/config.md and the messages
about wrong values are all derived from them. Settings that every model has are `settings.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from laya.config.cost import Cost
from laya.config.peers import PeerConfig
from laya.config.ray import RayConfig
from laya.config.request_log import RequestLogConfig
from laya.config.routing import RoutingConfig
from laya.config.server import ServerConfig
from laya.config.settings import Limit, ModelSettings
from laya.config.store import StoreConfig
from laya.config.traces import TracesConfig
from laya.config.units import parse_budget
from laya.config.vllm import VllmKeys

if TYPE_CHECKING:
    from laya.config.resolve import ResolvedModel

Budget = Annotated[str | int | None, Meta(extra={"unit": "budget"}, extra_json_schema={"x-unit": "budget"})]


class ModelConfig(VllmKeys, kw_only=True, forbid_unknown_fields=True):
    """One entry under `models`: settings of this model alone, and where it comes from."""

    source: Annotated[
        str | None,
        Meta(description="Where the model is: pypi://PACKAGE==VERSION, hf://org/repo:file, a URL or a path."),
    ] = None
    aliases: Annotated[list[str], Meta(description="Other names a request may use.")] = []
    cost: Annotated[
        Cost | None, Meta(description="What a million of its tokens cost, for `laya usage`; null = it is not counted.")
    ] = None


class MemoryConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How much memory all models together may take."""

    budget: Annotated[Budget, Meta(description="80% of what is available, or an amount such as 12GiB; null = 80%.")] = (
        None
    )
    gpu: Annotated[
        dict[str, Limit], Meta(description='Most that engines may take of a GPU, by its number: {"0": 22GiB}.')
    ] = {}
    anyway: Annotated[
        bool, Meta(description="Load what does not fit too, held to what is free: the engine may die, the machine not.")
    ] = False

    @property
    def budget_bytes(self) -> int | None:
        """The budget when it was given as an amount, in bytes."""
        share_or_bytes = parse_budget(self.budget)
        return share_or_bytes if isinstance(share_or_bytes, int) else None

    @property
    def budget_share(self) -> float:
        """The budget as a share of the memory that is available; 1.0 when it was given as an amount."""
        share_or_bytes = parse_budget(self.budget)
        return share_or_bytes if isinstance(share_or_bytes, float) else 1.0


class Config(ModelSettings, kw_only=True, forbid_unknown_fields=True):
    """The whole of config.yaml; `Config()` is complete and is what runs when there is no file."""

    version: Annotated[Literal[1], Meta(description="Version of this file's form.")] = 1
    models_dir: Annotated[
        str, Meta(description="Folder whose GGUF files and Hugging Face folders are served by name.")
    ] = "./models"
    server: Annotated[ServerConfig, Meta(description="The port, the keys and the limits of a request.")] = (
        msgspec.field(default_factory=ServerConfig)
    )
    memory: Annotated[MemoryConfig, Meta(description="How much memory all models together may take.")] = msgspec.field(
        default_factory=MemoryConfig
    )
    routing: Annotated[
        RoutingConfig, Meta(description="Which model serves a request, where that is not the one it names.")
    ] = msgspec.field(default_factory=RoutingConfig)
    store: Annotated[StoreConfig, Meta(description="Where conversations are kept, and for how long.")] = msgspec.field(
        default_factory=StoreConfig
    )
    ray: Annotated[
        RayConfig, Meta(description="Engines on the nodes of a Ray cluster, by the extra laya-llm[ray].")
    ] = msgspec.field(default_factory=RayConfig)
    request_log: Annotated[
        RequestLogConfig, Meta(description="A line for each request, in a file; off unless asked.")
    ] = msgspec.field(default_factory=RequestLogConfig)
    traces: Annotated[
        TracesConfig, Meta(description="OpenTelemetry traces, by the extra laya-llm[otel]; off unless asked.")
    ] = msgspec.field(default_factory=TracesConfig)
    peers: Annotated[
        dict[str, PeerConfig],
        Meta(description="Other Laya servers, by a name: their models are served here as NAME/MODEL."),
    ] = msgspec.field(default_factory=dict)
    models: Annotated[
        dict[str, ModelConfig], Meta(description="Settings of single models, by the name requests use.")
    ] = msgspec.field(default_factory=dict)

    def for_model(self, model_id: str) -> ResolvedModel:
        """Every setting of a model decided: its own entry over the top level over the built-in defaults.

        `model_id` may be an id or an alias under `models`, or any other name, which gets the top level's settings.
        """
        from laya.config.resolve import resolve  # resolve.py is made of these structs

        return resolve(self, model_id)
