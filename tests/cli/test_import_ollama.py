"""`laya import ollama`: Modelfiles, the environment of its service, and its store."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from importing_world import imported, refusal

MODELFILE = '''# a cartoon
FROM ./model.gguf
PARAMETER temperature 1
parameter num_ctx 4096
PARAMETER stop "<|end|>"
PARAMETER stop AI assistant:
PARAMETER num_predict -1
PARAMETER repeat_last_n 64
PARAMETER num_gpu 99
PARAMETER top_p 7
PARAMETER num_keep 5
PARAMETER mirostat 1
PARAMETER temprature 1
ADAPTER ./lora.gguf
TEMPLATE """{{ if .System }}<|system|>
FROM the inside {{ .System }}{{ end }}"""
SYSTEM You are Mario
MESSAGE user Is Toronto in Canada?
MESSAGE assistant "yes, ${it} is"
LICENSE """
Mine
"""
REQUIRES 0.14.0
'''
OVERRIDE = """
[Service]
# the defaults
Environment="OLLAMA_KEEP_ALIVE=24h" "OLLAMA_NUM_PARALLEL=2"
Environment=OLLAMA_KV_CACHE_TYPE=q8_0
Environment="OLLAMA_CONTEXT_LENGTH=8192"
Environment="OLLAMA_MAX_QUEUE=100"
Environment="OLLAMA_LOAD_TIMEOUT=5m30s"
Environment="OLLAMA_HOST=0.0.0.0:11500"
Environment="OLLAMA_ORIGINS=https://chat.example,http://*"
Environment="OLLAMA_FLASH_ATTENTION=1"
Environment="OLLAMA_MAX_LOADED_MODELS=3"
Environment="OLLAMA_WHATEVER=1"
Environment="HTTPS_PROXY=http://me:secret@proxy"
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAYA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "store"))


def written(path: str, text: str | bytes) -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file.absolute()


def test_modelfile_becomes_a_model() -> None:
    model, lora = written("mario/model.gguf", b"GGUF"), written("mario/lora.gguf", b"GGUF")
    written("mario/Modelfile", MODELFILE)
    made = imported("ollama", "mario/Modelfile")
    assert made.config["models"] == {
        "mario": {
            "source": str(model), "max_seq_len": 4096, "lora": [str(lora)], "args": {"n_keep": 5},
            "defaults": {"temperature": 1, "stop": ["<|end|>", "AI assistant:"], "repeat_last_n": 64},
        }
    }  # fmt: skip
    assert "(line 13: an unknown parameter of Ollama)" in made.about("mario: PARAMETER temprature")
    assert "top_p" in made.about("mario: PARAMETER top_p")
    assert "(line 15: Go's template syntax" in made.about("mario: TEMPLATE")
    assert "(line 17: clients send" in made.about("mario: SYSTEM")
    assert "sampling.mirostat" in made.about("mario: PARAMETER mirostat")
    for name in ("LICENSE", "REQUIRES"):
        assert made.about(f"mario: {name}")
    assert list(imported("ollama", "mario/Modelfile", "--name", "luigi").config["models"]) == ["luigi"]


def test_environment_becomes_settings_of_all_models() -> None:
    written("override.conf", OVERRIDE)
    made = imported("ollama", "override.conf")
    assert made.config == {
        "version": 1, "ttl": "24h", "max_num_seqs": 2, "kv_cache_dtype": "q8_0", "max_seq_len": 8192, "queue_size": 100,
        "load_timeout_s": 330, "server": {"port": 11500, "cors_origins": ["https://chat.example"]},
    }  # fmt: skip
    assert "laya serve --lan" in made.about("OLLAMA_HOST")
    assert "(line 13: an unknown variable of Ollama)" in made.about("OLLAMA_WHATEVER")
    assert "by bytes" in made.about("OLLAMA_MAX_LOADED_MODELS")
    assert not any("secret" in line for line in made.told)
    written("ollama.env", "export OLLAMA_KEEP_ALIVE=-1\nOLLAMA_NUM_PARALLEL=0\nOLLAMA_HOST=127.0.0.1\n")
    assert imported("ollama", "ollama.env").config == {"version": 1, "ttl": -1}


