"""Owns: what `laya doctor` looks at in the machine: CPU, memory, swap, control groups, pressure, OOM daemons, disk.

Every probe only reads, takes the root of the file system it reads, and changes nothing. Knows no server and no network.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

from laya.cli.finding import Finding, must_fix, ok, warn
from laya.cli.fit import Fitter
from laya.config import Config
from laya.engines.cpu import check_cpu, cpu_flags
from laya.errors import ConfigError, LayaError
from laya.memory import Budget, Machine, size_text
from laya.memory.cgroup import Mount, mounts
from laya.models import default_model, entries
from laya.types import GIB, MIB

CALM_SWAPPINESS = 10
LITTLE_DISK_BYTES = 10 * GIB  # a 4-bit model of 8 B parameters takes half of it
NO_DISK_BYTES = 256 * MIB  # the default model and its download
OOM_DAEMONS = frozenset({"earlyoom", "systemd-oomd", "oomd", "nohang"})
_INSTALLERS = {
    "apt": "sudo apt install",
    "dnf": "sudo dnf install",
    "pacman": "sudo pacman -S",
    "zypper": "sudo zypper install",
}

CanWrite = Callable[[Path], bool]
FreeBytes = Callable[[Path], int]


def can_write(path: Path) -> bool:
    """Whether this process could write here; asked of the kernel, not tried."""
    return os.access(path, os.W_OK)


def cpu(root: Path, config: Config, machine: str | None = None) -> Finding:
    """The model, the cores engines may use, and the instructions the built-in engine is compiled with."""
    facts = Machine(root).facts()
    allowed = f"{facts.n_cores} of {facts.n_cpus} cores for engines"
    if facts.n_cores < facts.n_cpus:
        allowed += " (CPU affinity or quota)"
    seen = f"CPU {facts.cpu_model}, {allowed}"
    if config.for_model("").engine_path is not None:
        return ok("cpu", seen)
    try:
        check_cpu(root / "proc/cpuinfo", machine)
    except LayaError as error:
        is_virtual = "hypervisor" in cpu_flags(root / "proc/cpuinfo")
        cure = "this is a virtual machine: give it its host's CPU (QEMU: -cpu host), or " if is_virtual else ""
        return must_fix(
            "cpu", f"{seen}: {error.message}", f"{cure}set engine_path in config.yaml to a llama-server built here"
        )
    is_x86 = (machine or platform.machine()) in ("x86_64", "AMD64")
    return ok("cpu", f"{seen}{', AVX2' if is_x86 and facts.has_avx2 else ''}")


def budget_of(root: Path, config: Config) -> Budget:
    """The budget by the config; by the default where the config's cannot be read."""
    try:
        return Machine(root).budget(config.memory.budget)
    except ConfigError:
        return Machine(root).budget()


def memory(root: Path, config: Config) -> Finding:
    """Total, available, what engines may have of it, and what bounds that."""
    facts, budget = Machine(root).memory(), budget_of(root, config)
    seen = (
        f"memory {size_text(facts.total_bytes)}, {size_text(facts.available_bytes)} available; "
        f"engines may have {size_text(budget.bytes)}, bound by {budget.limit}"
    )
    smallest = next(entry for entry in entries() if entry.id == default_model())
    if Fitter(Config(), budget).entry(smallest).fits:
        return ok("memory", seen)
    if budget.is_users:
        fix = "raise memory.budget in config.yaml"
    elif budget.limit.startswith("cgroup"):
        fix = "raise the limit of this container or group, e.g. docker update --memory 4g --memory-swap 4g CONTAINER"
    else:
        fix = "close a program; the largest: ps -eo rss,pid,comm --sort=-rss | head"
    return must_fix("memory", f"{seen}: too little for {smallest.id}", fix)


def swap(root: Path) -> Finding:
    """Swap on a disk and how eagerly the kernel uses it: a machine that swaps under a model freezes."""
    facts = Machine(root).memory()
    swappiness = kernel_text(root / "proc/sys/vm/swappiness").strip()
    eagerness = f"swappiness {swappiness}" if swappiness else "swappiness unknown"
    if not facts.swap_total_bytes:
        return ok("swap", f"no swap ({eagerness})")
    devices = [line.split()[0] for line in kernel_text(root / "proc/swaps").splitlines()[1:] if line.strip()]
    used = facts.swap_total_bytes - facts.swap_free_bytes
    seen = f"{size_text(facts.swap_total_bytes)} swap ({size_text(used)} used), {eagerness}"
    if devices and all("zram" in device for device in devices):
        return ok("swap", f"{seen}, in compressed memory")
    if swappiness.isdigit() and int(swappiness) <= CALM_SWAPPINESS:
        return ok("swap", seen)
    return warn("swap", f"{seen}, on {', '.join(devices) or 'a disk'}", f"sudo sysctl vm.swappiness={CALM_SWAPPINESS}")


