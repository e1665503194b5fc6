"""Owns: config.yaml (version 1), its keys, their types and defaults, and every message about a wrong one.

Knows no room: rooms take their own section. Zero config works: `Config()` is a complete configuration.
"""

from laya.config.resolve import ResolvedModel, with_settings
from laya.config.schema import (
    ApiKey,
    Config,
    MemoryConfig,
    ModelConfig,
    ModelSettings,
    SamplingDefaults,
    ServerConfig,
)

__all__ = [
    "ApiKey",
    "Config",
    "MemoryConfig",
    "ModelConfig",
    "ModelSettings",
    "ResolvedModel",
    "SamplingDefaults",
    "ServerConfig",
    "with_settings",
]
