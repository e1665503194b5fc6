"""A model of the config whose file is not there costs that model alone, says why, and is served once the file comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from laya.config import Config, ModelConfig
from laya.errors import BadModelFile, ConfigError, ModelNotFound
from laya.gateway.entries import TRY_EVERY_S, Entries

FILE = b"GGUF\x03\x00\x00\x00" + bytes(100)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """One entry whose file is there, and one whose file is not."""
    (tmp_path / "good.gguf").write_bytes(FILE)
    models = {
        "good": ModelConfig(source=str(tmp_path / "good.gguf")),
        "late": ModelConfig(source=str(tmp_path / "late.gguf"), aliases=["tardy"]),
    }
    return Config(models=models, models_dir=str(tmp_path / "models"))


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_wrong_entry_is_kept_with_its_reason_and_the_others_are_found(config: Config, tmp_path: Path) -> None:
    clock = Clock()
    entries = Entries(config, tmp_path, clock)
    assert [file.id for file in entries.found()] == ["good"]
    clock.now_s += 7
    (status,) = entries.statuses()
    assert (status.id, status.state, status.since_s) == ("late", "failed", 7)
    assert status.error is not None and "late.gguf" in status.error
    for name in ("late", "tardy"):
        with pytest.raises((ModelNotFound, BadModelFile), match=r"late\.gguf"):
            entries.check(name)
    entries.check("good")
    entries.check_any(1)
    with pytest.raises(ConfigError, match=r"^models\.late: .*late\.gguf") as caught:
        entries.check_any(0)
    assert caught.value.exit_code == 2


def test_entry_is_mended_when_its_file_comes_and_looked_for_now_and_then_only(config: Config, tmp_path: Path) -> None:
    clock = Clock()
    entries = Entries(config, tmp_path, clock)
    list(entries.found())
    (tmp_path / "late.gguf").write_bytes(FILE)
    assert entries.mended() == []
    clock.now_s += TRY_EVERY_S
    (file,) = entries.mended()
    assert (file.id, file.path) == ("late", tmp_path / "late.gguf")
    assert "tardy" in file.aliases
    assert entries.faults == {} and entries.statuses() == []
    entries.check("late")
