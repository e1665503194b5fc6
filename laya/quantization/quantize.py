"""Owns: carrying out a quantization job: rows are read, converted and written by several threads, then read back.

The memory it takes does not depend on the model's size. The file it writes into is the caller's: it gives it its name
when it is whole. Knows no store.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from laya.errors import BadModelFile, EngineFailed
from laya.memory.gguf import read_header
from laya.quantization.ggml_api import Converter, prepare
from laya.quantization.job import CHUNK_ELEMENTS, Job, Piece
from laya.quantization.kinds import FULL_TYPES
from laya.quantization.recipe import is_protected

Progress = Callable[[int, int], None]
"""Called with the bytes of the source that are done, and in all."""
_IN_FLIGHT = 4  # chunks of each thread that wait for it
_READ_BYTES = 1 << 20


class _Chunk(NamedTuple):
    """Rows of one matrix of one tensor."""

    piece: Piece
    matrix: int
    first_row: int  # in the whole tensor
    n_rows: int


def write(job: Job, path: Path, *, n_threads: int, progress: Progress) -> None:
    """The result into `path`, which is made or overwritten, and synced.

    Raises BadModelFile for a source that is shorter than it was or holds NaN, OSError for a disk that is full.
    """
    for kind in {piece.target.type for piece in job.pieces}:
        prepare(kind)
    with ExitStack() as stack:
        inputs = {source: stack.enter_context(source.open("rb", buffering=0)).fileno() for source in job.sources}
        output = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        stack.callback(os.close, output)
        os.posix_fallocate(output, 0, job.file_bytes)  # a disk that is too small says so now; padding is zeros
        os.pwrite(output, job.header, 0)
        _convert_all(job, inputs, output, n_threads, progress)
        os.fsync(output)


def sha256_of(paths: Sequence[Path]) -> str:
    """Of the files' bytes, one file after another."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            buffer = memoryview(bytearray(_READ_BYTES))
            while n_bytes := file.readinto(buffer):
                digest.update(buffer[:n_bytes])
    return digest.hexdigest()


def check_result(path: Path, job: Job) -> None:
    """Read the file again and hold it to its job: every tensor is there in its type, none that must not be is small.

    Raises EngineFailed, naming the tensor.
    """
    header = read_header(path)
    wanted = {target.tensor.name: target for target in job.targets}
    if {tensor.name for tensor in header.tensors} != set(wanted) or header.file_bytes != job.file_bytes:
        raise EngineFailed(f"{path}: what was written has other tensors or another size than was planned.")
    for tensor in header.tensors:
        target = wanted[tensor.name]
        if tensor.type_id != target.type.id or tensor.shape != target.tensor.shape:
            raise EngineFailed(f"{path}: {tensor.name} became {tensor.type_name}, not {target.type.name}.")
        if is_protected(tensor) and tensor.type_name not in FULL_TYPES | {"F64", "I32", "I64"}:
            raise EngineFailed(f"{path}: {tensor.name} became {tensor.type_name}: it needs 16 bits at least.")


def _convert_all(job: Job, inputs: dict[Path, int], output: int, n_threads: int, progress: Progress) -> None:
    total_bytes = sum(piece.target.tensor.n_bytes for piece in job.pieces)
    local, lock, done_bytes = threading.local(), threading.Lock(), 0

    def convert(chunk: _Chunk) -> None:
        nonlocal done_bytes
        if not hasattr(local, "converter"):
            local.converter = Converter(_most_elements(job))
        n_bytes = _convert(job, chunk, local.converter, inputs[chunk.piece.source], output)
        with lock:
            done_bytes += n_bytes
            progress(done_bytes, total_bytes)

    with ThreadPoolExecutor(n_threads, thread_name_prefix="quantize") as pool:
        try:
            pending = set()
            for chunk in _chunks(job):
                pending.add(pool.submit(convert, chunk))
                if len(pending) >= _IN_FLIGHT * n_threads:
                    finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for future in finished:
                        future.result()
            for future in wait(pending, return_when=FIRST_EXCEPTION).done:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _chunks(job: Job) -> Iterator[_Chunk]:
    for piece in job.pieces:
        n_columns, *others = piece.target.tensor.shape
        n_rows = others[0] if others else 1
        n_matrices = 1
        for length in others[1:]:
            n_matrices *= length
        step = max(1, CHUNK_ELEMENTS // n_columns)
        for matrix in range(n_matrices):
            for row in range(0, n_rows, step):
                yield _Chunk(piece, matrix, matrix * n_rows + row, min(step, n_rows - row))


def _most_elements(job: Job) -> int:
    return max(CHUNK_ELEMENTS, *(piece.target.tensor.shape[0] for piece in job.pieces))


def _convert(job: Job, chunk: _Chunk, converter: Converter, source: int, output: int) -> int:
    """Gives the bytes of the source that were read."""
    target = chunk.piece.target
    n_columns, own = target.tensor.shape[0], target.own_type
    row_bytes = own.row_bytes(n_columns)
    wanted_bytes = chunk.n_rows * row_bytes
    room = memoryview(converter.source).cast("B")[:wanted_bytes]
    n_read = os.preadv(source, [room], chunk.piece.source_offset + chunk.first_row * row_bytes)
    if n_read != wanted_bytes:
        raise BadModelFile(f"{chunk.piece.source}: ends in the middle of {target.tensor.name}; it has changed.")
    importance = job.imatrix.tensors.get(target.tensor.name) if job.imatrix and not target.is_protected else None
    weights = ctypes.c_void_p(importance.address(chunk.matrix, n_columns)).value if importance else None
    try:
        result = converter.convert(own, target.type, chunk.n_rows, n_columns, weights)
    except ValueError as error:
        raise BadModelFile(f"{chunk.piece.source}: {target.tensor.name}: {error}.") from None
    offset = chunk.piece.offset + chunk.first_row * target.type.row_bytes(n_columns)
    while result:
        n_written = os.pwrite(output, result, offset)
        result, offset = result[n_written:], offset + n_written
    return wanted_bytes
