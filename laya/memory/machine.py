"""Owns: what this machine has and what of it engines may use: the budget, and the facts `laya doctor` shows.

Readers take the root of the file system, so that tests run on recorded trees. Swap is read to be shown, never counted.
The budget is recomputed for each decision, since other programs come and go.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from laya.config import parse_budget
from laya.errors import InsufficientMemory
from laya.memory.cgroup import CgroupLimit, cpu_quota, memory_limits
from laya.memory.sizes import size_text
from laya.types import KIB, MIB

# The most a user may set: the kernel and the desktop need the rest to stay responsive.
MAX_SHARE = 0.95
# Kept for the gateway: it held 44 MiB of its own at its first plan, 50 MiB after a load (one model, CPython 3.11).
GATEWAY_BYTES = 64 * MIB
# With so much free the smallest model of the catalogue is served (a test plans and loads it).
LEAST_BYTES = 384 * MIB
LEAST_COMMAND = "laya serve smollm2 --max-num-seqs 1 --max-seq-len 512"
CORES_ALL_USED = 2  # up to so many, none is left free: half of the speed would be too high a price


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What may be planned with, and what bound it. `bytes` may be lowered with msgspec.structs.replace."""

    bytes: int
    limit: str  # in words: "memory available", "cgroup /path", "memory.budget"
    total_bytes: int = 0  # `bytes` as it was computed, before loaded engines were taken off
    memory_bytes: int = 0  # what the hardware rule compares with: the memory of the machine or its group
    ceiling_bytes: int = 0  # the most memory.budget could be set to now
    is_users: bool = False  # the user's own memory.budget is what binds
    gpu_bytes: tuple[int, ...] = ()  # of each GPU, by its number, what may be planned with
    why_no_gpu: str = "no GPU was found"  # where none may be
    is_elsewhere: bool = False  # of another machine, which has said itself whether its engine can use its GPUs

    @property
    def taken_bytes(self) -> int:
        """What loaded engines hold of it."""
        return max(0, self.total_bytes - self.bytes)


class MemoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """/proc/meminfo, in bytes."""

    total_bytes: int
    available_bytes: int  # what the kernel can give without swapping; clean file cache is in it
    swap_total_bytes: int
    swap_free_bytes: int


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What `laya doctor` shows of this machine."""

    memory: MemoryFacts
    cgroup: CgroupLimit | None  # the tightest, or None where no group limits us
    cgroup_kinds: tuple[str, ...]  # hierarchies that control memory here: "v1", "v2"
    has_psi: bool
    n_cores: int  # that engines may use: affinity and CPU quota
    n_cpus: int  # online
    has_avx2: bool
    cpu_model: str


class Machine:
    """Readers over one root. Cheap to make; nothing is cached."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def memory(self) -> MemoryFacts:
        """The kernel's own figures. 0 where a figure is missing."""
        kib = dict(re.findall(r"^(\w+):\s+(\d+) kB$", self._text("proc/meminfo"), re.MULTILINE))
        total, free = int(kib.get("MemTotal", 0)), int(kib.get("MemFree", 0))
        return MemoryFacts(
            total_bytes=total * KIB,
            available_bytes=int(kib.get("MemAvailable", free)) * KIB,
            swap_total_bytes=int(kib.get("SwapTotal", 0)) * KIB,
            swap_free_bytes=int(kib.get("SwapFree", 0)) * KIB,
        )

    def tightest_cgroup(self) -> CgroupLimit | None:
        """The group above us that leaves the least, or None."""
        return min(memory_limits(self.root), key=lambda limit: limit.available_bytes, default=None)

    def available_bytes(self) -> int:
        """What can be had now without swapping: the kernel's figure, or what the tightest group leaves."""
        return self._available()[0]

    def _available(self) -> tuple[int, str]:
        """The same, and what bounds it."""
        group, available = self.tightest_cgroup(), self.memory().available_bytes
        if group is not None and group.available_bytes < available:
            return group.available_bytes, f"cgroup {group.path}"
        return available, "memory available"

    def budget(self, asked: str | int | None = None, own_bytes: int = 0) -> Budget:
        """What all engines together may hold, as of now.

        asked: memory.budget, a share ("80%", also None) or an amount. own_bytes: anonymous memory of our own running
        engines; it is used now but ours to plan with. Mapped weights are not in it: the kernel counts them as
        available already. Of `GATEWAY_BYTES` what this process does not hold yet is taken off, so that a command plans
        with what the gateway will have. Raises ConfigError for an amount that cannot be read.
        """
        whole, group = self.memory().total_bytes, self.tightest_cgroup()
        if group is not None and group.limit_bytes < whole:
            whole = group.limit_bytes
        usable, limit = self._available()
        usable = max(0, usable + own_bytes - self._gateway_due_bytes())
        return budget_within(usable, limit, whole, asked)

    def check_gateway(self) -> None:
        """Raise InsufficientMemory where not even the gateway can have what it needs, however small the model."""
        available, limit = self._available()
        if available >= self._gateway_due_bytes():
            return
        available += self._held_bytes()  # that is the gateway's already
        raise InsufficientMemory(
            f"`laya serve` needs {size_text(GATEWAY_BYTES)} for itself, beside any model; {size_text(available)} may "
            f"be used ({limit}). With {size_text(LEAST_BYTES)} free the smallest model is served: `{LEAST_COMMAND}`.",
            need_bytes=GATEWAY_BYTES,
            available_bytes=available,
            limit=limit,
            suggestions=[f"--memory {LEAST_BYTES // MIB}MiB"],
        )

    def _gateway_due_bytes(self) -> int:
        """What the gateway will hold beyond what this process, it or a command before it, holds already."""
        held_bytes = self._held_bytes()
        kernel_bytes = held_bytes // 20  # page tables and stacks of it, at most: a group's use has them, RssAnon not
        return max(0, GATEWAY_BYTES - held_bytes - kernel_bytes) if held_bytes else 0

    def _held_bytes(self) -> int:
        """Anonymous memory of this process; 0 where the kernel does not say."""
        held = re.search(r"^RssAnon:\s+(\d+) kB$", self._text("proc/self/status"), re.MULTILINE)
        return int(held[1]) * KIB if held is not None else 0

    def cores(self) -> int:
        """Cores that engines may compute on: allowed by affinity and, rounded down, by the CPU quota; at least 1.

        Of more than two one stays free, for the gateway and whoever works at this machine.
        """
        allowed = len(os.sched_getaffinity(0))
        quota = cpu_quota(self.root)
        allowed = max(1, min(allowed, int(quota)) if quota is not None else allowed)
        return allowed - 1 if allowed > CORES_ALL_USED else allowed

    def facts(self) -> MachineFacts:
        """Everything at once, for `laya doctor`."""
        cpuinfo = self._text("proc/cpuinfo")
        model = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
        flags = re.search(r"^flags\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
        return MachineFacts(
            memory=self.memory(),
            cgroup=self.tightest_cgroup(),
            cgroup_kinds=self._cgroup_kinds(),
            has_psi=(self.root / "proc/pressure/memory").exists(),
            n_cores=self.cores(),
            n_cpus=os.cpu_count() or 1,
            has_avx2=bool(flags and "avx2" in flags[1].split()),
            cpu_model=model[1] if model else "unknown",
        )

    def _cgroup_kinds(self) -> tuple[str, ...]:
        kinds = []
        for line in self._text("proc/self/mountinfo").splitlines():
            words = line.split()
            if " - cgroup " in line and "memory" in words[-1].split(","):
                kinds.append("v1")
            if " - cgroup2 " in line and self._controls_memory(words[4]):
                kinds.append("v2")
        return tuple(dict.fromkeys(kinds))

    def _controls_memory(self, mount_point: str) -> bool:
        return "memory" in self._text(f"{mount_point.lstrip('/')}/cgroup.controllers").split()

    def _text(self, path: str) -> str:
        try:
            return (self.root / path).read_text()
        except OSError:
            return ""


def budget_within(usable_bytes: int, limit: str, memory_bytes: int, asked: str | int | None = None) -> Budget:
    """The budget where engines can have so many bytes, bound by `limit`. Raises ConfigError as `Machine.budget`."""
    ceiling = int(usable_bytes * MAX_SHARE)
    wanted = parse_budget(asked)
    n_bytes = wanted if isinstance(wanted, int) else int(usable_bytes * wanted)
    is_users = asked is not None and n_bytes <= ceiling
    n_bytes = min(n_bytes, ceiling)
    if is_users:
        limit, memory_bytes = "memory.budget", min(memory_bytes, n_bytes)
    return Budget(
        bytes=n_bytes,
        limit=limit,
        total_bytes=n_bytes,
        memory_bytes=memory_bytes,
        ceiling_bytes=ceiling,
        is_users=is_users,
    )


def limit_text(budget: Budget) -> str:
    """`17.4 GiB (memory available)`."""
    return f"{size_text(budget.bytes)} ({budget.limit})"
