"""Owns: the keys of a model that vLLM runs (`engine: vllm`), and what they come to. Knows no process and no plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from laya.config.remote import RemoteKeys

# Checkpoints in these forms are run as they are; what others need is asked of vLLM by `args`.
VLLM_QUANTIZATIONS = ("awq", "gptq", "compressed-tensors", "fp8", "bitsandbytes", "modelopt", "mxfp4", "auto-round")
# Settings that are llama.cpp's alone, and what vLLM has in their place.
INSTEAD = {
    "kv_pool_tokens": "vLLM's sequences share one pool; max_num_seqs and max_seq_len say how large it is",
    "prompt_cache": "vLLM keeps old prompts in its KV cache",
    "gpu_layers": "vLLM has all layers on GPUs; tensor_parallel_size and pipeline_parallel_size share them out",
    "experts_on_cpu": "vLLM has all experts on GPUs; enable_expert_parallel: true shares them out",
    "tensor_split": "vLLM shares out evenly, by tensor_parallel_size",
    "mmap": "vLLM has args: {safetensors-load-strategy: eager}",
    "mmproj": "vLLM finds it in the model's folder",
    "draft": "vLLM has args: {speculative-config: {...}}",
    "lora": "vLLM has args: {enable-lora: true, lora-modules: [NAME=FOLDER]}",
}


def not_vllms(settings: Mapping[str, Any]) -> str | None:
    """The first of these settings that vLLM cannot honour; None: it can, or their values are what it does anyway."""
    for name in INSTEAD:
        value = settings.get(name)
        if value is False if name == "mmap" else value not in (msgspec.UNSET, None, 0, "auto", [], ()):
            return name
    return None


_Side = Annotated[int, Meta(ge=1, le=1024)]


class VllmKeys(RemoteKeys, kw_only=True, forbid_unknown_fields=True):
    """What only vLLM needs."""

    tensor_parallel_size: Annotated[
        _Side, Meta(description="engine: vllm: GPUs that share each layer; it must divide the attention heads.")
    ] = 1
    pipeline_parallel_size: Annotated[
        _Side, Meta(description="engine: vllm: groups of GPUs, each with a part of the layers.")
    ] = 1
    enable_expert_parallel: Annotated[
        bool, Meta(description="engine: vllm: true: whole experts on each GPU, instead of a part of each expert.")
    ] = False
    gpu_memory_utilization: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="engine: vllm: most of each GPU it may take; its plan stays below it. null = what is free."),
    ] = None
    max_num_batched_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 20)] | None,
        Meta(description="engine: vllm: tokens computed in one step; null = 8192 on a GPU, 2048 on a CPU."),
    ] = None
    enforce_eager: Annotated[
        bool, Meta(description="engine: vllm: true: no compilation and no CUDA graphs; it starts sooner.")
    ] = False


VLLM_KEYS = tuple(name for name in VllmKeys.__struct_fields__ if name not in RemoteKeys.__struct_fields__)


class Vllm(msgspec.Struct, frozen=True, kw_only=True):
    """How vLLM runs a model, every key decided."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    gpu_memory_utilization: float | None = None  # None: all that is free
    max_num_batched_tokens: int | None = None
    enforce_eager: bool = False

    @property
    def n_workers(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


def read_vllm(keys: VllmKeys) -> Vllm:
    return Vllm(**{name: getattr(keys, name) for name in VLLM_KEYS})
