"""Owns: whether the counts of GGUF metadata can be those of one model, each being in its range.

A layer may have no heads where it keeps a recurrent state or where an array says so layer by layer; not all of them in
a model that has nothing but attention. Knows no bytes.
"""

from __future__ import annotations

from laya.memory.families import RECURRENT
from laya.memory.keys import Keys
from laya.memory.shape import ModelShape

# The widths of layers that need no heads.
STATE_KEYS = ("ssm.state_size", "ssm.conv_kernel", "wkv.head_size", "shortconv.l_cache", "kda.head_dim")


def check_counts(keys: Keys, figures: ModelShape) -> None:
    """Raises BadModelFile naming the key, its value and what would be right."""
    if not keys.has(*STATE_KEYS) and RECURRENT.get(keys.architecture) != "all":
        for key, counts in (("head_count", figures.n_head), ("head_count_kv", figures.n_head_kv)):
            if not any(counts):
                _refuse(keys, f"attention.{key}", "some layer must have at least 1")
        if keys.has("feed_forward_length") and not (figures.n_ff or figures.n_expert):
            _refuse(keys, "feed_forward_length", "without experts it must be at least 1")
    _check_division(keys, figures)
    if any(figures.n_head):
        for key in ("attention.key_length", "attention.value_length"):
            keys.number(key, 1, least=1)
    _check_experts(keys, figures)
    factor = keys.get("rope.scaling.factor")
    if isinstance(factor, int | float) and not factor >= 0:  # 0: not scaled
        _refuse(keys, "rope.scaling.factor", "it must be above 0")


def _check_division(keys: Keys, figures: ModelShape) -> None:
    """Every KV head serves as many heads as the others."""
    pairs = zip(figures.n_head, figures.n_head_kv, strict=True)
    wrong = next(((heads, kv) for heads, kv in pairs if heads and kv and heads % kv), None)
    if wrong is not None:
        _refuse(
            keys,
            "attention.head_count_kv",
            f"KV heads must divide the heads, and {wrong[1]} does not divide {wrong[0]}",
        )


def _check_experts(keys: Keys, figures: ModelShape) -> None:
    n_expert = figures.n_expert
    if n_expert < 2:  # a dense model of a family with experts
        return
    if keys.has("expert_used_count"):
        keys.number("expert_used_count", least=1, most=n_expert)
    if not figures.n_ff_expert:
        _refuse(keys, "expert_feed_forward_length", f"with {n_expert} experts it must be at least 1")


def _refuse(keys: Keys, key: str, right: str) -> None:
    told = keys.get(key)
    shown = "missing" if told is None else repr(told)
    keys.fail(f"is corrupt: {keys.architecture}.{key} is {shown if len(shown) < 80 else shown[:77] + '...'}; {right}")
