"""The budget and the facts of a machine, on recorded trees of /proc and /sys/fs/cgroup and on this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from laya.errors import ConfigError, InsufficientMemory
from laya.memory.cgroup import cpu_quota, memory_limits, mounts
from laya.memory.machine import Machine
from laya.types import GIB, KIB, MIB

MEMINFO = """MemTotal:       24684092 kB
MemFree:         1000000 kB
MemAvailable:   20971520 kB
SwapTotal:       8388604 kB
SwapFree:        8388604 kB
"""
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
UNIFIED_MOUNT = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
V2_MOUNT = "41 31 0:38 {root} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"


def tree(root: Path, files: dict[str, str]) -> Machine:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine(root)


def v2(root: Path, path: str, groups: dict[str, dict[str, str]], mounted: str = "/") -> Machine:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": f"0::{path}\n",
        "proc/self/mountinfo": V2_MOUNT.format(root=mounted),
        "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
    }
    for group, values in groups.items():
        files |= {f"sys/fs/cgroup{group}/{name}": text for name, text in values.items()}
    return tree(root, files)


def v1(root: Path, path: str, groups: dict[str, dict[str, str]], mounted: str = "/") -> Machine:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": f"5:cpu:/\n4:memory:{path}\n0::/\n",
        "proc/self/mountinfo": V1_MOUNT.format(root=mounted) + UNIFIED_MOUNT,
    }
    for group, values in groups.items():
        files |= {f"sys/fs/cgroup/memory{group}/{name}": text for name, text in values.items()}
    return tree(root, files)


V2_STAT = """anon {anon}
file {file}
kernel {kernel}
sock 0
shmem {shmem}
slab_reclaimable {slab}
"""
V1_STAT = """cache {file}
rss 1
hierarchical_memory_limit {limit}
total_cache {file}
total_rss {anon}
total_shmem {shmem}
"""


def in_group(root: Path, limit: int, held: int) -> Machine:
    """A process that holds so much, alone in a group with this limit."""
    stat = V1_STAT.format(anon=held, file=0, limit=limit, shmem=0)
    kernel = {"memory.limit_in_bytes": str(limit), "memory.kmem.usage_in_bytes": str(held // 20)}
    machine = v1(root, "/small", {"/small": kernel | {"memory.stat": stat}})
    return tree(machine.root, {"proc/self/status": f"Name:\tlaya\nRssAnon:\t   {held // KIB} kB\n"})


def test_budget_is_80_percent_of_what_is_available(tmp_path: Path) -> None:
    machine = tree(tmp_path, {"proc/meminfo": MEMINFO})
    budget = machine.budget()
    assert budget.bytes == budget.total_bytes == int(0.8 * 20 * GIB)
    assert budget.limit == "memory available"
    assert budget.memory_bytes == 24684092 * KIB
    assert budget.ceiling_bytes == int(0.95 * 20 * GIB)


def test_swap_is_shown_and_never_counted(tmp_path: Path) -> None:
    machine = tree(tmp_path, {"proc/meminfo": MEMINFO})
    without = tree(tmp_path / "b", {"proc/meminfo": MEMINFO.replace("8388604", "0")})
    assert machine.budget() == without.budget()
    assert machine.memory().swap_total_bytes == 8388604 * KIB


def test_memory_of_our_own_engines_counts_as_ours(tmp_path: Path) -> None:
    machine = tree(tmp_path, {"proc/meminfo": MEMINFO})
    assert machine.budget(own_bytes=5 * GIB).bytes == int(0.8 * 25 * GIB)


def test_a_command_plans_with_what_the_gateway_will_have(tmp_path: Path) -> None:
    """The same group of 290 MiB, seen by `laya plan` (27 MiB), a new gateway (44 MiB) and a later one."""
    budgets = []
    for held in (27 * MIB, 44 * MIB, 60 * MIB):
        budgets.append(in_group(tmp_path / str(held), 290 * MIB, held).budget().bytes)
    assert budgets == [int(0.8 * (290 - 64) * MIB)] * 3


def test_group_too_small_for_the_gateway_is_refused_before_it_is_imported(tmp_path: Path) -> None:
    with pytest.raises(InsufficientMemory) as caught:
        in_group(tmp_path / "40", 40 * MIB, 18 * MIB).check_gateway()
    error = caught.value
    assert error.exit_code == 3
    assert "needs 64 MiB for itself, beside any model; 39 MiB may be used (cgroup /small)" in error.message
    assert error.details["need_bytes"] == 64 * MIB
    assert error.details["available_bytes"] == 40 * MIB - 18 * MIB // 20
    assert error.details["limit"] == "cgroup /small"
    assert "384 MiB" in error.message and "laya serve smollm2" in error.message
    in_group(tmp_path / "65", 65 * MIB, 18 * MIB).check_gateway()
    in_group(tmp_path / "later", 65 * MIB, 62 * MIB).check_gateway()  # a gateway that is there already


@pytest.mark.parametrize(
    ("asked", "expected", "limit"),
    [
        ("50%", 10 * GIB, "memory.budget"),
        ("4GiB", 4 * GIB, "memory.budget"),
        ("100MiB", 100 * MIB, "memory.budget"),
        (3 * GIB, 3 * GIB, "memory.budget"),
        ("64GiB", int(0.95 * 20 * GIB), "memory available"),
        ("100%", int(0.95 * 20 * GIB), "memory available"),
        (None, 16 * GIB, "memory available"),
    ],
)
def test_budget_of_the_user_binds_below_what_is_there(
    tmp_path: Path, asked: str | int | None, expected: int, limit: str
) -> None:
    budget = tree(tmp_path, {"proc/meminfo": MEMINFO}).budget(asked)
    assert (budget.bytes, budget.limit) == (expected, limit)


def test_budget_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'much' is not a budget"):
        tree(tmp_path, {"proc/meminfo": MEMINFO}).budget("much")


def test_tightest_v2_ancestor_binds_without_its_file_cache(tmp_path: Path) -> None:
    stat = V2_STAT.format(anon=GIB, file=5 * GIB, kernel=300 * MIB, shmem=100 * MIB, slab=200 * MIB)
    machine = v2(
        tmp_path,
        "/a/b",
        {
            "/a/b": {"memory.max": "max", "memory.high": "max", "memory.stat": stat},
            "/a": {"memory.max": str(8 * GIB), "memory.stat": stat},
        },
    )
    (limit,) = memory_limits(tmp_path)
    assert (limit.kind, limit.path, limit.limit_bytes) == ("v2", "/a", 8 * GIB)
    assert limit.used_bytes == GIB + 200 * MIB
    budget = machine.budget()
    assert budget.limit == "cgroup /a"
    assert budget.bytes == int(0.8 * (7 * GIB - 200 * MIB))
    assert budget.memory_bytes == 8 * GIB
    assert machine.facts().cgroup_kinds == ("v2",)


def test_v2_high_is_a_limit_and_older_kernels_name_the_parts(tmp_path: Path) -> None:
    kernel = f"slab_unreclaimable {MIB}\nkernel_stack {MIB}\npagetables {MIB}\nslab_reclaimable {GIB}\n"
    stat = f"anon {GIB}\nshmem 0\n{kernel}"
    v2(tmp_path, "/a", {"/a": {"memory.max": str(8 * GIB), "memory.high": str(4 * GIB), "memory.stat": stat}})
    (limit,) = memory_limits(tmp_path)
    assert (limit.limit_bytes, limit.used_bytes) == (4 * GIB, GIB + 3 * MIB)


def test_tightest_v1_ancestor_binds_and_no_limit_is_none(tmp_path: Path) -> None:
    unlimited = str(9223372036854771712)
    full = V1_STAT.format(file=3 * GIB, anon=2 * GIB, shmem=MIB, limit=4 * GIB)
    machine = v1(
        tmp_path,
        "/a/b",
        {
            "": {"memory.limit_in_bytes": unlimited},
            "/a": {"memory.limit_in_bytes": str(4 * GIB), "memory.stat": full, "memory.kmem.usage_in_bytes": str(MIB)},
            "/a/b": {
                "memory.limit_in_bytes": unlimited,
                "memory.stat": V1_STAT.format(file=0, anon=GIB, shmem=0, limit=unlimited),
            },
        },
    )
    (limit,) = memory_limits(tmp_path)
    assert (limit.kind, limit.path, limit.used_bytes) == ("v1", "/a", 2 * GIB + 2 * MIB)
    assert machine.budget().limit == "cgroup /a"
    assert "v1" in machine.facts().cgroup_kinds


def test_v1_container_sees_ancestors_through_the_hierarchical_limit(tmp_path: Path) -> None:
    stat = V1_STAT.format(file=0, anon=0, shmem=0, limit=2 * GIB)
    files = {"memory.limit_in_bytes": str(9223372036854771712), "memory.stat": stat}
    v1(tmp_path, "/docker/abc", {"": files}, mounted="/docker/abc")
    (limit,) = memory_limits(tmp_path)
    assert (limit.limit_bytes, limit.path) == (2 * GIB, "/docker/abc")


def test_group_outside_what_is_mounted_falls_back_to_the_top(tmp_path: Path) -> None:
    v2(tmp_path, "/../..", {"": {"memory.max": str(GIB), "memory.stat": "anon 0\nkernel 0\n"}})
    (mount,) = mounts(tmp_path, "memory")
    assert mount.group == mount.top
    assert memory_limits(tmp_path)[0].limit_bytes == GIB


def test_machine_without_groups_or_proc_has_no_limits(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert memory_limits(tmp_path) == []
    assert machine.tightest_cgroup() is None
    assert machine.budget().bytes == 0
    assert not machine.facts().has_psi


def test_cores_follow_the_cpu_quota_rounded_down(tmp_path: Path) -> None:
    v2(tmp_path / "a", "/a", {"/a": {"cpu.max": "150000 100000\n"}})
    assert cpu_quota(tmp_path / "a") == 1.5
    assert Machine(tmp_path / "a").cores() == 1
    v2(tmp_path / "b", "/a", {"/a": {"cpu.max": "max 100000\n"}})
    assert cpu_quota(tmp_path / "b") is None


@pytest.mark.parametrize(("n_allowed", "n_cores"), [(1, 1), (2, 2), (3, 2), (4, 3), (16, 15)])
def test_one_core_is_left_free_where_there_are_more_than_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_allowed: int, n_cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(n_allowed)))
    assert Machine(tmp_path).cores() == n_cores
    v2(tmp_path / "c", "/a", {"/a": {"cpu.max": "20000 100000\n"}})
    assert Machine(tmp_path / "c").cores() == 1


def test_v1_cpu_quota_of_an_ancestor_is_seen(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/a/b\n",
            "proc/self/mountinfo": "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n",
            "sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cpu_quota(tmp_path) == 4.0


def test_this_machine_has_memory_and_cores() -> None:
    facts = Machine().facts()
    assert facts.memory.total_bytes > facts.memory.available_bytes > 0
    assert 1 <= facts.n_cores <= facts.n_cpus
    budget = Machine().budget()
    assert 0 < budget.bytes < budget.ceiling_bytes < facts.memory.total_bytes


# real groups
CHILD = """
import json, os, sys
group, data, project = sys.argv[1:]
sys.path.insert(0, project)
open(group + "/cgroup.procs", "w").write("0")
from laya.memory.machine import Machine

