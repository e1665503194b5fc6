"""Owns: the store of pulled models under `$LAYA_HOME` (or the XDG data folder), and finding a model by its name.

Layout: `models/<id>/` holds one pulled model and its manifest; `partial/<id>/` holds a pull that is under way, and
`partial/~*` what is made here and is of no use once its process has ended. A name
is an id, an alias or the source of a pulled model, a file name in models_dir, a name of another program's store
(`ollama/llama3:8b`), one that comes with Laya, a path with a slash in it, an id of the catalogue, or else whatever lies
in the current folder, tried in this order; a name in its exact case comes before any in another. Knows nothing of
memory, engines or networks.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from laya.config.places import data_dir
from laya.errors import BadModelFile, DownloadError, InvalidRequest, ModelNotFound, ModelNotPulled
from laya.models import catalogue
from laya.models.files import check_present, is_sound, model_at, models_in, shard_paths
from laya.models.found import STORES, found_models
from laya.models.manifest import MANIFEST_NAME, Manifest, read_manifest, sync_folder, write_manifest
from laya.models.shipped import shipped_models
from laya.models.sources import is_source
from laya.types import ModelFile

MODELS_DIR = Path("models")
T = TypeVar("T")


def home_path() -> Path:
    """The folder of everything Laya keeps: `$LAYA_HOME`, else the user's data folder."""
    return data_dir(os.environ).absolute()


class Library:
    """The models Laya pulled. Every method reads the disk anew, so several processes may share one store."""

    def __init__(self, home: Path | None = None) -> None:
        self.home = home or home_path()
        self.models_path = self.home / "models"
        self.partial_path = self.home / "partial"

    def folder(self, model_id: str) -> Path:
        """Where a model of this id lives; the ':' of `qwen3-8b:q4_k_m` is no character for a folder name."""
        return self.models_path / quote(model_id, safe="")

    def work_path(self, model_id: str) -> Path:
        """Where what is to become a model of this id is made."""
        return self.partial_path / self.folder(model_id).name

    def scratch_path(self, name: str) -> Path:
        """Where something is made that nobody goes on with: no id of a model has a '~'."""
        return self.partial_path / f"~{quote(name, safe='')}"

    def scratch_paths(self) -> Iterator[Path]:
        """All of them, also of processes that run."""
        return self.partial_path.glob("~*")

    def manifests(self) -> Iterator[Manifest]:
        """Every pulled model, by id. A folder without a readable manifest is no model and is passed over."""
        folders = sorted(self.models_path.iterdir()) if self.models_path.is_dir() else []
        for folder in folders:
            try:
                yield read_manifest(folder)
            except BadModelFile:
                continue

    def manifest(self, model_id: str) -> Manifest | None:
        """What is written of this model, or None when it was not pulled."""
        folder = self.folder(model_id)
        return read_manifest(folder) if (folder / MANIFEST_NAME).is_file() else None

    def find(self, name: str) -> Manifest:
        """The manifest of the pulled model of this id or alias. Raises: ModelNotFound."""
        manifests = list(self.manifests())
        manifest = _match(name, manifests, lambda manifest: _names(self.model(manifest)))
        if manifest is None:
            raise ModelNotFound(name, [known for manifest in manifests for known in _names(self.model(manifest))])
        return manifest

    def models(self) -> Iterator[ModelFile]:
        """Every pulled model as the other rooms know it."""
        return (self.model(manifest) for manifest in self.manifests())

    def model(self, manifest: Manifest) -> ModelFile:
        """The pulled model of a manifest, with the catalogue's aliases and template where it has them."""
        entry = catalogue.find(manifest.id)
        first = Path(manifest.linked) if manifest.linked else self.folder(manifest.id) / manifest.files[0].name
        return ModelFile(
            id=manifest.id,
            path=first,
            format=manifest.format,
            file_bytes=manifest.file_bytes,
            origin="pulled",
            aliases=tuple(dict.fromkeys(manifest.aliases + (entry.aliases if entry else ()))),
            source=manifest.source,
            chat_template=entry.template_text() if entry else None,
            task=entry.task if entry else None,
        )

    def check(self, manifest: Manifest) -> None:
        """Raise BadModelFile unless the files are there, and as long as they were."""
        model = self.model(manifest)
        check_present(model)
        if manifest.linked:
            return  # the user's own file may change; the memory room reads its header anew each time
        for path, file in zip(shard_paths(model.path), manifest.files, strict=True):
            if path.stat().st_size != file.file_bytes:
                raise BadModelFile(
                    f"{path}: {path.stat().st_size} bytes, {file.file_bytes} were pulled. "
                    f"`laya pull {manifest.id}` fetches it again."
                )

    def commit(self, staged: Path, manifest: Manifest) -> ModelFile:
        """Make a staged folder the model of its id, in one rename, replacing what was there."""
        target = self.folder(manifest.id)
        self.models_path.mkdir(parents=True, exist_ok=True)
        write_manifest(staged, manifest)
        if target.exists():
            old = staged.with_name(staged.name + ".old")
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
            staged.rename(target)
            shutil.rmtree(old)
        else:
            staged.rename(target)
        sync_folder(self.models_path)
        return self.model(manifest)

    def remove(self, manifest: Manifest) -> int:
        """Delete a pulled model, a link's record only. Returns the bytes freed."""
        target = self.folder(manifest.id)
        doomed = self.partial_path / (target.name + ".removed")
        self.partial_path.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(doomed, ignore_errors=True)
        target.rename(doomed)  # first out of sight, then deleted: nobody finds half a model
        shutil.rmtree(doomed)
        return 0 if manifest.linked else manifest.file_bytes


