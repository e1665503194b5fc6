"""Owns: the folder in which files are made that are to appear whole: one process at a time, gone again when empty."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from laya.errors import DownloadError


@contextmanager
def work_folder(folder: Path, what: str) -> Iterator[Path]:
    """Locked until the block ends. What a process that was killed left in it is there still.

    Raises DownloadError, naming `what`, where another process is at it, and for a folder that cannot be written.
    """
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise DownloadError(f"{folder}: cannot be written ({error.strerror}).") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the process before us may have renamed the folder away between our two looks at it
            if not _is_open_folder(descriptor, folder):
                continue
            try:
                yield folder
            finally:
                if _is_open_folder(descriptor, folder) and not any(folder.iterdir()):
                    folder.rmdir()
            return
        except BlockingIOError:
            raise DownloadError(f"{what} is being made by another process.") from None
        finally:
            os.close(descriptor)


def _is_open_folder(descriptor: int, folder: Path) -> bool:
    """Whether `folder` is still the folder that is open here."""
    return folder.is_dir() and os.path.samestat(os.fstat(descriptor), folder.stat())
