"""Owns: deciding an engine's settings from a choice of context, sequences and KV type, and pricing them.

Pure: the same facts and choice give the same bytes. It does not search (fit.py does) and knows no machine.
"""

from __future__ import annotations

import msgspec

from laya.errors import ConfigError
from laya.memory.caches import check_blocks, head_widths
from laya.memory.correction import NOTHING_LEARNED, TERM, Correction
from laya.memory.engine_facts import EngineFacts
from laya.memory.facts import ModelFacts
from laya.memory.ggml import KV_CACHE_TYPES, kv_cache_type
from laya.memory.load import Load, padded
from laya.memory.placement import CPU
from laya.memory.shape import ModelShape
from laya.memory.split import check_split, with_split
from laya.memory.terms import terms_by_device
from laya.types import MIB, AskedSettings, PlannedSettings

MAX_NUM_SEQS = 256  # llama.cpp's own limit
DRAFT_TOKENS = 3  # llama.cpp's speculative.draft.n_max: what recurrent state must be able to go back


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What the fit may vary."""

    max_num_seqs: int
    max_seq_len: int  # tokens per sequence
    kv_cache_dtype: str
    offloads: bool = False  # layers and experts that the GPUs do not hold may stay in RAM


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a model that stays the same while settings are tried."""

    id: str
    facts: ModelFacts
    engine: EngineFacts
    n_cores: int
    draft: ModelFacts | None = None
    projector_bytes: int = 0
    gpu_free_bytes: tuple[int, ...] = ()  # what may be used of each GPU, by its number; 0: nothing
    why_no_gpu: str = "no GPU was found"  # where none may be used
    correction: Correction = NOTHING_LEARNED  # what was learned of such engines, on top of the formulas

    @property
    def shape(self) -> ModelShape:
        return self.facts.shape


def decide(model: Model, asked: AskedSettings, choice: Choice) -> PlannedSettings:
    """Every setting of the engine for this choice."""
    worst_case = padded(choice.max_seq_len) * choice.max_num_seqs
    pool = asked.kv_pool_tokens or auto_pool_tokens(model, asked, choice)
    pool_tokens = worst_case if pool is None else min(padded(pool), worst_case)
    # Of sequences with a cache each llama.cpp computes pieces of equal length, and an embedding is of the last piece
    # alone: a longer text beside a shorter one would get another vector. In one cache texts stay whole.
    unified = choice.max_num_seqs > 1 and (pool_tokens < worst_case or asked.task != "chat")
    slot = pool_tokens if unified else padded(choice.max_seq_len)
    # An embedding is computed in one piece, so the batch must hold the longest input.
    n_batch = choice.max_seq_len if asked.task != "chat" else min(_batch(model, asked, is_shared=unified), slot)
    settings = PlannedSettings(
        max_seq_len=choice.max_seq_len,
        slot_tokens=slot,
        max_num_seqs=choice.max_num_seqs,
        kv_cache_dtype=choice.kv_cache_dtype,
        kv_unified=unified,
        kv_pool_tokens=slot if unified else choice.max_seq_len * choice.max_num_seqs,
        n_batch=n_batch,
        n_ubatch=n_batch,
        n_threads=asked.n_threads or model.n_cores,
        task=asked.task,
        mmap=asked.mmap,
        # What is embedded or ranked is never continued, so old prompts of it are of no use.
        prompt_cache_bytes=(asked.prompt_cache_bytes or 0) // MIB * MIB if asked.task == "chat" else 0,
    )
    placed = with_split(load_of(model, settings), asked, offloads=choice.offloads)
    if uses_gpus(model, asked) and not placed.gpu_layers:  # not one fits: as on a machine without
        none = msgspec.structs.replace(asked, gpu_layers=0, gpus=(), tensor_split=())
        return msgspec.structs.replace(decide(model, none, choice), spills=True)
    return placed


def uses_gpus(model: Model, asked: AskedSettings) -> bool:
    """Whether layers may lie on GPUs."""
    return any(model.gpu_free_bytes) and asked.gpu_layers != 0