def test_folder_of_modelfiles_and_a_drop_in_is_one_configuration() -> None:
    model = written("models/w.gguf", b"GGUF")
    written("models/Modelfile.a", f"FROM {model}\n")
    written("models/b.Modelfile", "FROM ./w.gguf\nPARAMETER seed 7\n")
    written("models/c/Modelfile", "FROM ../w.gguf\n")
    written("models/override.conf", OVERRIDE)
    config = imported("ollama", "models").config
    assert set(config["models"]) == {"a", "b", "c"}
    assert (config["models"]["b"]["defaults"], config["max_num_seqs"]) == ({"seed": 7}, 2)


def blob(content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    written(f"store/blobs/sha256-{digest}", content)
    return f"sha256:{digest}"


def test_store_is_served_from_where_it_lies() -> None:
    weights = blob(b"GGUF weights")
    kinds = {"model": weights, "params": blob(json.dumps({"num_ctx": 2048, "stop": ["<e>"]}).encode()),
             "template": blob(b"{{ .Prompt }}")}  # fmt: skip
    layers = [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": each} for kind, each in kinds.items()]
    written("store/manifests/registry.ollama.ai/library/tiny/latest", json.dumps({"layers": layers}))
    cloud = [{"mediaType": "application/vnd.ollama.image.license", "digest": blob(b"mine")}]
    written("store/manifests/registry.ollama.ai/library/cloud/1b", json.dumps({"layers": cloud}))
    written("store/manifests/registry.ollama.ai/library/broken/1b", "{")
    made = imported("ollama", "store")
    file = Path("store/blobs", weights.replace(":", "-")).absolute()
    assert made.config["models"] == {
        "tiny:latest": {
            "source": str(file), "max_seq_len": 2048, "defaults": {"stop": ["<e>"]}, "aliases": ["tiny"],
        }
    }  # fmt: skip
    assert "no weights" in made.about("cloud:1b")
    assert "Go's template" in made.about("tiny:latest: template")
    written("Modelfile", "FROM tiny\n")
    mine = imported("ollama", "Modelfile", "--name", "mine")
    assert mine.config["models"] == {"mine": {"source": "ollama/tiny"}}
    assert len(mine.told) == 1  # that it was written


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a Modelfile has a FROM line"),
        ("PARAMETER num_ctx 1\n", "a Modelfile has a FROM line"),
        (
            "FROM x\n\nPARAMETR num_ctx 1\n",
            "Modelfile:3: PARAMETR is no instruction of a Modelfile. Did you mean PARAMETER?",
        ),
        ('FROM x\nSYSTEM """never\nends\n', 'Modelfile:2: SYSTEM begins with """ and never ends'),
        ("models:\n  a: 1\n", "Modelfile:1: models: is no instruction"),
        (b"\xff\xfe\x00", "Modelfile:1: not UTF-8 text"),
        ("#" * 2**20 + "\n", "larger than 1 MiB"),
    ],
)
def test_file_that_is_none_is_refused_by_its_line(text: str | bytes, words: str) -> None:
    written("Modelfile", text)
    assert words in refusal("ollama", "Modelfile")


def test_what_is_not_there_is_told() -> None:
    Path("empty").mkdir()
    assert "no Modelfile is in it" in refusal("ollama", "empty")
    assert refusal("ollama", "gone") == "gone: no such file"
    written("a.Modelfile", "FROM ./x.gguf")
    written("b.Modelfile", "FROM ./x.gguf")
    assert "names the model of one Modelfile" in refusal("ollama", "a.Modelfile", "b.Modelfile", "--name", "n")


@pytest.mark.parametrize(("value", "expected"), [("99", None), ("-1", None), ("0", 0), ("24", 24)])
def test_layers_on_the_gpu_are_taken_over_and_all_are_as_many_as_fit(value: str, expected: int | None) -> None:
    written("m/model.gguf", b"GGUF")
    written("m/Modelfile", f"FROM ./model.gguf\nPARAMETER num_gpu {value}\n")
    made = imported("ollama", "m/Modelfile")
    assert made.config["models"]["m"].get("gpu_layers") == expected
