"""Hugging Face models: config.json to shape, safetensors headers to weights, and faults by name."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hf_models import CONFIGS, PARAMETERS, facts_of_config, safetensors_header, table_of, write_model, write_safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from laya.bench import plan_terabyte_hf
from laya.bench.fresh_plan import plan_in_a_fresh_process
from laya.errors import BadModelFile, LayaError
from laya.memory import Budget, facts_of_hf, plan_source, plan_vllm
from laya.memory.caches import kv_by_layer, state_by_layer
from laya.memory.engine_facts import XLLAMACPP
from laya.memory.fit import fit
from laya.memory.gpu import GpuMemory
from laya.memory.load import Load, padded
from laya.memory.planner import Model
from laya.types import GIB, MIB, AskedSettings, PlannedSettings

SMALL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "hidden_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512,
    "vocab_size": 320, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
SMALL_MOE = SMALL | {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128
}  # fmt: skip


def load_of(name: str, n_ctx: int, n_seqs: int, kv_type: str, n_ubatch: int, unified: bool) -> Load:
    slot = padded(n_ctx if unified else n_ctx // n_seqs)
    planned = PlannedSettings(
        max_seq_len=slot, slot_tokens=slot, max_num_seqs=n_seqs, kv_cache_dtype=kv_type, kv_unified=unified,
        kv_pool_tokens=n_ctx, n_batch=2048, n_ubatch=n_ubatch, n_threads=1, task="chat", mmap=True,
    )  # fmt: skip
    return Load(facts=facts_of_config(name).facts, settings=planned, engine=XLLAMACPP)


# What llama.cpp's logs say of the same models: tests/memory/memory_cases.json has where each was printed.
@pytest.mark.parametrize(
    ("name", "n_ctx", "n_seqs", "kv_type", "n_ubatch", "unified", "kv_mib", "state_mib"),
    [
        ("gemma-3-270m", 8192, 1, "f16", 512, False, 39, 0),
        ("gemma-3-270m", 8192, 2, "f16", 512, False, 54, 0),
        ("gemma-3-270m", 8192, 4, "f16", 512, True, 61.5, 0),
        ("gpt-oss-20b", 131072, 1, "f16", 2048, False, 3072 + 54, 0),
        ("gemma-2-2b", 8192, 4, "f16", 512, True, 832, 0),
        ("gemma-4-12b", 8192, 4, "q8_0", 512, True, 833, 0),
        ("gemma-4-12b", 262144, 1, "q8_0", 512, False, 2176 + 255, 0),
        ("gemma-4-12b", 8192, 1, "f16", 512, False, 608, 0),
        ("qwen3-4b", 4096, 1, "f16", 512, False, 576, 0),
        ("qwen2.5-0.5b", 8192, 1, "f16", 512, False, 96, 0),
        ("qwen3.8-27b", 24576, 1, "f16", 512, False, 1536, 149.62),
        ("qwen3.8-27b", 262144, 4, "f16", 512, True, 16384, 598.5),
        ("qwen3.8-27b", 32768, 1, "q8_0", 512, False, 1088, 149.62),
    ],
)
def test_config_gives_the_cache_that_logs_show(
    name: str, n_ctx: int, n_seqs: int, kv_type: str, n_ubatch: int, unified: bool, kv_mib: float, state_mib: float
) -> None:
    load = load_of(name, n_ctx, n_seqs, kv_type, n_ubatch, unified)
    assert sum(kv_by_layer(load)) / MIB == pytest.approx(kv_mib, abs=0.51)
    assert sum(state_by_layer(load)) / MIB == pytest.approx(state_mib, abs=0.006)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("deepseek-v3", {61: {"n_head_kv": 1, "head_k": 576, "head_v": 0}}),
        ("kimi-linear-48b", {7: {"head_k": 576}, 20: {"conv": 3 * 3 * 4096, "state": 128 * 4096, "n_head_kv": 0}}),
        (
            "nemotron-h-8b",
            {4: {"n_head_kv": 8}, 24: {"conv": 3 * (8192 + 2 * 8 * 128), "state": 128 * 8192}},
        ),
        ("jamba-v0.1", {4: {"n_head_kv": 8}, 28: {"conv": 3 * 8192, "state": 16 * 8192}}),
        ("lfm2-1.2b", {6: {"n_head_kv": 8, "head_k": 64}, 10: {"conv": 2 * 2048, "state": 0}}),
        ("mamba-2.8b", {64: {"conv": 3 * 5120, "state": 16 * 5120, "n_head_kv": 0}}),
        ("rwkv7-1.5b", {24: {"conv": 2 * 2048, "state": 64 * 2048, "n_head_kv": 0}}),
        ("granite-4-tiny", {1: {"n_head_kv": 4}, 39: {"conv": 3 * (3072 + 256), "state": 128 * 3072}}),
        ("falcon-h1-0.5b", {36: {"n_head_kv": 2, "conv": 3 * (1536 + 256), "state": 128 * 1536}}),
        ("minimax-01", {10: {"n_head_kv": 8}, 70: {"state": 128 * 128 * 64, "n_head_kv": 0}}),
        ("qwen3-next-80b", {12: {"n_head_kv": 2, "head_k": 256}, 36: {"state": 128 * 4096, "n_head_kv": 0}}),
        ("llama-4-scout", {12: {"window": 0}, 36: {"window": 8192, "is_chunked": True}}),
        ("falcon-7b", {32: {"n_head_kv": 1, "head_k": 64}}),
    ],
)
def test_config_says_what_each_layer_keeps(name: str, rows: dict[int, dict[str, Any]]) -> None:
    layers = facts_of_config(name).shape.layers
    for count, figures in rows.items():
        found = [layer for layer in layers if all(getattr(layer, key) == value for key, value in figures.items())]
        assert len(found) >= count, (name, figures, set(layers))


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_computed_parameters_are_never_under_and_a_thousandth_over(name: str) -> None:
    facts = facts_of_config(name)
    assert facts.weights.is_computed
    assert PARAMETERS[name] * 0.9999 <= facts.weights.n_parameters <= PARAMETERS[name] * 1.002
    assert any("computed from config.json" in note for note in facts.notes)


def test_every_config_has_a_plan(plenty: Budget, tmp_path: Path) -> None:
    for name, figures in CONFIGS.items():
        path = tmp_path / name / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(figures))
        plan = plan_source(path, AskedSettings(max_seq_len=1024, max_num_seqs=1), plenty, model_id=name)
        assert not plan.exact
        assert plan.devices[0].terms["weights"] > 0


def test_config_and_gguf_of_one_model_need_the_same_beside_weights(
    plenty: Budget, tmp_path: Path, smollm2_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["smollm2-135m"]))
    asked = AskedSettings(max_seq_len=8192, max_num_seqs=2)
    hf = plan_source(tmp_path / "config.json", asked, plenty, model_id="hf").devices[0].terms
    gguf = plan_source(smollm2_path, asked, plenty, model_id="gguf").devices[0].terms
    same = ("kv_cache", "compute", "output")
    assert [hf[name] for name in same] == [gguf[name] for name in same]
    assert gguf["overhead"] <= hf["overhead"] <= 1.3 * gguf["overhead"]  # the vocabulary is bounded
    assert gguf["grammar"] <= hf["grammar"]


def test_unknown_model_type_is_a_named_upper_bound(plenty: Budget, tmp_path: Path) -> None:
    figures = SMALL | {"model_type": "brand_new", "sliding_window": 64, "layer_types": ["sliding_attention", "odd"] * 2}
    (tmp_path / "config.json").write_text(json.dumps(figures))
    plan = plan_source(
        tmp_path / "config.json", AskedSettings(max_seq_len=4096, max_num_seqs=1), plenty, model_id="new"
    )
    assert not plan.exact
    assert any("upper bound" in note and "brand_new" in note for note in plan.notes)
    assert any("odd" in note for note in plan.notes)
    assert plan.devices[0].terms["kv_cache"] == 4 * 4096 * 2 * 2 * 64 * 2  # every layer at full context


def test_heads_by_kind_of_layer_and_cross_attention() -> None:
    windows = {"model_type": "mimo_v2_flash", "sliding_window": 128, "hybrid_layer_pattern": [0, 1, 1, 1],
               "swa_num_key_value_heads": 4}  # fmt: skip
    layers = facts_of_config(SMALL | windows).shape.layers
    assert [(layer.n_head_kv, layer.window) for layer in layers] == [(2, 0), (4, 128), (4, 128), (4, 128)]
    crossed = facts_of_config(SMALL | {"model_type": "mllama_text_model", "cross_attention_layers": [1]}).shape.layers
    assert [bool(layer.n_cross) for layer in crossed] == [False, True, False, False]


def test_config_without_a_length_says_so() -> None:
    facts = facts_of_config({key: value for key, value in SMALL.items() if key != "max_position_embeddings"})
    assert facts.shape.n_ctx_train == 1 << 20
    assert any("no trained length" in note for note in facts.notes)


def test_folder_weights_are_exact(tmp_path: Path) -> None:
    total = write_model(tmp_path / "m", SMALL, table_of(SMALL))
    facts = facts_of_hf(tmp_path / "m")
    assert facts.facts.weights_bytes == facts.weights.total_bytes == total
    assert facts.weights.n_parameters == total // 2
    assert not facts.weights.is_computed and facts.notes == ()
    assert sum(group.n_bytes for group in facts.facts.groups) == total
    assert facts.facts.tied_output is None and facts.facts.n_ff_matrices == 3


def test_folder_of_many_files_with_experts(tmp_path: Path) -> None:
    total = write_model(tmp_path / "m", SMALL_MOE, table_of(SMALL_MOE), n_files=3)
    write_safetensors(tmp_path / "m" / "consolidated.safetensors", table_of(SMALL_MOE))  # the same weights once more
    facts = facts_of_hf(tmp_path / "m")
    assert facts.weights.total_bytes == total
    experts = 4 * 8 * 3 * 256 * 128 * 2
    assert sum(facts.weights.expert_bytes) == experts
    assert sum(group.n_bytes for group in facts.facts.groups if group.is_expert) == experts
    assert facts.weights.whole_bytes == (9 * 256 + 4 * 8 * 256) * 2  # norms and routers


def test_tied_and_quantized_and_multi_token_layers(tmp_path: Path) -> None:
    figures = SMALL | {"tie_word_embeddings": True, "num_nextn_predict_layers": 1,
                       "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}  # fmt: skip
    table: dict[str, Any] = dict(table_of(figures))
    table["model.layers.4.mlp.up_proj.weight"] = ("BF16", (512, 256))
    table["model.layers.0.mlp.up_proj.qweight"] = ("I32", (256, 64))
    write_model(tmp_path / "m", figures, table)
    facts = facts_of_hf(tmp_path / "m")
    assert facts.facts.tied_output == ("BF16", 320 * 256 * 2)
    assert facts.quantization == "awq" and facts.weights.n_parameters == 0
    assert facts.weights.nextn_bytes == 512 * 256 * 2
    assert facts.shape.file_type.startswith("AWQ")


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, (8.0, 8.1)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, (4.15, 4.17)),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, (4.6, 4.65)),
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, (4.5, 4.5)),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}}, (4.1, 4.2)),
        ({"quant_method": "unheard_of"}, (16, 16)),
    ],
)  # fmt: skip
def test_quantization_config_sets_the_bits_of_computed_weights(
    quantization: dict[str, Any], bits: tuple[float, float]
) -> None:
    plain = facts_of_config("llama-3.1-8b").weights
    facts = facts_of_config(CONFIGS["llama-3.1-8b"] | {"quantization_config": quantization})
    unquantized = plain.embedding_bytes + plain.output_bytes + plain.whole_bytes
    linear = plain.total_bytes - unquantized
    found = 16 * (facts.weights.total_bytes - unquantized) / linear
    assert bits[0] - 0.01 <= found <= bits[1] + 0.01


def test_long_context_above_the_trained_length_needs_rope_scaling(plenty: Budget, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-3.1-8b"]))
    plan = plan_source(tmp_path / "config.json", AskedSettings(max_seq_len=200_000), plenty, model_id="m")
    assert plan.settings.max_seq_len == 200_000


# Faults, each by name


def write_config(folder: Path, text: str) -> Path:
    (folder / "config.json").write_text(text)
    return folder / "config.json"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{not json", "is no JSON"),
        ("[1, 2]", "is a list, not an object"),
        ("[" * 100_000, "is no JSON"),
        ('{"hidden_size": 8}', "neither `architectures` nor `model_type`"),
        (json.dumps({"model_type": "llama", "hidden_size": 8}), "lacks num_hidden_layers"),
        (json.dumps(SMALL | {"num_hidden_layers": "many"}), "num_hidden_layers is 'many'"),
        (json.dumps(SMALL | {"num_hidden_layers": 1 << 60}), "num_hidden_layers is 1152921504606846976"),
        (json.dumps(SMALL | {"hidden_size": -4}), "hidden_size is -4"),
        (json.dumps(SMALL | {"torch_dtype": "float17"}), "torch_dtype is 'float17'"),
        (json.dumps(SMALL | {"layer_types": ["full_attention"]}), "says what 1 of 4 layers are"),
        (json.dumps({"model_type": "siglip_vision_model"}), "no language model"),
    ],
)
def test_config_fault_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = write_config(tmp_path, text)
    with pytest.raises(BadModelFile) as caught:
        facts_of_hf(path)
    assert words in caught.value.message
    assert str(tmp_path) in caught.value.message


QWEN = CONFIGS["qwen3-235b-a22b"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": [1, 2]}, "hidden_size is [1, 2]; it must be a whole number from 1 to"),
        ({"vocab_size": [9]}, "vocab_size is [9]; it must be a whole number from 1"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number from 1 to 4096"),
        ({"num_hidden_layers": [94]}, "num_hidden_layers is [94]"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be a whole number from 1"),
        ({"num_attention_heads": [0] * 94}, "some layer must have at least 1"),
        ({"num_attention_heads": 8192, "head_dim": None}, "num_attention_heads is 8192; it must be at most the width"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; it must be a whole number from 1"),
        ({"num_key_value_heads": 3}, "is 3; KV heads must divide the heads, and 3 does not divide 64"),
        ({"num_key_value_heads": [4] * 93 + [5]}, "5 does not divide 64"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"num_experts_per_tok": 500}, "num_experts_per_tok is 500; it must be at most the number of experts, 128"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0; it must be a whole number from 1"),
        ({"num_experts": -1}, "num_experts is -1"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be a whole number from 1 to 94"),
        ({"mlp_only_layers": list(range(94))}, "has 128 experts and leaves none of its 94 layers to them"),
        ({"first_k_dense_replace": 95}, "first_k_dense_replace is 95; it must be a whole number from 0 to 94"),
        ({"num_kv_shared_layers": 94}, "num_kv_shared_layers is 94; it must be a whole number from 0 to 93"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0; it must be a whole number from 1 to 94"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ({"intermediate_size": [1, 2]}, "a list must have one for each of 94 layers"),
        ({"intermediate_size": 0, "num_experts": 0}, "intermediate_size is 0; without experts it must be at least 1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -1}}, "factor is -1; it must be a number above 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "rope_scaling.factor is '4'"),
        ({"rope_scaling": {"rope_type": 4}}, "rope_scaling.rope_type is 4"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; it must be an object with rope_type and factor"),
        ({"rope_parameters": {"full_attention": {"factor": 0}}}, "rope_parameters.factor is 0"),
        ({"quantization_config": "gptq"}, "quantization_config is 'gptq'; it must be an object with a quant_method"),
        ({"quantization_config": ["gptq"]}, "quantization_config is ['gptq']"),
        ({"quantization_config": {"method": "gptq"}}, "quantization_config has no quant_method"),
        ({"quantization_config": {"quant_method": 4}}, "quantization_config.quant_method is 4"),
        ({"quantization_config": {"quant_method": "gptq", "bits": -4}}, "quantization_config.bits is -4"),
        ({"linear_attn_config": {"head_dim": 0}}, "linear_attn_config.head_dim is 0"),
        ({"mamba_d_state": 0}, "mamba_d_state is 0"),
        ({"layer_types": ["mamba"] * 94}, "it leaves no layer to attention, and no key says how wide"),
        ({"kv_lora_rank": 0, "qk_rope_head_dim": 64}, "kv_lora_rank is 0"),
    ],
)  # fmt: skip
def test_figure_no_model_can_have_is_refused_by_name_and_value(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadModelFile) as caught:
        facts_of_config(QWEN | changes)
    assert words in caught.value.message and "config.json" in caught.value.message


@pytest.mark.parametrize(
    "changes",
    [
        {"intermediate_size": [12288] * 94},  # one for each layer, as Gemma 3n has them
        {"num_experts_per_tok": [8] * 94, "moe_intermediate_size": [1536] * 94},  # as Hunyuan
        {"num_key_value_heads": [0] + [4] * 93},  # a layer without attention
        {"rope_scaling": None, "quantization_config": None, "sliding_window": None},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        {"quantization_config": {"group_size": 64, "bits": 4}},  # MLX says no method
        {"num_experts": 0, "num_experts_per_tok": 0},  # a dense model of a family with experts
        {"kv_lora_rank": None, "qk_rope_head_dim": 0, "qk_nope_head_dim": 0, "v_head_dim": 0},  # DeepSeek OCR
    ],
)
def test_figure_that_real_models_have_is_sound(changes: dict[str, Any]) -> None:
    shape = facts_of_config(QWEN | changes).shape
    assert sum(row.k > 0 and row.v > 0 for row in shape.layers) >= 93


def test_folder_without_config_or_weights(tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match=r"no config\.json"):
        facts_of_hf(tmp_path)
    write_config(tmp_path, json.dumps(SMALL))
    with pytest.raises(BadModelFile, match=r"no \.safetensors files"):
        facts_of_hf(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(BadModelFile, match="pickles"):
        facts_of_hf(tmp_path)
    with pytest.raises(BadModelFile, match="there is no such file"):
        facts_of_hf(tmp_path / "nowhere.json")


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_model(tmp_path / "m", SMALL, table_of(SMALL), n_files=3)
    (tmp_path / "m" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(BadModelFile, match=r"model-00002-of-00003\.safetensors of the 3 files"):
        facts_of_hf(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(BadModelFile, match="is no index"):
        facts_of_hf(tmp_path / "m")


def raw(header: str) -> bytes:
    """A file with this header and sixteen bytes of data."""
    return struct.pack("<Q", len(header)) + header.encode() + bytes(16)


HEADER, DATA_BYTES = safetensors_header({"model.embed_tokens.weight": ("BF16", (4, 4))})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "is empty"),
        (b"GGUF" + bytes(100), "is not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (struct.pack("<Q", 1 << 60) + b"{}" + bytes(100), "header claims 1152921504606846976 bytes"),
        (struct.pack("<Q", 5000) + b"{}" + bytes(100), "header claims 5000 bytes, and the file has 110 in all"),
        (HEADER[:20], "is cut off or corrupt"),
        (HEADER + bytes(DATA_BYTES - 1), "1 bytes of tensor 'model.embed_tokens.weight' lie past its end"),
        (raw('{"a": "text"}'), "no table of tensors"),
        (raw('{"a":{"dtype":"BF16","shape":[9],"data_offsets":[0,4]}}'), "of BF16 9 lies at 0 to 4"),
        (raw('{"a":{"dtype":"BF16","shape":[-1],"data_offsets":[0,4]}}'), "no table of tensors"),
        (raw('{"a":{"dtype":"BF16","shape":[2],"data_offsets":[4,0]}}'), "lies at 4 to 0"),
        (raw('{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,1152921504606846976]}}'), "lie past its end"),
    ],
)  # fmt: skip
def test_safetensors_fault_is_named(tmp_path: Path, body: bytes, words: str) -> None:
    write_config(tmp_path, json.dumps(SMALL))
    (tmp_path / "model.safetensors").write_bytes(body)
    with pytest.raises(BadModelFile) as caught:
        facts_of_hf(tmp_path)
    assert words in caught.value.message and "model.safetensors" in caught.value.message


def test_deep_nesting_and_empty_tables_are_refused(tmp_path: Path) -> None:
    write_config(tmp_path, json.dumps(SMALL))
    nested = b'{"a":' * 50_000
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(nested)) + nested)
    with pytest.raises(BadModelFile, match="no table of tensors"):
        facts_of_hf(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}" + bytes(8))
    with pytest.raises(BadModelFile, match="hold no tensors"):
        facts_of_hf(tmp_path)


def test_more_rows_than_any_model_has_are_not_built(tmp_path: Path) -> None:
    write_config(tmp_path, json.dumps(SMALL))
    many = b'{"a":{}' + b',"a":{}' * 1_000_000 + b"}"
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(many)) + many + bytes(8))
    with pytest.raises(BadModelFile, match="more than 1000000 tensors"):
        facts_of_hf(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(many)
    with pytest.raises(BadModelFile, match="more than 1000000 rows"):
        facts_of_hf(tmp_path)
    write_config(tmp_path, " " * (5 << 20))
    with pytest.raises(BadModelFile, match="at most 4 MiB can be right"):
        facts_of_hf(tmp_path)


def test_pipes_and_folders_are_no_config(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(BadModelFile, match=r"no config\.json"):
        facts_of_hf(tmp_path)
    with pytest.raises(BadModelFile, match="is not a regular file"):
        facts_of_hf(tmp_path / "config.json")


def fault_of(call: Callable[[], object]) -> str | None:
    """What a call says where it fails as it should; anything but a named fault goes through."""
    try:
        call()
    except LayaError as error:
        return error.message
    return None


_KEYS = sorted({key for figures in CONFIGS.values() for key in (*figures, *figures.get("text_config", {}))})
_VALUES: list[Any] = [
    None, 0, 1, -1, True, 3.5, 1e300, 1 << 62, "", "full_attention", [], {}, [1, 2], [None], [{}], ["mamba"], {"a": 1},
    {"quant_method": 7, "bits": "4"}, {"type": []}, {"head_dim": 64, "full_attn_layers": [None, 99]},
]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    changes=st.dictionaries(st.sampled_from(_KEYS), st.sampled_from(_VALUES), min_size=1, max_size=3),
)
def test_any_config_is_planned_or_refused_by_name(name: str, changes: dict[str, Any]) -> None:
    figures = CONFIGS[name]
    inner = figures["text_config"] | changes if "text_config" in figures else None
    budget = Budget(bytes=GIB, limit="test", memory_bytes=GIB)
    card = GpuMemory(index=0, name="card", total_bytes=8 * GIB, free_bytes=8 * GIB, own_bytes=0)

    def plan_both() -> None:
        found = facts_of_config(figures | {"text_config": inner} if inner else figures | changes)
        fit(Model(id="m", facts=found.facts, engine=XLLAMACPP, n_cores=1), AskedSettings(), budget)
        plan_vllm(found, AskedSettings(), budget, [card], model_id="m")

    said = fault_of(plan_both)
    assert said is None or "config.json" in said or "kv_cache_dtype" in said


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_safetensors_header_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    body = bytearray(HEADER + bytes(DATA_BYTES))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(HEADER) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.getbasetemp() / "mutated"
    folder.mkdir(exist_ok=True)
    write_config(folder, json.dumps(SMALL))
    (folder / "model.safetensors").write_bytes(bytes(body[: data.draw(st.integers(0, len(body)))]))
    said = fault_of(lambda: facts_of_hf(folder))
    assert said is None or "safetensors" in said


def test_a_terabyte_is_planned_in_little_memory(tmp_path: Path) -> None:
    total = plan_terabyte_hf.write_model(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == plan_terabyte_hf.N_FILES
    planned = plan_in_a_fresh_process(tmp_path)
    assert planned["weights_bytes"] == total > 10**12
    assert planned["peak_mib"] < 200
