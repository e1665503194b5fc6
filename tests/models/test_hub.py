"""Pulling from a Hugging Face hub, a local one reached by HF_ENDPOINT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from laya.errors import DownloadError
from laya.models import pull, resolve
from laya.models.hub import HubSource, choose_file

from .conftest import FileServer, gguf_bytes

Hub = Callable[..., None]


def test_pull_named_file(hub: Hub, server: FileServer, home: Path) -> None:
    hub("org/repo", {"Tiny-Q4_K_M.gguf": gguf_bytes(), "Tiny-Q8_0.gguf": gguf_bytes(seed=2), "README.md": b"#"})
    seen: list[tuple[int, int | None]] = []
    model = pull("hf://org/repo:Tiny-Q8_0.gguf", progress=lambda done, total: seen.append((done, total)))
    assert model.path.read_bytes() == gguf_bytes(seed=2)
    assert model.source == "hf://org/repo:Tiny-Q8_0.gguf"
    assert seen[-1] == (300_000, 300_000)
    assert resolve("hf://org/repo:Tiny-Q8_0.gguf").id == model.id == "tiny-q8_0"


def test_pull_split_model_brings_every_shard(hub: Hub, home: Path) -> None:
    shards = {f"Q8_0/Big-Q8_0-0000{n}-of-00003.gguf": gguf_bytes(seed=n) for n in (1, 2, 3)}
    hub("org/repo", {**shards, "Big-Q4_0.gguf": gguf_bytes()})
    seen: list[tuple[int, int | None]] = []
    model = pull("hf://org/repo:q8_0", progress=lambda done, total: seen.append((done, total)))
    assert model.id == "big-q8_0"
    assert model.path.name == "Big-Q8_0-00001-of-00003.gguf"
    assert model.file_bytes == 900_000
    assert [path.read_bytes() for path in sorted(model.path.parent.glob("*.gguf"))] == list(shards.values())
    assert seen[-1] == (900_000, 900_000)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_pull_token_goes_to_the_hub(hub: Hub, server: FileServer, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    hub("org/repo", {"tiny.gguf": gguf_bytes()})
    pull("hf://org/repo")
    assert {headers.get("authorization") for _, headers in server.requests} == {"Bearer hf_test"}


def test_pull_hub_checksum_is_checked(hub: Hub, home: Path) -> None:
    hub("org/repo", {"tiny.gguf": gguf_bytes()}, sha256={"tiny.gguf": "0" * 64})
    with pytest.raises(DownloadError, match="0" * 64) as caught:
        pull("hf://org/repo")
    assert "29f94" in caught.value.message or "sha256 is" in caught.value.message
    assert list(home.rglob("*.gguf*")) == []


def test_pull_other_checksum_than_pinned_is_refused_before_the_bytes(hub: Hub, server: FileServer, home: Path) -> None:
    hub("org/repo", {"tiny.gguf": gguf_bytes()})
    with pytest.raises(DownloadError, match="wrong checksum"):
        pull("hf://org/repo", sha256="1" * 64)
    assert [path for path, _ in server.requests] == ["/api/models/org/repo?blobs=true"]


def test_pull_unknown_repository_says_so(hub: Hub, home: Path) -> None:
    with pytest.raises(DownloadError, match="no such repository"):
        pull("hf://org/none")


def test_pull_gated_file_names_the_way_in(hub: Hub, home: Path) -> None:
    hub("org/repo", {"tiny.gguf": gguf_bytes()}, status=403)
    with pytest.raises(DownloadError, match="HF_TOKEN"):
        pull("hf://org/repo")


def test_pull_unreachable_hub_is_one_sentence(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="could not be asked") as caught:
        pull("hf://org/repo")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("text", ["hf://org", "hf://org/repo:", "hf://", "hf://a/b/c:d", "hf://org/repo file"])
def test_hub_source_refuses_what_is_none(text: str) -> None:
    with pytest.raises(DownloadError, match="is not hf://"):
        HubSource(text)


CHOICE = ["m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "mmproj-f16.gguf"]


@pytest.mark.parametrize(
    ("paths", "wanted", "chosen"),
    [
        (["only.gguf", "config.json"], None, "only.gguf"),
        (CHOICE, None, "m-Q4_K_M.gguf"),
        (CHOICE, "q2_k", "m-Q2_K.gguf"),
        (CHOICE, "Q8_0", "m-Q8_0-00001-of-00002.gguf"),
        (CHOICE, "mmproj-f16.gguf", "mmproj-f16.gguf"),
        (["sub/m-Q4_K_M.gguf", "m-Q5_K.gguf"], "m-Q4_K_M.gguf", "sub/m-Q4_K_M.gguf"),
    ],
)
def test_choose_file_takes_the_one_that_is_meant(paths: list[str], wanted: str | None, chosen: str) -> None:
    assert choose_file("org/repo", paths, wanted) == chosen


@pytest.mark.parametrize(
    ("paths", "wanted", "said"),
    [
        (["a.gguf", "b.gguf"], None, "name one.*a.gguf, b.gguf"),
        (["a-q4_k_m.gguf", "b-q4_k_m.gguf"], None, "name one"),
        (["model.safetensors"], None, "holds no GGUF.*org/repo-GGUF"),
        (["a-Q4_0.gguf", "a-Q8_0.gguf"], "a-Q4_1.gguf", "no file.*Did you mean a-Q4_0.gguf"),
    ],
)
def test_choose_file_says_what_there_is(paths: list[str], wanted: str | None, said: str) -> None:
    with pytest.raises(DownloadError, match=said):
        choose_file("org/repo", paths, wanted)
