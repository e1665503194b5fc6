"""What the page's bars are drawn from: RAM with and without a group's limit, and graphics cards."""

from __future__ import annotations

from pathlib import Path

from laya.gateway.gauge import cards, ram
from laya.memory import Ledger, Machine
from laya.types import MIB, ModelStatus

GIB_IN_KIB = 1024 * 1024
GIB = 1024 * MIB


def status(pid: int | None, measured: int, anonymous: int) -> ModelStatus:
    return ModelStatus(
        id="m", state="ready", task="chat", since_s=0, pid=pid, measured_bytes=measured, anonymous_bytes=anonymous
    )


def machine(root: Path, *, limit_gib: int | None = None) -> Machine:
    """64 GiB, 40 of them available; a group of ours with 6 GiB of anonymous memory in it."""
    files = {"proc/meminfo": f"MemTotal: {64 * GIB_IN_KIB} kB\nMemAvailable: {40 * GIB_IN_KIB} kB\n"}
    if limit_gib is not None:
        files |= {
            "proc/self/mountinfo": "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "proc/self/cgroup": "0::/box\n",
            "sys/fs/cgroup/box/memory.max": f"{limit_gib * GIB}\n",
            "sys/fs/cgroup/box/memory.stat": f"anon {6 * GIB}\n",
            "sys/fs/cgroup/box/memory.current": f"{7 * GIB}\n",
        }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Machine(root)


def test_ram_counts_our_engines_once_and_the_dead_not_at_all(tmp_path: Path) -> None:
    here = machine(tmp_path)
    engines = [status(7, 5 * GIB, 2 * GIB), status(None, 9 * GIB, 0)]
    gauge = ram(here, here.budget(own_bytes=2 * GIB), 6 * GIB, engines)
    assert (gauge.total_bytes, gauge.available_bytes) == (64 * GIB, 40 * GIB)
    assert gauge.others_bytes == (64 - 40 - 2) * GIB
    assert gauge.measured_bytes == 5 * GIB
    assert (gauge.reserved_bytes, gauge.budget_bytes) == (6 * GIB, int(42 * GIB * 0.8))
    assert gauge.others_bytes + gauge.budget_bytes < gauge.total_bytes


def test_ram_of_a_group_with_a_limit_is_the_groups(tmp_path: Path) -> None:
    here = machine(tmp_path, limit_gib=16)
    gauge = ram(here, here.budget(own_bytes=2 * GIB), 0, [status(7, 3 * GIB, 2 * GIB)])
    assert (gauge.total_bytes, gauge.available_bytes, gauge.others_bytes) == (16 * GIB, 10 * GIB, 4 * GIB)
    assert gauge.limit == "cgroup /box"


def test_cards_keep_a_reserve_and_a_limit_of_the_config(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.set_total("gpu0", 20 * GIB)
    ledger.reserve("m", "gpu0", 8 * GIB)
    held = {"free": 12 * GIB, "own": 6 * GIB, "others": 2 * GIB}
    (free,) = cards([("0", held)], ledger, {})
    assert (free.device, free.name, free.total_bytes) == ("gpu0", "GPU 0", 20 * GIB)
    assert (free.others_bytes, free.measured_bytes, free.reserved_bytes) == (2 * GIB, 6 * GIB, 8 * GIB)
    assert free.budget_bytes == 18 * GIB - round(0.03 * 20 * GIB)
    (limited,) = cards([("0", held)], ledger, {"0": 10 * GIB, "1": GIB})
    assert (limited.budget_bytes, limited.limit) == (10 * GIB, "memory.gpu.0")
