"""Owns: the part of llama.cpp's C interface by which a model file is evaluated: every token's logits, and its experts.

The wheel of the built-in engine exports it. Parameter structs are passed by value and differ between builds: their size
is generous and fields are written by offset, which `check_layout` holds to the defaults first. llama.cpp ends the
process where it does not like something: use this in a child.
"""

from __future__ import annotations

import array
import ctypes
import os
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from laya.errors import EngineFailed
from laya.memory.ggml import kv_cache_type
from laya.quantization.library import bound, last_logged

_P, _I32, _I64, _BOOL = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_bool
F32, F16, I32 = 0, 1, 26
_N_CTX, _FLASH_ATTN, _CB_EVAL, _TYPE_K = 0, 52, 88, 104  # of llama_context_params, in the build that the wheel has
_TENSOR_NE, _TENSOR_NB = 16, 48  # of ggml_tensor
_EXPERT_IDS = b"ffn_moe_topk-"
_ON_EVAL = ctypes.CFUNCTYPE(_BOOL, _P, _BOOL, _P)


class _Params(ctypes.Structure):
    """Larger than either parameter struct."""

    _fields_ = (("raw", ctypes.c_uint8 * 512),)

    def put(self, layout: str, offset: int, *values: int) -> None:
        struct.pack_into(layout, self, offset, *values)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", _I32),
        ("token", ctypes.POINTER(_I32)),
        ("embd", _P),
        ("pos", ctypes.POINTER(_I32)),
        ("n_seq_id", ctypes.POINTER(_I32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(_I32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_model_default_params": (_Params, ()),
    "llama_context_default_params": (_Params, ()),
    "llama_model_load_from_file": (_P, (ctypes.c_char_p, _Params)),
    "llama_model_free": (None, (_P,)),
    "llama_model_get_vocab": (_P, (_P,)),
    "llama_model_n_ctx_train": (_I32, (_P,)),
    "llama_vocab_n_tokens": (_I32, (_P,)),
    "llama_vocab_get_add_bos": (_BOOL, (_P,)),
    "llama_vocab_bos": (_I32, (_P,)),
    "llama_tokenize": (_I32, (_P, ctypes.c_char_p, _I32, ctypes.POINTER(_I32), _I32, _BOOL, _BOOL)),
    "llama_init_from_model": (_P, (_P, _Params)),
    "llama_set_n_threads": (None, (_P, _I32, _I32)),
    "llama_free": (None, (_P,)),
    "llama_get_memory": (_P, (_P,)),
    "llama_memory_clear": (None, (_P, _BOOL)),
    "llama_batch_init": (_Batch, (_I32, _I32, _I32)),
    "llama_batch_free": (None, (_Batch,)),
    "llama_decode": (_I32, (_P, _Batch)),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), (_P, _I32)),
    "ggml_get_name": (ctypes.c_char_p, (_P,)),
    "ggml_get_data": (_P, (_P,)),
}


@cache
def functions() -> dict[str, Callable[..., Any]]:
    """Name -> function. Raises EngineFailed where the wheel does not export one, or its structs lie otherwise."""
    table = bound(_SIGNATURES)
    check_layout(bytes(table["llama_context_default_params"]()))
    table["llama_backend_init"]()
    return table


def check_layout(raw: bytes) -> None:
    """The defaults of llama_context_params lie where they should: another build would be asked nonsense."""
    defaults = (
        struct.unpack_from("<4I", raw, _N_CTX) == (512, 2048, 512, 1),
        struct.unpack_from("<i", raw, _FLASH_ATTN) == (-1,),
        struct.unpack_from("<2Q", raw, _CB_EVAL) == (0, 0),
        struct.unpack_from("<2i", raw, _TYPE_K) == (F16, F16),
    )
    if not all(defaults):
        raise EngineFailed(
            "This build of the engine lays its parameters out in a way that is not known: no evaluation."
        )


