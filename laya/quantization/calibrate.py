"""Owns: computing an importance matrix: a model reads a text, and what each matrix is multiplied with is squared and
summed by column; of experts, by expert, over the tokens that chose it.

Runs as a process of its own, as llama.cpp may end it and the model's memory is its own; what it writes is llama.cpp's
imatrix in GGUF. A line of JSON on stdout tells each window that is done, the last one what there was.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from laya.errors import EngineFailed, LayaError
from laya.quantization.imatrix import CHUNK_COUNT, CHUNK_SIZE, COUNTS, DATASETS, SUMS, WINDOW_TOKENS
from laya.quantization.library import bound
from laya.quantization.llama_api import F32, I32, Evaluator

_OP, _SRC, _DATA, _NAME = 80, 152, 248, 256  # of ggml_tensor; 16 and 48: ne and nb
_P = ctypes.c_void_p


class Tensor:
    """A ggml_tensor at an address."""

    def __init__(self, address: int) -> None:
        self.raw = ctypes.string_at(address, _NAME + 64)
        self.type, self.op = (struct.unpack_from("<i", self.raw, offset)[0] for offset in (0, _OP))
        self.ne = struct.unpack_from("<4q", self.raw, 16)
        self.nb = struct.unpack_from("<4Q", self.raw, 48)
        self.name = self.raw[_NAME:].partition(b"\0")[0].decode(errors="replace")
        self.data: int = struct.unpack_from("<Q", self.raw, _DATA)[0]

    def source(self, index: int) -> Tensor:
        return Tensor(struct.unpack_from("<Q", self.raw, _SRC + 8 * index)[0])

    def values(self) -> np.ndarray:
        """As it lies in memory, outermost dimension first."""
        span = 4 + sum((length - 1) * step for length, step in zip(self.ne, self.nb, strict=True))
        room = (ctypes.c_uint8 * span).from_address(self.data)
        kind: Any = np.float32 if self.type == F32 else np.int32
        values: np.ndarray = np.ndarray(self.ne[::-1], kind, buffer=room, strides=self.nb[::-1])
        return values


class Calibrator(Evaluator):
    """Sums of squares and counts, by the name of each matrix in the layers."""

    def __init__(self, path: Path, *, n_threads: int) -> None:
        """Raises EngineFailed where the file cannot be run, or tensors lie otherwise in this build."""
        self.sums: dict[str, np.ndarray] = {}
        self.counts: dict[str, np.ndarray] = {}
        self._is_checked = False
        self._ops = _op_numbers()
        super().__init__(path, n_ctx=WINDOW_TOKENS, n_threads=n_threads, collects_experts=True)

    def read(self, tokens: Sequence[int]) -> None:
        """Compute one window; nothing is kept but the sums."""
        try:
            self._compute(tokens)
        except EngineFailed:
            if not self._fault:
                raise
        if self._fault:
            raise EngineFailed(self._fault)

    _fault = ""

    def _see_tensor(self, tensor: int, asks: bool, _data: int | None) -> bool:
        try:
            return self._see(tensor, asks)
        except Exception as error:  # must not cross into C; `read` raises it
            self._fault = f"{type(error).__name__}: {error}"
            return False

    def _see(self, address: int, asks: bool) -> bool:
        op = struct.unpack("<i", ctypes.string_at(address + _OP, 4))[0]
        if op not in self._ops:
            return not asks
        result = Tensor(address)
        weights, inputs = result.source(0), result.source(1)
        is_wanted = weights.name.startswith("blk.") and weights.name.endswith("weight") and inputs.type == F32
        if asks or not is_wanted:
            return is_wanted or not asks
        self._check(result, address)
        if self._ops[op] == "MUL_MAT":
            self._add(weights, 0, 1, inputs.values().reshape(-1, weights.ne[0]))
        else:
            self._add_experts(weights, inputs.values()[0], result.source(2))
        return True

    def _add_experts(self, weights: Tensor, inputs: np.ndarray, chosen: Tensor) -> None:
        """inputs: [token, expert chosen or 1, column]."""
        if chosen.type != I32:
            raise EngineFailed(f"the experts of {weights.name} are told by another type than int32")
        ids = chosen.values()[0, 0]
        wide = np.broadcast_to(inputs, (*ids.shape, inputs.shape[-1]))
        for expert in range(weights.ne[2]):
            self._add(weights, expert, weights.ne[2], wide[ids == expert])

    def _add(self, weights: Tensor, matrix: int, n_matrices: int, rows: np.ndarray) -> None:
        sums = self.sums.setdefault(weights.name, np.zeros((n_matrices, weights.ne[0])))
        counts = self.counts.setdefault(weights.name, np.zeros((n_matrices, 1)))
        sums[matrix] += np.square(rows, dtype=np.float64).sum(0)
        counts[matrix] += len(rows)

    def _check(self, tensor: Tensor, address: int) -> None:
        """Once: fields lie where they should, the sources' addresses between them."""
        if self._is_checked:
            return
        name: bytes = self._api["ggml_get_name"](address)
        if tensor.name.encode() != name or tensor.data != self._api["ggml_get_data"](address):
            raise EngineFailed("this build of the engine lays its tensors out in a way that is not known")
        self._is_checked = True


def _op_numbers() -> dict[int, str]:
    name_of = bound({"ggml_op_name": (ctypes.c_char_p, (ctypes.c_int,))})["ggml_op_name"]
    names = {number: name_of(number).decode() for number in range(64)}
    found = {number: name for number, name in names.items() if name in ("MUL_MAT", "MUL_MAT_ID")}
    if len(found) != 2:
        raise EngineFailed("This build of the engine does not name its matrix products: no calibration.")
    return found


def write_imatrix(calibrator: Calibrator, path: Path, *, text_name: str, n_chunks: int) -> None:
    """As llama.cpp's own tool writes it."""
    writer = gguf.GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    writer.add_array(DATASETS, [text_name])
    writer.add_uint32(CHUNK_COUNT, n_chunks)
    writer.add_uint32(CHUNK_SIZE, WINDOW_TOKENS)
    for name in sorted(calibrator.sums):
        writer.add_tensor(name + SUMS, calibrator.sums[name].astype(np.float32))
        writer.add_tensor(name + COUNTS, calibrator.counts[name].astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def windows_of(tokens: Sequence[int], first: int | None, most_tokens: int) -> list[list[int]]:
    """Whole windows, each beginning as the model wants a text to begin; of a short text, the one there is."""
    own = WINDOW_TOKENS - (first is not None)
    begin = [] if first is None else [first]
    starts = range(0, max(1, len(tokens) - own + 1), own)
    return [[*begin, *tokens[at : at + own]] for at in starts][: max(1, most_tokens // WINDOW_TOKENS)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="laya quantize --calibration")
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text-name", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args(argv)
    try:
        calibrator = Calibrator(args.model, n_threads=args.threads)
        tokens = calibrator.tokens_of(args.text.read_text(encoding="utf-8"))
        if len(tokens) < 16:
            raise EngineFailed(f"{args.text_name}: {len(tokens)} tokens are too few to calibrate on.")
        windows = windows_of(tokens, calibrator.first_token, args.tokens)
        for done, window in enumerate(windows, 1):
            calibrator.read(window)
            print(json.dumps({"done": done, "total": len(windows)}), flush=True)
        write_imatrix(calibrator, args.out, text_name=args.text_name, n_chunks=len(windows))
    except (LayaError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps({"n_chunks": len(windows), "n_tokens": sum(map(len, windows)), "peak_bytes": _peak_bytes()}))
    return 0


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


if __name__ == "__main__":
    sys.exit(main())
