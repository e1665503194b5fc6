"""Owns: what one generated token makes each device read, the least that it takes its time for. Pure.

Each weight of a dense layer is read once, of experts those that the token is sent to, and of the cache what is kept.
How fast a device reads is not known here.
"""

from __future__ import annotations

from laya.memory.load import Load
from laya.memory.placement import CPU, group_device
from laya.memory.speed import TYPICAL_TOKENS, kv_element_bytes, tokens_seen
from laya.memory.weights import INPUT_LAYER


def bytes_per_token(load: Load, kept_tokens: int = TYPICAL_TOKENS) -> dict[str, int]:
    """Device -> bytes that one sequence with so many tokens of context reads for its next one."""
    facts, devices = load.facts, load.layer_devices
    shape, kept = facts.shape, min(kept_tokens, load.settings.max_seq_len)
    used_share = min(1.0, shape.n_expert_used / shape.n_expert) if shape.n_expert else 1.0
    read: dict[str, float] = dict.fromkeys((CPU, *load.gpus), 0.0)
    for group in facts.groups:
        if group.layer != INPUT_LAYER:
            share = used_share if group.is_expert else 1.0
            read[group_device(group, devices, load.settings.experts_on_cpu)] += share * group.n_bytes
    if facts.tied_output is not None:
        read[devices[-1]] += facts.tied_output[1]
    each = kv_element_bytes(load.settings)
    for layer, device in zip(shape.layers, devices, strict=False):
        read[device] += (layer.k + layer.v) * tokens_seen(layer, kept) * each + 4 * (layer.conv + layer.state)
    return {device: round(n_bytes) for device, n_bytes in read.items() if n_bytes}