def _batch(model: Model, asked: AskedSettings, *, is_shared: bool) -> int:
    """Tokens of a chat's prompt that are computed at once, beside one token of everybody else."""
    if uses_gpus(model, asked):
        return model.engine.n_batch_gpu
    return model.engine.n_batch_shared if is_shared else model.engine.n_batch


def auto_pool_tokens(model: Model, asked: AskedSettings, choice: Choice) -> int | None:
    """`kv_pool_tokens: auto`: one document of full length and a chat in every other sequence; None where not asked.

    One batch more, since the engine fills cells a batch at a time and admission leaves it free.
    """
    if asked.kv_pool_chat_tokens is None or asked.task != "chat":
        return None
    chats = (choice.max_num_seqs - 1) * min(asked.kv_pool_chat_tokens, choice.max_seq_len)
    return choice.max_seq_len + chats + max(model.engine.n_batch, _batch(model, asked, is_shared=True))


def load_of(model: Model, settings: PlannedSettings) -> Load:
    """What every term is computed from."""
    return Load(
        facts=model.facts,
        settings=settings,
        engine=model.engine,
        draft=model.draft,
        projector_bytes=model.projector_bytes,
        gpu_free_bytes=model.gpu_free_bytes,
        n_rollback=DRAFT_TOKENS if model.draft is not None else 0,
        prompt_cache_bytes=settings.prompt_cache_bytes,
    )


def price(model: Model, settings: PlannedSettings) -> dict[str, dict[str, int]]:
    """Device -> term -> bytes. What was learned of such engines is a term of RAM, so that no choice leaves it out."""
    devices = terms_by_device(load_of(model, settings))
    learned_bytes = model.correction.bytes_of(sum(devices[CPU].values()))
    return devices if not learned_bytes else devices | {CPU: devices[CPU] | {TERM: learned_bytes}}


def need_bytes(model: Model, asked: AskedSettings, choice: Choice) -> int:
    """The sum of all terms on all devices."""
    devices = price(model, decide(model, asked, choice))
    return sum(sum(terms.values()) for terms in devices.values())


def check_asked(model: Model, asked: AskedSettings) -> None:
    """Raise ConfigError, naming both numbers, for settings that no machine could give."""
    for name, least, most in (
        ("max_seq_len", 1, None),
        ("max_num_seqs", 1, MAX_NUM_SEQS),
        ("kv_pool_tokens", 1, None),
        ("n_threads", 1, None),
    ):
        value = getattr(asked, name)
        if value is not None and (value < least or (most is not None and value > most)):
            bounds = f"at least {least}" if most is None else f"between {least} and {most}"
            raise ConfigError(f"{name} is {value}; it must be {bounds}.", param=name)
    check_split(asked, model.gpu_free_bytes, model.why_no_gpu)
    if asked.kv_cache_dtype is not None:
        check_blocks(model.facts, kv_cache_type(asked.kv_cache_dtype))
    if asked.max_seq_len is not None:
        _check_length(model, asked.max_seq_len)
    if asked.kv_pool_tokens is not None and asked.kv_pool_tokens < (asked.max_seq_len or 1):
        raise ConfigError(
            f"kv_pool_tokens is {asked.kv_pool_tokens}, below max_seq_len {asked.max_seq_len}: no sequence could reach "
            f"its length. Raise the one or lower the other.",
            param="kv_pool_tokens",
        )


def _check_length(model: Model, max_seq_len: int) -> None:
    shape = model.shape
    if max_seq_len > shape.n_ctx_train and not shape.has_rope_scaling:
        raise ConfigError(
            f"max_seq_len {max_seq_len} is above the {shape.n_ctx_train} tokens that '{model.id}' was trained for, and "
            f"its file has no rope scaling: the engine would stop at {shape.n_ctx_train}. Ask for that or less.",
            param="max_seq_len",
            max_seq_len=max_seq_len,
            n_ctx_train=shape.n_ctx_train,
        )


def kv_types_for(model: Model, names: tuple[str, ...]) -> tuple[str, ...]:
    """Of these KV types, those whose blocks divide the model's heads."""
    heads = head_widths(model.facts)
    return tuple(name for name in names if not any(width % KV_CACHE_TYPES[name].block for width in heads))
