"""Owns: installing a build of llama.cpp beside Laya: finding its wheel in the index, fetching, unpacking, proving it.

Everything happens in a folder of another name, which becomes the build's by one rename after the build has been loaded
and has named the devices it computes on. So what was cut off, or does not run here, is never taken for a build.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import httpx
import msgspec
from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from laya.engines.builds import PACKAGE, RECORD, Build, builds_folder, writing
from laya.engines.llamacpp_child import CUDA_DRIVER
from laya.errors import ConfigError, DownloadError, EngineFailed

Progress = Callable[[int, int | None], None]  # bytes so far, bytes in all
CONNECT_TIMEOUT_S, READ_TIMEOUT_S, PROOF_TIMEOUT_S = 15.0, 60.0, 180
UNPACKED_FACTOR = 4  # of a wheel's bytes: itself, its libraries unpacked, and room to spare
_STAGE = ".installing-"
_GPUS = ("GPU", "IGPU")
_PROOF = """import json, xllamacpp
found = xllamacpp.get_device_info()
print(json.dumps([[each["name"], each["description"], each["type"].name.rpartition("_")[2]] for each in found]))
"""


class FoundWheel(msgspec.Struct, frozen=True, kw_only=True):
    """A wheel of an index that this Python can load."""

    url: str
    name: str
    version: str
    sha256: str | None = None


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hrefs += [value for name, value in attrs if tag == "a" and name == "href" and value]


def find_wheel(index_url: str, wanted: str) -> FoundWheel:
    """The wheel of this version of xllamacpp. Raises DownloadError."""
    page_url = f"{index_url.rstrip('/')}/{PACKAGE}/"
    try:
        with _client() as http:
            answer = http.get(page_url)
            answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DownloadError(
            f"The index of {PACKAGE}'s wheels, {page_url}, cannot be reached ({_why(error)}). Download the wheel "
            "where it can, and give it: --wheel FILE; or name a mirror of the index: --index-url URL."
        ) from None
    links = _Links()
    links.feed(answer.text)
    wheels = [found for href in links.hrefs if (found := _wheel_of(str(answer.url), href)) is not None]
    for wheel in wheels:
        if Version(wheel.version) == Version(wanted) and fits(wheel.name):
            return wheel
    versions = sorted({Version(wheel.version) for wheel in wheels if fits(wheel.name)}, reverse=True)
    if any(Version(wheel.version) == Version(wanted) for wheel in wheels):
        system = f"Python {sys.version_info.major}.{sys.version_info.minor} on this system"
        raise DownloadError(f"{page_url} has {PACKAGE} {wanted}, but no wheel of it for {system}.")
    others = f"It has {', '.join(map(str, versions[:5]))}: --version" if versions else "It has none for this system"
    raise DownloadError(f"{page_url} has no {PACKAGE} {wanted}. {others}.")


def _wheel_of(page_url: str, href: str) -> FoundWheel | None:
    try:
        parts = urlsplit(urljoin(page_url, href))
        name = unquote(parts.path.rpartition("/")[2])
        package, version, _, _ = parse_wheel_filename(name)
    except ValueError:  # another file, or no address
        return None
    if package != PACKAGE:
        return None
    kind, _, digest = parts.fragment.partition("=")
    return FoundWheel(
        url=parts._replace(fragment="").geturl(),
        name=name,
        version=str(version),
        sha256=digest if kind == "sha256" else None,
    )


def fits(wheel_name: str) -> bool:
    """Whether this Python on this system can load it."""
    return not parse_wheel_filename(wheel_name)[3].isdisjoint(sys_tags())


def version_in(wheel: Path) -> str:
    """Of a wheel's file. Raises ConfigError for one that is none of xllamacpp, or none for this system."""
    if not wheel.is_file():
        raise ConfigError(f"--wheel {wheel}: {'it is no file' if wheel.exists() else 'there is no such file'}.")
    try:
        package, version, _, _ = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as error:
        raise ConfigError(f"--wheel {wheel}: {error}. A wheel keeps the name it was published by.") from None
    if package != PACKAGE:
        raise ConfigError(f"--wheel {wheel.name} is a wheel of {package}, not of {PACKAGE}.")
    if not fits(wheel.name):
        raise ConfigError(f"{wheel.name} is for another system or another Python than this.")
    return str(version)


