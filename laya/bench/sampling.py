"""Owns: what choosing one token takes, by the engine's own samplers with llama-server's defaults, alone.

Logits are of chance, as many as the model has words; top-k comes first and leaves 40 of them, so their values hardly
matter. The built-in engine's library is called through llama.cpp's C interface; nothing of a model is read.
"""

from __future__ import annotations

import ctypes
import importlib.util
import random
import statistics
import time
from pathlib import Path
from typing import Any

from laya.errors import EngineFailed

REPEATS, WARM_UP = 200, 20
TOP_K, TOP_P, MIN_P, TEMPERATURE = 40, 0.95, 0.05, 0.8


class _TokenData(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int32), ("logit", ctypes.c_float), ("p", ctypes.c_float))


class _Candidates(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.POINTER(_TokenData)),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    )


class _ChainParams(ctypes.Structure):
    _fields_ = (("no_perf", ctypes.c_bool),)


_P, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "chain_init": (_P, (_ChainParams,)),
    "chain_add": (None, (_P, _P)),
    "init_top_k": (_P, (ctypes.c_int32,)),
    "init_top_p": (_P, (_FLOAT, _SIZE)),
    "init_min_p": (_P, (_FLOAT, _SIZE)),
    "init_temp": (_P, (_FLOAT,)),
    "init_dist": (_P, (ctypes.c_uint32,)),
    "apply": (None, (_P, ctypes.POINTER(_Candidates))),
    "free": (None, (_P,)),
}


def _functions() -> dict[str, Any]:
    spec = importlib.util.find_spec("xllamacpp")
    found = sorted(Path(spec.origin).parent.glob("*.so")) if spec and spec.origin else []
    if not found:
        raise EngineFailed("The built-in engine is not installed: its samplers cannot be timed.")
    library, table = ctypes.CDLL(str(found[0])), {}
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, f"llama_sampler_{name}", None)
        if function is None:
            raise EngineFailed(f"This build of the engine does not export llama_sampler_{name}: it cannot be timed.")
        function.restype, function.argtypes = result, arguments
        table[name] = function
    return table


def sample_s(n_words: int) -> float:
    """Seconds to choose one of so many words: the candidates laid out, cut to the likely ones, one drawn."""
    llama, dice = _functions(), random.Random(1)
    chain = llama["chain_init"](_ChainParams(True))
    for sampler in (
        llama["init_top_k"](TOP_K),
        llama["init_top_p"](TOP_P, 0),
        llama["init_min_p"](MIN_P, 0),
        llama["init_temp"](TEMPERATURE),
        llama["init_dist"](1),
    ):
        llama["chain_add"](chain, sampler)
    fresh = (_TokenData * n_words)(*(_TokenData(index, dice.gauss(0.0, 2.0), 0.0) for index in range(n_words)))
    used = (_TokenData * n_words)()
    runs = []
    for _ in range(WARM_UP + REPEATS):
        start_s = time.perf_counter()
        ctypes.memmove(used, fresh, ctypes.sizeof(fresh))
        candidates = _Candidates(used, n_words, -1, False)
        llama["apply"](chain, ctypes.byref(candidates))
        runs.append(time.perf_counter() - start_s)
        if not 0 <= candidates.selected < candidates.size <= TOP_K:
            raise EngineFailed("This build's samplers are not those that are known here: nothing was timed.")
    llama["free"](chain)
    return statistics.median(runs[WARM_UP:])
