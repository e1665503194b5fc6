"""Owns: whether a checkpoint's tensors can be those of one whole model, by its tensor tables alone.

Loaders that find no value for a weight leave chance in it, and some say nothing: vLLM is ready and answers nonsense.
So a layer is compared with its likes, and what every model has is looked for, before an engine is spent on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from laya.errors import BadModelFile
from laya.memory.hf_config import HfConfig
from laya.memory.hf_weights import EMBEDDINGS, NUMBERED, OUTPUTS
from laya.memory.safetensors import SafeTensor, model_files, read_tables
from laya.memory.source import ModelSource

MOST_NAMED = 3  # tensors, in a message


def check_complete(source: ModelSource) -> None:
    """Raises BadModelFile naming the tensors that are missing, or that nothing loads."""
    if source.config is None or not source.files:
        return
    tables = list(read_tables(model_files(source.name, source.files, source.index)))
    missing, unexpected = strays(tables)
    if missing:
        raise _fault(source, f"lacks {_named(missing)}: it is not the whole model")
    if unexpected:
        raise _fault(source, f"has {_named(unexpected)}, which its other layers have not: its files are of two models")
    names = [name for table in tables for name in table]
    if not _has(names, EMBEDDINGS):
        raise _fault(source, "has no token embeddings: it is not the whole model")
    is_untied = HfConfig(source.name, source.config).get("tie_word_embeddings") is False  # else nothing is promised
    if is_untied and not _has(names, OUTPUTS):
        raise _fault(source, "has no output matrix (lm_head): it is not the whole model")


def _has(names: Iterable[str], wanted: Iterable[str]) -> bool:
    """Whether one of these tensors is there, whole or packed: lm_head.weight, lm_head.qweight."""
    stems = tuple(name.removesuffix("weight") for name in wanted)
    return any(stem in f"{name}." for name in names for stem in stems)


def _fault(source: ModelSource, what: str) -> BadModelFile:
    return BadModelFile(f"{source.name} {what}. Get it again.", param="model")


def strays(tables: Iterable[Mapping[str, SafeTensor]]) -> tuple[list[str], list[str]]:
    """Tensors that one layer lacks of what others have, and those that it has beside what they have.

    A kind of layer that is there once may be meant so: a layer is judged only where it differs from a kind that is
    there several times by tensors it has too few, or too many, and by nothing else.
    """
    layers: dict[tuple[str, int], set[str]] = {}
    for table in tables:
        for name in table:
            found = NUMBERED.match(name)
            if found:
                layers.setdefault((found[1], int(found[2])), set()).add(found[3])
    kinds = Counter((stack, frozenset(names)) for (stack, _), names in layers.items())
    missing: list[str] = []
    unexpected: list[str] = []
    for (stack, number), names in sorted(layers.items()):
        if kinds[stack, frozenset(names)] > 1:
            continue
        likes = [kind for (other, kind), count in kinds.items() if other == stack and count > 1]
        fuller = [kind - names for kind in likes if kind > names]
        leaner = [names - kind for kind in likes if kind < names]
        missing += [f"{stack}{number}.{name}" for name in sorted(min(fuller, key=len, default=()))]
        unexpected += [f"{stack}{number}.{name}" for name in sorted(min(leaner, key=len, default=()))]
    return missing, unexpected


def _named(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more tensors" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