def model_id_of(text: str) -> str:
    """The id a model gets from a file name or a name the user chose: lower case, `a-z 0-9 . _ : -`.

    Raises: DownloadError when nothing of the text can stay.
    """
    model_id = re.sub(r"[^a-z0-9._:-]+", "-", text.casefold()).strip("-._:")
    if not model_id:
        raise DownloadError(f"'{text}' cannot be the name of a model: it has no letter or digit.")
    return model_id


def now_utc() -> str:
    """The time as a manifest has it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def resolve(
    name: str,
    *,
    models_dir: Path | None = MODELS_DIR,
    home: Path | None = None,
    allow_path: bool = True,
) -> ModelFile:
    """The model a name means, its files checked to be there, whole and not empty.

    `allow_path=False` is for names that come from a network: it never touches a path the caller made up.
    Raises: InvalidRequest (an empty name), BadModelFile (found, but broken), ModelNotPulled (in the catalogue only),
    ModelNotFound.
    """
    if not name.strip():
        raise InvalidRequest("The model's name is empty. `laya list` shows what there is.", param="model")
    library = Library(home)
    manifests = {manifest.id: manifest for manifest in library.manifests()}
    pulled = [library.model(manifest) for manifest in manifests.values()]
    in_dir = list(models_in(models_dir)) if models_dir else []
    in_package = list(shipped_models())
    elsewhere = list(found_models()) if name.partition("/")[0].casefold() in STORES else []
    # all at once: the exact name of any of them comes before a name in another case
    model = _match(name, (*pulled, *in_dir, *in_package, *elsewhere), _names_and_source)
    if model is not None:
        if model.origin == "pulled":
            library.check(manifests[model.id])
        else:
            check_present(model)
        return model
    if is_source(name):
        raise ModelNotPulled(name, name)
    entry = catalogue.find(name)
    if allow_path and (_looks_like_path(name) or (entry is None and os.path.lexists(name))):
        return _at_path(Path(name).expanduser())
    if entry is not None:
        raise ModelNotPulled(name, entry.id)
    known = [known for model in (*pulled, *in_dir, *elsewhere) for known in _names(model)]
    raise ModelNotFound(name, known + [known for entry in catalogue.entries() for known in entry.names])


def available(
    *, models_dir: Path | None = MODELS_DIR, home: Path | None = None, found: bool = False
) -> list[ModelFile]:
    """Every model that can be served by name right now; of two with one id the first found wins.

    Pulled models come first, then those of `models_dir`, then (with `found`) those of other programs' stores.
    """
    models: dict[str, ModelFile] = {}
    sources = (Library(home).models(), models_in(models_dir) if models_dir else (), found_models() if found else ())
    for model in (model for source in sources for model in source):
        if model.id not in models and is_sound(model):
            models[model.id] = model
    return list(models.values())


def remove(name: str, *, home: Path | None = None) -> int:
    """Remove a pulled model by id or alias. Returns the bytes freed. Raises: ModelNotFound."""
    library = Library(home)
    return library.remove(library.find(name))


def _names(model: ModelFile) -> tuple[str, ...]:
    return (model.id, *model.aliases)


def _names_and_source(model: ModelFile) -> tuple[str, ...]:
    return (*_names(model), model.source) if model.source else _names(model)


def _looks_like_path(name: str) -> bool:
    return "/" in name or name.startswith("~") or name.lower().endswith(".gguf")


def is_config_alone(path: Path) -> bool:
    """Whether this folder says what a model is and holds no weights of any kind."""
    kinds = {".safetensors", ".gguf", ".bin", ".pt", ".pth"}
    return (path / "config.json").is_file() and not any(file.suffix.lower() in kinds for file in path.glob("*"))


def _at_path(path: Path) -> ModelFile:
    """The model at a path. Raises: BadModelFile."""
    if is_config_alone(path):
        raise BadModelFile(
            f"{path}: has a config.json and no .safetensors files: it can be planned, as `laya plan "
            f"{path / 'config.json'}`, not served."
        )
    return model_at(path)


def _match(name: str, things: Iterable[T], names: Callable[[T], tuple[str, ...]]) -> T | None:
    """The thing of this name, in its exact case if there is one, else in any."""
    things = list(things)
    for wanted, fold in ((name, str), (name.casefold(), str.casefold)):
        for thing in things:
            if wanted in map(fold, names(thing)):
                return thing
    return None
