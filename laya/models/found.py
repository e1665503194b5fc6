"""Owns: the models that other programs keep on this machine: Ollama, LM Studio, llama.cpp, the Hugging Face cache.

Knows where each keeps its files and how it names them. Nothing is copied or changed: a found model is served from
where it lies, by a name such as `ollama/llama3:8b`, and is gone here when it is gone there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from laya.models.files import gguf_model, hf_model, is_hf_folder, is_weights_file, model_stem
from laya.types import ModelFile

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class _OllamaLayer(msgspec.Struct):
    media_type: str = msgspec.field(name="mediaType")
    digest: str


class _OllamaManifest(msgspec.Struct):
    layers: list[_OllamaLayer]


def _env_path(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value).expanduser() if value else None


def _cache_home() -> Path:
    return _env_path("XDG_CACHE_HOME") or Path.home() / ".cache"


def _ollama_folders() -> list[Path]:
    """The user's store and the one the system service keeps."""
    own = _env_path("OLLAMA_MODELS")
    return [own] if own else [Path.home() / ".ollama/models", Path("/usr/share/ollama/.ollama/models")]


def _lmstudio_folders() -> list[Path]:
    return [Path.home() / ".lmstudio/models", Path.home() / ".cache/lm-studio/models"]


def _llama_cpp_folders() -> list[Path]:
    return [_env_path("LLAMA_CACHE") or _cache_home() / "llama.cpp"]


def _huggingface_folders() -> list[Path]:
    home = _env_path("HF_HOME") or _cache_home() / "huggingface"
    return [_env_path("HF_HUB_CACHE") or home / "hub"]


class OllamaEntry(msgspec.Struct, frozen=True):
    """A model of an Ollama store, by the names Ollama has for it, and the blobs it is made of."""

    id: str  # llama3.2:latest
    aliases: tuple[str, ...]
    blobs: tuple[tuple[str, Path], ...]  # (media type, file), those that are there

    def files(self, kind: str) -> list[Path]:
        """Of a kind: model, params, template, system, adapter, projector."""
        return [path for media_type, path in self.blobs if media_type == f"application/vnd.ollama.image.{kind}"]


def ollama_entries(store: Path) -> Iterator[OllamaEntry]:
    """Every manifest of a store; one that cannot be read is passed over."""
    manifests = store / "manifests"
    for path in _files_below(manifests, "*"):
        parts = path.relative_to(manifests).parts
        if len(parts) < 3:
            continue  # host / namespace... / model / tag; anything shorter is not Ollama's
        prefix = () if parts[0] == "registry.ollama.ai" else parts[:1]
        space = () if parts[1] == "library" and not prefix else parts[1:-2]
        name = "/".join((*prefix, *space, parts[-2]))
        aliases = (name,) if parts[-1] == "latest" else ()
        yield OllamaEntry(f"{name}:{parts[-1]}", aliases, tuple(_ollama_blobs(store, path)))


def _ollama_models(store: Path) -> Iterator[ModelFile]:
    for entry in ollama_entries(store):
        for blob in entry.files("model")[:1]:  # none: a cloud model, another format or a damaged file
            aliases = tuple(f"ollama/{alias}" for alias in entry.aliases)
            yield gguf_model(blob, origin="ollama", id=f"ollama/{entry.id}", aliases=aliases)


def _ollama_blobs(store: Path, manifest: Path) -> Iterator[tuple[str, Path]]:
    try:
        layers = msgspec.json.decode(manifest.read_bytes(), type=_OllamaManifest).layers
    except (OSError, msgspec.DecodeError):
        return
    for layer in layers:
        # the digest comes from a file anyone could have written: only a digest may become part of a path
        if _DIGEST.fullmatch(layer.digest):
            blob = store / "blobs" / layer.digest.replace(":", "-")
            if blob.is_file():
                yield layer.media_type, blob


def _lmstudio_models(store: Path) -> Iterator[ModelFile]:
    for path in filter(is_weights_file, _files_below(store, "*.gguf")):
        yield _named_by_file("lmstudio", path, path.relative_to(store).parent)


def _llama_cpp_models(store: Path) -> Iterator[ModelFile]:
    for path in filter(is_weights_file, _files_below(store, "*.gguf")):
        yield _named_by_file("llama.cpp", path, path.relative_to(store).parent)


def _named_by_file(store: str, path: Path, folder: Path) -> ModelFile:
    """`store/file`, and `store/publisher/repo/file` too, which is unique."""
    stem = model_stem(path.name)
    return gguf_model(path, origin=store, id=f"{store}/{stem}", aliases=(f"{store}/{(folder / stem).as_posix()}",))


def _huggingface_models(hub: Path) -> Iterator[ModelFile]:
    for repo in sorted(hub.glob("models--*--*")):
        snapshot = _snapshot(repo)
        if snapshot is None:
            continue
        name = "huggingface/" + repo.name.removeprefix("models--").replace("--", "/", 1)
        if is_hf_folder(snapshot):
            yield hf_model(snapshot, origin="huggingface", id=name)
        ggufs = [path for path in _files_below(snapshot, "*.gguf") if is_weights_file(path)]
        for path in ggufs:
            aliases = (name,) if len(ggufs) == 1 else ()
            yield gguf_model(path, origin="huggingface", id=f"{name}:{model_stem(path.name)}", aliases=aliases)


def _snapshot(repo: Path) -> Path | None:
    """The snapshot that `main` points to, else the newest one."""
    main = repo / "refs" / "main"
    snapshots = repo / "snapshots"
    if main.is_file():
        snapshot = snapshots / main.read_text(encoding="utf-8").strip()
        if snapshot.is_dir() and snapshot.parent == snapshots:
            return snapshot
    kept = [path for path in snapshots.glob("*") if path.is_dir()]
    return max(kept, key=lambda path: path.stat().st_mtime, default=None)


def _files_below(folder: Path, pattern: str) -> Iterable[Path]:
    return sorted(path for path in folder.rglob(pattern) if path.is_file())


STORES: dict[str, tuple[Callable[[], list[Path]], Callable[[Path], Iterator[ModelFile]]]] = {
    "ollama": (_ollama_folders, _ollama_models),
    "lmstudio": (_lmstudio_folders, _lmstudio_models),
    "llama.cpp": (_llama_cpp_folders, _llama_cpp_models),
    "huggingface": (_huggingface_folders, _huggingface_models),
}


def found_models() -> Iterator[ModelFile]:
    """Every model of the four stores, unchecked; a store that is absent or unreadable holds none."""
    for folders, models in STORES.values():
        for folder in folders():
            try:
                yield from models(folder)
            except OSError:
                continue  # another user's store: not readable means not ours to list
