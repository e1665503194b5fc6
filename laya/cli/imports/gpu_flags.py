"""Owns: where llama-server's flags put layers, experts and cards, as Laya's settings have it. Knows no file's form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

ALL = 99  # so many layers or more are "all that there are" to everybody who writes it
MOST_LAYERS = 200  # looked at for which of them a pattern names
_EXPERTS = ("ffn_up_exps", "ffn_gate_exps", "ffn_down_exps")
_OTHERS = ("attn_q", "attn_output", "ffn_gate_inp", "ffn_norm", "ffn_up_shexp")


def layers_of(value: str) -> str | None:
    """What gpu_layers is for -ngl; None: as many as fit, which is what all that there are comes to."""
    is_all = value.lower() in ("all", "auto", "-1") or (value.isdigit() and int(value) >= ALL)
    return None if is_all else value


def experts_of(override: str) -> int | str | None:
    """How many layers keep their experts in RAM by an --override-tensor; None: it says something else."""
    pattern, _, place = override.rpartition("=")
    try:
        names = re.compile(pattern)
    except re.error:
        return None
    if place.upper() != "CPU" or "," in pattern:
        return None
    kept = [all(names.search(f"blk.{n}.{part}.weight") for part in _EXPERTS) for n in range(MOST_LAYERS)]
    others = any(names.search(f"blk.{n}.{part}.weight") for part in _OTHERS for n in range(MOST_LAYERS))
    n_layers = sum(kept)
    if others or not n_layers or not all(kept[:n_layers]):
        return None
    return "all" if n_layers == MOST_LAYERS else n_layers


def gpus_of(devices: Sequence[str]) -> list[int] | None:
    """The numbers of `CUDA0`, `1`; None where one is something else."""
    found = [re.fullmatch(r"(?:CUDA)?(\d+)", each.strip(), re.IGNORECASE) for each in devices]
    return [int(each[1]) for each in found if each] if found and all(found) else None


def placed(flags: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings for flags of places by their long names, and what of them is not taken over, with the reason."""
    made: dict[str, Any] = {}
    left: dict[str, str] = {}
    mode = flags.get("--split-mode", "layer")
    devices = flags.get("--device")
    if devices is not None:
        gpus = gpus_of(devices.split(","))
        if devices.lower() == "none":
            made["gpu_layers"] = 0
        elif gpus is None:
            left["--device"] = "gpus takes numbers of NVIDIA's cards"
        else:
            made["gpus"] = gpus
    if "--main-gpu" in flags:
        gpus = gpus_of([flags["--main-gpu"]])
        if mode == "none" and gpus is not None:
            made["gpus"] = gpus
        else:
            left["--main-gpu"] = "gpus names the cards that share the layers"
    elif mode == "none":
        made.setdefault("gpus", [0])
    if mode not in ("layer", "none"):
        left["--split-mode"] = "each card gets whole layers here: tensor_split"
    if "--override-tensor" in flags:
        kept = experts_of(flags["--override-tensor"])
        if kept is None:
            left["--override-tensor"] = "experts_on_cpu keeps the experts of the first layers in RAM"
        else:
            made["experts_on_cpu"] = kept
    return made, left
