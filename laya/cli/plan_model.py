"""Owns: from the word a user typed to what can be planned: a name, a path, a config.json, hf://, or a description.

The meeting place of the models room, which finds files, and the memory room, which reads their headers. Nothing is
downloaded: of a model that lies elsewhere only the headers are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from laya.cli.fit import learned_of
from laya.cli.gpus import gpus_here
from laya.config import Config, ResolvedModel, with_settings
from laya.config.quantization import split_kind
from laya.config.units import parse_limit
from laya.engines.builds import packages_for
from laya.errors import BadModelFile, ConfigError, ModelNotPulled
from laya.gateway.catalogued import model_shape
from laya.gateway.kind_llamacpp import LlamaCppKind
from laya.gateway.variants import Candidate, candidates, choose, find_model, is_choosing
from laya.memory import Budget, ModelFacts, read_facts
from laya.memory.engine_facts import LLAMA_SERVER, EngineFacts, built_in_engine
from laya.memory.facts import facts_before_download
from laya.memory.fit import fit
from laya.memory.gpu import GpuMemory
from laya.memory.hf import HfFacts
from laya.memory.machine import Machine
from laya.memory.params import read_params
from laya.memory.plan_source import AS_GGUF, facts_anywhere
from laya.memory.planner import Model
from laya.memory.rates import MachineRates
from laya.memory.vllm_place import usable_bytes
from laya.models import entries, home_path, is_config_alone, is_remote, open_remote
from laya.types import AskedSettings, ModelFile, Plan, Task

NOT_HERE = "an upper bound: the file is not here, so its tensor table and vocabulary are estimated"


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be planned, and what is asked of it."""

    word: str  # how the command line names it
    model: Model
    asked: AskedSettings
    is_exact: bool = True
    notes: tuple[str, ...] = ()
    variants: tuple[tuple[Candidate, Subject], ...] = ()  # where `quantization` is said: the best quality first
    settings: ResolvedModel | None = None  # of the model, there

    def plan(self, budget: Budget, rates: MachineRates | None = None, *, suggests: bool = True) -> Plan:
        """Raises ConfigError for settings that no memory could give."""
        if self.variants and self.settings is not None:
            of_path = {each.file.path: subject for each, subject in self.variants}
            found = [each for each, _ in self.variants]
            return choose(found, lambda file: of_path[file.path].plan(budget, rates, suggests=suggests), self.settings)
        plan = fit(self.model, self.asked, budget, rates, suggests=suggests)
        return msgspec.structs.replace(plan, exact=plan.exact and self.is_exact, notes=[*plan.notes, *self.notes])

    def of_variant(self, plan: Plan) -> Subject:
        """The one that this plan of it is for."""
        path = plan.variant.path if plan.variant is not None else None
        return next((subject for each, subject in self.variants if str(each.file.path) == path), self)


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """Where settings come from: the config, the command line over it, and cards to plan for."""

    config: Config
    settings: dict[str, Any] = {}
    card_bytes: tuple[int, ...] = ()  # of each GPU, as it is sold; none: the GPUs that are here
    is_elsewhere: bool = False  # planned for another machine, which has none of them

    def gpus_for(self, engine_path: Path | None) -> tuple[tuple[int, ...], str]:
        """What an engine may use of each GPU, and why it may use none."""
        if self.card_bytes or self.is_elsewhere:
            return usable_of(self.card_bytes), "--memory is of a machine without GPUs, unless --gpu-memory says more"
        return gpus_here(self.config, engine_path)

    def of(self, model_id: str, task: Task | None = None) -> tuple[AskedSettings, ResolvedModel]:
        """What is asked of this model, the task it was made for unless one was chosen; and all its settings."""
        resolved = with_settings(self.config, self.settings, model_id).for_model(model_id)
        asked = resolved.asked()
        if task is not None and "task" not in resolved.fixed:
            asked = msgspec.structs.replace(asked, task=task)
        return asked, resolved


def subject_named(name: str, asking: Asking) -> Subject:
    """The model of a name, path or address. Raises ModelNotFound naming the nearest, BadModelFile, DownloadError."""
    source = asking.config.for_model(name).source or name
    path = Path(source).expanduser()
    if path.suffix.lower() == ".json" and not is_remote(source):
        return _described_by_hf(name, facts_anywhere(path), asking)
    if is_remote(source):
        try:
            return _on_disk(name, source, asking)  # it may have been pulled
        except ModelNotPulled:
            with open_remote(source) as remote:
                return _described_by_hf(name, facts_anywhere(remote), asking, model_id=remote.name)
    try:
        return _on_disk(name, source, asking)
    except ModelNotPulled:
        return _in_catalogue(source, name, asking)
    except BadModelFile:
        if not is_config_alone(path):
            raise
        return _described_by_hf(name, facts_anywhere(path / "config.json"), asking)


