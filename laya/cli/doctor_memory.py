"""Owns: what `laya doctor` says of memory: the budget, swap, the limit engines get, pressure, OOM daemons.

Every probe reads below the root it is given and changes nothing; whether a control group can be made is tried out by
the engines room, which leaves nothing behind. The reasons for each piece of advice are in docs/doctor.md.
"""

from __future__ import annotations

import re
from pathlib import Path

from laya.cli.doctor_machine import kernel_text
from laya.cli.finding import Finding, must_fix, ok, warn
from laya.cli.fit import Fitter
from laya.config import Config
from laya.errors import ConfigError
from laya.gateway.guarding import ceiling_support
from laya.memory import Budget, Machine, size_text
from laya.models import default_model, entries
from laya.types import MIB

CALM_SWAPPINESS = 10
MUCH_PRESSURE_PERCENT = 10.0  # of the last minute in which some program waited for memory
OOM_DAEMONS = frozenset({"earlyoom", "systemd-oomd", "oomd", "nohang"})
_SYSCTL_FILE = "/etc/sysctl.d/60-laya.conf"
_BIGGEST = "close a program; the largest: ps -eo rss,pid,comm --sort=-rss | head"
_INSTALLERS = {
    "apt": "sudo apt install",
    "dnf": "sudo dnf install",
    "pacman": "sudo pacman -S",
    "zypper": "sudo zypper install",
}
_ZRAM_PACKAGES = {"apt": "zram-tools", "dnf": "zram-generator-defaults"}  # elsewhere zram-generator


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
        fix = _BIGGEST
    return must_fix("memory", f"{seen}: too little for {smallest.id}", fix)


def swap(root: Path) -> Finding:
    """Swap on a disk and how eagerly the kernel uses it. Engines never swap; the programs beside them do."""
    facts = Machine(root).memory()
    swappiness = kernel_text(root / "proc/sys/vm/swappiness").strip()
    eagerness = f"swappiness {swappiness}" if swappiness else "swappiness unknown"
    if not facts.swap_total_bytes:
        return ok("swap", f"no swap ({eagerness})")
    devices = _swap_devices(root)
    used = facts.swap_total_bytes - facts.swap_free_bytes
    seen = f"{size_text(facts.swap_total_bytes)} swap ({size_text(used)} used), {eagerness}"
    if any("zram" in device for device in devices):
        return ok("swap", f"{seen}, compressed memory first")
    if swappiness.isdigit() and int(swappiness) <= CALM_SWAPPINESS:
        return ok("swap", seen)
    seen = f"{seen}, on {', '.join(devices) or 'a disk'}"
    if in_container(root):
        return ok("swap", f"{seen}; the host decides that")
    setting = f"vm.swappiness={CALM_SWAPPINESS}"
    return warn("swap", seen, f"echo {setting} | sudo tee {_SYSCTL_FILE} && sudo sysctl -p {_SYSCTL_FILE}")


def zram(root: Path) -> Finding:
    """Compressed memory as swap: what other programs do not use shrinks there, at the speed of memory."""
    devices = [device for device in _swap_devices(root) if "zram" in device]
    if devices:
        return ok("zram", f"compressed swap in {', '.join(devices)}")
    if in_container(root):
        return ok("zram", "compressed swap cannot be seen from inside a container")
    command = _install_command(root, "zram-generator", _ZRAM_PACKAGES)
    return ok("zram", "no compressed swap (zram): it serves other programs better than a swap disk", command)


def _swap_devices(root: Path) -> list[str]:
    return [line.split()[0] for line in kernel_text(root / "proc/swaps").splitlines()[1:] if line.strip()]


def ceiling(root: Path, config: Config) -> Finding:
    """The limit above Laya, and what can hold each engine to its own."""
    facts = Machine(root).facts()
    support = ceiling_support(root)
    above = facts.cgroup
    seen = f"ceiling: {support.words}" + (
        f"; {size_text(above.limit_bytes)} for all at {above.path}" if above is not None else ""
    )
    if support.has_hard_limit or above is not None:
        return ok("ceiling", seen)
    if not facts.cgroup_kinds:
        return warn("ceiling", seen, "add cgroup_enable=memory to the kernel command line and reboot")
    return warn("ceiling", seen, _limit_command(root, facts.cgroup_kinds, budget_of(root, config).bytes))


def _limit_command(root: Path, kinds: tuple[str, ...], budget_bytes: int) -> str:
    """How to have a ceiling, where Laya can't make one by itself."""
    n_mib = max(1, budget_bytes // MIB)
    if in_container(root):
        return f"start the container with --memory {n_mib}m --memory-swap {n_mib}m"
    if not (root / "run/systemd/system").is_dir():
        return f"bash -c 'ulimit -d {n_mib * 1024}; exec laya serve'   # bounds each process by itself"
    if "v2" in kinds:
        return "sudo loginctl enable-linger $USER   # then, in a new login: laya service install --user"
    return f"sudo systemd-run --scope --uid=$USER -p MemoryMax={n_mib}M laya serve"


def in_container(root: Path) -> bool:
    """Whether the marks of Docker or Podman are there."""
    return (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()


def pressure(root: Path) -> Finding:
    """Whether the kernel measures how long programs wait for memory (PSI), and how long they do now."""
    text = kernel_text(root / "proc/pressure/memory")
    some = re.search(r"^some .*\bavg60=([\d.]+)", text, re.MULTILINE)
    if some is None:
        return warn(
            "pressure",
            "no memory pressure information (PSI) from this kernel",
            "add psi=1 to GRUB_CMDLINE_LINUX in /etc/default/grub, then: sudo update-grub && sudo reboot",
        )
    percent = float(some[1])
    seen = f"memory pressure (PSI) {percent:.0f} % in the last minute"
    return warn("pressure", seen, _BIGGEST) if percent >= MUCH_PRESSURE_PERCENT else ok("pressure", seen)


def oom_daemon(root: Path) -> Finding:
    """A daemon that ends a runaway program before the machine freezes; the kernel's own killer comes minutes later."""
    names = {kernel_text(comm).strip() for comm in (root / "proc").glob("[0-9]*/comm")}
    running = sorted(names & OOM_DAEMONS)
    if running:
        return ok("oom", f"{' and '.join(running)} running")
    if in_container(root):
        return ok("oom", "earlyoom and systemd-oomd cannot be seen from inside a container")
    seen = "no earlyoom or systemd-oomd"
    if any((root / folder / "systemd/systemd-oomd").exists() for folder in ("usr/lib", "lib")):
        return warn("oom", seen, "sudo systemctl enable --now systemd-oomd")
    command = _install_command(root, "earlyoom")
    if command is None:
        return warn("oom", seen, "install earlyoom with this system's package manager")
    start = "" if "apt" in command else " && sudo systemctl enable --now earlyoom"
    return warn("oom", seen, f"{command}{start}")


def _install_command(root: Path, package: str, names: dict[str, str] | None = None) -> str | None:
    """How this system installs it; `names` has what it is called where it is called otherwise."""
    tool = next((tool for tool in _INSTALLERS if (root / "usr/bin" / tool).exists()), None)
    return None if tool is None else f"{_INSTALLERS[tool]} {(names or {}).get(tool, package)}"