def read(name):
    with open(name, "rb") as file:
        while file.read(1 << 20):
            pass

def survives(n_bytes):
    pid = os.fork()
    if pid == 0:
        open("/proc/self/oom_score_adj", "w").write("1000")
        b"x" * n_bytes
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0

held = bytearray(60 << 20)
for name in ("once", "often"):  # written here, so that the pages are charged to this group
    with open(data + name, "wb") as file:
        for _ in range(100):
            file.write(os.urandom(1 << 20))
        os.fsync(file.fileno())
for _ in range(3):  # the second reading makes the pages active
    read(data + "often")
limit = Machine().tightest_cgroup()
stat = dict(line.split() for line in open(group + "/memory.stat"))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
seen = {
    "path": limit.path, "limit": limit.limit_bytes, "used": limit.used_bytes,
    "anon": int(status["RssAnon"].split()[0]) * 1024, "budget": Machine().budget().bytes,
    "active": int(stat["active_file"]), "inactive": int(stat["inactive_file"]),
}
usable = seen["budget"] / 0.8
seen["fits"] = survives(int(usable * 0.98))
seen["over"] = survives(int(usable * 1.02))
print(json.dumps(seen))
"""


@pytest.fixture
def v1_groups() -> Iterator[tuple[Path, Path]]:
    """A real v1 memory group of 300 MiB below our own, and one without a limit in it."""
    found = [mount for mount in mounts(Path("/"), "memory") if mount.kind == "v1"]
    if not found:
        pytest.skip("no cgroup v1 memory hierarchy on this machine")
    outer = found[0].group / f"laya-test-{os.getpid()}"
    try:
        (outer / "inner").mkdir(parents=True)
        (outer / "memory.limit_in_bytes").write_text(str(300 * MIB))
        for group in (outer, outer / "inner"):  # what is too much is to die, on a machine with swap too
            (group / "memory.swappiness").write_text("0")
    except OSError as error:
        pytest.skip(f"no right to make a memory group here: {error}")
    yield outer, outer / "inner"
    (outer / "inner").rmdir()
    outer.rmdir()


def test_real_nested_v1_group_full_of_file_cache_leaves_the_right_budget(
    v1_groups: tuple[Path, Path], tmp_path: Path
) -> None:
    """Within 2 %: by the figures, and by taking 98 % and 102 % of what is said to be usable."""
    outer, inner = v1_groups
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    project = Path(__file__).resolve().parents[2]
    words = [sys.executable, str(script), str(inner), str(tmp_path / "data"), str(project)]
    child = subprocess.run(words, capture_output=True, text=True, check=True)
    seen = json.loads(child.stdout)
    assert seen["path"].endswith(outer.name)
    assert seen["limit"] == 300 * MIB
    assert seen["active"] > 80 * MIB and seen["inactive"] > 80 * MIB  # charged to the group, and yet not in the way
    assert abs(seen["used"] - seen["anon"]) < 0.02 * seen["limit"]
    assert abs(seen["budget"] - 0.8 * (seen["limit"] - seen["anon"])) < 0.02 * seen["limit"]
    assert (seen["fits"], seen["over"]) == (True, False)
