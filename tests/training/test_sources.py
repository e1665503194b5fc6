"""A recipe's documents: forms, cuts, what is held out, and what is wrong with a recipe said by name."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import pytest

from laya.errors import ConfigError, LayaError
from laya.training import recipe as recipes
from laya.training.recipe import HeldOut, Recipe, Schedule, Source
from laya.training.sources import Document, fetch, is_held_out


def _documents(folder: Path, tmp_path: Path, **source: object) -> list[Document]:
    """With a second file of the topic that is always held out, as a topic needs both."""
    (folder / "zz-held.txt").write_text("held out")
    told = {"topic": "t", "package": f"folder:{folder}", "licence": "own", "files": ["*"]} | source
    recipe = Recipe(
        name="r", sources=[Source(**told)], train=Schedule(tokens=1), held_out=HeldOut(share=0.0, files=["*zz-held*"])
    )
    documents, _ = fetch(recipe, tmp_path / "cache", lambda line: None)
    return [document for document in documents if not document.is_held_out]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "texts"
    path.mkdir()
    return path


def test_html_is_what_a_reader_sees(folder: Path, tmp_path: Path) -> None:
    (folder / "a.html").write_text(
        "<html><head><title>no</title></head><body><script>no()</script><h1>Head</h1><p>one &amp; two<p>three</body>"
    )
    (only,) = _documents(folder, tmp_path, form="html", files=["*.html", "zz*"])
    assert only.text == "Head\n\none & two\nthree"


def test_gzip_and_what_is_removed(folder: Path, tmp_path: Path) -> None:
    (folder / "a.dz").write_bytes(gzip.compress(b"see {this} entry"))
    (folder / "zz-held.txt.dz").write_bytes(gzip.compress(b"held out"))
    (only,) = _documents(folder, tmp_path, form="gzip", files=["*.dz"], remove="[{}]")
    assert only.text == "see this entry"


def _r_vector(*lines: str) -> bytes:
    raw = b"X\n" + struct.pack(">IIII", 3, 0x040201, 0x030500, 5) + b"UTF-8" + struct.pack(">II", 16, len(lines))
    for line in lines:
        raw += struct.pack(">Ii", 0x00040009, len(line.encode())) + line.encode()
    return struct.pack(">I", len(raw)) + zlib.compress(raw)


def test_the_strings_of_an_r_data_base(folder: Path, tmp_path: Path) -> None:
    (folder / "a.rdb").write_bytes(_r_vector("first line", "", "é") + _r_vector("another"))
    (folder / "zz-held.txt.rdb").write_bytes(_r_vector("held"))
    found = _documents(folder, tmp_path, form="rdb", files=["*.rdb"])
    assert [one.text for one in found] == ["first line\n\né", "another"]
    assert found[0].name.endswith("a.rdb/0") and found[1].name.endswith("a.rdb/1")


def test_long_documents_are_cut_between_paragraphs(folder: Path, tmp_path: Path) -> None:
    paragraphs = [f"paragraph {number} " + "x" * 80 for number in range(10)]
    (folder / "a.txt").write_text("\n\n".join(paragraphs))
    found = _documents(folder, tmp_path, split_bytes=250)
    assert len(found) > 2 and "\n\n".join(one.text for one in found) == "\n\n".join(paragraphs)
    assert len({one.name for one in found}) == len(found)


def test_most_bytes_and_excluded_names(folder: Path, tmp_path: Path) -> None:
    for name in "abcd":
        (folder / f"{name}.txt").write_text(name * 100)
    (folder / "0-zz-held.txt").write_text("held out")
    found = _documents(folder, tmp_path, exclude=["*/b.txt"], max_bytes=150)
    assert [one.text[0] for one in found] == ["a", "c"]


def test_what_is_held_out_depends_on_the_name_alone() -> None:
    names = [f"package/file-{number}" for number in range(4000)]
    held = [name for name in names if is_held_out(name, HeldOut(share=0.05))]
    assert 140 < len(held) < 260
    assert held == [name for name in reversed(names) if is_held_out(name, HeldOut(share=0.05))][::-1]
    assert is_held_out("p/data/Rdata.rdb/2#7", HeldOut(share=0.0, files=["*/data/Rdata.rdb/2*"]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"package": "git:x"}, "expected debian:NAME"),
        ({"package": "debian:--help"}, "expected debian:NAME"),
        ({"package": "pypi:numpy"}, "pypi:NAME==VERSION"),
        ({"topic": "../t"}, "files are named by it"),
        ({"files": []}, "files is empty"),
        ({"files": ["/etc/*"]}, "a path inside the package"),
        ({"files": ["../*"]}, "a path inside the package"),
        ({"files": ["**.txt"]}, r"\*\* stands alone"),
        ({"remove": "["}, "no regular expression"),
        ({"split_bytes": 0}, "split_bytes is 0; expected 1 or more"),
        ({"files": ["a.txt"], "form": "gzip"}, r"a\.txt is not of form gzip"),
        ({"files": ["a.txt"], "form": "rdb"}, r"a\.txt is not of form rdb"),
        ({"package": "folder:/nowhere/at/all"}, "there is no such folder"),
        ({"files": ["*.none"]}, r"no file of it matches \*\.none"),
        ({"exclude": ["*zz-held*"]}, "nothing is held out"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, tmp_path: Path, change: dict[str, object], says: str) -> None:
    (folder / "a.txt").write_text("text of no form")
    with pytest.raises((ValueError, LayaError), match=says):
        _documents(folder, tmp_path, **change)


def test_a_recipe_is_known_by_name_or_file(tmp_path: Path) -> None:
    assert recipes.load("laya-nano").model.num_local_experts == 8
    with pytest.raises(ConfigError, match="did you mean laya-nano"):
        recipes.load("laya-nan")
    bad = tmp_path / "bad.yaml"
    for text, says in (
        ("name: [", "not YAML"),
        ("name: x\ntrain: {tokens: 5}\nsources: []\n", "sources is empty"),
        ("name: x\nname: y\n", "name is here twice"),
        ("name: ../x\ntrain: {tokens: 5}\nsources: []\n", "files are named by it"),
        ("name: x\nseed: -1\ntrain: {tokens: 5}\nsources: []\n", "seed is -1"),
        ("name: x\nheld_out: {share: 2}\ntrain: {tokens: 5}\nsources: []\n", "share is 2"),
        ("name: x\nmodel: {hidden_size: 30}\ntrain: {tokens: 5}\nsources: []\n", "no multiple of num_attention_heads"),
        ("name: x\nmodel: {hidden_size: 36}\ntrain: {tokens: 5}\nsources: []\n", "expected an even number"),
        ("name: x\nmodel: {num_experts_per_tok: 9}\ntrain: {tokens: 5}\nsources: []\n", "there are 8"),
        ("name: x\nmodel: {vocab_size: 70000}\ntrain: {tokens: 5}\nsources: []\n", "expected 257 to 65536"),
        ("name: x\ntrain: {tokens: 5, balance_steps: -1}\nsources: []\n", "balance_steps is -1; expected 0"),
        (
            "name: x\ntrain: {tokens: 5, learning_rate: .nan}\nsources: []\n",
            "learning_rate: expected a number, got nan",
        ),
        ("name: x\ntrain: {tokens: 0}\nsources: []\n", r"tokens is 0; expected 1 or more"),
        ("name: x\ntrain: {tokens: 5, lr: 3}\nsources: []\n", "bad.yaml:2: train.lr is not a key here"),
    ):
        bad.write_text(text)
        with pytest.raises(ConfigError, match=says):
            recipes.load(str(bad))


def test_links_out_of_a_package_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("of this machine")
    files = tmp_path / "cache" / "pypi_x==1" / "files"
    files.mkdir(parents=True)
    (files.parent / "x-1-py3-none-any.whl").touch()
    for name in ("a.txt", "held.txt"):
        (files / name).write_text(name)
    (files / "b.txt").symlink_to(tmp_path / "secret.txt")
    (files / "c.txt").symlink_to("a.txt")
    source = Source(topic="t", package="pypi:x==1", licence="own", files=["*.txt"])
    held_out = HeldOut(share=0.0, files=["*held*"])
    recipe = Recipe(name="r", sources=[source], train=Schedule(tokens=1), held_out=held_out)
    documents, (told,) = fetch(recipe, tmp_path / "cache", lambda line: None)
    assert [one.text for one in documents] == ["a.txt", "a.txt", "held.txt"] and told.version == "1"


def test_the_dense_twin_has_the_same_active_size() -> None:
    recipe = recipes.load("laya-nano")
    twin = recipe.dense_twin()
    assert twin.model.intermediate_size == recipe.model.num_experts_per_tok * recipe.model.intermediate_size
    assert twin.model.num_local_experts == twin.model.num_experts_per_tok == 1
    assert twin.data_key == recipe.data_key == recipe.without_balance().data_key
