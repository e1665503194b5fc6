"""Wheels of an engine package that names the devices it is told to, and an index that serves them."""

from __future__ import annotations

import importlib.metadata
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAMES_DEVICES = """
class Kind:
    def __init__(self, name): self.name = "GGML_BACKEND_DEVICE_TYPE_" + name
def get_device_info():
    return [{{"name": name, "description": what, "type": Kind(kind)}} for name, what, kind in {devices!r}]
"""
A_GPU = (("CUDA0", "NVIDIA GeForce RTX 4090", "GPU"), ("CPU", "some CPU", "CPU"))
NO_GPU = A_GPU[1:]


def write_wheel(folder: Path, version: str, code: str, *, tag: str = "py3-none-any") -> Path:
    """A wheel of xllamacpp that is only this code."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel, info = folder / f"xllamacpp-{version}-{tag}.whl", f"xllamacpp-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("xllamacpp/__init__.py", code)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: xllamacpp\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def repack(folder: Path) -> Path:
    """The wheel of the package that is installed here."""
    package = importlib.metadata.distribution("xllamacpp")
    wheel = folder / f"xllamacpp-{package.version}-cp310-abi3-{_platform(package)}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in package.files or []:
            if "__pycache__" not in file.parts and file.name not in ("INSTALLER", "REQUESTED"):
                archive.write(str(file.locate()), str(file))
    return wheel


def _platform(package: importlib.metadata.Distribution) -> str:
    lines = (package.read_text("WHEEL") or "").splitlines()
    return next(line for line in lines if line.startswith("Tag: ")).rpartition("-")[2]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def index(root: Path) -> Iterator[str]:
    """Serves the folder of a package index; its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(root)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def list_wheels(root: Path, links: dict[str, str]) -> None:
    """The index page: the file of each wheel -> what stands behind its link."""
    page = root / "xllamacpp" / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    anchors = "".join(f'<a href="../files/{name}{more}">{name}</a><br>' for name, more in links.items())
    page.write_text(f"<!DOCTYPE html><html><body>{anchors}</body></html>")
