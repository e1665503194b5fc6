"""`laya import llama-swap`: the keys of its documented example, in files of our own, and files that are none."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from importing_world import imported, refusal, runner

from laya.cli.importing import import_app

SECRET = "sk-0123456789-abcdefghij"
EXAMPLE = f"""
healthCheckTimeout: 500
logLevel: info
startPort: 10001
globalTTL: 300
macros:
  "server": >
    /opt/llama.cpp/llama-server-ec9e
    --port ${{PORT}}
  "ctx": 4096
  "common": "--ctx-size ${{ctx}} --jinja -fa on"
  "models_dir": "${{env.MODELS_HOME}}"
apiKeys: ["{SECRET}", "${{env.SWAP_KEY}}", short]
models:
  "big":
    macros: {{ctx: 16384, temp: 0.7}}
    cmd: |
      # ${{server}} is above
      ${{server}} ${{common}}
      --model ${{models_dir}}/big.gguf --temp ${{temp}} --host 0.0.0.0 --api-key {SECRET} \\
      -np 4 -ngl 99 -ctk q8_0 -ctv q8_0 -t 2 --rope-scaling yarn --made-up 3
    name: Big
    env: ["CUDA_VISIBLE_DEVICES=0,1"]
    ttl: 0
    aliases: [gpt-4o-mini, {{id: big-too, unlisted: true}}]
    concurrencyLimit: 6
    alises: [typo]
    filters:
      stripParams: "temperature, top_p"
      setParams: {{top_p: 0.9, provider: {{a: 1}}}}
  "pool":
    cmd: llama-server --port ${{PORT}} -m other.gguf -c 8192 -np 4 -kvu --embeddings --pooling mean
    unlisted: true
    ttl: 60
  "vllm":
    proxy: http://127.0.0.1:8999
    cmd: vllm serve org/model --port 8999 --api-key {SECRET}
    checkEndpoint: none
    useModelName: org/model
    cmdStop: docker stop vllm
  "docker":
    cmd: |
      docker run --name ${{MODEL_ID}} --rm -p ${{PORT}}:8080
      img --model '/models/A b.gguf'
    checkEndpoint: /ready
    env: ["FAST=1", "HF_TOKEN=hf_0123456789abc"]
    timeouts: {{connect: 30, responseHeader: 60}}
  "cramped":
    cmd: llama-server --port ${{PORT}} -m big.gguf -c 60 -np 4 -hft {SECRET}
  "elsewhere":
    proxy: http://me:{SECRET}@127.0.0.1:9000
    cmd: python serve.py --port 9000
  "fixed":
    cmd: python serve.py
groups:
  forever: {{persistent: true, swap: false, members: [pool]}}
hooks: {{on_startup: {{preload: [big-too, llama]}}}}
peers:
  router:
    proxy: https://openrouter.ai/api
    apiKey: ${{env.ROUTER_KEY}}
    models: [meta/llama, qwen/q3]
    timeouts: {{connect: 5}}
  plain:
    proxy: http://192.168.1.23/
    apiKey: {SECRET}
    models: [model_a]
  leaky:
    proxy: https://me:{SECRET}@host
    models: [model_b]
