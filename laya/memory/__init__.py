"""The memory room: what a model needs, what there is, and who holds what. Its door is this module.

A plan is made from a file's header alone; no tensor is read. Knows no engine, no request and no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from laya.errors import BadModelFile, InsufficientMemory
from laya.memory.admission import Admission
from laya.memory.advice import what_fits
from laya.memory.cgroup import mounts
from laya.memory.correction import NOTHING_LEARNED, Correction
from laya.memory.engine_facts import LLAMA_SERVER, EngineFacts, built_in_engine
from laya.memory.facts import ModelFacts, facts_before_download, read_facts
from laya.memory.fit import fit
from laya.memory.gguf import GgufHeader, read_header
from laya.memory.gpu import GpuMemory, GpuMeter
from laya.memory.guard import Ladder, Reading, Step, ceiling_bytes, plan_bytes_within
from laya.memory.hf import HfFacts, facts_of_hf
from laya.memory.ledger import THREADS, Ledger
from laya.memory.limits import MEMORY_LIMIT
from laya.memory.machine import Budget, Machine, MachineFacts, budget_within
from laya.memory.placement import CPU
from laya.memory.plan_source import plan_source
from laya.memory.planner import Model
from laya.memory.pressure import PressureMeter, PressureTrigger, pressure_files
from laya.memory.program import ProgramBytes, after_run, plan_program, plan_remote
from laya.memory.rates import MachineRates
from laya.memory.shape import ModelShape
from laya.memory.sizes import flag_text, size_text
from laya.memory.vllm import plan_vllm
from laya.memory.vllm_cache import VllmSettings
from laya.types import AskedSettings, Plan

__all__ = [
    "LLAMA_SERVER",
    "THREADS",
    "Admission",
    "Budget",
    "Correction",
    "EngineFacts",
    "GgufHeader",
    "GpuMemory",
    "GpuMeter",
    "HfFacts",
    "Ladder",
    "Ledger",
    "Machine",
    "MachineFacts",
    "MachineRates",
    "ModelFacts",
    "ModelShape",
    "PressureMeter",
    "PressureTrigger",
    "ProgramBytes",
    "Reading",
    "Step",
    "VllmSettings",
    "after_run",
    "budget_within",
    "ceiling_bytes",
    "facts_of_hf",
    "mounts",
    "plan_before_download",
    "plan_bytes_within",
    "plan_file",
    "plan_program",
    "plan_remote",
    "plan_source",
    "plan_vllm",
    "pressure_files",
    "read_facts",
    "read_header",
    "refusal",
    "size_text",
    "what_fits",
]


def plan_file(
    path: Path,
    asked: AskedSettings,
    budget: Budget,
    *,
    model_id: str,
    engine: EngineFacts | None = None,
    rates: MachineRates | None = None,
    correction: Correction = NOTHING_LEARNED,
) -> Plan:
    """The plan of a GGUF model, from its header and those of its draft and projector.

    rates: how fast this machine is; with them `max_num_seqs: auto` grows where that gains. correction: what was learned
    of such engines.
    Raises BadModelFile naming the file, ConfigError for settings that no memory could give.
    """
    model = Model(
        id=model_id,
        facts=read_facts(path),
        engine=engine or built_in_engine(),
        n_cores=Machine().cores(),
        draft=read_facts(asked.draft_path) if asked.draft_path else None,
        projector_bytes=_file_bytes(asked.mmproj_path) if asked.mmproj_path else 0,
        gpu_free_bytes=budget.gpu_bytes,
        why_no_gpu=budget.why_no_gpu,
        correction=correction,
    )
    return fit(model, asked, budget, rates)


def plan_before_download(
    shape: ModelShape,
    file_bytes: int,
    weights_type: str,
    asked: AskedSettings,
    budget: Budget,
    *,
    model_id: str,
    rates: MachineRates | None = None,
) -> Plan:
    """The plan of a file that is not here yet, from its shape and size: an upper bound, marked so."""
    facts = facts_before_download(shape, file_bytes, weights_type)
    model = Model(
        id=model_id,
        facts=facts,
        engine=built_in_engine(),
        n_cores=Machine().cores(),
        gpu_free_bytes=budget.gpu_bytes,
        why_no_gpu=budget.why_no_gpu,
    )
    plan = fit(model, asked, budget, rates)
    note = "an upper bound: the file is not here, so its tensor table and vocabulary are estimated"
    return msgspec.structs.replace(plan, exact=False, notes=[*plan.notes, note])


def refusal(plan: Plan, budget: Budget, models: Sequence[str] = ()) -> InsufficientMemory:
    """The error for a plan that does not fit: both figures, what bound them, and changes that would fit.

    models: others at hand that do.
    """
    assert not plan.fits, "a plan that fits is not refused"
    settings = plan.settings
    available_bytes, limit = budget.bytes, budget.limit
    short = plan.shortest
    if short.device != CPU:
        available_bytes, limit = short.budget_bytes, f"free on {short.device}"
    elif short.budget_bytes < available_bytes:
        available_bytes, limit = short.budget_bytes, MEMORY_LIMIT
    where = "" if len(plan.devices) == 1 else " of RAM" if short.device == CPU else f" on {short.device}"
    what_for = f"for {settings.max_num_seqs} x {settings.max_seq_len} tokens"
    if not settings.is_computed:
        what_for = f"({', '.join(name for device in plan.devices for name in device.terms)})".replace("_", " ")
    words = [
        f"'{plan.model}' needs {size_text(short.total_bytes)}{where} {what_for}; "
        f"{size_text(available_bytes)} may be used ({limit})."
    ]
    if not settings.is_computed:
        words.append("What its program takes is for its own settings to lower, and for `memory` to say.")
    elif plan.suggestions:
        words.append(what_fits(plan))
    else:
        own = f" --memory-limit {flag_text(available_bytes)}" if limit == MEMORY_LIMIT else ""
        own += f" --memory-budget {flag_text(budget.total_bytes)}" if budget.is_users and budget.total_bytes else ""
        words.append(f"No setting of it fits; `laya plan {plan.model}{own}` names models, cards and memory that do.")
    if models:
        words.append(f"Of the models here {', '.join(repr(name) for name in models)} would fit.")
    return InsufficientMemory(
        " ".join(words),
        need_bytes=short.total_bytes,
        available_bytes=available_bytes,
        limit=limit,
        suggestions=[suggestion.flags for suggestion in plan.suggestions],
        models=models,
    )


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise BadModelFile(f"{path}: cannot be read ({error.strerror}).", param="mmproj") from None