class Evaluator:
    """A model file and one sequence of `n_ctx` tokens, computed anew for each list of tokens."""

    def __init__(
        self,
        path: Path,
        *,
        n_ctx: int,
        n_threads: int,
        exact: bool = False,
        collects_experts: bool = False,
        kv_cache_dtype: str | None = None,
    ) -> None:
        """exact: keys and values in 32 bits and no flash attention, to be compared with another implementation.

        kv_cache_dtype: of the KV cache, with flash attention, which a quantized one needs; None = the engine's own.
        Raises EngineFailed where the file cannot be loaded; the last line of the engine's log says why.
        """
        self._api = api = functions()
        self._model = api["llama_model_load_from_file"](os.fsencode(path), api["llama_model_default_params"]())
        if not self._model:
            raise EngineFailed(f"{path} cannot be loaded: {last_logged()}")
        vocab = api["llama_model_get_vocab"](self._model)
        self.n_vocab: int = api["llama_vocab_n_tokens"](vocab)
        self.n_ctx_train: int = api["llama_model_n_ctx_train"](self._model)
        self.first_token: int | None = (
            api["llama_vocab_bos"](vocab) if api["llama_vocab_get_add_bos"](vocab) else None
        )  # with which the model wants each text to begin
        self.n_ctx = n_ctx
        params = api["llama_context_default_params"]()
        params.put("<3I", _N_CTX, n_ctx, n_ctx, min(n_ctx, 512))
        if exact:
            params.put("<i", _FLASH_ATTN, 0)
            params.put("<2i", _TYPE_K, F32, F32)
        elif kv_cache_dtype is not None:
            kind = kv_cache_type(kv_cache_dtype).id
            params.put("<i", _FLASH_ATTN, 1)
            params.put("<2i", _TYPE_K, kind, kind)
        self._experts: dict[int, list[list[int]]] = {}
        self._on_eval = _ON_EVAL(self._see_tensor)
        if collects_experts:
            params.put("<Q", _CB_EVAL, ctypes.cast(self._on_eval, _P).value or 0)
        self._context = api["llama_init_from_model"](self._model, params)
        if not self._context:
            raise EngineFailed(f"{path} cannot be run: {last_logged()}")
        api["llama_set_n_threads"](self._context, n_threads, n_threads)

    def close(self) -> None:
        self._api["llama_free"](self._context)
        self._api["llama_model_free"](self._model)

    def tokens_of(self, text: str) -> list[int]:
        """By the model's own tokenizer, special tokens as they are written, nothing added."""
        raw = text.encode()
        room = (_I32 * (len(raw) + 8))()
        vocab = self._api["llama_model_get_vocab"](self._model)
        n_tokens = self._api["llama_tokenize"](vocab, raw, len(raw), room, len(room), False, True)
        return list(room[:n_tokens])

    def _compute(self, tokens: Sequence[int]) -> None:
        """One window, with logits of every token: the last layer leaves out tokens without. Raises EngineFailed."""
        api = self._api
        api["llama_memory_clear"](api["llama_get_memory"](self._context), True)
        batch = api["llama_batch_init"](len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for index, token in enumerate(tokens):
                batch.token[index], batch.pos[index] = token, index
                batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, 0, 1
            code = api["llama_decode"](self._context, batch)
        finally:
            api["llama_batch_free"](batch)
        if code:
            raise EngineFailed(f"The engine could not compute {len(tokens)} tokens: code {code}.")

    def logits(self, tokens: Sequence[int]) -> array.array[float]:
        """[len(tokens) * n_vocab] float32, of each token's successor. Raises ValueError for more than n_ctx tokens."""
        if not 0 < len(tokens) <= self.n_ctx:
            raise ValueError(f"{len(tokens)} tokens; this context takes 1 to {self.n_ctx}")
        self._experts.clear()
        self._compute(tokens)
        api = self._api
        values = array.array("f")
        for index in range(len(tokens)):
            row = api["llama_get_logits_ith"](self._context, index)
            values.frombytes(ctypes.string_at(row, 4 * self.n_vocab))
        return values

    def expert_ids(self) -> dict[int, list[list[int]]]:
        """Layer -> of each token of the last `logits`, the experts that were chosen."""
        return {layer: list(rows) for layer, rows in self._experts.items()}

    def _see_tensor(self, tensor: int, asks: bool, _data: int | None) -> bool:
        name: bytes = self._api["ggml_get_name"](tensor)
        if not name.startswith(_EXPERT_IDS):
            return not asks  # while it asks: whether this tensor is wanted; afterwards: whether to go on
        if asks:
            return True
        n_chosen, n_tokens = struct.unpack("<2q", ctypes.string_at(tensor + _TENSOR_NE, 16))
        row_bytes = struct.unpack("<2Q", ctypes.string_at(tensor + _TENSOR_NB, 16))[1]
        data: int = self._api["ggml_get_data"](tensor)
        rows = self._experts.setdefault(int(name[len(_EXPERT_IDS) :]), [])
        for token in range(n_tokens):
            rows.append(list(struct.unpack(f"<{n_chosen}i", ctypes.string_at(data + token * row_bytes, 4 * n_chosen))))
        return True
