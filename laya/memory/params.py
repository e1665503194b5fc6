"""Owns: models described by their figures alone, for plans of models that nobody has: `laya plan --params FILE`.

The file is JSON: `arch`, `params` (the keys of `_Params`), and `weights_type` or `weights_bytes`. Knows no settings.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from laya.errors import BadModelFile, nearest
from laya.memory.facts import ModelFacts, facts_before_download
from laya.memory.families import CACHED_LAYERS, KNOWN, RECURRENT, WINDOWS
from laya.memory.ggml import TYPE_NAMES, type_named
from laya.memory.keys import MAX_LAYERS
from laya.memory.layers import LayerShape, RecurrentShape, attention_layers, pattern, windowed, with_recurrent
from laya.memory.shape import ModelShape
from laya.memory.sizing import n_parameters

MAX_FILE_BYTES = 1 << 20
MAX_COUNT = 1 << 24
# What may be left out and may not be 0.
_AT_LEAST_ONE = frozenset(
    ("n_layer", "n_embd", "n_vocab", "n_ctx_train", "head_dim_k", "head_dim_k_swa", "n_head_kv_swa",
     "full_attention_interval", "tp")
)  # fmt: skip
_PERIOD = re.compile(r"period (\d+)|(\d+) swa : 1 full")


class _Ssm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Widths of a state-space layer, in elements."""

    conv: int = 0
    inner: int = 0
    state: int = 0
    group: int = 0
    dt_rank: int = 0


class _Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The figures of an architecture. Counts and elements; `swa` in tokens."""

    n_layer: int = 0
    n_head: int = 0
    n_head_kv: int = 0
    head_dim_k: int = 0
    head_dim_v: int | None = None
    n_head_kv_swa: int | None = None
    head_dim_k_swa: int | None = None
    head_dim_v_swa: int | None = None
    n_embd: int = 0
    n_embd_per_layer: int = 0
    n_ff: int = 0
    n_vocab: int = 0
    n_ctx_train: int = 1 << 20
    n_expert: int = 0
    n_expert_used: int = 0
    n_expert_shared: int = 0
    n_ff_exp: int = 0
    n_ff_shexp: int = 0
    swa: int = 0
    swa_pattern: str | None = None  # "period 6", or "5 swa : 1 full"
    mla: bool = False
    kv_lora_rank: int = 0
    key_length_mla: int = 0
    value_length_mla: int = 0
    indexer_key_length: int = 0
    shared_kv_layers: int = 0
    full_attention_interval: int = 0
    ssm: _Ssm = _Ssm()
    wkv_head_size: int = 0
    shortconv_l_cache: int = 0
    kda_head_dim: int = 0
    n_layer_nextn: int = 0
    n_layer_attn_full: int = 0
    n_layer_attn_swa: int = 0
    n_layer_recurrent: int = 0
    tp: int = 1  # of a vLLM run; a plan has its own


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds; keys beside these say how a run was made and are not read."""

    arch: str
    params: dict[str, Any]
    id: str = ""
    weights_type: str = "F16"
    weights_bytes: int | None = None


