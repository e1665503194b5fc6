"""llama.cpp and torch tell which experts a model chose, alike, or say why they can't."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from laya.bench.generated_models import GeneratedShape, generate
from laya.errors import BadModelFile, EngineFailed, InvalidRequest
from laya.experts.asking import ask
from laya.experts.counting import Counted, Job, count
from laya.experts.of_gguf import GgufRouter
from laya.experts.of_hf import HfRouter
from laya.modeling.export import _SAMPLE
from laya.modeling.gguf_file import write_gguf
from laya.texts import Document
from tests.modeling.small_model import VOCAB, small, write_tokenizer

DOCUMENTS = [Document("a", _SAMPLE.read_text()[:500]), Document("b", _SAMPLE.read_text()[500:900]), Document("a", "x")]
Written = tuple[Path, Path]


def job(path: Path, **kwargs: object) -> Job:
    fields = {"path": str(path), "documents": DOCUMENTS, "window_tokens": 64, "n_threads": 1, "n_experts": 4}
    return Job(**fields | kwargs)  # type: ignore[arg-type]


def counted(router: GgufRouter | HfRouter) -> Counted:
    seen: list[tuple[int, int]] = []
    found = count(router, DOCUMENTS, lambda done, of: seen.append((done, of)))
    assert seen[-1][0] == seen[-1][1] == sum(topic.n_tokens for topic in found.topics)
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The same model as a folder and as a GGUF file."""
    folder = tmp_path_factory.mktemp("experts") / "small"
    small().save_pretrained(folder)
    tokenizer_file = write_tokenizer(folder / "tokenizer.json")
    write_gguf(small(), tokenizer_file, folder.with_suffix(".gguf"), kind="f32")
    return folder, folder.with_suffix(".gguf")


def test_torch_and_llama_cpp_count_the_same(written: Written) -> None:
    folder, file = written
    by_torch, by_llama = counted(HfRouter(job(folder))), counted(GgufRouter(job(file)))
    assert by_torch == by_llama
    first, second = by_llama.topics
    assert (first.topic, second.topic, by_llama.n_experts, by_llama.top_k) == ("a", "b", 4, 2)
    assert first.n_windows > 2, "the text is longer than a window, and a topic has several documents"
    for topic in by_llama.topics:
        assert sorted(topic.layers) == [0, 1]
        assert all(sum(counts) == 2 * topic.n_tokens for counts in topic.layers.values())


def test_window_is_no_longer_than_the_context_of_a_folder(written: Written) -> None:
    router = HfRouter(job(written[0], window_tokens=100_000))
    assert router.window_tokens == 256
    assert [topic.n_windows for topic in counted(router).topics] == [2, 1], "one each that is shorter than a window"


def test_token_that_begins_every_text_is_not_counted(written: Written) -> None:
    router = GgufRouter(job(written[1]))
    without = counted(router)
    router.first_token = 0
    with_it = counted(router)
    assert [topic.n_tokens for topic in with_it.topics] == [topic.n_tokens for topic in without.topics]
    assert with_it != without, "the experts of the others depend on it"


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("qwen3moe", {}),
        ("gpt-oss", {"sliding_window": 32, "output_weights": "Q8_0"}),
        ("deepseek2", {"n_head_kv": 1, "kv_lora_rank": 64, "q_lora_rank": 64, "rope_dim": 32}),
    ],
)
def test_llama_cpp_tells_of_other_architectures(
    architecture: str, keys: dict[str, object], written: Written, tmp_path: Path
) -> None:
    shape = GeneratedShape(
        architecture=architecture, n_layer=2, n_expert=8, n_expert_used=3, n_ff_expert=64, n_ff=256, **keys
    )
    file = generate(tmp_path / "model.gguf", shape, vocabulary=written[1])
    found = counted(GgufRouter(job(file, n_experts=8)))
    assert found.top_k == 3 and sorted(found.topics[0].layers) == ([1] if architecture == "deepseek2" else [0, 1])


def test_graph_that_names_no_choice_is_told(written: Written, tmp_path: Path) -> None:
    shape = GeneratedShape(architecture="qwen3", n_layer=1, n_expert=4, n_expert_used=2, n_ff_expert=64)
    file = generate(tmp_path / "claims.gguf", shape, vocabulary=written[1])
    with pytest.raises(EngineFailed, match=r"says that it has 4 experts, but llama\.cpp's graph of it has no tensor"):
        ask("llama.cpp", job(file), lambda done, of: None)


