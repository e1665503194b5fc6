"""The ladder on made-up readings; pressure on recorded files and on this kernel; GPUs through a stand-in of NVML."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laya.memory.gpu import GpuMeter, amd_cards
from laya.memory.guard import CALM_S, CEILING_MARGIN_BYTES, Ladder, Reading, Step, ceiling_bytes
from laya.memory.pressure import PressureMeter, PressureTrigger, pressure_files
from laya.types import GIB, MIB, DevicePlan, Plan, PlannedSettings

SETTINGS = PlannedSettings(
    max_seq_len=512,
    slot_tokens=512,
    max_num_seqs=1,
    kv_cache_dtype="f16",
    kv_unified=False,
    kv_pool_tokens=512,
    n_batch=128,
    n_ubatch=128,
    n_threads=1,
    task="chat",
    mmap=True,
)


def reading(at_s: float, available: int, usable: int = 20 * GIB, **strain: float) -> Reading:
    return Reading(at_s=at_s, available_bytes=available, usable_bytes=usable, **strain)


def climbed(ladder: Ladder, *readings: Reading) -> list[Step | None]:
    return [ladder.climb(each) for each in readings]


def plan_of(need_bytes: int, budget_bytes: int, *, fits: bool) -> Plan:
    device = DevicePlan(device="cpu", budget_bytes=budget_bytes, terms={"weights": need_bytes}, total_bytes=need_bytes)
    return Plan(
        model="m", fits=fits, devices=[device], settings=SETTINGS, reasons={}, suggestions=[], verdict="", notes=[]
    )


def test_easy_machine_takes_no_step() -> None:
    assert climbed(Ladder(), *(reading(at, 4 * GIB) for at in range(10))) == [None] * 10


def test_steps_come_one_by_one_gentlest_first() -> None:
    ladder = Ladder()
    tight = [reading(at, 200 * MIB) for at in (0.0, 0.1, 0.3, 0.6, 1.0, 2.6)]
    assert climbed(ladder, *tight) == ["stop_admitting", "drop_caches", None, "unload_idle", None, "stop_youngest"]
    assert not ladder.is_admitting


def test_engine_that_works_is_stopped_only_when_it_is_critical() -> None:
    tight = [reading(at, 600 * MIB) for at in range(0, 40, 2)]
    steps = climbed(Ladder(), *tight)
    assert steps[:3] == ["stop_admitting", "drop_caches", "unload_idle"]
    assert set(steps[3:]) == {"unload_idle"}
    critical = climbed(Ladder(), *(reading(at, 100 * MIB) for at in range(0, 40, 4)))
    assert critical[3:] == ["stop_youngest"] * 7


def test_admission_comes_back_after_a_calm_time_and_not_before() -> None:
    ladder = Ladder()
    ladder.climb(reading(0, 500 * MIB))
    assert climbed(ladder, reading(1, 3 * GIB), reading(1 + CALM_S - 0.1, 3 * GIB)) == [None, None]
    assert ladder.climb(reading(1 + CALM_S, 3 * GIB)) == "admit_again"
    assert ladder.is_admitting


def test_between_tight_and_easy_nothing_changes_in_either_direction() -> None:
    between = [reading(at, 1500 * MIB) for at in range(1, 40)]
    assert climbed(Ladder(), *between) == [None] * 39
    ladder = Ladder()
    ladder.climb(reading(0, 500 * MIB))
    assert climbed(ladder, *between) == [None] * 39
    assert not ladder.is_admitting


def test_calm_time_starts_anew_after_each_dip() -> None:
    ladder = Ladder()
    ladder.climb(reading(0, 500 * MIB))
    steps = climbed(ladder, reading(1, 3 * GIB), reading(4, 1500 * MIB), reading(5, 3 * GIB), reading(7, 3 * GIB))
    assert steps == [None] * 4
    assert ladder.climb(reading(5 + CALM_S, 3 * GIB)) == "admit_again"


@pytest.mark.parametrize("strain", [{"stall_share": 0.2}, {"swap_out_bytes_per_s": 8.0 * MIB}])
def test_strain_makes_less_free_memory_tight_earlier(strain: dict[str, float]) -> None:
    assert Ladder().climb(reading(0, 1500 * MIB)) is None
    assert Ladder().climb(reading(0, 1500 * MIB, **strain)) == "stop_admitting"
    assert Ladder().climb(reading(0, 4 * GIB, **strain)) is None, "the strain is in somebody else's group"


def test_everybody_stalling_is_critical() -> None:
    assert not reading(0, 600 * MIB).is_critical
    assert reading(0, 600 * MIB, full_stall_share=0.3).is_critical
    assert not reading(0, 4 * GIB, full_stall_share=0.3).is_critical


@given(usable=st.integers(64 * MIB, 1024 * GIB))
def test_a_model_that_fills_the_budget_trips_nothing(usable: int) -> None:
    left = int(usable * (1 - 0.8))
    assert not Reading(at_s=0, available_bytes=left, usable_bytes=usable, stall_share=1.0).is_tight


@given(st.lists(st.tuples(st.floats(0.05, 5), st.integers(0, 8 * GIB), st.floats(0, 1)), max_size=60))
def test_ladder_never_skips_a_step_whatever_happens(states: list[tuple[float, int, float]]) -> None:
    ladder, now_s, taken = Ladder(), 0.0, []
    for passed_s, available, stall in states:
        now_s += passed_s
        step = ladder.climb(reading(now_s, available, stall_share=stall, full_stall_share=stall / 2))
        if step is not None:
            taken.append(step)
    allowed = {
        None: {"stop_admitting"},
        "stop_admitting": {"drop_caches", "admit_again"},
        "drop_caches": {"unload_idle", "admit_again"},
        "unload_idle": {"unload_idle", "stop_youngest", "admit_again"},
        "stop_youngest": {"unload_idle", "stop_youngest", "admit_again"},
        "admit_again": {"stop_admitting"},
    }
    before: Step | None = None
    for step in taken:
        assert step in allowed[before]
        before = step


def test_ceiling_is_the_plan_with_a_margin() -> None:
    assert ceiling_bytes(plan_of(1000 * MIB, 4 * GIB, fits=True)) == 1100 * MIB + CEILING_MARGIN_BYTES


def test_ceiling_does_not_pass_the_models_own_limit() -> None:
    assert ceiling_bytes(plan_of(1000 * MIB, 1050 * MIB, fits=True), 1050 * MIB) == 1050 * MIB


def test_ceiling_of_what_does_not_fit_is_what_there_is() -> None:
    assert ceiling_bytes(plan_of(8 * GIB, 3 * GIB, fits=False)) == 3 * GIB
    assert ceiling_bytes(plan_of(8 * GIB, 0, fits=False)) == CEILING_MARGIN_BYTES


# pressure


def pressure_text(some_us: int, full_us: int) -> str:
    return (
        f"some avg10=0.00 avg60=0.00 avg300=0.00 total={some_us}\n"
        f"full avg10=0.00 avg60=0.00 avg300=0.00 total={full_us}\n"
    )


def recorded(root: Path, *, some_us: int, full_us: int, swapped_pages: int) -> Path:
    (root / "proc/pressure").mkdir(parents=True, exist_ok=True)
    (root / "proc/pressure/memory").write_text(pressure_text(some_us, full_us))
    (root / "proc/vmstat").write_text(f"nr_free_pages 1\npswpin 0\npswpout {swapped_pages}\n")
    return root


def test_strain_is_the_difference_between_readings(tmp_path: Path) -> None:
    meter = PressureMeter(recorded(tmp_path, some_us=1_000_000, full_us=0, swapped_pages=100))
    assert meter.read(10.0).stall_share == 0.0
    recorded(tmp_path, some_us=1_500_000, full_us=200_000, swapped_pages=612)
    strain = meter.read(12.0)
    assert (strain.stall_share, strain.full_stall_share) == (0.25, 0.1)
    assert strain.swap_out_bytes_per_s == MIB
    assert meter.read(13.0).stall_share == 0.0


def group_pressure(folder: Path, *, some_us: int, full_us: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.pressure").write_text(pressure_text(some_us, full_us))
    return folder


def test_group_of_ours_that_stands_still_counts_though_the_machine_is_at_ease(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/laya.service"
    meter = PressureMeter(recorded(tmp_path, some_us=1_000_000, full_us=0, swapped_pages=0), groups=[group])
    assert meter.read(10.0).full_stall_share == 0.0
    group_pressure(group, some_us=9_000_000, full_us=9_000_000)  # what it stalled before we first saw it is not ours
    assert meter.read(12.0).full_stall_share == 0.0
    group_pressure(group, some_us=9_600_000, full_us=9_400_000)
    strain = meter.read(14.0)
    assert (strain.stall_share, strain.full_stall_share) == (0.3, 0.2)
    recorded(tmp_path, some_us=2_000_000, full_us=0, swapped_pages=0)
    assert meter.read(16.0).stall_share == 0.5  # the machine's, which is worse now


def test_container_that_sees_its_own_group_alone_is_read_by_that(tmp_path: Path) -> None:
    group = group_pressure(tmp_path / "sys/fs/cgroup", some_us=0, full_us=0)
    assert pressure_files([group], tmp_path) == [group / "memory.pressure"]
    meter = PressureMeter(tmp_path, groups=[group])
    meter.read(1.0)
    group_pressure(group, some_us=500_000, full_us=0)
    assert meter.read(2.0).stall_share == 0.5


def test_kernel_without_pressure_information_strains_nobody(tmp_path: Path) -> None:
    meter = PressureMeter(tmp_path)
    meter.read(0.0)
    assert meter.read(1.0).stall_share == 0.0
    with pytest.raises(OSError, match="No such file"):
        PressureTrigger(tmp_path / "proc/pressure/memory")


@pytest.mark.skipif(not Path("/proc/pressure/memory").exists(), reason="this kernel has no pressure information")
def test_trigger_is_set_on_this_kernel_and_quiet_at_first() -> None:
    try:
        trigger = PressureTrigger()
    except OSError as error:
        pytest.skip(f"no trigger for this user: {error}")
    with contextlib.closing(trigger):
        assert trigger.fileno() > 0
        assert trigger.take() in (True, False)  # whatever else runs here decides


# GPUs


def test_gpu_memory_is_split_into_ours_free_and_that_of_others(nvml: Any) -> None:
    """Two cards, the second one gone from the bus; a process that draws too is in both lists."""
    card = {"name": "RTX", "total": 24 * GIB, "free": 10 * GIB}
    compute, graphics = {"7": 9 * GIB, "8": None, "9": GIB}, {"9": GIB, "10": 2 * GIB}
    nvml.play(card | {"compute": compute, "graphics": graphics}, {"is_lost": True})
    (read,) = GpuMeter(nvml.library).read(own_pids={7, 9})
    assert (read.index, read.name, read.free_bytes, read.own_bytes) == (0, "RTX", 10 * GIB, 10 * GIB)
    assert (read.others_bytes, read.process_bytes, read.is_tight) == (4 * GIB, {7: 9 * GIB, 9: GIB}, False)
    nvml.play(card | {"free": 700 * MIB})
    assert GpuMeter(nvml.library).read()[0].is_tight


def test_machine_without_driver_or_library_has_no_gpus(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLAYED_NVML")
    assert GpuMeter(nvml.library).read() == []
    assert isinstance(GpuMeter().read(), list)


def test_cards_of_amd_are_read_from_their_driver(tmp_path: Path) -> None:
    for number, (vendor, total, used) in enumerate(((0x1002, 512 * MIB, MIB), (0x1002, 16 * GIB, GIB), (0x8086, 0, 0))):
        device = tmp_path / f"sys/class/drm/renderD{128 + number}/device"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor:#x}\n")
        (device / "mem_info_vram_total").write_text(f"{total}\n")
        (device / "mem_info_vram_used").write_text(f"{used}\n")
    (card,) = amd_cards(tmp_path)  # the first is part of the processor
    assert (card.index, card.total_bytes, card.free_bytes) == (0, 16 * GIB, 15 * GIB)
    assert amd_cards(tmp_path / "nowhere") == []
