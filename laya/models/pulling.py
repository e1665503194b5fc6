"""Owns: the steps of a pull, the same for every source, and what stands before the first byte.

Knows no protocol (the sources do) and no memory (the caller's `before_download` judges the fit). A pull works in
`partial/<id>/` under a lock and ends with one rename into the library: until then nothing has the model's name.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from laya.errors import BadModelFile, DownloadError, ModelNotFound
from laya.models import catalogue
from laya.models.catalogue import CatalogueEntry
from laya.models.files import check_gguf, check_utf8, model_at, shard_paths
from laya.models.library import Library, model_id_of, now_utc
from laya.models.manifest import Manifest, StoredFile
from laya.models.sources import FetchedFile, Probe, Progress, Source, is_source, parse_source
from laya.models.work_folder import work_folder
from laya.types import GIB, MIB, ModelFile

FreeBytes = Callable[[Path], int]


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a pull is about to do. Sizes are None where the source does not tell them."""

    id: str
    source: str
    file_bytes: int | None
    disk_need_bytes: int | None
    disk_free_bytes: int
    folder: Path
    entry: CatalogueEntry | None


class _Asked(msgspec.Struct, frozen=True):
    """What the user named: an entry of the catalogue or not, and the source text."""

    entry: CatalogueEntry | None
    source: str


