"""Models that share GPUs: what each device holds is in the ledger, and loads, evictions and refusals go by device.

The planner is the real one, for a model of 8B weights; NVML answers as the engines that run and other programs hold.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from laya.config import load_config
from laya.errors import InsufficientMemory, LayaError, MemoryBusy
from laya.memory import Budget, GpuMeter
from laya.memory.engine_facts import XLLAMACPP
from laya.memory.facts import facts_before_download
from laya.memory.fit import fit
from laya.memory.planner import Model
from laya.memory.shape import ModelShape
from laya.types import GIB, MIB, AskedSettings, Plan

from .fleet_world import World, in_world

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("in_world")]
__all__ = ["in_world"]

SHAPE = ModelShape(
    architecture="llama", n_layer=32, n_embd=4096, n_head=(32,) * 32, n_head_kv=(8,) * 32, head_dim_k=128,
    head_dim_v=128, n_ff=14336, n_vocab=128256, n_ctx_train=8192,
)  # fmt: skip
FACTS = facts_before_download(SHAPE, 8 * GIB, "Q8_0")
MAX_SETTINGS = "max_num_seqs: 1\nmax_seq_len: 8192\nkv_cache_dtype: f16\n"


def planned(path: Path, asked: AskedSettings, budget: Budget, *, model_id: str, **more: object) -> Plan:
    model = Model(
        id=model_id, facts=FACTS, engine=XLLAMACPP, n_cores=2, gpu_free_bytes=budget.gpu_bytes,
        why_no_gpu=budget.why_no_gpu,
    )  # fmt: skip
    return fit(model, asked, budget)


class Machine:
    """Engines and another program on cards of these sizes."""

    def __init__(self, world: World, nvml: Any, cards: tuple[int, ...]) -> None:
        self.world, self.cards = world, cards
        self.others_bytes = [0] * len(cards)
        self.uuids = [""] * len(cards)
        self.names_ours = True  # NVML names no process of ours from within some containers
        nvml.library._script = self._answer
        world.fleet.loading.cards.meter = GpuMeter(nvml.library)

    def _answer(self) -> dict[str, Any]:
        cards = []
        for number, total in enumerate(self.cards):
            own = {}
            for name, engine in self.world.engines.items():
                if not engine.exited.done() and engine.pid is not None:
                    own[str(engine.pid)] = self.on(name, number)
            free = total - sum(own.values()) - self.others_bytes[number]
            named = own if self.names_ours else {}
            uuid = self.uuids[number]
            cards.append({"name": "card", "total": total, "free": max(0, free), "uuid": uuid, "compute": named})
        return {"cards": cards}

    def on(self, name: str, number: int) -> int:
        """What this engine was planned to hold of a card."""
        devices = self.world.fleet.plans[name].devices
        return sum(device.total_bytes for device in devices if device.device == f"gpu{number}")

    def layers(self, name: str) -> int:
        return self.world.fleet.plans[name].settings.gpu_layers

    def free(self, number: int) -> int:
        self.world.fleet.loading.free_budget()
        return self.world.fleet.ledger.free(f"gpu{number}")


@pytest.fixture
def make_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvml: Any) -> Callable[..., Machine]:
    """`make_machine((24 * GIB,), "models: ...")`: models a, b and c of the same size, 64 GiB of RAM."""
    monkeypatch.setattr("laya.gateway.kind_llamacpp.plan_file", planned)
    monkeypatch.setattr("laya.gateway.kind_llamacpp.why_no_gpu", lambda *_: None)
    monkeypatch.setattr("laya.gateway.cards.family", lambda pid: [pid])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(cards: tuple[int, ...], more: str = "", *, ram_bytes: int = 64 * GIB) -> Machine:
        file = tmp_path / "config.yaml"
        file.write_text(f"version: 1\nqueue_timeout_s: 0.01\n{MAX_SETTINGS}{more}")
        needs = dict.fromkeys(("a", "b", "c"), 100 * MIB)
        world = World(tmp_path, needs, total_bytes=ram_bytes, config=load_config(file, {}))
        return Machine(world, nvml, cards)

    return make


async def test_a_model_that_ram_holds_and_the_card_does_not_is_shared_out(make_machine: Any) -> None:
    machine = make_machine((8 * GIB,))
    await machine.world.load("a")
    assert 0 < machine.layers("a") < 33
    ledger = machine.world.fleet.ledger
    for device in machine.world.fleet.plans["a"].devices:
        assert ledger.held_by("a", device.device) >= device.total_bytes > 0
    assert machine.free(0) >= 0
    machine.world.check_books()
    await machine.world.fleet.unload(machine.world.endpoint("a"))
    assert ledger.held("gpu0") == 0
    await machine.world.close()


async def test_an_idle_model_leaves_the_card_to_one_that_would_lie_in_ram(make_machine: Any) -> None:
    machine = make_machine((24 * GIB,))
    for name in ("a", "b", "c"):
        await machine.world.load(name)
        assert machine.layers(name) == 33
    assert machine.world.loaded() == {"b", "c"}
    machine.world.check_books()
    await machine.world.close()


async def test_beside_a_busy_model_the_rest_of_the_card_is_used(make_machine: Any) -> None:
    machine = make_machine((16 * GIB,))
    await machine.world.load("a")
    assert machine.world.endpoint("a").reserve_express(1)
    await machine.world.load("b")
    assert machine.world.loaded() == {"a", "b"}
    assert machine.layers("a") == 33
    assert 0 < machine.layers("b") < 33
    assert machine.free(0) >= 0
    await machine.world.close()


async def test_the_second_model_goes_to_the_card_that_has_room(make_machine: Any) -> None:
    machine = make_machine((12 * GIB, 16 * GIB))
    for name in ("a", "b"):
        await machine.world.load(name)
    assert [machine.world.fleet.plans[name].settings.tensor_split for name in ("a", "b")] == [(0, 33), (33, 0)]
    await machine.world.close()


@pytest.mark.parametrize("names_ours", [True, False])
async def test_what_another_program_holds_is_not_planned_with(make_machine: Any, names_ours: bool) -> None:
    machine = make_machine((24 * GIB,))
    machine.names_ours = names_ours
    await machine.world.load("a")
    free = machine.free(0)
    machine.others_bytes = [9 * GIB]
    assert abs(free - machine.free(0) - 9 * GIB) < 64 * MIB
    assert machine.world.endpoint("a").reserve_express(1)
    await machine.world.load("b")
    assert 0 < machine.layers("b") < 33
    assert machine.on("a", 0) + machine.on("b", 0) + 9 * GIB < 24 * GIB - 512 * MIB
    await machine.world.close()


async def test_layers_that_were_fixed_wait_for_the_card(make_machine: Any) -> None:
    machine = make_machine((12 * GIB,), "gpu_layers: all\n")
    await machine.world.load("a")
    assert machine.world.endpoint("a").reserve_express(1)
    with pytest.raises(MemoryBusy, match=r"'b' needs .* on gpu0; .* \(of gpu0\) can be had now") as busy:
        await machine.world.load("b")
    assert busy.value.details["held_bytes"] == {"a": machine.on("a", 0)}
    await machine.world.close()


async def test_layers_that_no_card_will_ever_hold_are_refused_for_it(make_machine: Any) -> None:
    machine = make_machine((12 * GIB,), "gpu_layers: all\n")
    machine.others_bytes = [8 * GIB]
    with pytest.raises(InsufficientMemory, match=r"'c' needs .* on gpu0 for 1 x 8192 tokens") as refused:
        await machine.world.load("c")
    assert refused.value.details["limit"] == "free on gpu0"
    assert any(flags.startswith("--gpu-layers ") for flags in refused.value.details["suggestions"])
    await machine.world.close()


async def test_a_limit_of_the_config_and_of_the_environment_bound_a_card(
    make_machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = make_machine((24 * GIB, 24 * GIB), 'memory: {gpu: {"0": 4GiB}}\n')
    assert machine.world.fleet.budget().gpu_bytes[0] == 4 * GIB
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert machine.world.fleet.budget().gpu_bytes == (4 * GIB, 0)


async def test_a_card_is_named_by_its_uuid_or_a_beginning_of_it(
    make_machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuids = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-b3f51d2a-0f2c-7c44-8a11-6c0e5c1e7a02")
    machine = make_machine((24 * GIB, 24 * GIB))
    machine.uuids = list(uuids)
    for said, seen in ((uuids[1], (False, True)), ("GPU-8932", (True, False)), (f"1,{uuids[0]}", (True, True))):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
        assert tuple(n_bytes > 0 for n_bytes in machine.world.fleet.budget().gpu_bytes) == seen, said
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0000")
    assert machine.world.fleet.budget().gpu_bytes == (0, 0)
    assert f"names none of the GPUs here by its number or UUID (0 {uuids[0]}" in machine.world.fleet.budget().why_no_gpu


async def test_a_build_for_cpus_uses_no_card_and_says_so_where_layers_were_asked(
    make_machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laya.gateway.kind_llamacpp.why_no_gpu", lambda *_: "it is a build for CPUs")
    machine = make_machine((24 * GIB,), "models: {b: {gpu_layers: all}}\n")
    await machine.world.load("a")
    assert machine.world.fleet.plans["a"].settings.tensor_split == ()
    with pytest.raises(LayaError, match="gpu_layers is all, and no layer can lie on a GPU: it is a build for CPUs"):
        await machine.world.load("b")
    await machine.world.close()
