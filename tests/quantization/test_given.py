"""A text that a user gave: how much of it is read does not change what is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from laya.errors import ConfigError
from laya.quantization.given import given_text


def test_text_that_begins_with_empty_lines_is_one_however_little_of_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("\n\n\n\n\nwords")
    assert given_text("--text", str(file), 1) == "\n"
    assert given_text("--text", str(file)) == "\n\n\n\n\nwords"
    file.write_text("\n\n\n")
    with pytest.raises(ConfigError, match="there is no text in it"):
        given_text("--text", str(file), 1)