"""

PLACES = {"gpu_layers", "experts_on_cpu", "gpus", "tensor_split"}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAYA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MODELS_HOME", str(tmp_path))
    monkeypatch.setenv("SWAP_KEY", "0123456789abcdefgh")
    for name in ("big.gguf", "other.gguf"):
        Path(name).write_bytes(b"GGUF")
    programs = tmp_path / "home"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    for name in ("vllm", "docker"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)


def test_example_becomes_models_of_three_engines() -> None:
    Path("config.yaml").write_text(EXAMPLE)
    made = imported("llama-swap", "config.yaml")
    models, here = made.config["models"], str(Path.cwd())
    assert (made.config["load_timeout_s"], made.config["ttl"]) == (500, 300)
    assert models["big"] == {
        "source": "${env.MODELS_HOME}/big.gguf", "max_seq_len": 4096, "max_num_seqs": 4, "kv_cache_dtype": "q8_0",
        "n_threads": 2, "defaults": {"temperature": 0.7, "top_p": 0.9}, "args": {"rope_scaling_type": "yarn"},
        "ttl": None, "limits": {"max_concurrent": 6}, "aliases": ["gpt-4o-mini", "big-too"], "preload": True,
        "gpus": [0, 1],
    }  # fmt: skip
    assert models["pool"] == {
        "source": f"{here}/other.gguf", "max_seq_len": 8192, "max_num_seqs": 4, "kv_pool_tokens": 8192,
        "task": "embed", "args": {"pooling_type": "mean"}, "ttl": 60, "pinned": True,
    }  # fmt: skip
    assert models["vllm"] == {
        "engine": "command", "cmd": "vllm serve org/model --port ${PORT} --api-key ${API_KEY}", "health": None,
        "served_model_name": "org/model", "cwd": here,
    }  # fmt: skip
    assert models["docker"] == {
        "engine": "command", "cmd": "docker run --name docker --rm -p ${PORT}:8080 img --model '/models/A b.gguf'",
        "health": "/ready", "env": {"FAST": "1"}, "cwd": here, "progress_timeout_s": 60,
    }  # fmt: skip
    assert models["qwen/q3"] == {
        "engine": "remote", "url": "https://openrouter.ai/api/v1", "key_env": "ROUTER_KEY", "connect_timeout_s": 5,
    }  # fmt: skip
    assert models["model_a"] == {"engine": "remote", "url": "http://192.168.1.23/v1", "key_env": "PLAIN_API_KEY"}
    assert models["cramped"] == {"source": f"{here}/big.gguf", "max_num_seqs": 4}
    assert {"fixed", "elsewhere", "model_b"}.isdisjoint(models)


def test_what_is_not_taken_over_is_told_by_key_and_line_and_no_secret_is_kept() -> None:
    Path("config.yaml").write_text(EXAMPLE)
    made = imported("llama-swap", "config.yaml")
    assert made.about("models.big.alises").endswith("an unknown key of llama-swap, did you mean aliases?)")
    assert f"(line {EXAMPLE[: EXAMPLE.index('startPort')].count(chr(10)) + 1}: " in made.about("startPort")
    assert "no flag that is known here" in made.about("models.big.cmd --made-up 3")
    assert "cmd names no ${PORT}" in made.about("models.fixed")
    assert "HF_TOKEN: ${env.HF_TOKEN}" in made.about("models.docker.env HF_TOKEN")
    assert "-c 60 for 4 slots" in made.about("models.cramped.cmd -c")
    for key in ("models.elsewhere", "peers.leaky.proxy"):
        assert "no query, no user and no password" in made.about(key)
    assert "PLAIN_API_KEY" in made.about("peers.plain.apiKey")
    assert "llama is no model" in made.about("hooks.on_startup.preload.1")
    assert "pinned" in made.about("groups.forever.persistent")
    keys = made.config["server"]["api_keys"]
    assert keys == [
        {"name": "llama-swap-1", "role": "user", "sha256": hashlib.sha256(SECRET.encode()).hexdigest()},
        {"name": "llama-swap-2", "role": "user", "key": "${env.SWAP_KEY}"},
    ]
    assert "16 characters" in made.about("apiKeys.2")
    for text in (made.text, *made.told):
        assert SECRET not in text
        assert "hf_0123456789abc" not in text


def test_files_are_written_whole_and_never_over_another(tmp_path: Path) -> None:
    Path("config.yaml").write_text("models: {a: {cmd: 'llama-server --port ${PORT} -m big.gguf'}}")
    result = runner.invoke(import_app, ["llama-swap", "config.yaml"])
    assert result.stdout.startswith("# from llama-swap's config.yaml")
    Path("out.yaml").write_text("mine")
    assert "--force replaces it" in refusal("llama-swap", "config.yaml", "--out", "out.yaml")
    assert Path("out.yaml").read_text() == "mine"
    assert "--force replaces it" in refusal("llama-swap", "config.yaml", "--out", "config.yaml")
    Path("link.yaml").symlink_to("out.yaml")
    assert runner.invoke(import_app, ["llama-swap", "config.yaml", "-o", "link.yaml", "--force"]).exit_code == 0
    assert "source:" in Path("out.yaml").read_text()
    assert Path("link.yaml").is_symlink()
    Path("link.yaml").unlink()
    assert "nowhere" in refusal("llama-swap", "config.yaml", "--out", "nowhere/out.yaml")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "big.gguf",
        "config.yaml",
        "home",
        "other.gguf",
        "out.yaml",
    ]


def test_model_whose_file_is_not_there_is_told_as_what_is_left_to_do() -> None:
    Path("config.yaml").write_text("models: {a: {cmd: 'llama-server --port ${PORT} -m gone.gguf'}}")
    result = runner.invoke(import_app, ["llama-swap", "config.yaml"])
    assert result.exit_code == 0
    assert "to do: config.yaml:" in result.stderr
    assert "gone.gguf" in result.stderr


BOMB = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 10)}]\n" for n in range(8)
)
DOUBLED = "  m0: x\n" + "".join(f"  m{n + 1}: '${{m{n}}}${{m{n}}}'\n" for n in range(17))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is this llama-swap's config.yaml?"),
        ("- a\n- b\n", "expected keys with values"),
        ("models: [a\n", "not YAML"),
        ("models: 3\n", "expected names with settings"),
        ("models:\n  a: text\n", "config.yaml:2: models.a: expected keys with values, got str"),
        ("models:\n  a:\n    cmd: [llama-server]\n", "config.yaml:3: models.a.cmd: expected a command line, got list"),
        ("models: {}\nhealthCheckTimeout: soon\n", "config.yaml:2: healthCheckTimeout: expected whole seconds"),
        ("models: {a: {cmd: '${x}'}}\nmacros: {x: '${x}${x}'}\n", "its macros hold themselves"),
        ("models: {a: {cmd: '${m17}'}}\nmacros:\n" + DOUBLED, "its macros hold themselves, or are more than 65536"),
        (BOMB, "more than 100000 values"),
        ("models: {}\n#" + "x" * 2**20, "larger than 1 MiB"),
        ("models: {a: {cmd: 1, cmd: 2}}", "here twice"),
    ],
)  # fmt: skip
def test_file_that_is_none_is_refused_by_its_line(text: str, words: str) -> None:
    Path("config.yaml").write_text(text)
    result = runner.invoke(import_app, ["llama-swap", "config.yaml"])
    assert words in str(getattr(result.exception, "message", result.exception))


def test_file_that_is_not_there_is_told() -> None:
    assert refusal("llama-swap", "nope.yaml") == "nope.yaml: no such file"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("-ngl 99", {}),
        ("-ngl all", {}),
        ("-ngl 0", {"gpu_layers": 0}),
        ("--n-gpu-layers 24 -ncmoe 12", {"gpu_layers": 24, "experts_on_cpu": 12}),
        ("--cpu-moe", {"experts_on_cpu": "all"}),
        (r"-ot .ffn_.*_exps.=CPU", {"experts_on_cpu": "all"}),
        (r"-ot blk\.[0-9]\.ffn_.*_exps=CPU", {"experts_on_cpu": 10}),
        ("-ts 3,1 -dev CUDA0,CUDA2", {"tensor_split": [3, 1], "gpus": [0, 2]}),
        ("-sm none -mg 1", {"gpus": [1]}),
        ("-dev none", {"gpu_layers": 0}),
    ],
)
def test_where_layers_lie_is_taken_over(flags: str, expected: dict[str, object]) -> None:
    Path("config.yaml").write_text(f"models:\n  m:\n    cmd: 'llama-server --port ${{PORT}} -m big.gguf {flags}'\n")
    made = imported("llama-swap", "config.yaml")
    entry = made.config["models"]["m"]
    assert {name: value for name, value in entry.items() if name in PLACES} == expected
    assert "args" not in entry


@pytest.mark.parametrize(
    ("flags", "key", "why"),
    [
        ("-sm row", "--split-mode row", "tensor_split"),
        ("-mg 1", "--main-gpu 1", "gpus"),
        ("-dev Vulkan0", "--device Vulkan0", "NVIDIA"),
        (r"-ot attn=CUDA1", "--override-tensor attn=CUDA1", "experts_on_cpu"),
        ("-ngld 99", "-ngld 99", "use gpu_layers"),
    ],
)
def test_a_place_that_is_not_taken_over_is_told(flags: str, key: str, why: str) -> None:
    Path("config.yaml").write_text(f"models:\n  m:\n    cmd: llama-server --port ${{PORT}} -m big.gguf {flags}\n")
    made = imported("llama-swap", "config.yaml")
    assert why in made.about(f"models.m.cmd {key}")
    assert not PLACES & set(made.config["models"]["m"])
