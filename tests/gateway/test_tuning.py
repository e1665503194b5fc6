"""What a person changes of a running server: flags of a load, a pin, a pause; and the memory that it remembers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from laya.config import Config, parse_settings
from laya.errors import InvalidRequest
from laya.gateway.gauge import DeviceGauge
from laya.gateway.headroom import Headrooms
from laya.gateway.history import EVERY_S, KEPT_S, History
from laya.gateway.tuning import is_tunable, pin, together, tuned
from laya.models.catalogue import suggested

from .fleet_world import World, in_world

__all__ = ["in_world"]
GAUGE = DeviceGauge(
    device="cpu", name="RAM", total_bytes=9, available_bytes=5, others_bytes=4, measured_bytes=1, reserved_bytes=2,
    budget_bytes=5, limit="memory available",
)  # fmt: skip


def test_later_flags_win_and_the_rest_stays() -> None:
    assert together("--max-num-seqs 4 --max-seq-len 512", "--max-num-seqs 1 --no-mmap") == (
        "--max-num-seqs 1 --max-seq-len 512 --no-mmap"
    )
    assert is_tunable("--max-num-seqs 1 --no-mmap --prompt-cache 0")
    assert not is_tunable("--memory-budget 2GiB --max-num-seqs 1")


@pytest.mark.anyio
@pytest.mark.usefixtures("in_world")
async def test_flags_change_what_a_plan_weighs_and_name_no_program_or_file(tmp_path: Path) -> None:
    world = World(tmp_path, {"m": 100}, total_bytes=1000)
    endpoint = world.endpoint("m")
    endpoint.settings = msgspec.structs.replace(endpoint.settings, pinned=True)
    settings = tuned(world.fleet, endpoint, "--max-seq-len 512 --kv-cache-dtype q8_0")
    assert (settings.max_seq_len, settings.kv_cache_dtype, settings.pinned) == (512, "q8_0", True)
    assert {"max_seq_len", "kv_cache_dtype"} <= settings.fixed
    too_long = "--kv-cache-dtype f16 " * 14 + "--max-seq-len 4096"  # cut off, it would be another length
    for flags in (
        "--engine-path /bin/sh", "--mmproj /etc/passwd", "--no-such-flag 1", "words", "--max-seq-len '", too_long
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as caught:
            tuned(world.fleet, endpoint, flags)
        assert (caught.value.param, caught.value.http_status) == ("flags", 422)
    await world.close()


@pytest.mark.anyio
@pytest.mark.usefixtures("in_world")
async def test_pinned_model_stays_and_a_pause_holds_all(tmp_path: Path) -> None:
    world = World(tmp_path, {"m": 100, "n": 100}, total_bytes=1000)
    endpoint = world.endpoint("m")
    pin(world.fleet, endpoint, is_pinned=True)
    assert endpoint in world.fleet.kept_for(world.endpoint("n"))
    world.fleet.pausing.set(True)
    assert [each.held_back for each in world.fleet.endpoints.values()] == ["all models are paused"] * 2
    world.fleet.pausing.set(False)
    assert [each.held_back for each in world.fleet.endpoints.values()] == [None, None]
    assert [event.kind for event in world.events()] == ["paused", "resumed"]
    await world.close()


@pytest.mark.anyio
@pytest.mark.usefixtures("in_world")
async def test_room_is_told_also_where_a_models_settings_ask_for_what_is_not_here(tmp_path: Path) -> None:
    largest = max(suggested("chat"), key=lambda each: each.file_bytes).id
    config = Config(models={largest: parse_settings({"gpu_layers": "all"})})
    world = World(tmp_path, {"m": 100}, total_bytes=1 << 40, config=config)
    (told,) = await Headrooms(world.fleet).of([GAUGE])
    assert told.model is not None and not largest.startswith(told.model)
    await world.close()


def test_history_keeps_ten_minutes() -> None:
    now_s = [0.0]
    history = History(lambda: [GAUGE], clock=lambda: now_s[0])
    for step in range(int(2 * KEPT_S / EVERY_S)):
        now_s[0] = step * EVERY_S
        history.take()
    (kept,) = history.after(0.0).values()
    assert len(kept) == KEPT_S / EVERY_S
    assert kept[-1].at == now_s[0] and kept[0].at > now_s[0] - KEPT_S
    assert len(history.after(now_s[0] - 3 * EVERY_S)["cpu"]) == 3


@pytest.mark.anyio
async def test_history_goes_on_after_a_fault(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("laya.gateway.history.EVERY_S", 0.001)
    faults = [OSError("a file of the kernel was away")]

    def look() -> list[DeviceGauge]:
        if faults:
            raise faults.pop()
        return [GAUGE]

    history = History(look)
    running = asyncio.create_task(history.run())
    while not history.after(0.0):
        await asyncio.sleep(0)
    running.cancel()
    assert "no sample of the devices' memory" in caplog.text
