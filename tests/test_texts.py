"""The text sets that ship say where each document is from, and a user's own files are read or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from laya.errors import InvalidRequest
from laya.texts import DEFAULT_SET, Document, load_files, load_set, set_names, sources_of

_MOST_BYTES = 160 * 1024


def test_every_set_is_small_and_each_document_says_where_it_is_from_and_under_which_licence() -> None:
    assert DEFAULT_SET in set_names()
    for name in set_names():
        documents, sources = load_set(name), sources_of(name)
        assert sum(len(document.text.encode()) for document in documents) <= _MOST_BYTES
        for document, source in zip(documents, sources, strict=True):
            assert document.topic == source["topic"] and document.text.strip() and source["licence"]
            assert {"package", "version", "file"} <= source["origin"].keys()
        assert {document.topic for document in documents} == {"prose", "manual", "python", "c"}


def test_what_is_measured_on_is_in_no_other_set() -> None:
    measured = {(source["origin"]["package"], source["origin"]["file"]) for source in sources_of("mixed")}
    for name in set(set_names()) - {"mixed"}:
        own = {(source["origin"]["package"], source["origin"]["file"]) for source in sources_of(name)}
        assert {place for place in own & measured if not place[1].endswith("Rdata.rdb")} == set()


def test_unknown_set_names_the_nearest() -> None:
    with pytest.raises(InvalidRequest, match=r"no text set 'mixd'\. Did you mean 'mixed'\? There are: mixed, varied\."):
        load_set("mixd")


def test_files_are_topics_and_lines_of_jsonl_are_documents(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    lines, plain, other = tmp_path / "a.jsonl", tmp_path / "notes.txt", tmp_path / "sub" / "notes.md"
    lines.write_text(
        '{"topic": "x", "text": "one"}\n\n{"topic": "y", "text": "two"}\n{"topic": "x", "text": "three"}\n'
    )
    plain.write_text("plain")
    other.write_text("other")
    assert load_files([lines, plain]) == [
        Document("x", "one"),
        Document("y", "two"),
        Document("x", "three"),
        Document("notes", "plain"),
    ]
    assert [document.topic for document in load_files([plain, other])] == [str(plain), str(other)]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.txt", b" \n", "there is no text in it"),
        ("a.txt", b"abc\xff", r"is no text in UTF-8 \(byte 3\)"),
        ("a.jsonl", b'{"topic": "x", "text": "one"}\n{"topic": "x"}\n', r"line 2: expected"),
        ("a.jsonl", b"[1]\n", r"line 1: expected"),
    ],
)
def test_what_is_no_text_is_named(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidRequest, match=told):
        load_files([tmp_path / name])
    with pytest.raises(InvalidRequest, match="cannot be read"):
        load_files([tmp_path / "nowhere"])
