"""The terms of a plan: exact where the file decides, and against figures that public runs logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from small_gguf import MakeGguf

from laya.errors import BadModelFile, ConfigError
from laya.memory.caches import kv_bytes_per_token
from laya.memory.engine_facts import LLAMA_SERVER, XLLAMACPP
from laya.memory.facts import ModelFacts, facts_of, read_facts
from laya.memory.ggml import kv_cache_type
from laya.memory.gguf import read_header
from laya.memory.planner import Choice, Model, decide, price
from laya.memory.shape import ModelShape
from laya.memory.terms import TERMS
from laya.types import MIB, AskedSettings

NOTHING = AskedSettings()


def model(facts: ModelFacts, **fields: Any) -> Model:
    return Model(id="m", facts=facts, engine=fields.pop("engine", XLLAMACPP), n_cores=2, **fields)


def terms_of(facts: ModelFacts, asked: AskedSettings = NOTHING, **choice: Any) -> dict[str, int]:
    made = Choice(**({"max_num_seqs": 1, "max_seq_len": 2048, "kv_cache_dtype": "f16"} | choice))
    described = model(facts)
    return price(described, decide(described, asked, made))["cpu"]


class LoggedCache(NamedTuple):
    """A KV cache as a public run of llama.cpp logged it."""

    name: str
    n_layer: int
    n_head_kv: int
    head_dim: int
    n_ctx: int
    kv_type: str
    mib: float


LOGGED = (
    LoggedCache("qwen2.5-7b", 28, 4, 128, 8192, "q8_0", 238),
    LoggedCache("qwen2.5-7b", 28, 4, 128, 8192, "q4_0", 126),
    LoggedCache("qwen3-14b", 40, 8, 128, 65536, "q4_0", 2880.0),
    LoggedCache("qwen3-4b", 36, 8, 128, 4096, "f16", 576.0),
    LoggedCache("qwen3-1.7b", 28, 8, 128, 1024, "f16", 112.0),
    LoggedCache("mistral-7b", 32, 8, 128, 4096, "f16", 512.0),
    LoggedCache("mistral-large", 88, 8, 128, 32768, "f16", 11264.0),
    LoggedCache("glm-z1-32b", 61, 2, 128, 5120, "q8_0", 162.03),
    LoggedCache("qwen2.5-0.5b", 24, 2, 64, 8192, "f16", 96.0),
)


def facts(**shape: Any) -> ModelFacts:
    n_layer = shape.pop("n_layer", 2)
    fields: dict[str, Any] = {"n_embd": 512, "n_ff": 1536, "n_vocab": 4096, "n_ctx_train": 1 << 20}
    fields |= {"head_dim_k": 64, "head_dim_v": 64, "n_head": (8,) * n_layer, "n_head_kv": (4,) * n_layer}
    return ModelFacts(
        shape=ModelShape(architecture="llama", n_layer=n_layer, **(fields | shape)),
        weights_bytes=100 * MIB,
        matrix_bytes={"Q8_0": 90 * MIB},
        tied_output=None,
        n_ff_matrices=3,
        n_tensors=20,
        n_tokens=4096,
        n_merges=4096,
        vocabulary_bytes=30_000,
    )


@pytest.mark.parametrize("case", LOGGED, ids=lambda case: f"{case.name}-{case.kv_type}")
def test_kv_cache_equals_what_llama_cpp_logged(case: LoggedCache) -> None:
    heads = (case.n_head_kv,) * case.n_layer
    described = facts(n_layer=case.n_layer, n_head_kv=heads, head_dim_k=case.head_dim, head_dim_v=case.head_dim)
    found = terms_of(described, max_seq_len=case.n_ctx, kv_cache_dtype=case.kv_type)["kv_cache"] / MIB
    assert round(found, 2) == case.mib


def test_kv_cache_of_the_default_model_is_exact(smollm2_path: Path) -> None:
    described = read_facts(smollm2_path)
    assert terms_of(described, max_num_seqs=4, max_seq_len=8192)["kv_cache"] == 754_974_720
    assert terms_of(described, max_num_seqs=4, max_seq_len=8192)["weights"] == 96_576_768


def test_kv_cache_of_a_7b_model_with_full_heads_is_512_kib_a_token() -> None:
    described = facts(n_layer=32, n_head=(32,) * 32, n_head_kv=(32,) * 32, head_dim_k=128, head_dim_v=128)
    assert kv_bytes_per_token(described, kv_cache_type("f16")) == 512 * 1024
    assert terms_of(described, max_seq_len=4096)["kv_cache"] == 2 << 30
    assert terms_of(described, max_seq_len=4096, max_num_seqs=8)["kv_cache"] == 16 << 30
    assert terms_of(described, max_seq_len=32768, max_num_seqs=8)["kv_cache"] == 128 << 30


@pytest.mark.parametrize(
    ("asked", "choice", "slot", "unified", "pool"),
    [
        ({}, {"max_num_seqs": 3, "max_seq_len": 300}, 512, False, 900),
        ({}, {"max_num_seqs": 1, "max_seq_len": 100}, 256, False, 100),
        ({"kv_pool_tokens": 4096}, {"max_num_seqs": 4, "max_seq_len": 2048}, 4096, True, 4096),
        ({"kv_pool_tokens": 5000}, {"max_num_seqs": 4, "max_seq_len": 2048}, 5120, True, 5120),
        ({"kv_pool_tokens": 8192}, {"max_num_seqs": 4, "max_seq_len": 2048}, 2048, False, 8192),
        ({"kv_pool_tokens": 2048}, {"max_num_seqs": 1, "max_seq_len": 2048}, 2048, False, 2048),
    ],
)
def test_slots_and_pools_are_padded_as_the_engine_does(
    asked: dict[str, int], choice: dict[str, int], slot: int, unified: bool, pool: int
) -> None:
    described = facts()
    settings = decide(model(described), AskedSettings(**asked), Choice(kv_cache_dtype="f16", **choice))
    assert (settings.slot_tokens, settings.kv_unified, settings.kv_pool_tokens) == (slot, unified, pool)
    streams = 1 if unified else choice["max_num_seqs"]
    found = terms_of(described, AskedSettings(**asked), **choice)["kv_cache"]
    assert found == slot * streams * kv_bytes_per_token(described, kv_cache_type("f16"))


def test_quantized_cache_needs_heads_of_whole_blocks() -> None:
    with pytest.raises(ConfigError, match="blocks of 32, and the heads of this model are 80 wide"):
        kv_bytes_per_token(facts(head_dim_k=80, head_dim_v=80), kv_cache_type("q8_0"))


# The compute buffer, as the engine's log printed it for generated models of these shapes on a CPU (MiB).
WIDE = {"head_dim_k": 128, "head_dim_v": 128}
LOGGED_COMPUTE: tuple[tuple[dict[str, Any], dict[str, Any], float], ...] = (
    ({"n_embd": 512, "n_ff": 1536}, {}, 4.0),
    ({"n_embd": 2048, "n_ff": 8192, "n_head": (32, 32), "n_head_kv": (8, 8)}, {}, 17.5),
    ({"n_embd": 4096, "n_ff": 14336, "n_head": (32, 32), "n_head_kv": (8, 8)} | WIDE, {}, 31.5),
    ({"n_embd": 512, "n_ff": 256, "n_head_kv": (8, 8)}, {}, 2.5),
    ({"n_embd": 512, "n_ff": 512, "n_head": (32, 32)} | WIDE, {}, 5.75),
    ({"n_embd": 512, "n_ff": 512, "n_head": (16, 16), "n_head_kv": (8, 8)} | WIDE, {}, 4.25),
    ({"n_embd": 1024, "n_ff": 1024, "n_head": (16, 16), "n_head_kv": (16, 16)}, {}, 4.0),
    ({}, {"max_seq_len": 8192}, 5.5),
    ({}, {"max_seq_len": 1024, "max_num_seqs": 8}, 3.75),
    ({}, {"max_seq_len": 32768, "kv_cache_dtype": "q8_0"}, 11.54),
    ({}, {"max_seq_len": 32768, "kv_cache_dtype": "f32"}, 41.5),
    ({"n_vocab": 256000}, {"max_seq_len": 1024, "max_num_seqs": 8}, 9.32),
    ({"n_ff": 0, "n_expert": 32, "n_expert_used": 8, "n_ff_expert": 768}, {}, 10.75),
    ({"n_embd": 1024, "n_ff": 0, "n_expert": 16, "n_expert_used": 8, "n_ff_expert": 64}, {}, 7.0),
)


@pytest.mark.parametrize(("shape", "choice", "mib"), LOGGED_COMPUTE)
def test_compute_is_never_under_and_little_over_what_the_engine_logged(
    shape: dict[str, Any], choice: dict[str, Any], mib: float
) -> None:
    found = terms_of(facts(**shape), **choice)["compute"] / MIB
    assert mib - 0.005 <= found <= 1.35 * mib


def test_graph_that_was_not_measured_is_counted_twice() -> None:
    bounded = facts(bound="architecture 'new'")
    assert terms_of(bounded)["compute"] > 1.9 * terms_of(facts())["compute"]


def test_repacked_types_are_counted_a_second_time(make_gguf: MakeGguf) -> None:
    described = read_facts(make_gguf(weights="Q4_0"))
    tensors = read_header(make_gguf(weights="Q4_0")).tensors
    matrices = sum(tensor.n_bytes for tensor in tensors if len(tensor.shape) == 2)
    assert terms_of(described)["repack"] == matrices  # tied: the embedding is the output matrix too
    untied = read_facts(make_gguf("untied", weights="Q4_0", tied=False))
    assert terms_of(untied)["repack"] == matrices
    assert "repack" not in terms_of(read_facts(make_gguf("q8", weights="Q8_0")))


def test_repack_of_weights_read_into_memory_is_only_the_tied_embedding(make_gguf: MakeGguf) -> None:
    path = make_gguf(weights="Q4_0")
    embedding = next(tensor for tensor in read_header(path).tensors if tensor.name == "token_embd.weight")
    assert terms_of(read_facts(path), AskedSettings(mmap=False))["repack"] == embedding.n_bytes


def test_engine_that_was_not_measured_repacks_more(make_gguf: MakeGguf) -> None:
    described = read_facts(make_gguf(weights="Q8_0"))
    own = model(described, engine=LLAMA_SERVER)
    settings = decide(own, NOTHING, Choice(max_num_seqs=1, max_seq_len=512, kv_cache_dtype="f16"))
    assert price(own, settings)["cpu"]["repack"] == described.matrix_bytes["Q8_0"]


def test_embedding_counts_the_logits_of_a_whole_batch_twice(smollm2_path: Path) -> None:
    described = read_facts(smollm2_path)
    embed = terms_of(described, AskedSettings(task="embed"), max_seq_len=512)
    logits = 4 * 512 * 49152
    assert embed["compute"] >= logits
    assert embed["output"] >= logits
    assert terms_of(described, max_seq_len=512)["compute"] < logits / 10


def test_encoder_keeps_no_cache_but_room_for_rows_of_logits() -> None:
    terms = terms_of(facts(is_causal=False), AskedSettings(task="embed"), max_seq_len=512)
    assert "kv_cache" not in terms
    assert "grammar" not in terms
    assert terms["output"] == 4 * 512 * (512 + 4096)
    assert terms["compute"] < 4 * 512 * 4096 * 2


def test_recurrent_state_does_not_grow_with_context(make_gguf: MakeGguf) -> None:
    keys = {"ssm.conv_kernel": 4, "ssm.inner_size": 6144, "ssm.state_size": 128, "ssm.group_count": 16}
    described = read_facts(make_gguf(architecture="qwen35", n_layer=64, keys=keys))
    assert round(terms_of(described, max_seq_len=512)["state"] / MIB, 2) == 149.62  # as logged: 48 of 64 layers
    assert terms_of(described, max_seq_len=8192)["state"] == terms_of(described, max_seq_len=512)["state"]


def test_draft_and_projector_are_terms_of_their_own(make_gguf: MakeGguf) -> None:
    described = facts()
    small = read_facts(make_gguf())
    whole = model(described, draft=small, projector_bytes=10 * MIB)
    settings = decide(whole, NOTHING, Choice(max_num_seqs=2, max_seq_len=1024, kv_cache_dtype="q8_0"))
    terms = price(whole, settings)["cpu"]
    assert terms["draft"] > small.weights_bytes + 2 * 1024 * kv_bytes_per_token(small, kv_cache_type("f16"))
    assert terms["projector"] == 14 * MIB


def test_more_of_anything_never_needs_less() -> None:
    described = facts()
    base = sum(terms_of(described).values())
    for change in ({"max_num_seqs": 2}, {"max_seq_len": 4096}, {"kv_cache_dtype": "f32"}):
        assert sum(terms_of(described, **change).values()) > base
    assert sum(terms_of(described, AskedSettings(n_threads=16)).values()) > base


def test_every_term_says_its_device_and_formula() -> None:
    assert len({term.name for term in TERMS}) == len(TERMS)
    for term in TERMS:
        assert term.device in ("cpu", "gpu", "by layer")
        assert term.formula


def test_split_model_counts_all_its_files(tmp_path: Path, make_gguf: MakeGguf) -> None:
    parts = [make_gguf(f"m-0000{part}-of-00002", split=(part - 1, 2)) for part in (1, 2)]
    assert read_facts(parts[0]).weights_bytes == 2 * read_header(parts[0]).tensor_bytes
    with pytest.raises(BadModelFile, match="not the first of its 2 files"):
        read_facts(parts[1])
    parts[1].unlink()
    with pytest.raises(BadModelFile, match="00002-of-00002"):
        read_facts(parts[0])
    renamed = parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(BadModelFile, match="one of 2 files"):
        read_facts(renamed)


def test_file_without_tensors_is_no_model(make_gguf: MakeGguf) -> None:
    header = read_header(make_gguf())
    with pytest.raises(BadModelFile, match="holds no tensors"):
        facts_of([msgspec.structs.replace(header, tensors=())])
