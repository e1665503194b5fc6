"""An importance matrix is the mean square of what each column is multiplied with, as numpy finds it, and is used."""

from __future__ import annotations

import json
import struct
from array import array
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from laya.errors import BadModelFile
from laya.memory import Budget
from laya.memory.gguf import read_header
from laya.models.files import model_at
from laya.models.library import Library
from laya.quantization.calibration import calibration_text
from laya.quantization.imatrix import means, read_imatrix
from laya.quantization.make import Asked, Made, make
from tests.quantization.tiny_gguf import write_tiny

TEXT = "a few words of text, 40 letters and more."
PLENTY = Budget(bytes=8 << 30, limit="memory available")
N_EXPERTS = 64


class Calibrated(SimpleNamespace):
    made: Made
    matrix: Path
    source: Path


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    """A model with more experts than so few tokens reach."""
    folder = tmp_path_factory.mktemp("calibrated")
    source = write_tiny(folder / "wide.gguf", width=64, n_layers=2, n_experts=N_EXPERTS)
    text = folder / "text.txt"
    text.write_text(TEXT)
    watcher = SimpleNamespace(stage=lambda text: None, progress=lambda d, t: None, planned=lambda job, peak: None)
    asked = Asked(model_at(source), "q4_0", calibration=str(text))
    made = make(asked, Library(folder / "home"), PLENTY, watcher)
    return Calibrated(made=made, matrix=Path(made.path).parent / "imatrix.gguf", source=source)


def test_the_first_layers_columns_are_as_numpy_computes_them(calibrated: Calibrated) -> None:
    """Its input is known: the normalised embeddings of the text's bytes."""
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(calibrated.source).tensors}
    alphabet = gguf.GGUFReader(calibrated.source).fields["tokenizer.ggml.tokens"].contents()
    ids = [alphabet.index("Ġ" if letter == " " else letter) for letter in TEXT]
    rows = np.asarray(tensors["token_embd.weight"], np.float32)[ids].astype(np.float64)
    rows /= np.sqrt(np.mean(rows**2, axis=1, keepdims=True) + 1e-5)
    found = read_imatrix(calibrated.matrix).tensors
    for name in ("attn_q", "attn_k", "attn_v"):
        assert np.allclose(found[f"blk.0.{name}.weight"].values, np.mean(rows**2, axis=0), rtol=1e-4)


def test_experts_are_counted_by_the_tokens_that_chose_them(calibrated: Calibrated) -> None:
    raw = {tensor.name: tensor.data for tensor in gguf.GGUFReader(calibrated.matrix).tensors}
    for layer in range(2):
        router, up = (f"blk.{layer}.ffn_{name}.weight" for name in ("gate_inp", "up_exps"))
        assert raw[up + ".counts"].sum() == 2 * len(TEXT) == 2 * raw[router + ".counts"].sum()
        assert np.allclose(raw[up + ".in_sum2"].sum(0), 2 * raw[router + ".in_sum2"][0], rtol=1e-4)
        unseen = tuple(np.flatnonzero(raw[up + ".counts"][:, 0] == 0))
        assert 0 < len(unseen) < N_EXPERTS and read_imatrix(calibrated.matrix).tensors[up].unseen_experts == unseen
        values = np.array(read_imatrix(calibrated.matrix).tensors[up].values).reshape(N_EXPERTS, 64)
        assert (values[list(unseen)] == 1).all()


def test_the_card_and_the_file_tell_what_it_was_calibrated_on(calibrated: Calibrated) -> None:
    card = calibrated.made.card
    assert card.imatrix is not None and card.imatrix.text_tokens == len(TEXT)
    assert card.imatrix.text_name == "text.txt" and len(str(card.imatrix.text_sha256)) == 64
    assert sum("reached no token of experts" in text for text in card.warnings) == 2
    assert read_header(Path(calibrated.made.path)).metadata["quantize.imatrix.file"] == "text.txt"
    assert json.loads((calibrated.matrix.parent / "card.json").read_bytes())["imatrix"]["name"] == "imatrix.gguf"
    peak, planned = calibrated.made.calibration_peak_bytes, calibrated.made.calibration_planned_bytes
    assert peak is not None and planned is not None and peak <= planned


def test_a_matrix_may_be_given_again_and_must_be_of_this_model(calibrated: Calibrated, tmp_path: Path) -> None:
    watcher = SimpleNamespace(stage=lambda text: None, progress=lambda d, t: None, planned=lambda job, peak: None)
    asked = Asked(model_at(calibrated.source), "q4_0", imatrix=calibrated.matrix, out=tmp_path / "again.gguf")
    again = make(asked, Library(tmp_path), PLENTY, watcher)
    first = read_header(Path(calibrated.made.path))
    data = Path(calibrated.made.path).read_bytes()[first.data_offset :]
    assert Path(again.path).read_bytes().endswith(data)
    dense = write_tiny(tmp_path / "dense.gguf", width=64, n_layers=2)
    of_dense = make(asked._replace(model=model_at(dense), out=tmp_path / "d.gguf"), Library(tmp_path), PLENTY, watcher)
    assert any("tensors that the model has not, such as" in text for text in of_dense.card.warnings)
    other = write_tiny(tmp_path / "other.gguf", width=64, n_layers=2, n_experts=4)
    with pytest.raises(Exception, match="The importance matrix is of another model"):
        make(asked._replace(model=model_at(other), out=tmp_path / "no.gguf"), Library(tmp_path), PLENTY, watcher)


def test_the_older_format_is_read_and_junk_is_not(tmp_path: Path) -> None:
    name = b"blk.0.attn_q.weight"
    entry = struct.pack("<i", len(name)) + name + struct.pack("<2i2f", 4, 2, 8.0, 2.0)
    (tmp_path / "old.dat").write_bytes(struct.pack("<i", 1) + entry + struct.pack("<i", 7))
    matrix = read_imatrix(tmp_path / "old.dat")
    assert list(matrix.tensors["blk.0.attn_q.weight"].values) == [2.0, 0.5] and matrix.n_chunks == 7
    (tmp_path / "cut.dat").write_bytes(struct.pack("<i", 1) + entry[:-2])
    with pytest.raises(BadModelFile, match="ends in the middle"):
        read_imatrix(tmp_path / "cut.dat")
    (tmp_path / "nan.dat").write_bytes((struct.pack("<i", 1) + entry).replace(struct.pack("<f", 8.0), b"\0\0\xc0\x7f"))
    with pytest.raises(BadModelFile, match="no finite number"):
        read_imatrix(tmp_path / "nan.dat")
    with pytest.raises(BadModelFile, match="5 sums for 2 matrices"):
        means(array("f", [1.0] * 5), array("f", [1.0] * 2), tmp_path)


def test_the_built_in_text_is_none_that_models_are_measured_on() -> None:
    raw = calibration_text("python").raw.decode()
    assert len(raw) > 500_000
    assert "A multi-producer, multi-consumer queue." not in raw  # the first line of the measured document