def disk_free_bytes(path: Path) -> int:
    """Bytes this user may still write on the disk that holds `path`, which need not exist yet."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def pull(
    name_or_source: str,
    *,
    home: Path | None = None,
    progress: Progress | None = None,
    before_download: Callable[[Offer], None] | None = None,
    before_link: Callable[[Path], object] | None = None,
    model_id: str | None = None,
    sha256: str | None = None,
    free_bytes: FreeBytes = disk_free_bytes,
) -> ModelFile:
    """Bring a model into the library; one that is there whole already is given back at once.

    `before_download` sees the offer before the first byte and raises to refuse it. `progress` gets bytes so far and
    in all. `before_link` sees each file of a path before it is linked and raises to refuse it.
    `model_id` names the model instead of its file, `sha256` (hex) is what it must be. A path is linked.
    Raises: ModelNotFound, BadModelFile (a bad path), DownloadError: nothing under the model's name is left.
    """
    library = Library(home)
    # 1. what is meant
    asked = _asked(name_or_source)
    if not is_source(asked.source):
        return _link(library, Path(asked.source), model_id, before_link)
    # 2. there already
    named = asked.entry.id if asked.entry else model_id_of(model_id) if model_id else None
    if present := _present(library, asked.source, named):
        return present
    # 3. what it would bring
    source = _source(asked)
    probe = _pinned(source.probe(), sha256 or (asked.entry.sha256 if asked.entry else None))
    wanted_id = named or model_id_of(probe.suggested_id)
    _check_name_free(library, wanted_id, asked.source)
    with work_folder(library.work_path(wanted_id), wanted_id) as folder:
        if present := _present(library, asked.source, wanted_id):
            return present  # by a pull that ended while we asked
        # 4. room for it, and a yes
        _check_disk(offer := _offer(wanted_id, asked, probe, source, folder, free_bytes))
        if before_download:
            before_download(offer)
        # 5. the bytes, checked, under its name
        fetched = _fetch(source, probe, progress or _ignore, offer, free_bytes)
        return library.commit(folder, _manifest(offer, fetched))


def _asked(text: str) -> _Asked:
    """Raises: ModelNotFound for what is no catalogue name, source or path."""
    if entry := catalogue.find(text) or catalogue.of_source(text):
        return _Asked(entry, entry.source)
    if is_source(text) or Path(text).expanduser().exists():
        return _Asked(None, text)
    names = [name for entry in catalogue.entries() for name in entry.names]
    raise ModelNotFound(text, [f"hf://{text}"] if text.count("/") == 1 else names)


def _source(asked: _Asked) -> Source:
    if asked.entry is None:
        return parse_source(asked.source)
    entry = asked.entry
    return parse_source(entry.source, file_bytes=entry.file_bytes, download_bytes=entry.download_bytes)


def _present(library: Library, source: str, wanted_id: str | None) -> ModelFile | None:
    """The whole model of this source in the library, or None."""
    for manifest in library.manifests():
        if manifest.source == source and wanted_id in (None, manifest.id):
            try:
                library.check(manifest)
            except BadModelFile:
                return None
            return library.model(manifest)
    return None


def _check_name_free(library: Library, model_id: str, source: str) -> None:
    for manifest in library.manifests():
        if manifest.id == model_id and manifest.source != source:
            raise DownloadError(
                f"The name '{model_id}' is taken by the model from {manifest.source}. "
                f"Choose another with --name, or `laya rm {model_id}` first."
            )


def _pinned(probe: Probe, sha256: str | None) -> Probe:
    """The probe with the checksum we know. Raises before the download when the server states another one."""
    if sha256 is None:
        return probe
    if len(probe.files) > 1:
        raise DownloadError(f"One checksum cannot be that of the {len(probe.files)} files of a split model.")
    file = probe.files[0]
    if file.sha256 not in (None, sha256.lower()):
        raise _wrong_checksum(file.name, str(file.sha256), sha256)
    return msgspec.structs.replace(probe, files=(msgspec.structs.replace(file, sha256=sha256.lower()),))


def _offer(model_id: str, asked: _Asked, probe: Probe, source: Source, folder: Path, free_bytes: FreeBytes) -> Offer:
    return Offer(
        id=model_id,
        source=asked.source,
        file_bytes=probe.file_bytes,
        disk_need_bytes=source.disk_need_bytes(probe, folder),
        disk_free_bytes=free_bytes(folder),
        folder=folder,
        entry=asked.entry,
    )


def _check_disk(offer: Offer) -> None:
    if offer.disk_need_bytes is not None and offer.disk_need_bytes > offer.disk_free_bytes:
        raise _disk_full(offer, offer.disk_free_bytes)


def _disk_full(offer: Offer, free: int) -> DownloadError:
    need = "more" if offer.disk_need_bytes is None else size_text(offer.disk_need_bytes)
    return DownloadError(
        f"{offer.id} needs {need} of disk, {size_text(free)} free on {offer.folder.parent}.",
        need_bytes=offer.disk_need_bytes,
        available_bytes=free,
    )


def _fetch(source: Source, probe: Probe, progress: Progress, offer: Offer, free_bytes: FreeBytes) -> list[FetchedFile]:
    """Fetch and verify. What cannot be gone on from, or must not be trusted, is deleted before the error leaves."""
    folder = offer.folder
    try:
        fetched = source.fetch(probe, folder, progress)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(offer, free_bytes(folder)) from None
        raise DownloadError(f"{folder}: {error.strerror or error}.") from None
    except BaseException:
        if not source.keeps_partial:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    for expected, arrived in zip(probe.files, fetched, strict=True):
        try:
            check_gguf(arrived.path)
        except BadModelFile as error:
            shutil.rmtree(folder)
            raise DownloadError(f"What arrived is no model: {error.message}") from None
        if expected.sha256 not in (None, arrived.sha256):
            shutil.rmtree(folder)
            raise _wrong_checksum(arrived.path.name, arrived.sha256, str(expected.sha256))
    return fetched


def _wrong_checksum(name: str, got: str, expected: str) -> DownloadError:
    return DownloadError(f"{name}: wrong checksum, nothing was kept. sha256 is {got}, expected {expected}.")


def _manifest(offer: Offer, fetched: list[FetchedFile]) -> Manifest:
    files = tuple(
        StoredFile(name=file.path.name, file_bytes=file.path.stat().st_size, sha256=file.sha256) for file in fetched
    )
    licence = offer.entry.licence if offer.entry else None
    return Manifest(id=offer.id, source=offer.source, format="gguf", files=files, pulled_at=now_utc(), licence=licence)


def _link(
    library: Library, path: Path, model_id: str | None, before_link: Callable[[Path], object] | None
) -> ModelFile:
    """Give the model at a path a name in the library; the file stays where it is."""
    model = model_at(path.expanduser())
    for shard in shard_paths(model.path) if model.format == "gguf" else []:
        check_gguf(shard)
        if before_link:
            before_link(shard)
    wanted_id = model_id_of(model_id or model.id)
    source = str(model.path)
    check_utf8(model.path)
    if present := _present(library, source, wanted_id):
        return present
    _check_name_free(library, wanted_id, source)
    manifest = Manifest(
        id=wanted_id,
        source=source,
        format="hf" if model.format == "hf" else "gguf",
        files=(StoredFile(name=model.path.name, file_bytes=model.file_bytes),),
        pulled_at=now_utc(),
        linked=source,
    )
    with work_folder(library.work_path(wanted_id), wanted_id) as folder:
        return library.commit(folder, manifest)


def size_text(size: int) -> str:
    """Bytes as people read them: `93.8 MiB`, `4.6 GiB`."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"


def _ignore(done: int, total: int | None) -> None:
    """No one watches."""