def cgroup(root: Path, config: Config, is_writable: CanWrite = can_write) -> Finding:
    """The control group above us, its limit, and whether a group with a limit of its own could be made for children."""
    facts = Machine(root).facts()
    if not facts.cgroup_kinds:
        return warn(
            "cgroup",
            "no control group limits memory on this kernel",
            "add cgroup_enable=memory to the kernel command line and reboot",
        )
    place, why_not = _place_for_children(root, facts.cgroup_kinds, is_writable)
    kinds = " and ".join(facts.cgroup_kinds)
    limit = facts.cgroup
    seen = f"cgroup {kinds}, " + (
        f"{size_text(limit.limit_bytes)} limit at {limit.path}" if limit is not None else "no limit above Laya"
    )
    if place is not None:
        return ok("cgroup", f"{seen}; groups with a hard limit can be made in {place}")
    seen = f"{seen}; no group can be made for children ({why_not})"
    if limit is not None:
        return ok("cgroup", seen)
    return warn("cgroup", seen, _limit_command(root, facts.cgroup_kinds, budget_of(root, config).bytes))


def _place_for_children(root: Path, kinds: tuple[str, ...], is_writable: CanWrite) -> tuple[str | None, str]:
    """The path of the nearest group that could hold limited groups for our children, or why there is none."""
    why_not = "its folder is not writable for this user"
    for mount in (mount for mount in mounts(root, "memory") if mount.kind in kinds):
        for folder, path in mount.upwards():
            if not (is_writable(folder) and is_writable(folder / "cgroup.procs")):
                continue
            if _can_hand_on_memory(mount, folder, is_writable):
                return f"{mount.kind} {path}", ""
            why_not = f"{path} holds processes itself"
    return None, why_not


def _can_hand_on_memory(mount: Mount, folder: Path, is_writable: CanWrite) -> bool:
    if mount.kind == "v1":
        return True
    if "memory" in kernel_text(folder / "cgroup.subtree_control").split():
        return True
    # A v2 group hands a controller on only while no process is in it; the kernel's own root group is the exception.
    has_memory = "memory" in kernel_text(folder / "cgroup.controllers").split()
    is_kernels_root = not (folder / "cgroup.type").exists()
    is_empty = not kernel_text(folder / "cgroup.procs").strip()
    return has_memory and (is_kernels_root or is_empty) and is_writable(folder / "cgroup.subtree_control")


def _limit_command(root: Path, kinds: tuple[str, ...], budget_bytes: int) -> str:
    """How to have a ceiling over all of Laya, where it can't make one itself."""
    n_mib = max(1, budget_bytes // MIB)
    if in_container(root):
        return f"start the container with --memory {n_mib}m --memory-swap {n_mib}m"
    if not (root / "run/systemd/system").is_dir():
        return f"bash -c 'ulimit -d {n_mib * 1024}; exec laya serve'   # bounds each process by itself"
    if "v2" in kinds:
        return f"systemd-run --user --scope -p MemoryMax={n_mib}M -p MemorySwapMax=0 laya serve"
    return f"sudo systemd-run --scope --uid=$USER -p MemoryMax={n_mib}M laya serve"


def in_container(root: Path) -> bool:
    """Whether the marks of Docker or Podman are there."""
    return (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()


def pressure(root: Path) -> Finding:
    """Whether the kernel measures how long tasks wait for memory (PSI)."""
    if Machine(root).facts().has_psi:
        return ok("pressure", "the kernel measures memory pressure (PSI)")
    return warn(
        "pressure",
        "no memory pressure information (PSI) from this kernel",
        "add psi=1 to GRUB_CMDLINE_LINUX in /etc/default/grub, then: sudo update-grub && sudo reboot",
    )


def oom_daemon(root: Path) -> Finding:
    """A daemon that ends a runaway program before the machine freezes; the kernel's own killer comes minutes later."""
    names = {kernel_text(comm).strip() for comm in (root / "proc").glob("[0-9]*/comm")}
    running = sorted(names & OOM_DAEMONS)
    if running:
        return ok("oom", f"{' and '.join(running)} running")
    if in_container(root):
        return ok("oom", "earlyoom and systemd-oomd cannot be seen from inside a container")
    install = next((verb for tool, verb in _INSTALLERS.items() if (root / "usr/bin" / tool).exists()), None)
    if install is None:
        return warn("oom", "no earlyoom or systemd-oomd", "install earlyoom with this system's package manager")
    start = "" if "apt" in install else " && sudo systemctl enable --now earlyoom"
    return warn("oom", "no earlyoom or systemd-oomd", f"{install} earlyoom{start}")


def free_bytes_of(folder: Path) -> int:
    """Bytes this user may still write on the disk that holds `folder`."""
    return shutil.disk_usage(folder).free


def disk(home: Path, free_bytes: FreeBytes = free_bytes_of, is_writable: CanWrite = can_write) -> Finding:
    """Room for models where Laya keeps them."""
    folder = home
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    elsewhere = "export LAYA_HOME=/a/folder/on/a/larger/disk"
    if not (folder.is_dir() and is_writable(folder)):
        return must_fix("disk", f"{home} cannot be written by this user", "export LAYA_HOME=/a/folder/of/yours")
    try:
        n_bytes = free_bytes(folder)
    except OSError as error:
        return must_fix("disk", f"{home} cannot be read: {error.strerror}", "export LAYA_HOME=/a/folder/of/yours")
    seen = f"disk {size_text(n_bytes)} free in {home}"
    if n_bytes < NO_DISK_BYTES:
        return must_fix("disk", f"{seen}: no model fits", elsewhere)
    if n_bytes < LITTLE_DISK_BYTES:
        return warn("disk", f"{seen}: small models only", elsewhere)
    return ok("disk", seen)


def kernel_text(path: Path) -> str:
    """A kernel file's text; "" where it is not there or not ours to read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
