"""Owns: which file of a model is loaded where `quantization` is said: of those it allows the best one that fits.

Variants are files of one model in other bits, found by their names and held to one shape by their headers. The order is
that of their types (config/quantization.py). A variant fits where its plan does, with all that the plan may lower
itself. Decided while a load is planned; loads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from laya.config import ResolvedModel
from laya.config.quantization import AUTO, GGUF_KINDS, NONE, WHOLE_KINDS, split_kind
from laya.errors import BadModelFile, ConfigError, InsufficientMemory, LayaError, ModelNotFound
from laya.memory import facts_of_hf, read_facts, size_text
from laya.memory.ggml import type_named
from laya.memory.placement import CPU
from laya.memory.shape import ModelShape
from laya.models import resolve
from laya.models.variants import variants_named, variants_of
from laya.types import ModelFile, Plan, Variant, VariantPlan

SMALLER_KIND, SMALLER_BITS = "q4_k_m", 4.9  # what is proposed where nothing at hand fits; bits a weight


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A variant by its header."""

    file: ModelFile
    quantization: str
    weights_bytes: int
    shape: ModelShape

    @property
    def loss(self) -> tuple[int, int]:
        """Less is better. Folders of one model differ by method, whose bits their bytes tell."""
        known = self.quantization in GGUF_KINDS
        return GGUF_KINDS.index(self.quantization) if known else len(GGUF_KINDS), -self.weights_bytes


def is_choosing(settings: ResolvedModel) -> bool:
    """Whether a variant is chosen: it is said, and the model is files of ours."""
    return settings.quantization is not None and settings.engine in ("llamacpp", "vllm")


def find_model(settings: ResolvedModel, *, models_dir: Path, home: Path) -> ModelFile:
    """The file of a model's name; where there is none of just that name, and `quantization` is said, a variant's.

    Raises as `resolve`.
    """
    name = settings.source or settings.id
    try:
        return resolve(name, models_dir=models_dir, home=home)
    except ModelNotFound:
        wanted = "hf" if settings.engine == "vllm" else "gguf"
        there = variants_named(name, models_dir=models_dir, home=home) if settings.quantization else []
        first = next((file for file in there if file.format == wanted), None)
        if first is None:
            raise
        return first


def candidates(
    settings: ResolvedModel,
    file: ModelFile,
    check: Callable[[ModelFile], None],
    *,
    models_dir: Path,
    home: Path,
) -> list[Candidate]:
    """The variants at hand that `quantization` allows, the best quality first. check: raises for what can't be started.

    Raises ConfigError where there is none, naming the nearest and how to make it; what is wrong with the model's own
    file, where no other can be used instead.
    """
    own: LayaError | None = None
    found: list[Candidate] = []
    for other in variants_of(file, models_dir=models_dir, home=home):
        try:
            found.append(candidate(other))
        except BadModelFile as error:
            own = own or (error if other is file else None)
    if not found:
        raise own or BadModelFile(f"No variant of '{settings.id}' can be read.", param="model")
    found = [each for each in found if _is_same_model(each.shape, found[0].shape)]
    allowed = found  # vLLM's check knows its methods
    if settings.engine == "llamacpp" and file.format == "gguf":
        allowed = [each for each in found if _is_allowed(settings.quantization, each.quantization)]
    if not allowed:
        raise _not_at_hand(settings, found)
    usable, refused = [], []
    for each in allowed:
        try:
            check(each.file)
        except LayaError as error:
            refused.append(error)
        else:
            usable.append(each)
    if not usable:
        raise refused[0]
    best_first = sorted(usable, key=lambda each: each.loss)
    alike = {(each.quantization, each.weights_bytes): each for each in reversed(best_first)}
    return [each for each in best_first if alike[each.quantization, each.weights_bytes] is each]


def candidate(file: ModelFile) -> Candidate:
    """What its header says it is. Raises BadModelFile."""
    if file.format == "hf":
        of_folder = facts_of_hf(file.path)
        return Candidate(
            file=file,
            quantization=of_folder.quantization or NONE,
            weights_bytes=of_folder.weights.total_bytes,
            shape=of_folder.shape,
        )
    facts = read_facts(file.path)
    largest = max(facts.matrix_bytes, key=lambda name: facts.matrix_bytes[name], default="")
    says = (facts.shape.file_type.lower(), split_kind(file.id)[1], split_kind(file.path.name)[1], largest.lower())
    kind = next((each for each in says if each in GGUF_KINDS), largest.lower())
    return Candidate(file=file, quantization=kind, weights_bytes=facts.weights_bytes, shape=facts.shape)


def plan_best(
    settings: ResolvedModel,
    file: ModelFile,
    plan_of: Callable[[ModelFile], Plan],
    check: Callable[[ModelFile], None],
    models_dir: Path,
    home: Path,
    twin_path: str | None,
) -> Plan:
    """`choose` of `candidates`. twin_path: the variant that another engine of the model runs, which binds this one."""
    found = candidates(settings, file, check, models_dir=models_dir, home=home)
    return choose([each for each in found if str(each.file.path) == twin_path] or found, plan_of, settings)


