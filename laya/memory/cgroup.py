"""Owns: reading control groups, v1 and v2: which limits stand above this process and what is used inside each.

Every reader takes the root of the file system, so that tests run on recorded trees. It only reads; limits for children
are the guard's. Clean file cache is never use: it goes when somebody needs the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

UNLIMITED_BYTES = 1 << 60  # v1 writes "no limit" as the largest multiple of a page
Kind = Literal["v1", "v2"]


class CgroupLimit(msgspec.Struct, frozen=True, kw_only=True):
    """A group with a limit: what it allows and what cannot be taken back from it."""

    kind: Kind
    path: str  # of the group, as /proc/self/cgroup counts from the top
    limit_bytes: int
    used_bytes: int  # anonymous, shared and kernel memory of everything inside

    @property
    def available_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """A mounted hierarchy and the group of ours in it."""

    kind: Kind
    top: Path  # folder of the top group that can be seen
    group: Path  # folder of our own group; equals `top` or lies below it
    top_path: str  # the group that `top` shows

    def upwards(self) -> Iterator[tuple[Path, str]]:
        """Every group from ours to the top: its folder and its path."""
        folder = self.group
        while True:
            below = folder.relative_to(self.top)
            yield folder, str(PurePosixPath(self.top_path) / PurePosixPath(*below.parts))
            if folder == self.top:
                return
            folder = folder.parent


def memory_limits(root: Path = Path("/")) -> list[CgroupLimit]:
    """The limits above this process, its own group first; empty where there is none."""
    limits = []
    for mount in mounts(root, "memory"):
        for folder, path in mount.upwards():
            limit_bytes = _v2_limit(folder) if mount.kind == "v2" else _v1_limit(folder)
            if limit_bytes is not None:
                used_bytes = _v2_used(folder) if mount.kind == "v2" else _v1_used(folder)
                limits.append(CgroupLimit(kind=mount.kind, path=path, limit_bytes=limit_bytes, used_bytes=used_bytes))
    return limits


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time the tightest group above us may use, or None."""
    quotas = []
    for mount in mounts(root, "cpu"):
        for folder, _ in mount.upwards():
            if mount.kind == "v2":
                words = _text(folder / "cpu.max").split()
                quota, period = (_int(words[0]), _int(words[1])) if len(words) == 2 else (None, None)
            else:
                quota, period = _int(_text(folder / "cpu.cfs_quota_us")), _int(_text(folder / "cpu.cfs_period_us"))
            if quota and period and quota > 0:
                quotas.append(quota / period)
    return min(quotas, default=None)


def mounts(root: Path, controller: str) -> list[Mount]:
    """Where this controller is mounted and our group in it: one v1 hierarchy, or the v2 one, or both."""
    paths = _own_paths(root)
    found = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        fields, _, after = line.partition(" - ")
        words, kind_and_options = fields.split(), after.split()
        if len(words) < 5 or len(kind_and_options) < 3:
            continue
        file_system, options = kind_and_options[0], kind_and_options[2].split(",")
        key = "" if file_system == "cgroup2" else controller
        if file_system not in ("cgroup", "cgroup2") or key not in paths or (key and key not in options):
            continue
        top = root / words[4].lstrip("/")
        group = top / _below(words[3], paths[key])
        kind: Kind = "v1" if key else "v2"
        # A group that was removed, or is hidden by the container: the top of what can be seen stands for it.
        found.append(Mount(kind=kind, top=top, group=group if group.is_dir() else top, top_path=words[3]))
    return found


def _own_paths(root: Path) -> dict[str, str]:
    """Controller ("" for v2) -> path of our group."""
    paths = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _below(mounted: str, path: str) -> str:
    """Our group's path counted from what is mounted; "" where it lies outside."""
    inside = PurePosixPath(path)
    if ".." in inside.parts or not inside.is_relative_to(mounted):
        return ""
    return str(inside.relative_to(mounted))


def _v2_limit(folder: Path) -> int | None:
    # At memory.high the kernel slows the group down without end, so it is a limit as hard as memory.max.
    limits = [_int(_text(folder / name)) for name in ("memory.max", "memory.high")]
    return min((limit for limit in limits if limit is not None), default=None)


def _v2_used(folder: Path) -> int:
    stat = _stat(folder)
    parts = ("slab_unreclaimable", "kernel_stack", "pagetables", "sec_pagetables", "percpu", "vmalloc")
    if "kernel" in stat:
        kernel = max(0, stat["kernel"] - stat.get("slab_reclaimable", 0))
    else:  # older kernels name the parts only
        kernel = sum(stat.get(part, 0) for part in parts)
    return stat.get("anon", 0) + stat.get("shmem", 0) + stat.get("sock", 0) + kernel


def _v1_limit(folder: Path) -> int | None:
    # The hierarchical limit also knows ancestors that a container does not show.
    limits = [_int(_text(folder / "memory.limit_in_bytes")), _stat(folder).get("hierarchical_memory_limit")]
    return min((limit for limit in limits if limit is not None and limit < UNLIMITED_BYTES), default=None)


def _v1_used(folder: Path) -> int:
    stat = _stat(folder)
    anonymous = stat.get("total_rss", stat.get("rss", 0))
    return anonymous + stat.get("total_shmem", 0) + (_int(_text(folder / "memory.kmem.usage_in_bytes")) or 0)


def _stat(folder: Path) -> dict[str, int]:
    values = {}
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        number = _int(value)
        if number is not None:
            values[name] = number
    return values


def _text(path: Path) -> str:
    """A kernel file's text; "" where it is not there or not ours to read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _int(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
