"""config.yaml in, a Config or one sentence out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laya.config import Config, ModelConfig, SamplingDefaults, load_config, with_settings
from laya.config.foreign import IN_MODEL, SAMPLING, TOP_LEVEL
from laya.config.model_limits import ModelLimits
from laya.errors import ConfigError

ENVIRON = {"PORT": "8123", "HOST": "0.0.0.0", "SECRET": "hunter2-hunter2", "EMPTY": ""}
SHA = "a" * 64


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))


def load(text: str) -> Config:
    Path("config.yaml").write_text(text)
    return load_config(None, ENVIRON)


def message(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert caught.value.exit_code == 2
    return caught.value.message


def test_load_config_without_a_file_is_the_defaults() -> None:
    config = load_config(None, {})
    assert config == Config()
    model = config.for_model("anything")
    assert (model.default_max_tokens, model.queue_size, model.queue_timeout_s, model.load_timeout_s) == (
        1024,
        64,
        60,
        300,
    )
    assert (model.max_seq_len, model.max_num_seqs, model.ttl_s, model.kv_cache_dtype) == (None, None, None, "f16")
    assert (config.server.host, config.server.port, config.server.max_body_bytes) == ("127.0.0.1", 8000, 16 * 2**20)


def test_load_config_looks_in_the_working_folder_then_home_then_the_users_folder(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.yaml").write_text("queue_size: 1")
    (tmp_path / "xdg" / "laya").mkdir(parents=True)
    (tmp_path / "xdg" / "laya" / "config.yaml").write_text("queue_size: 2")
    assert load_config(None, {"LAYA_HOME": str(tmp_path / "home")}).for_model("m").queue_size == 1
    assert load_config(None, {}).for_model("m").queue_size == 2
    assert load("queue_size: 3").for_model("m").queue_size == 3


def test_load_config_names_a_missing_file() -> None:
    with pytest.raises(ConfigError, match=r"nope\.yaml: no such file"):
        load_config(Path("nope.yaml"), {})


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "server:\nmemory:\nmodels:\n  m:\nargs:\ndefaults:\n"])
def test_load_config_takes_empty_files_and_sections(text: str) -> None:
    assert load(text).server == Config().server


def test_for_model_lets_the_model_win_over_the_top_level_over_the_default() -> None:
    config = load(
        "limits: {max_concurrent: 2}\n"
        "max_seq_len: 4096\nttl: 5m\nargs: {a: 1, b: 1}\ndefaults: {temperature: 0.5, top_k: 10}\n"
        "models:\n  big:\n    aliases: [b]\n    max_num_seqs: 1\n    ttl: -1\n    args: {b: 2}\n"
        "    defaults: {temperature: 0}\n    limits: {tokens_per_minute: 9}\n    source: hf://o/r:f.gguf\n"
    )
    big = config.for_model("b")
    assert (big.id, big.source, big.aliases) == ("big", "hf://o/r:f.gguf", ("b",))
    assert (big.max_seq_len, big.max_num_seqs, big.ttl_s) == (4096, 1, None)
    assert big.args == {"a": 1, "b": 2}
    assert big.defaults == {"temperature": 0, "top_k": 10}
    assert big.queue_size == 64
    assert big.limits == ModelLimits(tokens_per_minute=9), "an entry's limits stand for themselves"
    other = config.for_model("other")
    assert (other.id, other.max_num_seqs, other.ttl_s) == ("other", None, 300)


def test_for_model_knows_what_the_user_fixed() -> None:
    config = load("kv_cache_dtype: f16\nmax_num_seqs: 2\nmodels:\n  m:\n    max_num_seqs: auto\n")
    assert config.for_model("other").asked().kv_cache_dtype == "f16"
    assert config.for_model("other").asked().max_num_seqs == 2
    assert config.for_model("m").asked().max_num_seqs is None
    assert Config().for_model("m").asked().kv_cache_dtype is None


def test_with_settings_wins_over_the_file_for_one_model_or_for_all() -> None:
    config = load("max_seq_len: 4096\nargs: {a: 1}\nmodels:\n  m:\n    max_seq_len: 8192\n")
    one = with_settings(config, {"max_seq_len": 512, "args": {"b": 2}}, "m")
    assert (one.for_model("m").max_seq_len, one.for_model("other").max_seq_len) == (512, 4096)
    assert one.for_model("m").args == {"a": 1, "b": 2}
    every = with_settings(config, {"max_seq_len": 512})
    assert (every.for_model("m").max_seq_len, every.for_model("other").max_seq_len) == (512, 512)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("300", 300), ("5m", 300), ("1h30m", 5400), ("90s", 90), ("0", 0), ("-1", None), ("'-1'", None), ("null", None)],
)
def test_ttl_takes_seconds_and_spans(written: str, seconds: float | None) -> None:
    assert load(f"ttl: {written}").for_model("m").ttl_s == seconds


def test_memory_limit_of_a_model_is_what_its_plan_is_asked_for() -> None:
    config = load("memory_limit: 6GiB\nmodels:\n  m: {memory_limit: 1.5GiB}\n  free: {memory_limit: null}\n")
    asked = [config.for_model(name).asked().memory_limit_bytes for name in ("other", "m", "free")]
    assert asked == [6 * 2**30, 3 * 2**29, None]
    assert Config().for_model("m").asked().memory_limit_bytes is None


def test_memory_gpu_takes_an_amount_by_number() -> None:
    assert load('memory: {gpu: {"0": 22GiB, "1": 1073741824}}').memory.gpu == {"0": 22 * 2**30, "1": 2**30}
    assert load("memory:\n  gpu:\n").memory.gpu == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("memory_limit: 6", "memory_limit: 6 is 6 bytes, less than any model: write a unit, such as 6GiB"),
        ("memory_limit: 4KiB", "'4KiB' is 4096 bytes, less than any model: write for example 6GiB"),
        ("memory_limit: 50%", "memory_limit: '50%' is not an amount of memory"),
        ("memory: {gpu: {0: 22GiB}}", "the key 0 is not text: write it in quotes"),
        ('memory: {gpu: {"0": 90%}}', "memory.gpu.0: '90%' is not an amount of memory"),
        ("memory: {gpu: {card: 9GiB}}", 'memory.gpu.card: a GPU is named by its number here, such as "0"'),
        ("memory: {gpu: 5GiB}", "memory.gpu: expected keys with values"),
    ],
)
def test_memory_limits_say_what_is_not_right(text: str, words: str) -> None:
    assert words in message(text)


@pytest.mark.parametrize(
    ("written", "n_bytes"),
    [("1024", 1024), ("16MiB", 16 * 2**20), ("1.5 GiB", 3 * 2**29), ("2GB", 2 * 10**9), ("1m", 2**20)],
)
def test_max_body_bytes_takes_amounts(written: str, n_bytes: int) -> None:
    assert load(f"server: {{max_body_bytes: {written}}}").server.max_body_bytes == n_bytes


def test_budget_is_a_share_or_an_amount() -> None:
    assert Config().memory.budget_share == 0.8
    assert load("memory: {budget: 50%}").memory.budget_share == 0.5
    amount = load("memory: {budget: 12GiB}").memory
    assert (amount.budget_bytes, amount.budget_share) == (12 * 2**30, 1.0)


def test_environment_is_filled_in_with_its_type() -> None:
    config = load(
        "server:\n  port: ${env.PORT}\n  host: '${env.HOST}'\nargs:\n  a: pre-${env.HOST}\n  b: $${env.PORT}\n"
    )
    assert (config.server.port, config.server.host) == (8123, "0.0.0.0")
    assert config.for_model("m").args == {"a": "pre-0.0.0.0", "b": "${env.PORT}"}


def test_relative_paths_start_from_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "t.jinja").write_text("{{ messages }}")
    (folder / "p.gguf").write_bytes(b"GGUF")
    (folder / "c.yaml").write_text("models_dir: ./weights\nmodels: {m: {mmproj: p.gguf, chat_template: t.jinja}}")
    config = load_config(folder / "c.yaml", {})
    model = config.for_model("m")
    assert config.models_dir == str(folder / "weights")
    assert (model.mmproj, model.chat_template) == (folder / "p.gguf", "{{ messages }}")


def test_anchors_and_merge_keys_work() -> None:
    config = load("models:\n  a: &a\n    max_seq_len: 4096\n    ttl: 5m\n  b:\n    <<: *a\n    ttl: 1h\n")
    assert (config.for_model("b").max_seq_len, config.for_model("b").ttl_s) == (4096, 3600)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("queue_size: 1\nmax_sek_len: 5", "config.yaml:2: max_sek_len is not a key here. Did you mean max_seq_len?"),
        ("max-seq-len: 64", "config.yaml:1: max-seq-len is not a key here. Did you mean max_seq_len?"),
        ("server:\n  prot: 80", "config.yaml:2: server.prot is not a key here. Did you mean port?"),
        ("port: 80", "config.yaml:1: port belongs under `server:`"),
        ("temperature: 1", "config.yaml:1: temperature belongs under `defaults:`"),
        ("max_concurrent: 1", "config.yaml:1: max_concurrent belongs under `limits:`"),
        ("limits: {max_concurrent: 0}",
         "config.yaml:1: limits.max_concurrent: expected a whole number >= 1 or null, got 0"),
        ("source: x", "config.yaml:1: source belongs to one model, under `models:`"),
        ("models:\n  m:\n    models_dir: x", "config.yaml:3: models.m.models_dir: models_dir belongs at the top level"),
        ("max_seq_len: many", "config.yaml:1: max_seq_len: expected a whole number >= 16 or auto, got 'many'"),
        ("max_seq_len: true", "config.yaml:1: max_seq_len: expected a whole number >= 16 or auto, got true"),
        ("max_seq_len: 1", "config.yaml:1: max_seq_len: expected a whole number >= 16 or auto, got 1"),
        ("server: {port: 99999}", "config.yaml:1: server.port: expected a whole number >= 0 and <= 65535, got 99999"),
        ("server: 5", "config.yaml:1: server: expected keys with values, got 5"),
        ("models: [m]", "config.yaml:1: models: expected model names with their settings, got ['m']"),
        ("defaults: {temperature: 3}", "config.yaml:1: defaults.temperature: expected a number >= 0 and <= 2, got 3"),
        ("max_seq_len: 64\nmax_seq_len: 32", "config.yaml:2: max_seq_len is here twice, first in line 1"),
        ("models: {1: {}}", "config.yaml:1: the key 1 is not text: write it in quotes"),
        (
            "version: 2",
            "config.yaml:1: version: 2: this Laya reads version: 1. "
            "The file was written for a newer Laya: update this one, or write the file in version 1",
        ),
        ("ttl: soon", "config.yaml:1: ttl: 'soon' is not a time: write seconds, or for example 5m or 1h; -1 is never"),
        ("memory: {budget: 16}",
         "config.yaml:1: memory.budget: 16 is 16 bytes, less than any model: write a unit, such as 16GiB"),
        ("memory: {budget: 0.8}",
         "config.yaml:1: memory.budget: 0.8 is not a budget: write a share such as 80% or an amount such as 12GiB"),
        ("a: [", "config.yaml:1: not YAML: expected the node content, but found '<stream end>'"),
        ("x: 1\n\ty: 2", "config.yaml:2: not YAML: found character '\\t' that cannot start any token"),
        ("- a", "config.yaml: expected keys with values, such as `max_seq_len: 8192`, got ['a']"),
        ("max_seq_len: ${env.NOPE}", "config.yaml:1: ${env.NOPE}: the environment has no NOPE"),
        ("max_seq_len: ${PORT}", "config.yaml:1: ${PORT} is not filled in: write ${env.PORT}, or $${PORT} to keep it"),
        ("mmproj: nope.gguf", "config.yaml:1: mmproj: there is no file 'nope.gguf'"),
        ("engine_path: ./nope", "config.yaml:1: engine_path: './nope' is no program here"),
        ("kv_pool_tokens: 64\nmax_seq_len: 128",
         "config.yaml:1: kv_pool_tokens: 64 tokens do not hold one sequence of max_seq_len 128"),
        ("models: {a: {aliases: [b]}, b: {}}", "config.yaml:1: models.a.aliases: b is the name of a model already"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_sentence_with_its_line(text: str, expected: str) -> None:
    assert message(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num_ctx: 8192", "num_ctx is a key of Ollama: num_ctx: 8192 -> max_seq_len: 8192"),
        ("ctx_size: 8192\nparallel: 4",
         "ctx_size: 8192 -> max_seq_len: 2048 and max_num_seqs: 4 (theirs is for all slots"),
        ("models:\n  m:\n    n_ctx: 8192", "n_ctx: 8192 -> max_seq_len: 8192 and max_num_seqs: 1"),
        ("max_model_len: 4096", "max_model_len: 4096 -> max_seq_len: 4096"),
        ("num_parallel: 2", "num_parallel: 2 -> max_num_seqs: 2"),
        ("n-parallel: 2", "n-parallel: 2 -> max_num_seqs: 2"),
        ("gpu_memory_utilization: 0.9", "-> memory: {budget: 90%}"),
        ("n_gpu_layers: 99", "n_gpu_layers: 99 -> gpu_layers: 99"),
        ("keep_alive: 5m", "keep_alive: '5m' -> ttl: 5m"),
        ("kv_cache_type: q8_0", "-> kv_cache_dtype: q8_0"),
        ("healthCheckTimeout: 120",
         "healthCheckTimeout is a key of llama-swap: healthCheckTimeout: 120 -> load_timeout_s: 120"),
        ("model_list: []", "model_list is a key of LiteLLM"),
        ("num_predict: 9", "num_predict: 9 -> defaults: {max_tokens: 9}"),
        ("defaults: {repetition_penalty: 1.1}", "-> repeat_penalty: 1.1"),
        ("no_mmap: true", "-> mmap: false"),
        ("OLLAMA_KEEP_ALIVE: 5m", "-> ttl: 5m"),
    ],
)  # fmt: skip
def test_a_foreign_key_is_converted_in_the_message(text: str, expected: str) -> None:
    assert expected in message(text)


def test_every_foreign_key_leads_to_a_key_of_ours() -> None:
    known = {name for struct in (Config, ModelConfig, SamplingDefaults) for name in struct.__struct_fields__}
    for name, foreign in [*IN_MODEL.items(), *TOP_LEVEL.items(), *SAMPLING.items()]:
        assert name not in Config.__struct_fields__, f"{name} is a key of ours"
        for key in re.findall(r"\b(\w+): ", foreign.convert("1", {})):
            assert key in known | {"budget", "api_keys", "nothing"}, name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("quantization: awq", "quantization 'awq': llama.cpp does not run it: engine: vllm does"),
        ("quantization: q4_m", "quantization 'q4_m': did you mean q4_k_m?"),
        ("gpus: [1, 1]", "gpus [1, 1]: each GPU is named once"),
        ("tensor_split: [0, 0]", "tensor_split [0.0, 0.0]: no GPU would get a layer"),
        ("gpus: [0, 1]\nmodels: {m: {tensor_split: [1]}}", "models.m.tensor_split: 1 shares for the 2 of gpus"),
        ("kv_cache_dtype: fp8", "kv_cache_dtype 'fp8': did you mean q8_0?"),
        ("engine: tgi", "engine: expected command or llamacpp or remote or vllm, got 'tgi'"),
        ("engine: vllm\nquantization: aqw", "quantization 'aqw': did you mean awq?"),
        ("engine: vllm\nkv_cache_dtype: q8_0", "kv_cache_dtype 'q8_0': did you mean fp8?"),
        ("models: {m: {engine: vllm, draft: x}}", "models.m.draft: is llama.cpp's; leave it out with engine: vllm"),
        (
            "engine: vllm\ngpu_layers: 20",
            "gpu_layers: is llama.cpp's; leave it out with engine: vllm. vLLM has all layers",
        ),
        ("kv_cache_dtype: q8_0\nmodels: {m: {engine: vllm}}", "no cache of kv_cache_dtype q8_0, which is said for all"),
        ("models: {m: {tensor_parallel_size: 2}}", "models.m.tensor_parallel_size: goes with engine: vllm"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused(text: str, expected: str) -> None:
    assert expected in message(text)


@pytest.mark.parametrize(
    "text", ["quantization: none", "quantization: auto", "quantization: Q4_K_M", "quantization:",
             "replicas: 1", "gpus: []", "gpu_layers: 0",
             "gpu_layers: auto", "gpu_layers: all", "gpus: [0, 2]\ntensor_split: [3, 1]", "experts_on_cpu: 0",
             "overflow: refuse", "overflow: trim", "kv_cache_dtype: iq4_nl",
             "kv_cache_dtype: auto"]
)  # fmt: skip
def test_the_plain_form_of_those_keys_is_taken(text: str) -> None:
    load(text)


@pytest.mark.parametrize(
    "keys",
    ["[sk-secret]", "[{name: a, key: sk-secret}]", "[{name: a, sha256: sk-secret}]", "sk-secret", "{a: sk-secret}"],
)
def test_a_plain_api_key_is_refused_and_never_shown(keys: str) -> None:
    text = message(f"server:\n  api_keys: {keys}")
    assert "laya config hash-key" in text
    assert "sk-secret" not in text


def test_api_keys_are_kept_by_hash() -> None:
    config = load(f"server:\n  api_keys:\n    - name: a\n      sha256: {SHA.upper()}\n")
    assert [(key.name, key.sha256) for key in config.server.api_keys] == [("a", SHA)]
    entry = f"    - {{name: a, sha256: {SHA}}}\n"
    assert "two keys are named a" in message(f"server:\n  api_keys:\n{entry}{entry}")


@pytest.mark.parametrize("key", ["max_seq_len", "ttl", "kv_cache_dtype", "quantization", "num_ctx", "mmproj"])
def test_what_came_from_the_environment_is_never_shown(key: str) -> None:
    text = message(f"{key}: ${{env.SECRET}}")
    assert "hunter2" not in text
    assert "${env.SECRET}" in text or key == "num_ctx"


def test_hostile_yaml_is_refused_quickly() -> None:
    layers = "\n".join(f"  k{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12))
    assert "more than 100000 values" in message(f"args:\n  k0: &a0 [x]\n{layers}\n")
    assert "levels" in message("args: &a [*a]")
    assert "nested deeper" in message("[" * 5000)
    assert "larger than 1 MiB" in message("#" * (2**20 + 1))
    assert "could not determine a constructor" in message("a: !!python/name:os.system ''")
    assert "os.system is not known here" in message("a: !!python/object/apply:os.system [echo]")


def test_a_file_that_is_not_text_names_the_line() -> None:
    Path("config.yaml").write_bytes(b"a: 1\nb: \xff\xfe")
    with pytest.raises(ConfigError, match=r"config\.yaml:2: not UTF-8"):
        load_config(None, {})


KEYS = st.sampled_from([*Config.__struct_fields__, "source", "aliases", "host", "num_ctx", "x", ""])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.dictionaries(KEYS, VALUES, max_size=4).map(repr), st.text(max_size=40), VALUES.map(str)))
def test_any_text_is_a_config_or_a_config_error(text: str) -> None:
    Path("config.yaml").write_text(text, encoding="utf-8", errors="surrogateescape")
    try:
        config = load_config(None, ENVIRON)
    except ConfigError:
        return
    config.for_model("m").asked()


def test_store_keeps_what_it_is_told_and_refuses_a_database_it_does_not_know() -> None:
    store = load("store: {url: 'sqlite:////srv/laya.db', keep: 7d, max_bytes: 2GiB}").store
    assert (store.url, store.keep, store.max_bytes) == ("sqlite:////srv/laya.db", 7 * 86400.0, 2 * 2**30)
    assert load("store: {keep: -1}").store.keep == -1
    assert load("store: {keep: null}").store.keep is None
    said = message("store: {url: 'mysql://ann:secret@db/x'}")
    assert "begins with sqlite:// or postgresql://, got mysql" in said and "secret" not in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("policy: robin", "got 'robin': write round_robin"),
        ("max_seq_len: 4k", "got '4k': write 4096"),
        ("max_seq_len: 1e3", "got '1e3': write 1000"),
        ("models: {auto: {source: a}}", "config.yaml:1: models.auto: auto leaves the choice to routing.rules"),
        ("request_log: {path: .}", "is a folder: write "),
    ],
)
def test_right_value_that_was_meant_is_said(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / "config.yaml", {})
    assert words in refused.value.message
