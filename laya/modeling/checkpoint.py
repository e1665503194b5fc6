"""Owns: how routers lie in the checkpoints of model families: tensor names and the rule that their config.json tells.

Reads headers and a router's own tensors, never the experts. Conventions: transformers' modeling files of each family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from laya.modeling.router import LayaRouter
from laya.modeling.rule import GateRule

Config = dict[str, Any]


class Family(NamedTuple):
    """`part`: of a router's tensors, what stands after `layers.N.`, to the name of LayaRouter's own tensor."""

    parts: dict[str, str]
    rule: Callable[[Config], GateRule]


def _experts(config: Config) -> int:
    for key in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        if key in config:
            return int(config[key])
    raise ValueError("config.json names no number of experts (num_local_experts, num_experts or n_routed_experts)")


def _top_k(config: Config) -> int:
    for key in ("num_experts_per_tok", "experts_per_token", "moe_k", "moe_topk", "top_k_experts"):
        if key in config:
            return int(config[key])
    raise ValueError("config.json does not say how many experts a token gets (num_experts_per_tok)")


def _softmax(renormalize: bool | None = None) -> Callable[[Config], GateRule]:
    """renormalize: what the family always does; None where its config says."""

    def rule(config: Config) -> GateRule:
        return GateRule(
            n_experts=_experts(config),
            top_k=_top_k(config),
            renormalize=bool(config.get("norm_topk_prob", False)) if renormalize is None else renormalize,
            jitter=float(config.get("router_jitter_noise") or 0.0),
        )

    return rule


def _deepseek_v3(config: Config) -> GateRule:
    return GateRule(
        n_experts=_experts(config),
        top_k=_top_k(config),
        score_func="sigmoid",
        renormalize=bool(config.get("norm_topk_prob", True)),
        renorm_eps=1e-20,
        routed_scaling_factor=float(config.get("routed_scaling_factor", 1.0)),
        n_group=int(config.get("n_group", 1)),
        topk_group=int(config.get("topk_group", 1)),
        group_score="sum_top2",
    )


def _gpt_oss(config: Config) -> GateRule:
    return GateRule(n_experts=_experts(config), top_k=_top_k(config), score_scope="topk", renormalize=False)


def _laya(config: Config) -> GateRule:
    return GateRule(**(config["router_rule"] | {"n_experts": _experts(config), "top_k": _top_k(config)}))


_GATE = {"mlp.gate.weight": "weight"}
_MIXTRAL = {"block_sparse_moe.gate.weight": "weight", "mlp.gate.weight": "weight"}
_V3 = _GATE | {"mlp.gate.e_score_correction_bias": "choice_bias"}
_GPT_OSS = {"mlp.router.weight": "weight", "mlp.router.bias": "logit_bias"}
_LAYA = {
    f"mlp.gate.{name}": name
    for name in ("weight", "projection", "expert_embeddings", "logit_bias", "choice_bias", "expert_scale")
}
FAMILIES = {
    "mixtral": Family(_MIXTRAL, _softmax(renormalize=True)),
    "qwen2_moe": Family(_GATE, _softmax()),
    "qwen3_moe": Family(_GATE, _softmax()),
    "olmoe": Family(_GATE, _softmax()),
    "deepseek_v3": Family(_V3, _deepseek_v3),
    "kimi_k2": Family(_V3, _deepseek_v3),
    "glm4_moe": Family(_V3, _deepseek_v3),
    "gpt_oss": Family(_GPT_OSS, _gpt_oss),
    "laya": Family(_LAYA, _laya),
}
_LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)\.(.+)$")


def load_router(path: str | Path, *, layer: int | None = None) -> LayaRouter:
    """See `LayaRouter.from_pretrained`."""
    files = list(_files(Path(path)))
    config = _config(files[0].parent)
    family = _family(config)
    with ExitStack() as stack:
        opened = [stack.enter_context(_opened(file)) for file in files]
        found: dict[int, dict[str, tuple[Any, str]]] = {}
        for file in opened:
            for name in list(file.keys()):  # a safetensors file is no mapping
                matched = _LAYER.match(name)
                if matched is not None and matched[2] in family.parts:
                    found.setdefault(int(matched[1]), {})[family.parts[matched[2]]] = (file, name)
        if not found:
            raise ValueError(f"{path} has no expert router: none of {', '.join(family.parts)} in any layer")
        chosen = min(found) if layer is None else layer
        if chosen not in found:
            raise ValueError(f"layer {chosen} of {path} has no expert router; layers with one: {_ranges(found)}")
        tensors = {part: file.get_tensor(name) for part, (file, name) in found[chosen].items()}
    return _router(tensors, family.rule(config))


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is no whole safetensors file: {error}") from None


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    index = path / "model.safetensors.index.json"
    if index.is_file():
        yield from (path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values())))
        return
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{path} is no safetensors file and no folder with one")
    yield from files


def _config(folder: Path) -> Config:
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: it says which router this is")
    config: Config = json.loads(file.read_text())
    text: Config = config.get("text_config") or {}
    return config | text if "num_hidden_layers" in text else config


def _family(config: Config) -> Family:
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type is '{kind}'; routers are known of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[kind]


def _router(tensors: dict[str, Tensor], rule: GateRule) -> LayaRouter:
    matrix = tensors.get("weight", tensors.get("projection"))
    if matrix is None:
        raise ValueError(f"the router's matrix is missing; there is only {', '.join(tensors)}")
    projection = tensors.get("projection")
    router = LayaRouter(
        matrix.shape[1],
        rule,
        projection_size=None if projection is None else projection.shape[0],
        has_logit_bias="logit_bias" in tensors,
        has_choice_bias="choice_bias" in tensors,
        has_expert_scale="expert_scale" in tensors,
    )
    state = {name: tensor.to(torch.float32) for name, tensor in tensors.items()}
    n_experts = next(len(state[name]) for name in ("weight", "expert_embeddings") if name in state)
    if n_experts != rule.n_experts:
        raise ValueError(f"the router has {n_experts} rows, but config.json says {rule.n_experts} experts")
    router.load_state_dict(state)
    return router.eval().requires_grad_(False)


def _ranges(numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    return f"{ordered[0]} to {ordered[-1]}" if len(ordered) == ordered[-1] - ordered[0] + 1 else str(ordered)
