"""What the engine itself would allocate for a model that is described and never built: the oracle of the planner.

The wheel exports llama.cpp's C API. `llama_model_init_from_user` takes metadata alone, and with `no_alloc` no weight is
made, so an architecture of any size answers in milliseconds: its log says the bytes of its cache, its recurrent state
and its graph. Each question is asked in a process of its own, since metadata that it does not like ends the process.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xllamacpp

LIBRARY = next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))
SECONDS = 20
F32, F16, Q8_0 = 0, 1, 8
GGUF_U32, GGUF_F32, GGUF_BOOL = 4, 6, 7
_KV = re.compile(r"llama_kv_cache: size =\s+([\d.]+) MiB")
_STATE = re.compile(r"llama_memory_recurrent: size =\s+([\d.]+) MiB")
_COMPUTE = re.compile(r"CPU compute buffer size =\s+([\d.]+) MiB")


class Allocated(NamedTuple):
    """MiB, with the two digits that the engine prints."""

    kv_mib: float
    state_mib: float
    compute_mib: float


class Params(ctypes.Structure):
    """Larger than either of the engine's parameter structs, which are passed by value; fields are set by offset."""

    _fields_ = (("raw", ctypes.c_uint8 * 512),)

    def put(self, layout: str, offset: int, *values: int) -> None:
        struct.pack_into(layout, self, offset, *values)


# Offsets of llama_model_params and llama_context_params in the build that the wheel has; `_check` holds them to it.
MODEL_NO_ALLOC = 76
N_CTX, FLASH_ATTN, TYPE_K, SWA_FULL, KV_UNIFIED = 0, 52, 104, 140, 141


class Oracle:
    """A small process that answers questions, each in a fork of its own."""

    def __init__(self) -> None:
        quiet = os.environ | {"GGML_NO_BACKTRACE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=quiet,
        )

    def ask(self, metadata: Mapping[str, Any], **settings: Any) -> Allocated | str:
        """What the engine allocates for this metadata, or the last line of its log where it refuses.

        Settings are those of `_log_of`: n_ctx, n_ubatch, n_seqs, unified, swa_full, cache_type, n_rollback.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([dict(metadata), settings]) + "\n")
        self._process.stdin.flush()
        log = json.loads(self._process.stdout.readline())
        graph = _COMPUTE.search(log)
        if graph is None:
            return log.strip().rpartition("\n")[2] or "the engine ended the process"
        caches, states = (sum(map(float, found.findall(log))) for found in (_KV, _STATE))
        return Allocated(caches, states, float(graph[1]))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(SECONDS)


def serve() -> None:
    """Answer the questions of standard input until it ends."""
    for line in sys.stdin:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(SECONDS)
            metadata, settings = json.loads(line)
            os.write(writer, _log_of(metadata, **settings).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, errors="replace") as pipe:
            log = pipe.read()
        os.waitpid(child, 0)
        sys.stdout.write(json.dumps(log) + "\n")
        sys.stdout.flush()


def _log_of(
    metadata: Mapping[str, Any],
    *,
    n_ctx: int = 4096,
    n_ubatch: int = 128,
    n_seqs: int = 1,
    unified: bool = False,
    swa_full: bool = False,
    cache_type: int = F16,
    n_rollback: int = 0,
) -> str:
    engine = ctypes.CDLL(str(LIBRARY))
    log: list[str] = []
    on_line = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
        lambda _level, text, _data: log.append(text.decode(errors="replace"))
    )
    engine.llama_log_set(on_line, None)
    for name in ("llama_model_default_params", "llama_context_default_params"):
        getattr(engine, name).restype = Params
    for name in ("gguf_init_empty", "llama_model_init_from_user", "llama_init_from_model"):
        getattr(engine, name).restype = ctypes.c_void_p
    model, context = engine.llama_model_default_params(), engine.llama_context_default_params()
    _check(model, context)
    model.raw[MODEL_NO_ALLOC] = 1
    context.put("<6I", N_CTX, n_ctx, n_ubatch, n_ubatch, n_seqs, n_rollback, n_seqs)
    context.put("<i", FLASH_ATTN, 1)
    context.put("<2i", TYPE_K, cache_type, cache_type)
    context.raw[SWA_FULL], context.raw[KV_UNIFIED] = swa_full, unified
    header = ctypes.c_void_p(engine.gguf_init_empty())
    for key, value in metadata.items():
        _put(engine, header, key.encode(), value)
    no_data = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(lambda _tensor, _data: None)
    loaded = engine.llama_model_init_from_user(header, no_data, None, model)
    if loaded:
        engine.llama_init_from_model(ctypes.c_void_p(loaded), context)
    return "".join(log)


def _check(model: Params, context: Params) -> None:
    """The defaults lie where they should: another build would be asked nonsense."""
    raw = bytes(context)
    assert struct.unpack_from("<4I", raw, N_CTX) == (512, 2048, 512, 1)
    assert struct.unpack_from("<i", raw, FLASH_ATTN) == (-1,)
    assert struct.unpack_from("<2i", raw, TYPE_K) == (F16, F16)
    assert (raw[SWA_FULL], raw[KV_UNIFIED]) == (1, 0)
    assert bytes(model)[72:78] == bytes((0, 0, 1, 0, 0, 0))


def _put(engine: ctypes.CDLL, header: ctypes.c_void_p, key: bytes, value: Any) -> None:
    if isinstance(value, bool):
        engine.gguf_set_val_bool(header, key, ctypes.c_bool(value))
    elif isinstance(value, int):
        engine.gguf_set_val_u32(header, key, ctypes.c_uint32(value))
    elif isinstance(value, float):
        engine.gguf_set_val_f32(header, key, ctypes.c_float(value))
    elif isinstance(value, str):
        engine.gguf_set_val_str(header, key, value.encode())
    else:
        kind, c_type = _ELEMENTS[type(value[0])]
        engine.gguf_set_arr_data(header, key, kind, (c_type * len(value))(*value), ctypes.c_size_t(len(value)))


_ELEMENTS: dict[type, tuple[int, Any]] = {
    bool: (GGUF_BOOL, ctypes.c_uint8),
    int: (GGUF_U32, ctypes.c_uint32),
    float: (GGUF_F32, ctypes.c_float),
}


if __name__ == "__main__":
    serve()