def subject_described(path: Path, asking: Asking) -> Subject:
    """The model a description holds. Raises BadModelFile naming the file and the key."""
    facts = read_params(path)
    asked, _ = asking.of(path.stem)
    model = _model(path.stem, facts, asked, asking, built_in_engine())
    return Subject(word=f"--params {path}", model=model, asked=asked, is_exact=False)


def cards_of(text: str | None) -> tuple[int, ...]:
    """`24GiB,24GiB` -> bytes of each card. Raises ConfigError."""
    if text is None:
        return ()
    try:
        return tuple(parse_limit(part.strip()) for part in text.split(","))
    except ConfigError as error:
        what = f"write what each card has, such as 24GiB or 24GiB,12GiB: {error.message}"
        raise ConfigError(f"--gpu-memory {text!r}: {what}", param="gpu_memory") from None


def _on_disk(name: str, source: str, asking: Asking) -> Subject:
    config = asking.config
    models_dir, home = Path(config.models_dir), home_path()
    settings = with_settings(config, asking.settings, name).for_model(name)
    file = find_model(msgspec.structs.replace(settings, source=source), models_dir=models_dir, home=home)
    is_base = is_choosing(settings) and split_kind(file.id)[0] == name.casefold()
    model_id = name if name in config.models or is_base else file.id
    settings = asking.of(model_id)[1]
    if file.format != "gguf":
        return _described_by_hf(name, facts_anywhere(file.path), asking, model_id=model_id)
    own = _of_file(name, model_id, file, asking)
    if not is_choosing(settings):
        return own
    found = candidates(settings, file, partial(LlamaCppKind().check, settings), models_dir=models_dir, home=home)
    variants = tuple((each, _of_file(name, model_id, each.file, asking)) for each in found)
    return msgspec.structs.replace(own, variants=variants, settings=settings)


def _of_file(name: str, model_id: str, file: ModelFile, asking: Asking) -> Subject:
    asked, settings = asking.of(model_id, file.task)
    is_bundled = settings.engine_path is None and packages_for(None, home_path()) is None
    engine = built_in_engine() if is_bundled else LLAMA_SERVER
    model = _model(model_id, read_facts(file.path), asked, asking, engine)
    model = msgspec.structs.replace(model, correction=learned_of(settings, file.path))
    return Subject(word=name, model=model, asked=asked)


def _in_catalogue(source: str, name: str, asking: Asking) -> Subject:
    entry = next(entry for entry in entries() if source.casefold() in {each.casefold() for each in entry.names})
    asked, _ = asking.of(name if name in asking.config.models else entry.id, entry.task)
    facts = facts_before_download(model_shape(entry.shape), entry.file_bytes, entry.weights_type)
    model = _model(entry.id, facts, asked, asking, built_in_engine())
    return Subject(word=name, model=model, asked=asked, is_exact=False, notes=(NOT_HERE,))


def _described_by_hf(name: str, found: ModelFacts | HfFacts, asking: Asking, *, model_id: str | None = None) -> Subject:
    """A model whose headers were read, here or elsewhere, in the terms of the built-in engine."""
    asked, _ = asking.of(model_id or name)
    is_hf = isinstance(found, HfFacts)
    facts = found.facts if isinstance(found, HfFacts) else found
    notes = (AS_GGUF, *found.notes) if isinstance(found, HfFacts) else ()
    model = _model(model_id or name, facts, asked, asking, built_in_engine())
    return Subject(word=name, model=model, asked=asked, is_exact=not is_hf, notes=notes)


def _model(model_id: str, facts: ModelFacts, asked: AskedSettings, asking: Asking, engine: EngineFacts) -> Model:
    gpu_bytes, why_no_gpu = asking.gpus_for(asking.of(model_id)[1].engine_path)
    return Model(
        id=model_id,
        facts=facts,
        engine=engine,
        n_cores=Machine().cores(),
        draft=read_facts(asked.draft_path) if asked.draft_path else None,
        projector_bytes=_file_bytes(asked.mmproj_path) if asked.mmproj_path else 0,
        gpu_free_bytes=gpu_bytes,
        why_no_gpu=why_no_gpu,
    )


def usable_of(card_bytes: Sequence[int]) -> tuple[int, ...]:
    """What may be planned with of cards that nobody else uses."""
    cards = (
        GpuMemory(index=index, name="", total_bytes=n_bytes, free_bytes=n_bytes, own_bytes=0)
        for index, n_bytes in enumerate(card_bytes)
    )
    return tuple(usable_bytes(card) for card in cards)


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise BadModelFile(f"{path}: cannot be read ({error.strerror}).", param="mmproj") from None
