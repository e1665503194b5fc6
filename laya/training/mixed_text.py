"""Owns: text of several kinds that lies on any machine with the lab on it, as windows of tokens that train a router.

Python's own sources, its manual (`pydoc_data`), descriptions of installed packages and torch's C++ headers. What
`laya.texts` ships is left out: models are measured on that. Documents stay apart: a window is of one of them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data import topics

from tokenizers import Tokenizer

from laya.texts import DEFAULT_SET, sources_of

_LEAST_CHARACTERS = 1000
_CHARACTERS_A_TOKEN = 12  # more than any text has, so that the front of a long document is enough


def local_documents(seed: int) -> list[str]:
    """Of each kind in turn, in an order drawn by `seed`."""
    kinds = [list(kind) for kind in (_descriptions(), topics.topics.values(), _python_sources(), _cpp_headers())]
    draw = random.Random(seed)
    for kind in kinds:
        kind[:] = sorted(text for text in kind if len(text) >= _LEAST_CHARACTERS)
        draw.shuffle(kind)
    n_each = max(map(len, kinds))
    return [kind[number] for number in range(n_each) for kind in kinds if number < len(kind)]


def _measured_files() -> set[str]:
    return {Path(str(source["origin"]["file"])).name for source in sources_of(DEFAULT_SET) if "origin" in source}


def _python_sources() -> Iterator[str]:
    measured = _measured_files()
    folder = Path(sysconfig.get_path("stdlib"))
    return (_text(file) for file in folder.glob("*.py") if file.name not in measured)


def _cpp_headers() -> Iterator[str]:
    torch = importlib.util.find_spec("torch")
    folders = torch.submodule_search_locations if torch is not None else None
    return (_text(file) for folder in folders or () for file in Path(folder, "include", "ATen").glob("*.h"))


def _descriptions() -> Iterator[str]:
    for package in importlib.metadata.distributions():
        yield (package.read_text("METADATA") or "").partition("\n\n")[2]


def _text(file: Path) -> str:
    return file.read_text("utf-8", errors="ignore")


def windows_of(
    documents: Iterable[str], tokenizer: Tokenizer, n_tokens: int, most: int, most_each: int
) -> list[list[int]]:
    """At most so many windows of n_tokens ids, none with another document's text; a remainder is left out."""
    windows: list[list[int]] = []
    for text in documents:
        front = text[: n_tokens * most_each * _CHARACTERS_A_TOKEN]
        ids = tokenizer.encode(front, add_special_tokens=False).ids
        starts = range(0, min(len(ids) - n_tokens + 1, most_each * n_tokens), n_tokens)
        windows += [ids[start : start + n_tokens] for start in starts]
        if len(windows) >= most:
            break
    return windows[:most]
