"""Owns: the plan of a model wherever it lies and whatever its files are: the one call a verb needs.

Knows no network: what lies elsewhere is read through a `ModelSource`, which somebody else opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from laya.errors import BadModelFile, ConfigError
from laya.memory.engine_facts import EngineFacts, built_in_engine
from laya.memory.facts import ModelFacts, facts_of, read_facts
from laya.memory.fit import fit
from laya.memory.gguf import read_header_of
from laya.memory.gpu import GpuMemory
from laya.memory.hf import HfFacts, facts_of_hf, facts_of_source
from laya.memory.machine import Budget, Machine
from laya.memory.planner import Model
from laya.memory.source import ModelSource
from laya.memory.vllm import plan_vllm
from laya.memory.vllm_cache import VllmSettings
from laya.types import AskedSettings, Plan

AS_GGUF = "as a GGUF of the same types would load; the built-in engine reads GGUF, vLLM reads these files"


def facts_anywhere(source: Path | ModelSource) -> ModelFacts | HfFacts:
    """The facts of a .gguf file, a model folder, a config.json, or a model that is read from elsewhere.

    Raises BadModelFile naming the file and what is wrong; DownloadError where it lies elsewhere and can't be read.
    """
    if isinstance(source, Path):
        is_hf = source.is_dir() or source.suffix.lower() in (".json", ".safetensors")
        if source.suffix.lower() == ".safetensors" and not source.is_dir():
            source = source.parent
        return facts_of_hf(source) if is_hf else read_facts(source)
    if source.format == "hf":
        return facts_of_source(source)
    headers = [read_header_of(file) for file in source.files.values()]
    if not headers:
        raise BadModelFile(f"{source.name} has no files.", param="model")
    count = headers[0].metadata.get("split.count", 1)
    if isinstance(count, int) and count > len(headers):
        raise BadModelFile(
            f"{headers[0].path} is one of {count} files; their names must end in -00001-of-{count:05d}.gguf.",
            param="model",
        )
    return facts_of(headers)


def plan_source(
    source: Path | ModelSource,
    asked: AskedSettings,
    budget: Budget,
    *,
    model_id: str,
    engine: EngineFacts | None = None,
    vllm: VllmSettings | None = None,
    cards: Sequence[GpuMemory] = (),
) -> Plan:
    """The plan of a model before a byte of its weights is read.

    source: a path, or what the models room opened at hf:// or http(s)://. engine: the llama.cpp it is planned for.
    vllm: plan it in vLLM's terms instead, on these cards. Raises as `facts_anywhere`, and ConfigError for settings
    that no memory could give.
    """
    found = facts_anywhere(source)
    if vllm is not None:
        if not isinstance(found, HfFacts):
            raise ConfigError(f"'{model_id}' is a GGUF file; vLLM is planned for Hugging Face models.", param="engine")
        return plan_vllm(found, asked, budget, cards, model_id=model_id, settings=vllm, n_cores=Machine().cores())
    model = Model(
        id=model_id,
        facts=found.facts if isinstance(found, HfFacts) else found,
        engine=engine or built_in_engine(),
        n_cores=Machine().cores(),
    )
    plan = fit(model, asked, budget)
    if not isinstance(found, HfFacts):
        return plan
    return msgspec.structs.replace(plan, exact=False, notes=[*plan.notes, AS_GGUF, *found.notes])
