"""Owns: which engine arguments a user may set under `args`, and the sentence for each one that may not be set.

An argument that decides memory, threads, the address or what the model is would make the plan a lie: it is refused by
name, with the key of Laya that does it. The names are those of llama.cpp's parameters as the `xllamacpp` wheel has
them (`n_ctx`, `sampling.top_k`); the spellings of llama-server's flags are known here only to be refused in the same
words. A test holds the table against the wheel, so it cannot drift.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from laya.config import ModelSettings
from laya.errors import ConfigError, nearest

BOOLS = """cache_prompt check_tensors cont_batching cors_credentials cpuparams.strict_cpu cpuparams_batch.strict_cpu
ctx_shift enable_chat_template endpoint_metrics escape force_pure_content_parser log_json lora_init_without_apply
no_extra_bufts no_host no_op_offload no_perf prefill_assistant
sampling.backend_sampling sampling.ignore_eos sampling.no_perf sampling.reasoning_control
sampling.timing_per_token special speculative.draft.backend_sampling speculative.draft.probabilistic use_jinja
warmup"""
INTS = """cpuparams.poll cpuparams_batch.poll embd_normalize enable_reasoning image_max_tokens image_min_tokens
mtmd_batch_max_tokens n_cache_reuse n_keep n_predict n_threads_http sampling.dry_allowed_length
sampling.dry_penalty_last_n sampling.min_keep sampling.mirostat sampling.n_prev sampling.n_probs
sampling.penalty_last_n sampling.reasoning_budget_tokens sampling.seed sampling.top_k
speculative.draft.n_max speculative.draft.n_min speculative.ngram_map_k.min_hits
speculative.ngram_map_k.size_m speculative.ngram_map_k.size_n speculative.ngram_mod.n_match
speculative.ngram_mod.n_max speculative.ngram_mod.n_min speculative.ngram_simple.size_m
speculative.ngram_simple.size_n sse_ping_interval timeout_read timeout_write verbosity
video_timestamp_interval_ms yarn_orig_ctx"""
FLOATS = """rope_freq_base rope_freq_scale sampling.adaptive_decay sampling.adaptive_target sampling.dry_base
sampling.dry_multiplier sampling.dynatemp_exponent sampling.dynatemp_range sampling.min_p sampling.mirostat_eta
sampling.mirostat_tau sampling.penalty_freq sampling.penalty_present sampling.penalty_repeat sampling.temp
sampling.top_p sampling.typ_p sampling.xtc_probability sampling.xtc_threshold slot_prompt_similarity
speculative.draft.p_min speculative.draft.p_split video_fps yarn_attn_factor yarn_beta_fast yarn_beta_slow
yarn_ext_factor"""
STRINGS = """cors_headers cors_methods cors_origins media_path path_prompts_log_dir
sampling.reasoning_budget_message sampling.samplers slot_save_path"""
# Enum arguments take the last word of the member's name, in lower case: `pooling_type: mean`.
ENUMS = "attention_type lazy_mode numa pooling_type reasoning_format rope_scaling_type"
LISTS = "speculative.types"
MAPPINGS = "default_template_kwargs"

KINDS: dict[str, tuple[type, ...]] = {
    name: kinds
    for names, kinds in (
        (BOOLS, (bool,)),
        (INTS, (int,)),
        (FLOATS, (float, int)),
        (STRINGS, (str,)),
        (ENUMS, (str,)),
        (LISTS, (list,)),
        (MAPPINGS, (dict,)),
    )
    for name in names.split()
}
BY_LEAF = {name.rpartition(".")[2]: name for name in reversed(KINDS)}  # top_k -> sampling.top_k
WORDS: dict[tuple[type, ...], str] = {
    (bool,): "true or false",
    (int,): "a whole number",
    (float, int): "a number",
    (str,): "a word or text",
    (list,): "a list",
    (dict,): "a mapping",
}

_LISTENS = "the engine listens on loopback for Laya alone; set the port and the keys of Laya itself"
_MEMORY = "memory is planned before the load; set memory.budget"
_CHECKPOINTS = "the plan decides the engine's checkpoints"
_BATCH = "the plan decides it, so that a client that leaves frees its slot at once"
_ADMIN = "Laya reads it to see the slots"
_UNCOUNTED = "the plan does not count the memory it takes"
_MODELS = "one engine serves one model; put the others under models:"

# Advice -> every spelling it answers, dashes as underscores. Advice that is a bare key reads "use <key>".
_REFUSED: dict[str, str] = {
    "use max_seq_len": "n_ctx ctx_size c yarn_ctx max_model_len num_ctx context_length",
    "use max_num_seqs": "n_parallel parallel np n_sequences",
    "use kv_cache_dtype": "cache_type_k cache_type_v ctk ctv speculative.draft.cache_type_k"
    " speculative.draft.cache_type_v cache_type_k_draft cache_type_v_draft ctkd ctvd",
    "use kv_pool_tokens": "kv_unified kv_unified_per_slot kvu no_kv_unified",
    "use n_threads": "threads t threads_batch tb cpuparams.n_threads cpuparams_batch.n_threads"
    " speculative.draft.cpuparams.n_threads speculative.draft.cpuparams_batch.n_threads threads_draft td",
    "use gpu_layers": "n_gpu_layers ngl speculative.draft.n_gpu_layers gpu_layers_draft ngld",
    "use experts_on_cpu": "n_cpu_moe cpu_moe ncmoe cmoe tensor_buft_overrides override_tensor ot"
    " speculative.draft.tensor_buft_overrides",
    "use gpus": "main_gpu mg device dev mmproj_device mmproj_use_gpu mmproj_offload no_mmproj_offload"
    " speculative.draft.devices device_draft devd",
    "use tensor_split": "ts",
    "the plan counts whole layers on each GPU": "split_mode sm no_kv_offload nkvo",
    "use mmap": "load_mode lm no_mmap mlock use_mmap use_mlock",
    "use task": "embedding embeddings rerank reranking",
    "use mmproj": "mmproj.path mm mmproj_url mmproj.url mmproj.hf_repo no_mmproj mmproj_auto",
    "use draft": "model_draft md speculative.draft.mparams.path load_mtp mtp hf_repo_draft",
    "use lora": "lora_adapters lora_scaled",
    "use chat_template": "chat_template_file",
    "use ttl": "sleep_idle_seconds",
    "name it under models:": "model_alias alias a model model.path m model.hf_repo model.url model_url hf_repo"
    " hf hf_file",
    _MODELS: "models_dir models_max models_preset models_preset_hf models_autoload",
    _LISTENS: "port host hostnames api_key api_keys api_key_file reuse_port ssl_file_cert ssl_file_key ssl_cert_file"
    " ssl_key_file api_prefix server_base ui webui no_webui no_ui",
    _MEMORY: "fit fit_params fit_params_target fit_params_min_ctx fit_target fit_ctx",
    "use prompt_cache": "cache_ram_mib cache_ram cram cache_idle_slots",
    _CHECKPOINTS: "n_ctx_checkpoints ctx_checkpoints ctxcp swa_checkpoints checkpoint_min_step",
    _BATCH: "n_batch batch_size b n_ubatch ubatch_size ub",
    _ADMIN: "endpoint_slots endpoint_props slots no_slots props",
    _UNCOUNTED: "swa_full moe_cache_size moe_cache_mib flash_attn_type flash_attn fa n_outputs_max control_vector"
    " no_alloc grp_attn_n grp_attn_w",
    "engines run behind the gateway": "cpuparams.priority cpuparams_batch.priority prio prio_batch",
    "Laya keeps the log: `laya logs`": "log_file log_disable log_jsonl",
}
REFUSED: dict[str, str] = {name: advice for advice, names in _REFUSED.items() for name in names.split()}
# A key of the model itself, put one level too deep.
LAYA_KEYS = frozenset(ModelSettings.__struct_fields__)


def check_args(args: Mapping[str, Any], *, where: str, has_draft: bool, native_flags: bool = False) -> dict[str, Any]:
    """`args` with nested mappings as dotted names. ConfigError names the first that is wrong, inside `where`.

    native_flags: the engine is the user's own llama-server; its flags pass as they are, except those that fight.
    """
    flat = dict(flatten(args))
    for name, value in flat.items():
        spelling = name.lstrip("-").replace("-", "_")
        if spelling in LAYA_KEYS:
            raise ConfigError(f"{where}.{name}: this is a key of the model itself; move it one level up", param=name)
        if advice := REFUSED.get(spelling):
            raise ConfigError(f"{where}.{name} fights the plan: {advice}", param=name)
        if not native_flags:
            check_kind(name, value, where)
    if not has_draft and any(str(kind).startswith("draft") for kind in flat.get("speculative.types", [])):
        raise ConfigError(f"{where}.speculative.types asks for a draft model: use draft", param="speculative.types")
    return flat


def check_kind(name: str, value: Any, where: str) -> None:
    kinds = KINDS.get(name)
    if kinds is None:
        close = BY_LEAF.get(name.rpartition(".")[2]) or nearest(name, KINDS)
        hint = f"; did you mean {close}?" if close else ""
        raise ConfigError(f"{where}.{name}: the engine has no such argument{hint}", param=name, nearest=close)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ConfigError(f"{where}.{name} must be {WORDS[kinds]}, not {value!r}", param=name)


def flatten(args: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in args.items():
        if isinstance(value, Mapping) and prefix + name not in KINDS:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
