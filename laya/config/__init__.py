"""Owns: config.yaml (version 1), its keys, their types and defaults, and every message about a wrong one.

Knows no room: rooms take their own section. Zero config works: `Config()` is a complete configuration.
"""

from laya.config.api_key import ApiKey
from laya.config.flags import parse_engine_flags
from laya.config.load import load_config, parse_settings
from laya.config.places import data_dir
from laya.config.program import Program
from laya.config.remote import Remote, RemoteUrl
from laya.config.request_log import RequestLogConfig
from laya.config.resolve import ResolvedModel, with_settings
from laya.config.schema import Config, MemoryConfig, ModelConfig
from laya.config.server import ServerConfig
from laya.config.settings import ModelSettings, SamplingDefaults
from laya.config.store import StoreConfig
from laya.config.traces import TracesConfig, read_headers
from laya.config.units import parse_budget, parse_bytes, parse_duration

__all__ = [
    "ApiKey",
    "Config",
    "MemoryConfig",
    "ModelConfig",
    "ModelSettings",
    "Program",
    "Remote",
    "RemoteUrl",
    "RequestLogConfig",
    "ResolvedModel",
    "SamplingDefaults",
    "ServerConfig",
    "StoreConfig",
    "TracesConfig",
    "data_dir",
    "load_config",
    "parse_budget",
    "parse_bytes",
    "parse_duration",
    "parse_engine_flags",
    "parse_settings",
    "read_headers",
    "with_settings",
]
