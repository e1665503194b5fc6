"""The stores of Ollama, LM Studio, llama.cpp and Hugging Face, built as these programs build them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laya.errors import ModelNotFound
from laya.models import available, resolve

from .conftest import gguf_bytes

MODEL = "application/vnd.ollama.image.model"


def put(path: Path, body: bytes = gguf_bytes(100)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    return path


def ollama(store: Path, name: str, body: bytes | None, digest: str | None = None, media_type: str = MODEL) -> None:
    digest = digest or "sha256:" + f"{len(list(store.rglob('*'))):064x}"
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "f" * 64, "size": 1},
        {"mediaType": media_type, "digest": digest, "size": 100},
    ]
    put(store / "manifests" / name, json.dumps({"schemaVersion": 2, "layers": layers}).encode())
    if body is not None:
        put(store / "blobs" / digest.replace(":", "-"), body)


def found() -> dict[str, Path]:
    return {model.id: model.path for model in available(models_dir=None, found=True)}


@pytest.fixture
def user(home: Path, tmp_path: Path) -> Path:
    return tmp_path / "user"


def test_ollama_models_have_ollamas_names(user: Path) -> None:
    store = user / ".ollama/models"
    ollama(store, "registry.ollama.ai/library/llama3/8b", gguf_bytes(100))
    ollama(store, "registry.ollama.ai/library/phi/latest", gguf_bytes(200))
    ollama(store, "registry.ollama.ai/someone/tuned/v1", gguf_bytes(100))
    ollama(store, "hf.co/org/repo-GGUF/Q4_K_M", gguf_bytes(100))
    assert set(found()) == {
        "ollama/llama3:8b", "ollama/phi:latest", "ollama/someone/tuned:v1", "ollama/hf.co/org/repo-GGUF:Q4_K_M",
    }  # fmt: skip
    model = resolve("ollama/phi", allow_path=False)
    assert (model.id, model.file_bytes, model.origin) == ("ollama/phi:latest", 200, "ollama")
    assert model.path.parent == store / "blobs"


def test_ollama_odd_manifests_are_passed_over(user: Path, tmp_path: Path) -> None:
    store = user / ".ollama/models"
    outside = put(tmp_path / "outside")
    library = "registry.ollama.ai/library"
    ollama(store, f"{library}/escape/latest", None, digest=f"../../../../{outside.name}")
    ollama(store, f"{library}/gone/latest", None)
    ollama(store, f"{library}/tensors/latest", gguf_bytes(100), media_type="application/vnd.ollama.image.tensor")
    ollama(store, f"{library}/notgguf/latest", b"safetensors")
    put(store / "manifests" / library / "broken/latest", b"{")
    put(store / "manifests/.DS_Store", b"")
    assert found() == {}


def test_ollama_store_is_where_the_environment_says(
    user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    ollama(tmp_path / "ollama", "registry.ollama.ai/library/llama3/8b", gguf_bytes(100))
    assert list(found()) == ["ollama/llama3:8b"]


@pytest.mark.parametrize("folder", [".lmstudio/models", ".cache/lm-studio/models"])
def test_lmstudio_models(user: Path, folder: str) -> None:
    path = put(user / folder / "pub/Repo-GGUF/Tiny-Q4_K_M.gguf")
    put(user / folder / "pub/Repo-GGUF/mmproj-f16.gguf")
    assert found() == {"lmstudio/Tiny-Q4_K_M": path}
    assert resolve("lmstudio/pub/Repo-GGUF/Tiny-Q4_K_M").path == path


def test_llama_cpp_models(user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = put(user / ".cache/llama.cpp/org_repo_Tiny-Q8_0.gguf")
    put(user / ".cache/llama.cpp/org_repo_Tiny-Q8_0.gguf.etag", b"x")
    assert found() == {"llama.cpp/org_repo_Tiny-Q8_0": first}
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "cache"))
    shard = put(tmp_path / "cache/big-00001-of-00002.gguf")
    put(tmp_path / "cache/big-00002-of-00002.gguf")
    assert found() == {"llama.cpp/big": shard}


def test_huggingface_models_are_those_main_points_to(user: Path) -> None:
    repo = user / ".cache/huggingface/hub/models--org--Repo-GGUF"
    blob = put(repo / "blobs/abc")
    for revision in ("old", "new"):
        link = repo / "snapshots" / revision / f"Tiny-{revision}.gguf"
        link.parent.mkdir(parents=True)
        link.symlink_to(blob)
    put(repo / "refs/main", b"new")
    model = resolve("huggingface/org/Repo-GGUF")
    assert model.id == "huggingface/org/Repo-GGUF:Tiny-new"
    assert list(found()) == [model.id]


def test_huggingface_folders(user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    snapshot = tmp_path / "hf/hub/models--org--repo/snapshots/r1"
    put(snapshot / "config.json", b"{}")
    put(snapshot / "model.safetensors", bytes(10))
    put(tmp_path / "hf/hub/models--org--empty/refs/main", b"../../../..")
    model = resolve("huggingface/org/repo")
    assert (model.format, model.path) == ("hf", snapshot)


def test_found_models_are_listed_when_asked_for_only(user: Path) -> None:
    put(user / ".lmstudio/models/pub/repo/tiny.gguf")
    assert available() == []
    assert [model.origin for model in available(found=True)] == ["lmstudio"]


def test_found_name_that_is_none_tells_the_nearest(user: Path) -> None:
    ollama(user / ".ollama/models", "registry.ollama.ai/library/llama3/8b", gguf_bytes(100))
    with pytest.raises(ModelNotFound, match="Did you mean 'ollama/llama3:8b'"):
        resolve("ollama/llama3:7b", allow_path=False)
