"""Reading a model where it lies: a real server with ranges, one without, a hub of our own, and plans of all of them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from laya.errors import BadModelFile, DownloadError, LayaError
from laya.memory import Budget, plan_file, plan_source
from laya.models import is_remote, open_remote
from laya.models.ranges import FIRST_BYTES, ByteAllowance, RangeFile, range_client
from laya.types import GIB, AskedSettings, Plan

from .conftest import FileServer

Hub = Callable[..., None]
ROOM = Budget(bytes=64 * GIB, limit="test", memory_bytes=64 * GIB)
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "hidden_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256,
    "vocab_size": 320, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip


def safetensors(tensors: dict[str, list[int]], padding: int = 0) -> bytes:
    """A safetensors file of BF16 zeros; `padding` makes its header longer."""
    rows: dict[str, Any] = {"__metadata__": {"note": "x" * padding}}
    end = 0
    for name, shape in tensors.items():
        n_bytes = 2 * int(np.prod(shape))
        rows[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + n_bytes]}
        end += n_bytes
    header = json.dumps(rows).encode()
    return struct.pack("<Q", len(header)) + header + bytes(end)


def weights(layer: int) -> dict[str, list[int]]:
    return {
        f"model.layers.{layer}.mlp.up_proj.weight": [256, 256],
        f"model.layers.{layer}.input_layernorm.weight": [256],
    }


def hf_files(config: dict[str, Any] = CONFIG) -> dict[str, bytes]:
    """A repository of two shards and the same weights once more under another name."""
    shards = {"model-00001-of-00002.safetensors": weights(0), "model-00002-of-00002.safetensors": weights(1)}
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    files = {shard: safetensors(tensors) for shard, tensors in shards.items()}
    return files | {
        "config.json": json.dumps(config).encode(),
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        "consolidated.safetensors": safetensors(weights(0) | weights(1)),
        "README.md": b"#",
    }


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    """A GGUF whose header is longer than the first piece that is read, and whose weights are a mebibyte of zeros."""
    path = tmp_path / "Tiny-Q8_0.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(256)
    writer.add_block_count(1)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token number {number}" for number in range(20_000)])
    writer.add_tensor("token_embd.weight", np.zeros((4096, 256), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def plan_of(text: str, **asked: Any) -> Plan:
    with open_remote(text) as model:
        return plan_source(model, AskedSettings(**asked), ROOM, model_id=model.name)


def fetched(server: FileServer) -> int:
    """Bytes that the ranges of all requests ask for."""
    spans = [text.removeprefix("bytes=").split("-") for text in server.ranges() if text]
    return sum(int(last) - int(first) + 1 for first, last in spans)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("hf://org/repo", True), ("https://x/y.gguf", True), ("HTTP://x/y.gguf", True), ("pypi://p==1", False),
        ("./folder", False), ("name:q4_k_m", False), ("", False),
    ],
)  # fmt: skip
def test_is_remote(text: str, found: bool) -> None:
    assert is_remote(text) is found


# GGUF


def test_gguf_at_an_address_is_planned_as_the_file_would_be(server: FileServer, home: Path, gguf_path: Path) -> None:
    url = server.serve("/models/Tiny-Q8_0.gguf", gguf_path.read_bytes())
    remote = plan_of(url + "?download=true")
    local = plan_file(gguf_path, AskedSettings(), ROOM, model_id="tiny-q8_0")
    assert remote.devices == local.devices and remote.settings == local.settings
    assert remote.model == "tiny-q8_0"
    assert all(text is not None for text in server.ranges())
    assert not list(home.rglob("*"))


def test_gguf_header_comes_in_growing_pieces_and_no_more(server: FileServer, gguf_path: Path) -> None:
    body = gguf_path.read_bytes()
    assert FIRST_BYTES < len(body) - 4096 * 256 * 2 < len(body)
    plan_of(server.serve("/Tiny-Q8_0.gguf", body + bytes(20 << 20)))
    assert fetched(server) < 3 << 20 < len(body) + (20 << 20)
    starts = [int(text.removeprefix("bytes=").split("-")[0]) for text in server.ranges() if text]
    assert starts == sorted(starts)
    assert starts[0] == 0 and len(set(starts)) == len(starts)  # nothing is fetched twice


def test_hub_gguf_by_file_and_by_variant(hub: Hub, server: FileServer, home: Path, gguf_path: Path) -> None:
    body = gguf_path.read_bytes()
    hub("org/repo", {"Tiny-Q8_0.gguf": body, "Tiny-Q4_K_M.gguf": b"GGUF" + bytes(100), "README.md": b"#"})
    assert plan_of("hf://org/repo:Tiny-Q8_0.gguf") == plan_of("hf://org/repo:q8_0")
    assert plan_of(f"{server.url}/org/repo/blob/main/Tiny-Q8_0.gguf").model == "tiny-q8_0"
    with pytest.raises(BadModelFile, match=r"org/repo/Tiny-Q4_K_M\.gguf"):
        plan_of("hf://org/repo")
    with pytest.raises(DownloadError, match="Did you mean"):
        plan_of("hf://org/repo:Tiny-Q8_1.gguf")


def test_split_gguf_is_read_shard_by_shard(hub: Hub, gguf_path: Path) -> None:
    body = gguf_path.read_bytes()
    shards = {f"Big-Q8_0-0000{number}-of-00002.gguf": body for number in (1, 2)}
    hub("org/repo", shards)
    one = plan_file(gguf_path, AskedSettings(), ROOM, model_id="x").devices[0].terms["weights"]
    assert plan_of("hf://org/repo").devices[0].terms["weights"] == 2 * one
    hub("org/half", {"Big-Q8_0-00001-of-00002.gguf": body})
    with pytest.raises(DownloadError, match="lacks Big-Q8_0-00002-of-00002"):
        plan_of("hf://org/half")


def test_one_file_of_a_split_model_is_not_planned_alone(server: FileServer, gguf_path: Path) -> None:
    writer = gguf.GGUFWriter(gguf_path, "llama")
    writer.add_uint16("split.count", 3)
    writer.add_tensor("token_embd.weight", np.zeros((32, 32), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(BadModelFile, match="is one of 3 files"):
        plan_of(server.serve("/renamed.gguf", gguf_path.read_bytes()))


# Hugging Face models


def test_hub_model_is_planned_from_its_headers(hub: Hub, server: FileServer, home: Path) -> None:
    hub("org/Repo", hf_files())
    plan = plan_of("hf://org/Repo", max_seq_len=1024, max_num_seqs=1)
    assert plan.model == "repo" and not plan.exact
    assert plan.devices[0].terms["weights"] == 2 * (256 * 256 + 256) * 2
    asked = [path for path, _ in server.requests]
    assert not any("consolidated" in path or "README" in path for path in asked)


def test_hub_model_by_page_and_when_gguf_is_there_too(hub: Hub, server: FileServer) -> None:
    hub("org/both", hf_files() | {"Tiny-Q4_K_M.gguf": b"GGUF" + bytes(100)})
    assert plan_of("hf://org/both:safetensors", max_num_seqs=1).devices[0].terms["weights"] > 0
    with pytest.raises(BadModelFile, match="Tiny-Q4_K_M"):  # what a pull would bring
        plan_of("hf://org/both")
    hub("org/Repo", hf_files())
    for page in ("", "/", "/tree/main", "/blob/main/config.json"):
        assert plan_of(f"{server.url}/org/Repo{page}", max_num_seqs=1).model == "repo"


def test_header_longer_than_the_first_piece(hub: Hub, server: FileServer) -> None:
    body = safetensors(weights(0) | weights(1), padding=2 * FIRST_BYTES)
    hub("org/Repo", {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": body + b""})
    assert plan_of("hf://org/Repo", max_num_seqs=1).devices[0].terms["weights"] == 2 * (256 * 256 + 256) * 2
    spans = [text for (path, _), text in zip(server.requests, server.ranges(), strict=True) if "safetensors" in path]
    assert len(spans) == 2


def test_bare_config_at_an_address(server: FileServer) -> None:
    url = server.serve("/some-model/config.json", json.dumps(CONFIG).encode())
    plan = plan_of(url, max_num_seqs=1)
    assert plan.model == "some-model"
    assert any("computed from config.json" in note for note in plan.notes)


def test_token_goes_to_the_hub_alone(hub: Hub, server: FileServer, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    other = FileServer()
    hub("org/Repo", hf_files())
    shard = "/org/Repo/resolve/c0ffee/model-00001-of-00002.safetensors"
    server.files[shard].redirect = other.serve("/cdn/shard", server.files[shard].body)
    try:
        plan_of("hf://org/Repo", max_num_seqs=1)
        assert {headers.get("authorization") for _, headers in server.requests} == {"Bearer hf_test"}
        assert [headers.get("authorization") for _, headers in other.requests] == [None]
        assert other.ranges()[0] is not None
    finally:
        other.close()


# Faults


def test_server_without_ranges_is_told_and_not_read(server: FileServer, gguf_path: Path) -> None:
    url = server.serve("/Tiny-Q8_0.gguf", gguf_path.read_bytes() + bytes(64 << 20), ranges=False)
    with pytest.raises(DownloadError, match=r"whole files only .* `laya pull` it first"):
        plan_of(url)


def test_server_without_ranges_still_gives_small_files(hub: Hub, server: FileServer) -> None:
    hub("org/Repo", hf_files())
    for file in server.files.values():
        file.ranges = False
    assert plan_of("hf://org/Repo", max_num_seqs=1).devices[0].terms["weights"] > 0  # shards below the first piece
    server.serve("/chunked.gguf", bytes(100), ranges=False, chunked=True)
    with pytest.raises(DownloadError, match="whole files only"):
        plan_of(server.url + "/chunked.gguf")


@pytest.mark.parametrize(
    ("status", "words"), [(404, "nothing at this address"), (401, "wants a login"), (403, "not give"), (500, "500")]
)
def test_statuses_of_a_server(server: FileServer, status: int, words: str) -> None:
    url = server.serve("/x.gguf", b"", status=status)
    with pytest.raises(DownloadError, match=words):
        plan_of(url)


def test_hub_says_what_to_do(hub: Hub, server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DownloadError, match="no such repository, or it is private and HF_TOKEN"):
        plan_of("hf://org/none")
    hub("org/gated", hf_files(), status=403)
    with pytest.raises(DownloadError, match=r"asks for its licence.*HF_TOKEN"):
        plan_of("hf://org/gated")
    hub("org/pickles", {"config.json": b"{}", "pytorch_model.bin": b"\x80"})
    with pytest.raises(DownloadError, match="pickles"):
        plan_of("hf://org/pickles")
    hub("org/empty", {"README.md": b"#"})
    with pytest.raises(DownloadError, match="holds no GGUF model"):
        plan_of("hf://org/empty")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="could not be asked"):
        plan_of("hf://org/repo")


def test_addresses_that_are_no_model(server: FileServer) -> None:
    with pytest.raises(DownloadError, match=r"a \.gguf file or a config\.json"):
        plan_of(server.url + "/page.html")
    with pytest.raises(DownloadError, match="is no address"):
        plan_of("http://[bad/x.gguf")
    with pytest.raises(DownloadError, match="is not hf://"):
        plan_of("hf://org")


def test_missing_shard_and_bad_headers_are_named(hub: Hub) -> None:
    files = hf_files()
    del files["model-00002-of-00002.safetensors"]
    hub("org/half", files)
    with pytest.raises(BadModelFile, match=r"model-00002-of-00002\.safetensors of the 2 files"):
        plan_of("hf://org/half")
    for body, words in (
        (b"", "is empty"),
        (struct.pack("<Q", 1 << 60) + b"{" + bytes(100), "claims 1152921504606846976 bytes"),
        (struct.pack("<Q", 90_000_000) + b"{" + bytes(100), "and the file has 109 in all"),
        (b"<!doctype html>" + bytes(100), "web page"),
    ):
        hub("org/bad", {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": body})
        with pytest.raises(BadModelFile, match=words):
            plan_of("hf://org/bad")


def test_config_too_large_is_not_read(server: FileServer) -> None:
    url = server.serve("/big/config.json", b"{" + b" " * (5 << 20) + b"}")
    with pytest.raises(DownloadError, match="at most 4 MiB can be right"):
        plan_of(url)
    assert fetched(server) <= FIRST_BYTES


def test_what_is_fetched_is_bounded(server: FileServer) -> None:
    url = server.serve("/x.gguf", bytes(1 << 20))
    with range_client() as client:
        file = RangeFile(url, client=client, allowance=ByteAllowance(FIRST_BYTES + 1000))
        assert file.file_bytes == 1 << 20
        assert file.read(0, FIRST_BYTES + 900) == bytes(FIRST_BYTES + 900)
        with pytest.raises(DownloadError, match="go on past 0 MiB"):
            file.read(0, FIRST_BYTES + 2000)


def test_a_file_that_changes_meanwhile_is_noticed(server: FileServer) -> None:
    url = server.serve("/x.gguf", bytes(1 << 20))
    with range_client() as client:
        file = RangeFile(url, client=client, allowance=ByteAllowance(1 << 30))
        file.read(0, 10)
        server.serve("/x.gguf", bytes(1 << 20), etag='"v2"')
        with pytest.raises(DownloadError, match="changed on the server"):
            file.read(0, 1 << 19)
        server.serve("/x.gguf", bytes(1 << 19))
        with pytest.raises(DownloadError, match="changed on the server"):
            file.read(0, 1 << 18 | 1)


def test_a_broken_piece_is_asked_for_again(server: FileServer) -> None:
    body = bytes(range(256)) * 4096
    url = server.serve("/x.gguf", body, stop_after=[100, 5000])
    with range_client() as client:
        file = RangeFile(url, client=client, allowance=ByteAllowance(1 << 30))
        assert file.read(0, 9000) == body[:9000]
        assert file.read(900_000, 50) == body[900_000:900_050]  # far away: a piece of its own
        assert file.read(len(body) - 5, 100) == body[-5:]
        server.files["/x.gguf"].stop_after = [10, 10, 10]
        with pytest.raises(DownloadError, match="received 10 bytes, expected 1000"):
            file.read(500_000, 1000)


def test_unreachable_server_is_one_sentence() -> None:
    with pytest.raises(LayaError) as caught:
        plan_of("http://127.0.0.1:9/x.gguf")
    assert "\n" not in caught.value.message and caught.value.code == "download_failed"
