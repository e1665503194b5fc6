"""Owns: a file or folder that a user named for a result: written whole or not at all, and through links; a pipe or a
device is written into; readable to whom the user's umask says.

Knows nothing of what is in it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from laya.errors import Conflict, InvalidRequest


def check_result_file(option: str, path: Path) -> None:
    """Raises InvalidRequest for what could not be written, before the work whose result it is."""
    if path.is_dir():
        raise InvalidRequest(f"{option} {path}: that is a folder; name a file.")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InvalidRequest(f"{option} {path}: there is no folder {path.parent}.")
    if not os.access(path if _is_special(path) else path.resolve().parent, os.W_OK):
        raise InvalidRequest(f"{option} {path}: it cannot be written there.")


def check_new(option: str, path: Path) -> None:
    """Raises Conflict for what is there already, InvalidRequest where there is no folder to put it into."""
    if os.path.lexists(path):
        raise Conflict(f"{option} {path} is there already; remove it first, or name another.")
    if not path.absolute().parent.is_dir():
        raise InvalidRequest(f"{option} {path}: there is no folder {path.parent}.")


def as_umask_says(folder: Path) -> None:
    """Give the folder's files the modes that `open` would have: safetensors writes through a private temporary file."""
    os.umask(umask := os.umask(0o077))
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o666 & ~umask)


def write_result_file(path: Path, content: bytes) -> None:
    """Raises InvalidRequest where it cannot be written; what was there before is there then."""
    try:
        if _is_special(path):
            path.write_bytes(content)
            return
        target = path.resolve()
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            part.write_bytes(content)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be written ({error.strerror}).") from None


def _is_special(path: Path) -> bool:
    """A pipe or a device: to be written into, not replaced. By its own name: /dev/stdout of a pipe leads to none."""
    return path.exists() and not stat.S_ISREG(path.stat().st_mode)