class Installation:
    """The folder that becomes a build; leaving it without `finish` leaves nothing behind."""

    def __init__(self, home: Path) -> None:
        self._folder = builds_folder(home)
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self._folder)
            self._stage = Path(tempfile.mkdtemp(prefix=f"{_STAGE}{os.getpid()}-", dir=self._folder))
        self.packages = self._stage / "build"

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._stage, ignore_errors=True)

    def fetch(self, wheel: FoundWheel, progress: Progress) -> Path:
        """Download it. Raises DownloadError, also where the disk has no room for what it unpacks to."""
        target, digest, n_bytes = self._stage / wheel.name, hashlib.sha256(), 0
        try:
            with _client() as http, http.stream("GET", wheel.url) as answer, target.open("wb") as file:
                answer.raise_for_status()
                said = answer.headers.get("content-length", "")
                all_bytes = int(said) if said.isdigit() else None
                self._check_disk(all_bytes or 0)
                progress(0, all_bytes)
                for chunk in answer.iter_bytes():
                    file.write(chunk)
                    digest.update(chunk)
                    n_bytes += len(chunk)
                    progress(n_bytes, all_bytes)
        except OSError as error:
            raise DownloadError(f"{self._folder} took {n_bytes} bytes of the wheel: {error.strerror}.") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise DownloadError(f"{wheel.url} broke off after {n_bytes} bytes ({_why(error)}).") from None
        if wheel.sha256 not in (None, digest.hexdigest()):
            raise DownloadError(f"{wheel.name} is damaged: its SHA-256 is not the one that the index names.")
        return target

    def _check_disk(self, wheel_bytes: int) -> None:
        free_bytes, need_bytes = shutil.disk_usage(self._folder).free, UNPACKED_FACTOR * wheel_bytes
        if free_bytes < need_bytes:
            raise DownloadError(
                f"The build takes about {need_bytes >> 20} MiB in {self._folder}; {free_bytes >> 20} MiB are free."
            )

    def unpack(self, wheel: Path) -> None:
        """Have pip put the wheel into the folder, and nothing else: it has no dependencies. Raises DownloadError."""
        if importlib.util.find_spec("pip") is None:
            raise DownloadError(f"pip unpacks wheels, and is missing: `{sys.executable} -m ensurepip` adds it.")
        words = ["-m", "pip", "install", "--no-index", "--no-deps", "--no-input", "--disable-pip-version-check"]
        command = [sys.executable, *words, "--quiet", "--target", str(self.packages), str(wheel)]
        # it unpacks in a temporary folder first: on the same disk, as /tmp may be memory
        environ = os.environ | {"TMPDIR": str(self._stage)}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise DownloadError(f"{wheel.name} cannot be unpacked: {said}")

    def prove(self, build: Build, *, needs_gpu: bool) -> Build:
        """Load it in a process of its own and have it name its devices. Raises EngineFailed where it does not run, or
        computes on no GPU though it should. One that needs no GPU here is taken without a driver too, unloaded: where
        an image is built there is none."""
        try:
            done = subprocess.run(
                [sys.executable, "-c", _PROOF],
                env=os.environ | {"PYTHONPATH": str(self.packages), "PYTHONSAFEPATH": "1"},
                capture_output=True, text=True, timeout=PROOF_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise EngineFailed(f"The build is not loaded after {PROOF_TIMEOUT_S} s; it was not installed.") from None
        if done.returncode:
            said = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
            if build.kind == "cuda" and not needs_gpu and f"{CUDA_DRIVER}: cannot open" in said:
                return msgspec.structs.replace(build, n_bytes=self._unpacked_bytes())
            raise EngineFailed(f"The build cannot be loaded here, so it was not installed: {said}")
        try:
            devices = msgspec.json.decode(done.stdout.strip().rpartition("\n")[2], type=list[tuple[str, str, str]])
        except msgspec.DecodeError:
            raise EngineFailed("The build names no devices that it computes on, so it was not installed.") from None
        gpus = tuple(f"{name} {description}" for name, description, kind in devices if kind in _GPUS)
        if needs_gpu and not gpus:
            raise EngineFailed(
                "The build was loaded and found no GPU, so it was not installed: models would run on the CPU. "
                "`laya doctor` looks at the cards and their drivers."
            )
        return msgspec.structs.replace(build, devices=gpus, n_bytes=self._unpacked_bytes())

    def _unpacked_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.packages.rglob("*") if path.is_file())

    def finish(self, build: Build) -> Build:
        """Now it is there. Raises EngineFailed where another installation was faster."""
        folder = self._folder / build.name
        with writing(self._folder):
            (self.packages / RECORD).write_bytes(msgspec.json.encode(msgspec.structs.replace(build, folder=None)))
        try:
            self.packages.rename(folder)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                meanwhile = f"another installation put {build.name} there meanwhile: `laya engines use {build.name}`"
                raise EngineFailed(f"Nothing was installed, since {meanwhile}.") from None
            raise EngineFailed(f"{build.name} cannot be put into {self._folder}: {error.strerror}") from None
        return msgspec.structs.replace(build, folder=folder)


def _remove_leftovers(folder: Path) -> None:
    """Of installations and removals whose process is gone."""
    for left in (*folder.glob(f"{_STAGE}*"), *folder.glob(".gone-*")):
        pid = left.name.removeprefix(_STAGE).removeprefix(".gone-").partition("-")[0]
        if not (pid.isdigit() and Path(f"/proc/{pid}").exists()):
            shutil.rmtree(left, ignore_errors=True)


def _client() -> httpx.Client:
    return httpx.Client(follow_redirects=True, timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S))


def _why(error: httpx.HTTPError | httpx.InvalidURL) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP {error.response.status_code}"
    return str(error) or type(error).__name__
