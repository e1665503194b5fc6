"""Owns: what stands in the unit with which systemd runs Laya, and why. deploy/laya.service is its default,
written by `python -m laya.cli.service_unit`.

The limits are the guard's own: what engines may take at most, the weight of a scope that Laya makes by itself, no swap.
In a service the guard makes its groups below the unit's (Delegate). Knows no command line.
"""

from __future__ import annotations

import grp
import math
from contextlib import suppress
from pathlib import Path

import msgspec

from laya.config import Config, ServerConfig, parse_budget
from laya.engines.ceiling_place import SCOPE_CPU_WEIGHT
from laya.gateway.listening import OPEN_FILES_LIMIT
from laya.memory.machine import MAX_SHARE
from laya.types import MIB

SYSTEM_USER = "laya"
SYSTEM_HOME = Path("/var/lib/laya")
GATEWAY_BYTES = 512 * MIB  # Laya itself, beside its engines
ENGINES_STOP_S = 30  # after the last answers
GPU_GROUPS = ("render", "video")
_HEAD = "# Laya under systemd. Made by `laya service show`; your own changes belong into `systemctl"


class ServiceUnit(msgspec.Struct, frozen=True, kw_only=True):
    """What differs from machine to machine; the defaults are those of a package for many of them."""

    is_user: bool = False
    program: tuple[str, ...] = ("/usr/local/bin/laya",)
    config_file: Path | None = None
    run_as: str | None = SYSTEM_USER
    laya_home: Path | None = SYSTEM_HOME
    memory_max: str = f"{MAX_SHARE:.0%}"
    drain_timeout_s: float = ServerConfig().drain_timeout_s
    groups: tuple[str, ...] = GPU_GROUPS
    modprobe: bool = False  # NVIDIA's helper is there: it makes the device files that a card needs


def memory_max(config: Config) -> str:
    """MemoryMax= for this config.

    A budget given in bytes must be reachable below it, and Laya itself stand beside the engines; a share of what is
    available (the default) is bounded by what no setting may pass.
    """
    budget = parse_budget(config.memory.budget)
    if isinstance(budget, float):
        return f"{MAX_SHARE:.0%}"
    return f"{-(-int(budget / MAX_SHARE + GATEWAY_BYTES) // MIB)}M"


def gpu_groups() -> tuple[str, ...]:
    """Groups of this machine whose members may use graphics cards; systemd refuses one that is not there."""
    known = []
    for name in GPU_GROUPS:
        with suppress(KeyError):
            known.append(grp.getgrnam(name).gr_name)
    return tuple(known)


def unit_text(unit: ServiceUnit | None) -> str:
    """The unit file; what the first line of every one begins with for None."""
    if unit is None:
        return _HEAD
    sections = [
        f"{_HEAD}{' --user' if unit.is_user else ''} edit laya`.\n",
        "[Unit]",
        "Description=Laya, language models on this machine",
        "After=network.target",
        "",
        "[Service]",
        *_start(unit),
        "",
        *_limits(unit),
        "",
        *_hardening(unit),
        "",
        "[Install]",
        f"WantedBy={'default.target' if unit.is_user else 'multi-user.target'}",
    ]
    return "\n".join(sections) + "\n"


def _start(unit: ServiceUnit) -> list[str]:
    owns_state = unit.laya_home == SYSTEM_HOME and not unit.is_user
    words = [*unit.program, "serve", *(["--config", str(unit.config_file)] if unit.config_file else [])]
    lines = ["Type=exec"]
    if unit.run_as is not None:
        lines.append(f"User={unit.run_as}")
    if unit.groups:
        lines += ["# who may use graphics cards", f"SupplementaryGroups={' '.join(unit.groups)}"]
    if owns_state:
        lines += ["StateDirectory=laya", "StateDirectoryMode=0750"]
    if unit.laya_home is not None:
        lines.append(f"Environment={_word(f'LAYA_HOME={unit.laya_home}')}")
    reader, folder = ("you", "%E") if unit.is_user else ("root", "/etc")
    lines += [
        f"# for ${{env.NAME}} in config.yaml; readable by {reader} only",
        f"EnvironmentFile=-{folder}/laya/environment",
    ]
    if unit.modprobe:
        lines += ["# makes the card's device files, which a program without privileges can't", _MODPROBE]
    return [
        *lines,
        f"WorkingDirectory={SYSTEM_HOME if owns_state else '%h' if unit.is_user else '~'}",
        f"ExecStart={' '.join(map(_word, words))}",
        "ExecReload=/bin/kill -HUP $MAINPID",
        "# what is wrong in the config, or does not fit, is not mended by another start",
        "Restart=on-failure",
        "RestartSec=5",
        "RestartPreventExitStatus=2 3",
        "# answers that are on their way may finish; engines are stopped by Laya",
        "KillMode=mixed",
        f"TimeoutStopSec={math.ceil(unit.drain_timeout_s) + ENGINES_STOP_S}",
    ]


_MODPROBE = "ExecStartPre=-+/usr/bin/nvidia-modprobe -u -c=0"


def _limits(unit: ServiceUnit) -> list[str]:
    lines = [
        "# Laya gives each engine a group with a hard limit of its own inside this one",
        "Delegate=yes",
        "# and this is the wall around all of them: the rest is for the kernel and the desktop",
        f"MemoryMax={unit.memory_max}",
        "# an engine that swaps freezes the machine: it is stopped instead",
        "MemorySwapMax=0",
        "# an engine that dies at its limit does not end the service",
        "OOMPolicy=continue",
    ]
    if not unit.is_user:
        lines += [
            "# the kernel takes an engine first (theirs is 500), the gateway late",
            "OOMScoreAdjust=-100",
        ]
    return [
        *lines,
        "# of 100: what you work with comes first",
        f"CPUWeight={SCOPE_CPU_WEIGHT}",
        f"LimitNOFILE={OPEN_FILES_LIMIT}",
        "# a dump of an engine would write all of its memory to the disk",
        "LimitCORE=0",
    ]


def _hardening(unit: ServiceUnit) -> list[str]:
    """What neither a graphics card nor a folder of models misses.

    Left out on purpose: PrivateDevices and ProtectClock (they hide the cards), MemoryDenyWriteExecute (drivers compile
    at run time), ProtectHome (models lie there), ProtectControlGroups (the guard writes there), ProcSubset=pid (the
    guard reads meminfo).
    """
    lines = [
        "NoNewPrivileges=yes",
        "LockPersonality=yes",
        "RestrictRealtime=yes",
        "RestrictSUIDSGID=yes",
        "RestrictNamespaces=yes",
        "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
        "SystemCallArchitectures=native",
        "UMask=0077",
    ]
    if unit.is_user:
        return lines
    return [
        *lines,
        "CapabilityBoundingSet=",
        "ProtectSystem=full",
        "PrivateTmp=yes",
        "ProtectKernelTunables=yes",
        "ProtectKernelModules=yes",
        "ProtectKernelLogs=yes",
        "ProtectHostname=yes",
    ]


def _word(text: str) -> str:
    """One word of a command or assignment, as systemd reads it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if any(char.isspace() or char in "\"'\\;" for char in text) else escaped


if __name__ == "__main__":
    print(unit_text(ServiceUnit()), end="")