def choose(found: Sequence[Candidate], plan_of: Callable[[ModelFile], Plan], settings: ResolvedModel) -> Plan:
    """The plan of the first candidate that fits, with what was chosen and why; where none does, of the smallest.

    One that needs the CPU for what the GPUs do not hold is taken only where no other one fits on them.
    """
    tried: list[tuple[Candidate, Plan]] = []
    for each in found:
        tried.append((each, plan_of(each.file)))
        if tried[-1][1].fits and not tried[-1][1].settings.spills:
            break
    whole = [(each, plan) for each, plan in tried if plan.fits and not plan.settings.spills]
    fitting = whole or [(each, plan) for each, plan in tried if plan.fits]
    chosen, plan = fitting[0] if fitting else min(tried, key=lambda pair: pair[1].need_bytes)
    passed = tried[: next(index for index, (each, _) in enumerate(tried) if each is chosen)]
    variant = Variant(
        id=chosen.file.id,
        quantization=chosen.quantization,
        path=str(chosen.file.path),
        reason=_reason(settings.quantization, len(found), passed, fits=plan.fits),
        tried=[
            VariantPlan(id=each.file.id, quantization=each.quantization, need_bytes=made.need_bytes, fits=made.fits)
            for each, made in tried
        ],
    )
    return msgspec.structs.replace(plan, variant=variant)


def file_of(plan: Plan, file: ModelFile) -> ModelFile:
    """What is loaded for the model of this file: the variant that was chosen, by the model's own id."""
    return file if plan.variant is None else msgspec.structs.replace(file, path=Path(plan.variant.path))


def variant_words(plan: Plan) -> str:
    """`q4_0 (tiny-q4_0.gguf): the best of 2 that fits: f16 would need ...`; "" where nothing was to choose."""
    chosen = plan.variant
    return "" if chosen is None else f"{chosen.quantization} ({Path(chosen.path).name}): {chosen.reason}"


def tell_variants(error: InsufficientMemory, plan: Plan) -> InsufficientMemory:
    """The refusal with what each variant would need, and the smaller one that could be made."""
    chosen = plan.variant
    if chosen is None:
        return error
    needs = ", ".join(f"{each.quantization} {size_text(each.need_bytes)}" for each in chosen.tried)
    error.message += f" Variants at hand need: {needs}."
    error.details["variants"] = msgspec.to_builtins(chosen.tried)
    need_bytes = _smaller_need(plan, chosen.quantization)
    if need_bytes is not None and need_bytes <= error.details["available_bytes"]:
        command = f"laya quantize {plan.model} --to {SMALLER_KIND}"
        error.message += f" `{command}` makes one that needs about {size_text(need_bytes)}."
        error.details["commands"] = [command]
    return error


def _smaller_need(plan: Plan, quantization: str) -> int | None:
    """About what the model would need in SMALLER_KIND, where that is much less; None where it is not known."""
    own = type_named(quantization)
    if own is None or [device.device for device in plan.devices] != [CPU]:
        return None
    share = SMALLER_BITS * own.block / (8 * own.block_bytes)
    return round(plan.need_bytes - (1 - share) * plan.ram.terms.get("weights", 0)) if share < 1 else None


def _is_same_model(one: ModelShape, other: ModelShape) -> bool:
    """Names may be alike where models are not."""
    names = ("architecture", "n_layer", "n_embd", "n_vocab", "n_expert")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _is_allowed(said: str | None, quantization: str) -> bool:
    return said == AUTO or (quantization in WHOLE_KINDS if said == NONE else quantization == said)


def _not_at_hand(settings: ResolvedModel, found: Sequence[Candidate]) -> ConfigError:
    said, kinds = settings.quantization or "", [each.quantization for each in sorted(found, key=lambda each: each.loss)]
    here = ", ".join(dict.fromkeys(kinds))
    if said == NONE:
        words = f"no variant in 16 or 32 bits is at hand, only {here}; write quantization: auto, or leave it out"
    else:
        close = min(kinds, key=lambda kind: _distance(kind, said))
        words = f"that variant is not at hand, the nearest of {here} is {close}; "
        words += f"`laya quantize {settings.id} --to {said}` makes it, best of one in 16 bits"
    return ConfigError(f"models.{settings.id}.quantization {said}: {words}", param="quantization")


def _distance(kind: str, said: str) -> int:
    known = {each: index for index, each in enumerate(GGUF_KINDS)}
    return abs(known.get(kind, len(known)) - known.get(said, len(known)))


def _reason(said: str | None, n_found: int, passed: Sequence[tuple[Candidate, Plan]], *, fits: bool) -> str:
    if said not in (AUTO, NONE):
        return "as quantization says"
    which = "" if said == AUTO else " in 16 or 32 bits"
    if not fits:
        return f"the smallest of {n_found}{which}; none fits" if n_found > 1 else f"the only one{which} at hand"
    if not passed:
        return f"the best of {n_found}{which} at hand" if n_found > 1 else f"the only one{which} at hand"
    return f"the best of {n_found}{which} that fits: {'; '.join(_passed_words(passed))}"


def _passed_words(passed: Sequence[tuple[Candidate, Plan]]) -> Iterator[str]:
    for each, plan in passed:
        short = plan.shortest
        where = "" if short.device == CPU else f" on {short.device}"
        if plan.fits:
            yield f"{each.quantization} would leave layers to the CPU"
        else:
            need, most = size_text(short.total_bytes), size_text(short.budget_bytes)
            kind = "unquantized" if each.quantization == NONE else each.quantization
            yield f"{kind} would need {need} of {most}{where}"