_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
}
_DEEPSEEK = {
    "head_dim": 8,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def folder_of(kind: str, keys: dict[str, int], path: Path, tokenizer_of: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **_SIZES | keys))
    model.save_pretrained(path)
    shutil.copy(tokenizer_of / "tokenizer.json", path)
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("mixtral", {"num_local_experts": 8}),
        ("qwen3_moe", {"num_experts": 8}),
        ("olmoe", {"num_experts": 8}),
        ("gpt_oss", {"num_local_experts": 8}),
        ("deepseek_v3", _DEEPSEEK),
    ],
)
def test_torch_tells_of_every_family(kind: str, keys: dict[str, int], written: Written, tmp_path: Path) -> None:
    model = folder_of(kind, keys, tmp_path / kind, written[0])
    router = HfRouter(job(tmp_path / kind))
    tokens = router.tokens_of(DOCUMENTS[0].text)[:40]
    chosen = router.expert_ids(tokens)
    assert router.n_experts == 8 and sorted(chosen) == ([1] if kind == "deepseek_v3" else [0, 1])
    assert all(len(rows) == len(tokens) and all(len(set(row)) == 2 for row in rows) for rows in chosen.values())
    if kind == "deepseek_v3":  # whose router logits are not told; two groups of four, of which one is chosen
        assert all(row[0] // 4 == row[1] // 4 for row in chosen[1])
        return
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens]), output_router_logits=True).router_logits
    for layer, of_layer in enumerate(logits):
        best = of_layer.reshape(-1, 8).topk(2).indices.sort(-1).values.tolist()
        assert [sorted(row) for row in chosen[layer]] == best


@pytest.mark.parametrize(
    ("kind", "told"),
    [("llama", "is a dense model: it has no experts"), ("llama4_text", "does not pass the router's ids to them")],
)
def test_folder_that_cannot_tell_is_refused_before_a_weight_is_read(kind: str, told: str, tmp_path: Path) -> None:
    AutoConfig.for_model(kind, **_SIZES, num_local_experts=4).save_pretrained(tmp_path)
    with pytest.raises(BadModelFile, match=told):
        HfRouter(job(tmp_path))


def test_folder_without_all_weights_or_a_tokenizer_is_refused(written: Written, tmp_path: Path) -> None:
    folder_of("mixtral", {"num_local_experts": 4}, tmp_path, written[0])
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(BadModelFile, match="lacks weights, which would be drawn at random"):
        HfRouter(job(tmp_path))
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadModelFile, match="broken safetensors file"):
        HfRouter(job(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(whole)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(BadModelFile, match=r"tokenizer\.json is missing"):
        HfRouter(job(tmp_path))


def test_end_of_the_process_is_told(written: Written, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(written[1].read_bytes()[:5000])
    with pytest.raises(EngineFailed, match="cannot be loaded"):
        ask("llama.cpp", job(broken), lambda done, of: None)
    with pytest.raises(EngineFailed, match=r"llama\.cpp ended with code 1 while it computed .*: .*"):
        ask("llama.cpp", job(written[1], n_experts=None), lambda done, of: None)


def test_model_that_chooses_an_expert_that_is_not_there_is_told(written: Written) -> None:
    with pytest.raises(ValueError, match=r"layer \d chose expert [23]; there are 2"):
        counted(GgufRouter(job(written[1], n_experts=2)))


def test_model_file_needs_no_torch() -> None:
    program = (
        "import sys, laya.cli.experts, laya.experts.of_gguf\n"
        "print([name for name in ('torch', 'numpy', 'transformers', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_text_and_no_room(written: Written) -> None:
    router: Callable[..., Counted] = counted
    gguf = GgufRouter(job(written[1], window_tokens=8))
    gguf.first_token, gguf.window_tokens = 0, 1
    with pytest.raises(InvalidRequest, match="a window of 1 tokens has no room"):
        router(gguf)
    with pytest.raises(InvalidRequest, match="topic 'e' has not one token"):
        count(GgufRouter(job(written[1])), [Document("e", "")], lambda done, of: None)