def read_params(path: Path) -> ModelFacts:
    """The facts of the model that a JSON file describes, its weights estimated where `weights_bytes` is not given.

    Raises BadModelFile naming the file and the key that is missing, unknown or impossible.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _fault(path, f"cannot be read ({error.strerror})") from None
    if len(text) > MAX_FILE_BYTES:
        raise _fault(path, f"is longer than {MAX_FILE_BYTES >> 20} MiB: it is no description of a model")
    try:
        described = msgspec.json.decode(text, type=Description)
        shape = shape_of(described.arch, described.params)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _fault(path, str(error).rstrip(".")) from None
    missing = [name for name in ("n_layer", "n_embd", "n_vocab") if not getattr(shape, name)]
    if missing:
        raise _fault(path, f"params.{missing[0]} is missing")
    if not shape.n_ff and not shape.n_ff_expert and not shape.is_recurrent:
        raise _fault(path, "params.n_ff is missing (with experts: n_ff_exp)")
    ggml_type = type_named(described.weights_type)
    if ggml_type is None:
        close = nearest(described.weights_type.upper(), TYPE_NAMES)
        raise _fault(path, f"weights_type {described.weights_type!r} is no type of weights" + _did_you_mean(close))
    if described.weights_bytes is not None and described.weights_bytes <= 0:
        raise _fault(
            path, f"weights_bytes is {described.weights_bytes}; it must be above 0, or left out to be estimated"
        )
    n_bytes = described.weights_bytes or -(-n_parameters(shape) * ggml_type.block_bytes // ggml_type.block)
    return facts_before_download(shape, n_bytes, ggml_type.name)


def shape_of(architecture: str, params: dict[str, Any]) -> ModelShape:
    """The shape of these figures, 0 for what is left out. Raises ValueError naming an unknown or impossible key."""
    for name in params:
        if name not in _Params.__struct_fields__:
            raise ValueError(f"params.{name} is not known" + _did_you_mean(nearest(name, _Params.__struct_fields__)))
    given = msgspec.convert(params, _Params)
    _check_ranges(given, params)
    _check_together(given)
    _check_zeros(given, params)
    head_k = given.head_dim_k or (given.n_embd // given.n_head if given.n_head else 0)
    n_layer = given.n_layer or given.n_layer_attn_full + given.n_layer_attn_swa + given.n_layer_recurrent
    recurrent = _recurrent(given, architecture)
    return ModelShape(
        architecture=architecture,
        n_layer=n_layer,
        n_embd=given.n_embd,
        n_head=(given.n_head or given.n_head_kv,) * n_layer,
        n_head_kv=(given.n_head_kv or given.n_head,) * n_layer,
        head_dim_k=head_k,
        head_dim_v=head_k if given.head_dim_v is None else given.head_dim_v,
        n_ff=given.n_ff,
        n_vocab=given.n_vocab,
        n_ctx_train=given.n_ctx_train,
        layers=_layers(given, architecture, n_layer, recurrent.layer(given.n_embd, given.n_head)),
        n_expert=given.n_expert,
        n_expert_used=given.n_expert_used,
        n_ff_expert=given.n_ff_exp,
        n_ff_shared=given.n_ff_shexp or given.n_expert_shared * given.n_ff_exp,
        n_embd_per_layer=given.n_embd_per_layer,
        kv_lora_rank=given.kv_lora_rank,
        head_dim_k_mla=given.key_length_mla,
        head_dim_v_mla=given.value_length_mla,
        n_layer_nextn=given.n_layer_nextn,
        recurrent=recurrent,
        is_length_known="n_ctx_train" in params,
        bound=_bound(architecture),
    )


def _bound(architecture: str) -> str:
    """Why the plan is an upper bound: the whole is a description, and its architecture may be one nobody knows."""
    words = "a description: its weights, vocabulary and graph are estimated"
    if architecture in KNOWN:
        return words
    close = nearest(architecture, sorted(KNOWN))
    hint = f" (did you mean {close}?)" if close else ""
    return f"architecture {architecture!r} is not known{hint}: its layers are counted from the figures alone; {words}"


def _check_ranges(given: _Params, params: dict[str, Any]) -> None:
    """Each count by itself. Raises ValueError."""
    for name in _Params.__struct_fields__:
        value = getattr(given, name)
        least = int(name in params and name in _AT_LEAST_ONE)
        most = MAX_LAYERS if name.startswith("n_layer") else MAX_COUNT
        if isinstance(value, int) and not least <= value <= most:
            raise ValueError(f"params.{name} is {value}; it must be between {least} and {most}")


def _check_together(given: _Params) -> None:
    """Counts beside each other. Raises ValueError."""
    for name in ("n_head_kv", "n_head_kv_swa"):
        kv = getattr(given, name)
        if given.n_head and kv and given.n_head % kv:
            raise ValueError(f"params.{name} is {kv}; it must divide n_head, {given.n_head}")
    if given.n_head > given.n_embd > 0 and not given.head_dim_k:
        raise ValueError(
            f"params.n_head is {given.n_head}; it must be at most n_embd, {given.n_embd}, without head_dim_k"
        )
    if given.n_expert and given.n_expert_used > given.n_expert:
        raise ValueError(
            f"params.n_expert_used is {given.n_expert_used}; it must be at most n_expert, {given.n_expert}"
        )
    if given.n_layer and given.shared_kv_layers >= given.n_layer:
        raise ValueError(
            f"params.shared_kv_layers is {given.shared_kv_layers}; it must be under n_layer, {given.n_layer}"
        )


def _check_zeros(given: _Params, params: dict[str, Any]) -> None:
    """Zeros that were written and mean nothing in this model. Raises ValueError."""
    has_state = given.ssm != _Ssm() or given.wkv_head_size or given.shortconv_l_cache or given.kda_head_dim
    zeros = [name for name, value in params.items() if value == 0]
    wrong: list[str] = [name for name in ("n_head", "n_head_kv") if name in zeros and not has_state]
    wrong += [name for name in ("head_dim_v", "head_dim_v_swa") if name in zeros and not given.mla and not has_state]
    wrong += [name for name in ("n_expert_used", "n_ff_exp") if name in zeros and given.n_expert]
    if wrong:
        raise ValueError(f"params.{wrong[0]} is 0; it must be at least 1, or left out")


def _layers(given: _Params, architecture: str, n_layer: int, row: LayerShape) -> tuple[LayerShape, ...]:
    head_k = given.head_dim_k or (given.n_embd // given.n_head if given.n_head else 0)
    head_v = 0 if given.mla else head_k if given.head_dim_v is None else given.head_dim_v
    marks = _windows(given, architecture, n_layer)
    own, swa_heads = given.n_head_kv or given.n_head, given.n_head_kv_swa
    heads = [swa_heads if mark and swa_heads is not None else own for mark in marks]
    layers = attention_layers(heads, head_k, head_v)
    layers = windowed(layers, marks, given.swa, head_k=given.head_dim_k_swa, head_v=given.head_dim_v_swa)
    if given.indexer_key_length:
        layers = tuple(layer.with_index(given.indexer_key_length) for layer in layers)
    if row.conv or row.state:
        rule = RECURRENT.get(architecture)
        every = rule in ("all", "beside")
        interval = given.full_attention_interval or (n_layer + 1 if every else 4)
        recurrent = tuple(every or (il + 1) % interval != 0 for il in range(n_layer))
        layers = with_recurrent(layers, recurrent, row, keeps_attention=rule == "beside")
    n_cached = CACHED_LAYERS.get(architecture, n_layer - given.shared_kv_layers)
    return tuple(layer if il < n_cached else LayerShape() for il, layer in enumerate(layers))


def _windows(given: _Params, architecture: str, n_layer: int) -> tuple[bool, ...]:
    """Which layers have a window: as described, else as the architecture has it."""
    if not given.swa:
        return (False,) * n_layer
    if given.swa_pattern is not None:
        said = _PERIOD.fullmatch(given.swa_pattern)
        if said is None:
            raise ValueError(f"params.swa_pattern is {given.swa_pattern!r}; write 'period 6' or '5 swa : 1 full'")
        return pattern(n_layer, int(said[1]) if said[1] else int(said[2]) + 1)
    rule = WINDOWS.get(architecture)
    return pattern(n_layer, rule.period, dense_first=rule.dense_first) if rule else (True,) * n_layer


def _recurrent(given: _Params, architecture: str) -> RecurrentShape:
    return RecurrentShape(
        conv_kernel=given.ssm.conv,
        inner=given.ssm.inner,
        state=given.ssm.state,
        groups=given.ssm.group,
        head_size=given.wkv_head_size,
        token_shift=2 if given.wkv_head_size else 0,
        l_cache=given.shortconv_l_cache,
        kda_head_dim=given.kda_head_dim,
        lightning_head_dim=given.head_dim_k if architecture == "minimax-01" else 0,
    )


def _did_you_mean(close: str | None) -> str:
    return f"; did you mean {close}?" if close else ""


def _fault(path: Path, what: str) -> BadModelFile:
    return BadModelFile(f"{path}: {what}{'' if what.endswith('?') else '.'}", param="params")
