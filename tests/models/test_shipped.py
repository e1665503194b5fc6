"""laya-nano comes with Laya: found by name with no store and no network, as the catalogue says it is."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import pytest

from laya.errors import DownloadError
from laya.memory.gguf import read_header
from laya.models import catalogue, pull, resolve
from laya.models.library import available
from laya.models.shipped import SHIPPED_DIR
from laya.models.sources import parse_source

ENTRY = catalogue.find("laya-nano")
assert ENTRY is not None


def test_it_is_found_without_a_pull(tmp_path: Path) -> None:
    model = resolve("laya-nano", models_dir=None, home=tmp_path, allow_path=False)
    assert (model.id, model.origin, model.path.parent) == ("laya-nano", "shipped", SHIPPED_DIR)
    assert resolve("LAYA-NANO:q8_0", models_dir=None, home=tmp_path).path == model.path
    assert available(models_dir=None, home=tmp_path) == []  # served where it is asked for, not offered by every server


def test_it_is_what_the_catalogue_says() -> None:
    assert ENTRY is not None
    path = SHIPPED_DIR / "laya-nano.gguf"
    data = path.read_bytes()
    assert len(data) == ENTRY.file_bytes <= 10 << 20
    assert hashlib.sha256(data).hexdigest() == ENTRY.sha256
    header = read_header(path)
    assert sum(math.prod(tensor.shape) for tensor in header.tensors) == ENTRY.parameters
    keys = header.metadata
    shape = ENTRY.shape
    assert keys["general.name"] == "laya-nano"
    for key, value in (
        ("block_count", shape.n_layer),
        ("embedding_length", shape.n_embd),
        ("expert_count", shape.n_expert),
        ("expert_used_count", shape.n_expert_used),
        ("context_length", shape.n_ctx_train),
    ):
        assert keys[f"llama.{key}"] == value
    assert "| topic | package |" in (SHIPPED_DIR / "laya-nano.md").read_text()


def test_a_pull_copies_it_into_the_store(tmp_path: Path) -> None:
    model = pull("laya-nano", home=tmp_path)
    assert model.origin == "pulled" and model.path.is_relative_to(tmp_path)
    assert resolve("laya-nano", models_dir=None, home=tmp_path).path == model.path


@pytest.mark.parametrize("name", ["shipped://laya-mini.gguf", "shipped://../catalogue.json", "shipped://"])
def test_what_does_not_ship_is_named(name: str) -> None:
    with pytest.raises(DownloadError, match=r"It comes with: shipped://laya-nano\.gguf"):
        parse_source(name)
