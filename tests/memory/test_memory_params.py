"""Models described by their figures: every record of the logged runs is such a description."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from laya.errors import BadModelFile
from laya.memory import Budget
from laya.memory.engine_facts import built_in_engine
from laya.memory.facts import read_facts
from laya.memory.fit import fit
from laya.memory.params import read_params
from laya.memory.planner import Model
from laya.memory.sizing import matrix_bytes_of_size, n_parameters
from laya.types import GIB, AskedSettings

LLAMA = {
    "n_layer": 32, "n_head": 32, "n_head_kv": 8, "head_dim_k": 128, "n_embd": 4096, "n_ff": 14336, "n_vocab": 128256,
}  # fmt: skip
EXPERTS = {
    "n_layer": 48, "n_head": 32, "n_head_kv": 4, "head_dim_k": 128, "n_embd": 2048, "n_vocab": 151936, "n_expert": 128,
    "n_expert_used": 8, "n_ff_exp": 768,
}  # fmt: skip


@pytest.fixture
def described(tmp_path: Path) -> Any:
    def write(**fields: Any) -> Path:
        path = tmp_path / "model.json"
        path.write_text(json.dumps({"arch": "llama", "params": LLAMA} | fields))
        return path

    return write


def test_a_description_is_a_model_with_estimated_weights(described: Any) -> None:
    facts = read_params(described(weights_type="Q8_0"))
    assert n_parameters(facts.shape) == pytest.approx(8.03e9, rel=0.01)
    assert facts.weights_bytes == pytest.approx(8.03e9 * 34 / 32, rel=0.01)
    assert sum(group.n_bytes for group in facts.groups) == facts.weights_bytes
    assert facts.shape.bound is not None
    assert "description" in facts.shape.bound
    assert read_params(described(weights_bytes=5 * GIB)).weights_bytes == 5 * GIB


def test_architecture_nobody_knows_is_an_upper_bound_that_names_it_and_the_nearest(described: Any) -> None:
    bound = read_params(described(arch="lama")).shape.bound
    assert bound is not None and "architecture 'lama' is not known (did you mean llama?):" in bound
    bound = read_params(described(arch="zzz")).shape.bound
    assert bound is not None and "architecture 'zzz' is not known:" in bound and "mean" not in bound


def test_trained_length_that_is_not_given_is_not_made_up(described: Any, plenty: Budget) -> None:
    for params, words in ((LLAMA, "is not given"), (LLAMA | {"n_ctx_train": 131072}, "trained for 131072")):
        path = described(params=params)
        model = Model(id="m", facts=read_params(path), engine=built_in_engine(), n_cores=2)
        plan = fit(model, AskedSettings(), plenty)
        assert words in plan.reasons["max_seq_len"]
        assert "1048576" not in plan.reasons["max_seq_len"]


def test_every_logged_run_can_be_given_as_a_description(described: Any) -> None:
    records = json.loads(Path(__file__).with_name("memory_cases.json").read_bytes())["cases"]
    named = {"n_layer": 2, "n_embd": 512, "n_ff": 1024, "n_vocab": 4096, "n_head": 8}
    for record in records:
        read_params(described(**record | {"params": named | record["params"]}))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"params": LLAMA | {"n_layers": 3}}, "params.n_layers is not known; did you mean n_layer"),
        ({"params": LLAMA | {"n_layer": "many"}}, "Expected `int`, got `str`"),
        ({"params": LLAMA | {"n_layer": -1}}, r"params.n_layer is -1; it must be between 1 and 4096"),
        ({"params": LLAMA | {"n_layer": 5000}}, "params.n_layer is 5000; it must be between 1 and 4096"),
        ({"params": LLAMA | {"n_vocab": 0}}, "params.n_vocab is 0; it must be between 1 and"),
        ({"params": {key: value for key, value in LLAMA.items() if key != "n_vocab"}}, "params.n_vocab is missing"),
        ({"params": LLAMA | {"n_head": 0}}, "params.n_head is 0; it must be at least 1"),
        ({"params": LLAMA | {"n_head_kv": 0}}, "params.n_head_kv is 0; it must be at least 1"),
        ({"params": LLAMA | {"n_head_kv": 5}}, "params.n_head_kv is 5; it must divide n_head, 32"),
        ({"params": LLAMA | {"n_head_kv_swa": 7, "swa": 512}}, "params.n_head_kv_swa is 7; it must divide n_head, 32"),
        ({"params": LLAMA | {"head_dim_v": 0}}, "params.head_dim_v is 0; it must be at least 1"),
        ({"params": LLAMA | {"shared_kv_layers": 32}}, "shared_kv_layers is 32; it must be under n_layer, 32"),
        ({"params": EXPERTS | {"n_expert_used": 500}}, "n_expert_used is 500; it must be at most n_expert, 128"),
        ({"params": EXPERTS | {"n_expert_used": 0}}, "params.n_expert_used is 0; it must be at least 1"),
        ({"weights_bytes": -5}, "weights_bytes is -5; it must be above 0"),
        ({"params": {key: value for key, value in LLAMA.items() if key != "n_ff"}}, "params.n_ff is missing"),
        ({"params": LLAMA | {"swa": 512, "swa_pattern": "often"}}, "swa_pattern is 'often'; write 'period 6'"),
        ({"weights_type": "Q4_KM"}, "weights_type 'Q4_KM' is no type of weights; did you mean Q4_K"),
        ({"arch": None}, r"Expected `str`, got `null`"),
    ],
)
def test_a_wrong_description_names_the_key(described: Any, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadModelFile, match=words) as caught:
        read_params(described(**fields))
    assert "model.json" in caught.value.message
    assert "?." not in caught.value.message


def test_a_file_that_is_no_description_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    with pytest.raises(BadModelFile, match="No such file"):
        read_params(path)
    path.write_text("{")
    with pytest.raises(BadModelFile, match="truncated"):
        read_params(path)
    path.write_bytes(b" " * (2 << 20))
    with pytest.raises(BadModelFile, match="longer than 1 MiB"):
        read_params(path)


@pytest.mark.parametrize(
    ("params", "arch", "file_bytes", "q4_k_bytes"),
    [(LLAMA, "llama", 4_920_739_232, 3_360_000_000), (EXPERTS, "qwen3moe", 18_556_685_824, 14_090_000_000)],
)
def test_a_files_size_tells_how_much_of_it_is_repacked(
    described: Any, params: dict[str, Any], arch: str, file_bytes: int, q4_k_bytes: int
) -> None:
    """Files of the mix Q4_K_M, whose tensor tables hold so many bytes of Q4_K matrices."""
    facts = read_params(described(params=params, arch=arch, weights_type="Q4_K", weights_bytes=file_bytes))
    assert q4_k_bytes <= facts.matrix_bytes["Q4_K"] <= 1.15 * q4_k_bytes


def test_a_file_of_one_type_is_repacked_whole(smollm2_path: Path) -> None:
    shape = read_facts(smollm2_path).shape
    q4_0 = n_parameters(shape) * 18 // 32
    assert matrix_bytes_of_size(shape, q4_0, "Q4_0") == pytest.approx(q4_0, rel=0.04)
    assert matrix_bytes_of_size(shape, q4_0, "Q8_0") == q4_0
    assert matrix_bytes_of_size(shape, q4_0, "unheard of") == q4_0
