"""`laya import litellm`: deployments, groups, fallbacks and keys of its documented forms."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from importing_world import imported, refusal

SECRET = "sk-0123456789-abcdefghij"
EXAMPLE = f"""
model_list:
  - model_name: gpt-4o
    litellm_params:
      model: azure/gpt-4o-eu
      api_base: https://example.openai.azure.com/
      api_key: "os.environ/AZURE_API_KEY"
      rpm: 6
  - model_name: vllm-models
    litellm_params:
      model: openai/facebook/opt-125m
      api_base: http://10.0.0.4:4000/v1/chat/completions
      api_key: none
      rpm: 1440
    model_info: {{version: 2}}
  - model_name: zephyr
    litellm_params: {{model: hosted_vllm/zephyr-7b, api_base: http://10.0.0.5:8001/v1, rpm: 60}}
  - model_name: zephyr
    litellm_params: {{model: hosted_vllm/zephyr-7b, api_base: http://10.0.0.6:8001/v1, rpm: 60}}
  - model_name: zephyr
    litellm_params: {{model: groq/zephyr, api_key: {SECRET}, timeout: 30, temperature: 0.2, tempreature: 1}}
    rpm: os.environ/RPM
    tpm: 20000
  - model_name: small
    litellm_params:
      model: gpt-4o-mini
      organization: os.environ/OPENAI_ORG
      extra_headers: {{x-team: blue, x-api-key: {SECRET}}}
      temperature: 7
  - model_name: shared
    litellm_params: {{model: openai/their-model, litellm_credential_name: house}}
  - model_name: vectors
    litellm_params: {{model: ollama/nomic-embed-text, api_base: os.environ/OLLAMA_BASE}}
    model_info: {{mode: embedding}}
  - model_name: claude
    litellm_params: {{model: anthropic/claude-3-haiku, api_key: os.environ/ANTHROPIC_API_KEY}}
  - model_name: pictures
    litellm_params: {{model: openai/dall-e-3}}
    model_info: {{mode: image_generation}}
  - model_name: odd
    litellm_params: {{model: mistralai/mistral-7b}}
  - model_name: "*"
    litellm_params: {{model: "openai/*"}}
credential_list:
  - credential_name: house
    credential_values: {{api_base: https://models.example/v1, api_key: os.environ/HOUSE_KEY}}
litellm_settings:
  drop_params: true
  request_timeout: 600
  fallbacks: [{{zephyr: [small, claude]}}]
  context_window_fallbacks: [{{zephyr: [small]}}]
  default_fallbacks: [shared]
router_settings:
  routing_strategy: least-busy
  model_group_alias: {{gpt-4: zephyr, tiny: small, other: nobody}}
  num_retries: 2
  redis_password: {SECRET}
general_settings:
  master_key: {SECRET}
  databas_url: "postgresql://me:{SECRET}@db/x"
environment_variables: {{REDIS_PASSWORD: {SECRET}}}
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAYA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OPENAI_ORG", "org-1")
    monkeypatch.setenv("OLLAMA_BASE", "http://127.0.0.1:11434")
    Path("config.yaml").write_text(EXAMPLE)


def test_deployments_become_remotes_and_those_of_one_name_a_model_or_a_pool() -> None:
    models = imported("litellm", "config.yaml").config["models"]
    assert models["vllm-models"] == {
        "engine": "remote", "url": "http://10.0.0.4:4000/v1", "model": "facebook/opt-125m",
        "limits": {"requests_per_minute": 1440},
    }  # fmt: skip
    assert models["zephyr-1"] == {
        "engine": "remote", "urls": ["http://10.0.0.5:8001/v1", "http://10.0.0.6:8001/v1"], "model": "zephyr-7b",
        "limits": {"requests_per_minute": 120},
    }  # fmt: skip
    assert models["zephyr-2"] == {
        "engine": "remote", "url": "https://api.groq.com/openai/v1", "model": "zephyr", "key_env": "ZEPHYR_API_KEY",
        "progress_timeout_s": 30, "defaults": {"temperature": 0.2}, "limits": {"tokens_per_minute": 20000},
    }  # fmt: skip
    assert models["small"] == {
        "engine": "remote", "url": "https://api.openai.com/v1", "model": "gpt-4o-mini", "key_env": "OPENAI_API_KEY",
        "headers": {"x-team": "blue", "OpenAI-Organization": "${env.OPENAI_ORG}"}, "aliases": ["tiny"],
    }  # fmt: skip
    assert models["shared"] == {
        "engine": "remote", "url": "https://models.example/v1", "model": "their-model", "key_env": "HOUSE_KEY",
    }  # fmt: skip
    assert models["vectors"] == {
        "engine": "remote", "url": "${env.OLLAMA_BASE}/v1", "model": "nomic-embed-text", "task": "embed",
    }  # fmt: skip
    assert set(models) == {"vllm-models", "zephyr-1", "zephyr-2", "small", "shared", "vectors"}


def test_fallbacks_and_aliases_become_rules() -> None:
    config = imported("litellm", "config.yaml").config
    assert (config["policy"], config["progress_timeout_s"]) == ("least_tokens", 600)
    assert config["routing"]["pools"] == {"zephyr": ["zephyr-1", "zephyr-2"]}
    assert config["routing"]["rules"] == [
        {"model": ["vllm-models"], "to": "vllm-models", "fallbacks": ["shared"]},
        {"model": ["zephyr", "gpt-4"], "to": "zephyr", "fallbacks": ["small"]},
        {"model": ["small", "tiny"], "to": "small", "fallbacks": ["shared"]},
        {"model": ["vectors"], "to": "vectors", "fallbacks": ["shared"]},
    ]


def test_what_is_not_taken_over_is_told_and_no_secret_is_kept() -> None:
    made = imported("litellm", "config.yaml")
    assert "azure: its API is not OpenAI's" in made.about("model_list gpt-4o")
    assert "anthropic: its API is not OpenAI's" in made.about("model_list claude")
    assert "did you mean mistral?" in made.about("model_list odd")
    assert "Laya has no image_generation" in made.about("model_list pictures")
    assert "each model is named" in made.about("model_list *")
    assert "claude is no model" in made.about("litellm_settings.fallbacks.0.zephyr")
    assert "limits.requests_per_minute takes a whole number" in made.about("model_list zephyr rpm")
    assert "nobody is no model" in made.about("router_settings.model_group_alias.other")
    assert "min_prompt_tokens" in made.about("litellm_settings.context_window_fallbacks")
    assert "<= 2, got 7" in made.about("model_list.5.litellm_params.temperature")
    line = EXAMPLE[: EXAMPLE.index("databas_url")].count("\n") + 1
    assert f"(line {line}: an unknown key of LiteLLM, did you mean database_url?)" in made.about(
        "general_settings.databas_url"
    )
    assert "ZEPHYR_API_KEY" in made.about("model_list.4.litellm_params.api_key")
    key = {"name": "litellm-master", "role": "admin", "sha256": hashlib.sha256(SECRET.encode()).hexdigest()}
    assert made.config["server"]["api_keys"] == [key]
    assert not any(SECRET in text for text in (made.text, *made.told))


def test_weights_go_with_the_policy_that_reads_them() -> None:
    one = "litellm_params: {model: openai/a, api_base: http://h/v1, weight: 3}"
    Path("config.yaml").write_text(
        f"model_list:\n- model_name: m\n  {one}\n- model_name: m\n  {one.replace('/a', '/b').replace('3', '1')}\n"
    )
    config = imported("litellm", "config.yaml").config
    assert config["policy"] == "weighted"
    assert [entry["weight"] for entry in config["models"].values()] == [3, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: {}", "model_list: expected a list of models"),
        ("model_list: [text]", "model_list.0: expected keys with values, got str"),
        ("model_list:\n- litellm_params: {model: a/b}", "config.yaml:2: model_list.0.model_name: expected a name"),
        ("model_list:\n- model_name: a", "litellm_params: expected keys with values, got nothing"),
        ("model_list: []\nrouter_settings: [1]", "config.yaml:2: router_settings: expected keys with values, got list"),
        ("model_list: []\nlitellm_settings: {fallbacks: [a]}", "fallbacks.0: expected {model: [others]}, got str"),
        ("\tmodel_list: []", "not YAML"),
    ],
)
def test_file_that_is_none_is_refused_by_its_line(text: str, words: str) -> None:
    Path("config.yaml").write_text(text)
    assert words in refusal("litellm", "config.yaml")


@pytest.mark.parametrize("url", ["https://me:secret@h/v1", "h/v1", "https://h/v1?key=secret"])
def test_address_that_is_none_costs_its_own_model(url: str) -> None:
    entries = "".join(
        f"- model_name: {name}\n  litellm_params: {{model: openai/x, api_base: '{base}'}}\n"
        for name, base in (("bad", url), ("good", "https://h/v1"))
    )
    Path("config.yaml").write_text(f"model_list:\n{entries}")
    made = imported("litellm", "config.yaml")
    assert list(made.config["models"]) == ["good"]
    assert "https://host/v1" in made.about("model_list bad") or "no password" in made.about("model_list bad")
