"""Owns: recognising a model on disk: a GGUF file, a split GGUF set, a Hugging Face folder; and saying what is wrong.

Knows no store and no catalogue. It reads at most the first four bytes of a file: what the header says is the memory
room's to judge, so that listing a folder of large models costs nothing.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path

from laya.errors import BadModelFile
from laya.types import ModelFile

GGUF_MAGIC = b"GGUF"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")


def model_stem(file_name: str) -> str:
    """The name of a model file without its folder, `.gguf` and shard number."""
    stem = re.split(r"[/\\]", file_name)[-1]
    stem = stem[:-5] if stem.lower().endswith(".gguf") else stem
    shard = _SHARD.fullmatch(stem)
    return shard["stem"] if shard else stem


def shard_number(file_name: str) -> int:
    """The number of this file in its split set, from 1; 1 for a file that is not split."""
    shard = _SHARD.fullmatch(file_name[:-5])
    return int(shard["number"]) if shard else 1


def shard_names(file_name: str) -> list[str]:
    """Every file name of the split set `file_name` belongs to, first shard first; just the name when not split."""
    shard = _SHARD.fullmatch(file_name[:-5])
    if shard is None:
        return [file_name]
    count = int(shard["count"])
    return [f"{shard['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def shard_paths(path: Path) -> list[Path]:
    """Every file of the split set `path` belongs to; just `path` when it is not split."""
    return [path.with_name(name) for name in shard_names(path.name)] if path.suffix.lower() == ".gguf" else [path]


def is_hf_folder(path: Path) -> bool:
    """Whether this is a Hugging Face model folder: config.json and safetensors weights."""
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def _first_bytes(path: Path) -> bytes:
    """The four bytes a file begins with. Raises: BadModelFile for a file that is missing, unreadable or empty."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before the open: a named pipe would wait for a writer
            raise BadModelFile(f"{path}: not a regular file.")
        with path.open("rb") as file:
            start = file.read(len(GGUF_MAGIC))
    except FileNotFoundError:
        raise BadModelFile(f"{path}: there is no such file.") from None
    except OSError as error:
        raise BadModelFile(f"{path}: cannot be read ({error.strerror}).") from None
    if not start:
        raise BadModelFile(f"{path}: the file is empty (0 bytes).")
    return start


def is_utf8(name: str) -> bool:
    """Whether a name of the file system, which may be any bytes, is text."""
    return not any("\ud800" <= char <= "\udfff" for char in name)


def check_utf8(path: Path) -> None:
    """Raise BadModelFile for a name that no JSON can hold."""
    if not is_utf8(str(path)):
        raise BadModelFile(f"{path}: the name is not UTF-8, so it cannot be written down; rename the file.")


def check_gguf(path: Path) -> None:
    """Raise BadModelFile, naming the file and what is wrong, unless it begins as a GGUF file does."""
    start = _first_bytes(path)
    if start != GGUF_MAGIC:
        raise BadModelFile(f"{path}: not a GGUF file; it begins with {start!r} instead of {GGUF_MAGIC!r}.")


def check_present(model: ModelFile) -> None:
    """Raise BadModelFile unless every file of this model is there and not empty.

    What they hold is not judged: the planner reads the header next and says more of a file that is no GGUF.
    """
    if model.format == "hf":
        if not is_hf_folder(model.path):
            raise BadModelFile(f"{model.path}: not a model folder; it needs config.json and .safetensors files.")
        return
    for shard in shard_paths(model.path):
        _first_bytes(shard)


def is_sound(model: ModelFile) -> bool:
    """Whether every file of this model is there and begins as it should."""
    try:
        check_present(model)
        for shard in shard_paths(model.path) if model.format == "gguf" else []:
            check_gguf(shard)
    except BadModelFile:
        return False
    return True


def gguf_model(path: Path, *, origin: str, id: str | None = None, aliases: tuple[str, ...] = ()) -> ModelFile:
    """The model whose file, or first shard, is `path`. `file_bytes` is the sum of the shards that are there."""
    present = [shard for shard in shard_paths(path) if shard.is_file()]
    return ModelFile(
        id=id or model_stem(path.name),
        path=path,
        format="gguf",
        file_bytes=sum(shard.stat().st_size for shard in present),
        origin=origin,
        aliases=aliases,
    )


def hf_model(path: Path, *, origin: str, id: str | None = None) -> ModelFile:
    """The model in a Hugging Face folder. `file_bytes` is the sum of its safetensors files."""
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return ModelFile(id=id or path.name, path=path, format="hf", file_bytes=weights, origin=origin)


def is_weights_file(path: Path) -> bool:
    """Whether a folder listing should show this file as a model: a GGUF, its first shard, no projector."""
    return (
        path.suffix.lower() == ".gguf"
        and not path.name.lower().startswith("mmproj")
        and shard_number(path.name) == 1
        and path.is_file()
    )


def models_in(folder: Path, *, origin: str = "models_dir") -> Iterator[ModelFile]:
    """Models directly in `folder` and one level below, by file name; broken ones too, since a name finds them."""
    try:
        children = sorted(folder.absolute().iterdir())
    except OSError:
        return  # no such folder, or not ours to read: it holds no models for us
    for path in children:
        if is_weights_file(path):
            yield gguf_model(path, origin=origin, aliases=(path.name,))
    for path in children:
        if not path.is_dir():
            continue
        if is_hf_folder(path):
            yield hf_model(path, origin=origin)
        for below in sorted(path.glob("*.[gG][gG][uU][fF]")):
            if is_weights_file(below):
                yield gguf_model(below, origin=origin, aliases=(below.name,))


def model_at(path: Path) -> ModelFile:
    """The model at a path the user typed.

    Raises: BadModelFile when there is nothing there.
    """
    if path.is_dir():
        model = hf_model(path.resolve(), origin="path")
    else:
        first = path.with_name(shard_names(path.name)[0]) if path.suffix.lower() == ".gguf" else path
        model = gguf_model(first.absolute(), origin="path")
    check_present(model)
    return model
