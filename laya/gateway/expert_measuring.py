"""Owns: which experts a model chooses for a text, measured beside its engine: one child at a time, its bytes promised
in the ledger before it starts, under a ceiling of its own. Nothing is unloaded for it.

The engine itself does not tell what it chooses, so the same file is computed once more by `laya.experts`, in a process
that llama.cpp may end. Knows no page.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from laya.engines.ceiling import Ceiling, Ceilings
from laya.engines.child import Child
from laya.errors import EngineFailed, InsufficientMemory, InvalidRequest, NotSupported
from laya.experts.counting import Counted, Job
from laya.experts.use import ExpertUse
from laya.gateway.variants import file_of
from laya.memory import ceiling_bytes, plan_file, read_facts, size_text
from laya.texts import Document
from laya.types import AskedSettings, ModelFile

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.fleet import Fleet

WINDOW_TOKENS = 256  # at once: the logits of each token are kept twice, and a large vocabulary makes that much
_CHILD_NICE = 15
_OOM_SCORE_ADJ = 500  # before the gateway, as any engine
_LOOK_EVERY_S = 0.5
_RAM = "cpu"


class ExpertMeasuring:
    """See the module."""

    def __init__(self, fleet: Fleet, ceilings: Ceilings) -> None:
        self._fleet = fleet
        self._ceilings = ceilings
        self._turns = asyncio.Lock()

    async def measure(
        self, endpoint: Endpoint, documents: list[Document], is_wanted: Callable[[], Awaitable[bool]]
    ) -> dict[str, Any]:
        """Shares by layer and topic. Raises NotSupported where the engine or the model can't tell, InsufficientMemory,
        EngineFailed. is_wanted: asked now and then; the child ends where it is not any more."""
        file = self._file(endpoint)
        facts = await asyncio.to_thread(read_facts, file.path)
        if not facts.shape.n_expert:
            raise NotSupported(
                f"'{endpoint.model_id}' is a dense model ({facts.shape.architecture}): it has no experts.",
                param="model",
            )
        async with self._turns:
            name = f"experts of {endpoint.model_id}"
            window = min(WINDOW_TOKENS, facts.shape.n_ctx_train or WINDOW_TOKENS)
            ceiling = self._ceilings.make(name, await self._promise(name, file, window, facts.shape.n_vocab))
            job = Job(
                path=str(file.path),
                documents=documents,
                window_tokens=window,
                n_threads=1,  # beside engines whose threads share the cores
                n_experts=facts.shape.n_expert,
                group=ceiling.entrance,
                nice=_CHILD_NICE,
                oom_score_adj=_OOM_SCORE_ADJ,
            )
            try:
                counted = await _run(job, ceiling, is_wanted)
            finally:
                ceiling.remove()
                self._fleet.ledger.release(name)
                self._fleet.room.changed()
        return {"model": endpoint.model_id, "engine": "llama.cpp", **ExpertUse(counted).as_json()}

    def _file(self, endpoint: Endpoint) -> ModelFile:
        """What its engine runs, or would. Raises NotSupported."""
        settings, model_id = endpoint.settings, endpoint.model_id
        file = self._fleet.files.get(model_id)
        engine = f"peer '{settings.peer}'" if settings.peer is not None else settings.engine
        if file is None or file.format != "gguf" or settings.engine != "llamacpp" or settings.peer is not None:
            raise NotSupported(
                f"'{model_id}' runs by {engine}, whose API does not tell which experts it chooses. A GGUF file that "
                "llama.cpp runs here can be measured; `laya experts FOLDER` measures a Hugging Face folder in torch.",
                param="model",
            )
        plan = self._fleet.plans.get(endpoint.name)
        return file if plan is None else file_of(plan, file)

    async def _promise(self, name: str, file: ModelFile, window: int, n_vocab: int) -> int:
        """Gives its ceiling. Raises InsufficientMemory: nobody leaves for this."""
        budget = msgspec.structs.replace(self._fleet.loading.free_budget(), gpu_bytes=())
        asked = AskedSettings(max_seq_len=window, max_num_seqs=1, kv_cache_dtype="f32", n_threads=1)
        plan = await asyncio.to_thread(plan_file, file.path, asked, budget, model_id=name)
        logits_bytes = 2 * 4 * window * n_vocab  # the engine's and what is read of them
        need_bytes = plan.need_bytes + logits_bytes
        if need_bytes > budget.bytes:
            raise InsufficientMemory(
                f"Measuring the {name} computes its file once more beside the engine, which needs "
                f"{size_text(need_bytes)}; {size_text(budget.bytes)} are free now.",
                need_bytes=need_bytes,
                available_bytes=budget.bytes,
                limit=budget.limit,
                suggestions=[],
            )
        self._fleet.ledger.reserve(name, _RAM, need_bytes)
        return ceiling_bytes(plan) + 2 * logits_bytes


async def _run(job: Job, ceiling: Ceiling, is_wanted: Callable[[], Awaitable[bool]]) -> Counted:
    said: list[bytes] = []
    errors = bytearray()
    child = Child(
        [sys.executable, "-m", "laya.experts.of_gguf"],
        document=msgspec.json.encode(job),
        environment=dict(os.environ),
        on_stdout=said.append,
        on_stderr=errors.extend,
        control_group=ceiling.folder,
    )
    ceiling.attend(child.pid, lambda: child.signal_group(signal.SIGKILL))
    try:
        while not await child.wait(_LOOK_EVERY_S):
            if not await is_wanted():
                break
    finally:
        child.signal_group(signal.SIGKILL)
        await child.wait()
    last = msgspec.json.decode(said[-1]) if said else {}
    if "n_experts" in last:
        return msgspec.json.decode(said[-1], type=Counted)
    if "error" in last:
        raise EngineFailed(last["error"])
    hit = ceiling.hit()
    why = hit.words() if hit is not None else bytes(errors).decode(errors="replace").strip().rpartition("\n")[2]
    raise EngineFailed(f"llama.cpp ended while it counted the experts of {job.path}: {why or 'it said nothing'}")


def documents_in(body: bytes) -> list[Document]:
    """`{"documents": [{"topic": ..., "text": ...}]}`. Raises InvalidRequest."""
    try:
        asked = msgspec.json.decode(body, type=AskedExperts)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not what is expected here: {error}", param="documents") from None
    return [Document(each.topic, each.text) for each in asked.documents]


class AskedText(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    text: Annotated[str, msgspec.Meta(min_length=1)]


class AskedExperts(msgspec.Struct, forbid_unknown_fields=True):
    """Texts by topic, each a conversation's side or anything else."""

    documents: Annotated[list[AskedText], msgspec.Meta(min_length=1)]
