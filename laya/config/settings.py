"""Owns: the settings that every model has, their types, bounds and one-line meanings. Knows no file and no message.

They may stand at the top level of config.yaml, where they are the default of every model, or in a model's entry, where
they win; `UNSET` means: not said here, so the next level up decides.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from laya.config.model_limits import ModelLimits
from laya.config.values import Count, Duration, Seconds
from laya.types import RoutePolicy, Task

KV_CACHE_DTYPES = ("auto", "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
VLLM_KV_CACHE_DTYPES = ("bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
Auto = Literal["auto"]
EngineName = Literal["llamacpp", "vllm", "command", "remote"]
Limit = Annotated[int, Meta(extra={"unit": "limit"}, extra_json_schema={"x-unit": "limit"})]
CacheSize = Annotated[int, Meta(ge=0, extra={"unit": "cache"}, extra_json_schema={"x-unit": "cache"})]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class SamplingDefaults(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling values for requests that do not say; the names are those of the request body."""

    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | UnsetType, Meta(description="Randomness; 0 = the likeliest token.")
    ] = UNSET
    top_p: Annotated[Share | UnsetType, Meta(description="Likeliest tokens up to this probability; 1 = all.")] = UNSET
    top_k: Annotated[
        Annotated[int, Meta(ge=0)] | UnsetType, Meta(description="Only the k likeliest tokens; 0 = all.")
    ] = UNSET
    min_p: Annotated[
        Share | UnsetType, Meta(description="Only tokens with this share of the likeliest one's probability; 0 = all.")
    ] = UNSET
    typical_p: Annotated[Share | UnsetType, Meta(description="Locally typical sampling; 1 = off.")] = UNSET
    seed: Annotated[int | UnsetType, Meta(description="Seed of the random numbers; -1 = a new one each time.")] = UNSET
    stop: Annotated[str | list[str] | UnsetType, Meta(description="Texts that end the answer.")] = UNSET
    max_tokens: Annotated[Count | UnsetType, Meta(description="Most tokens of an answer.")] = UNSET
    presence_penalty: Annotated[Penalty | UnsetType, Meta(description="Penalty of tokens that came before.")] = UNSET
    frequency_penalty: Annotated[
        Penalty | UnsetType, Meta(description="Penalty of tokens, times how often they came before.")
    ] = UNSET
    repeat_penalty: Annotated[
        Annotated[float, Meta(gt=0)] | UnsetType, Meta(description="llama.cpp's penalty of repeats; 1 = none.")
    ] = UNSET
    repeat_last_n: Annotated[
        Annotated[int, Meta(ge=-1)] | UnsetType,
        Meta(description="Tokens that repeat_penalty looks back; -1 = the whole context."),
    ] = UNSET


class ModelSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of a model."""

    engine: Annotated[
        EngineName | UnsetType,
        Meta(
            description="What runs the model: llama.cpp or vllm; under `models` also a program (command) or a server "
            "(remote)."
        ),
    ] = UNSET
    engine_path: Annotated[
        str | UnsetType | None,
        Meta(
            description="Your own llama-server instead of the one that comes with Laya; engine: vllm: the folder of "
            "the environment that vLLM is installed in."
        ),
    ] = UNSET
    task: Annotated[
        Task | UnsetType,
        Meta(description="What the model is for; an engine is loaded for one task only."),
    ] = UNSET
    max_seq_len: Annotated[
        # Below this a chat template alone fills the window, and llama.cpp asserts instead of answering.
        Annotated[int, Meta(ge=16)] | Auto | UnsetType,
        Meta(description="Tokens of one sequence, prompt and answer together; auto = what fits, at most 32768."),
    ] = UNSET
    max_num_seqs: Annotated[
        Annotated[int, Meta(ge=1, le=256)] | Auto | UnsetType,
        Meta(description="Sequences computed at once; each one holds its own KV cache."),
    ] = UNSET
    kv_cache_dtype: Annotated[
        str | UnsetType,
        Meta(
            description="Type of the KV cache: auto, f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl; vllm: fp8.",
            extra_json_schema={"enum": [*KV_CACHE_DTYPES, *VLLM_KV_CACHE_DTYPES]},
        ),
    ] = UNSET
    kv_pool_tokens: Annotated[
        Count | Auto | UnsetType | None,
        Meta(description="Tokens all sequences share; null = max_seq_len for each; auto = one long and many short."),
    ] = UNSET
    prompt_cache: Annotated[
        CacheSize | Auto | UnsetType,
        Meta(description="RAM for conversations that wait, such as 256MiB; auto = as many as sequences; 0 = none."),
    ] = UNSET
    default_max_tokens: Annotated[
        Count | UnsetType,
        Meta(description="Ceiling of an answer whose request has no max_tokens, where a pool is shared."),
    ] = UNSET
    enable_streaming: Annotated[
        bool | UnsetType,
        Meta(description="true: stream when the request asks for it; false: always answer whole."),
    ] = UNSET
    quantization: Annotated[
        str | UnsetType | None,
        Meta(
            description="Which variant at hand: auto = the best that fits; none = 16 bits; q4_k_m, ...; vllm: awq, "
            "...; null = as named."
        ),
    ] = UNSET
    memory_limit: Annotated[
        Limit | UnsetType | None,
        Meta(description="Most RAM the model may take, such as 6GiB: its plan and its engine's ceiling stay below it."),
    ] = UNSET
    n_threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | Auto | UnsetType,
        Meta(description="CPU threads of the engine; auto = the cores, shared out among engines that may run at once."),
    ] = UNSET
    gpu_layers: Annotated[
        Annotated[int, Meta(ge=0)] | Literal["auto", "all"] | UnsetType,
        Meta(description="Layers on GPUs, the output as one more; auto = as many as fit; needs an engine for GPUs."),
    ] = UNSET
    experts_on_cpu: Annotated[
        Annotated[int, Meta(ge=0)] | Literal["auto", "all"] | UnsetType,
        Meta(description="Layers, from the first, whose experts stay in RAM; auto = as few as the GPUs need."),
    ] = UNSET
    gpus: Annotated[
        list[Annotated[int, Meta(ge=0)]] | UnsetType,
        Meta(description="GPUs that share the layers, by nvidia-smi's numbers; empty = as few of all as hold them."),
    ] = UNSET
    tensor_split: Annotated[
        list[Annotated[float, Meta(ge=0)]] | UnsetType,
        Meta(description="Share of the layers on each of gpus, such as [3, 1]; empty = as their memory allows."),
    ] = UNSET
    replicas: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | UnsetType,
        Meta(description="Engines that run this model side by side; requests name the model, never one of them."),
    ] = UNSET
    policy: Annotated[
        RoutePolicy | UnsetType,
        Meta(description="How one of the model's engines is chosen; auto = session, prompt, then load."),
    ] = UNSET
    weight: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | UnsetType,
        Meta(description="Share of each of the model's engines in a pool, where policy is weighted; 0 = none."),
    ] = UNSET
    mmap: Annotated[
        bool | UnsetType,
        Meta(description="Map the weights from the file instead of copying them into memory."),
    ] = UNSET
    mmproj: Annotated[
        str | UnsetType | None,
        Meta(description="File of the projector that lets the model see images."),
    ] = UNSET
    draft: Annotated[
        str | UnsetType | None,
        Meta(description="File of a small draft model for speculative decoding."),
    ] = UNSET
    lora: Annotated[
        list[str] | UnsetType,
        Meta(description="Files of LoRA adapters to apply."),
    ] = UNSET
    chat_template: Annotated[
        str | UnsetType | None,
        Meta(description="Jinja template, or the file that holds it, instead of the one in the model."),
    ] = UNSET
    ttl: Annotated[
        Duration | UnsetType | None,
        Meta(description="Unload after this time without a request: seconds, or 5m, 1h; -1 or null = never."),
    ] = UNSET
    pinned: Annotated[
        bool | UnsetType,
        Meta(description="Never unload to make room for another model."),
    ] = UNSET
    preload: Annotated[
        bool | UnsetType,
        Meta(description="Load when the server starts instead of at the first request."),
    ] = UNSET
    overflow: Annotated[
        Literal["refuse", "trim"] | UnsetType,
        Meta(description="A chat longer than max_seq_len: refuse it, or trim its oldest turns (the answer says so)."),
    ] = UNSET
    queue_size: Annotated[
        Annotated[int, Meta(ge=0)] | UnsetType,
        Meta(description="Requests that may wait for a free sequence; the next one gets 429."),
    ] = UNSET
    queue_timeout_s: Annotated[
        Seconds | UnsetType,
        Meta(description="Seconds a request may wait for a free sequence before it gets 503."),
    ] = UNSET
    limits: Annotated[
        ModelLimits | UnsetType,
        Meta(description="Most that all keys together may use of the model; what asks for more gets 429."),
    ] = UNSET
    load_timeout_s: Annotated[
        Seconds | UnsetType,
        Meta(description="Seconds an engine may take from its start to its first token."),
    ] = UNSET
    progress_timeout_s: Annotated[
        Annotated[float, Meta(ge=1)] | UnsetType,
        Meta(description="Seconds an engine may give requests nothing until it is started anew; not llama.cpp: 600."),
    ] = UNSET
    args: Annotated[
        dict[str, Any] | UnsetType,
        Meta(description="More arguments for the engine, by its own names; one that fights the plan is refused."),
    ] = UNSET
    defaults: Annotated[
        SamplingDefaults | UnsetType,
        Meta(description="Sampling values for requests that do not say, such as temperature or top_p."),
    ] = UNSET
