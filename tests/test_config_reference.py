"""The schema, the example and the docs are derived from the structs, and are up to date."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from laya.config import Config, MemoryConfig, ModelConfig, SamplingDefaults, ServerConfig, load_config
from laya.config.api_key import ApiKey
from laya.config.reference import SCHEMA_PATH, example, json_schema, with_key_tables
from laya.config.routing import RouteRule, RoutingConfig

ROOT = Path(__file__).parent.parent
REWRITE = "run: python -m laya.config.reference"
STRUCTS = (Config, ServerConfig, MemoryConfig, RoutingConfig, ModelConfig, ApiKey, SamplingDefaults)
KEYS = sorted({name for struct in STRUCTS for name in struct.__struct_fields__})
RULE_KEYS = RouteRule.__struct_fields__


def valid(text: str) -> bool:
    validator = jsonschema.Draft202012Validator(json_schema())
    return bool(validator.is_valid(yaml.safe_load(text)))


def test_schema_file_is_up_to_date() -> None:
    assert json.loads(SCHEMA_PATH.read_text()) == json.loads(json.dumps(json_schema())), REWRITE
    jsonschema.Draft202012Validator.check_schema(json_schema())


def test_example_file_is_up_to_date_valid_and_the_defaults() -> None:
    path = ROOT / "config.example.yaml"
    assert path.read_text() == example(), REWRITE
    assert path.read_text().startswith("# yaml-language-server: $schema=laya/config.schema.json\n")
    jsonschema.validate(yaml.safe_load(path.read_text()), json_schema())
    config = load_config(path, {})
    other = config.for_model("any other")
    assert {name: getattr(other, name) for name in other.__struct_fields__ if name not in ("id", "fixed")} == {
        name: getattr(Config().for_model("any other"), name)
        for name in other.__struct_fields__
        if name not in ("id", "fixed")
    }
    assert other.asked() == Config().for_model("any other").asked()
    for section in ("server", "store", "request_log", "traces"):
        assert getattr(config, section) == getattr(Config(), section), section


def test_docs_are_up_to_date_and_name_every_key() -> None:
    text = (ROOT / "docs" / "config.md").read_text()
    assert text == with_key_tables(text), REWRITE
    assert [key for key in [*KEYS, *RULE_KEYS] if f"| `{key}` |" not in text] == []


def test_example_names_every_key_with_a_line_about_it() -> None:
    lines = example().splitlines()
    for key in set(KEYS) - set(ApiKey.__struct_fields__):
        at = [n for n, line in enumerate(lines) if re.match(rf"[ #]*{key}:", line)]
        assert at, key
        assert all(lines[n - 1].lstrip().startswith("#") for n in at), key


def test_schema_describes_every_key_and_refuses_others() -> None:
    for definition in json_schema()["$defs"].values():
        assert definition["additionalProperties"] is False
        for name, written in definition["properties"].items():
            assert written.get("description"), name


@pytest.mark.parametrize(
    "text",
    ["max_seq_len: 8192", "max_seq_len: auto", "ttl: 5m", "ttl: -1", "ttl: null", "server: {max_body_bytes: 16MiB}",
     "memory: {budget: 80%}", "memory: {budget: 12 GiB}", "server:\n  port: ${env.PORT}", "defaults: {stop: [a]}",
     "models: {m: {kv_cache_dtype: q8_0}}",
     "memory_limit: 6GiB", "memory: {gpu: {'0': 22GiB}}", "engine_path: null", "gpu_layers: all"],
)  # fmt: skip
def test_schema_takes_what_the_loader_takes(text: str) -> None:
    assert valid(text)


@pytest.mark.parametrize(
    "text",
    ["max_sek_len: 1", "max_seq_len: many", "max_seq_len: 1", "ttl: soon", "server: {max_body_bytes: 16 apples}",
     "memory: {budget: lots}", "version: 2", "defaults: {temperature: 3}", "kv_cache_dtype: fp9", "server: {port: x}",
     "server: {api_keys: [sk-secret]}", "server: {api_keys: [{name: a}]}",
     "memory_limit: half", "memory: {gpu: {'0': 90%}}", "models: {m: {port: 1}}"],
)  # fmt: skip
def test_schema_refuses_what_the_loader_refuses(text: str) -> None:
    assert not valid(text)


def test_schema_is_shipped_with_the_package() -> None:
    import laya

    assert SCHEMA_PATH.parent == Path(laya.__file__).parent


def any_of(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return schema.get("anyOf", [schema])  # type: ignore[no-any-return]


def test_schema_offers_the_choices_to_editors() -> None:
    properties = json_schema()["$defs"]["ModelConfig"]["properties"]
    choices = [kind["enum"] for kind in any_of(properties["kv_cache_dtype"]) if "enum" in kind]
    assert "q8_0" in choices[0]
