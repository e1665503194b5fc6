"""Owns: folders in which files are made that are to appear whole: one process at a time, gone again when empty; and
clearing away those of processes that were killed."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
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


@contextmanager
def scratch_folder(folder: Path, others: Iterable[Path], what: str) -> Iterator[Path]:
    """An empty work folder, gone after the block unless it was renamed. others: where such folders lie; those of
    processes that were killed are cleared away first. Raises what `work_folder` does."""
    clear_abandoned(others)
    with work_folder(folder, what):
        _clear(folder)
        try:
            yield folder
        finally:
            if folder.exists():
                _clear(folder)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def clear_abandoned(folders: Iterable[Path]) -> None:
    """Delete those that no process is at: what it made is of no use to another."""
    for folder in folders:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # no folder, another user's, or gone meanwhile
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_open_folder(descriptor, folder):
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)


def _is_open_folder(descriptor: int, folder: Path) -> bool:
    """Whether `folder` is still the folder that is open here."""
    return folder.is_dir() and os.path.samestat(os.fstat(descriptor), folder.stat())
