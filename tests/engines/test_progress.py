"""How far a load has come, read from the kernel of a child that maps or reads its file piece by piece as it is told."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from laya.engines.progress import LoadProgress

N_BYTES = 4_000_000
MAPS = """
import mmap, sys
file = open(sys.argv[1], "rb")
data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
data.madvise(mmap.MADV_RANDOM)  # as few pages as can be beside those that are asked for
for word in sys.stdin:
    n_bytes = int(word)
    sum(data[at] for at in range(0, n_bytes, 4096))
    print(n_bytes, flush=True)
"""
READS = """
import sys
sys.stdin.readline()
file = open(sys.argv[1], "rb", buffering=0)
print(0, flush=True)
for word in sys.stdin:
    while file.tell() < int(word):
        file.read(int(word) - file.tell())
    print(word, flush=True)
"""


class Loader:
    """A child that loads as much as it is told."""

    def __init__(self, program: str, path: Path) -> None:
        command = [sys.executable, "-c", program, str(path)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def load(self, n_bytes: int) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{n_bytes}\n")
        self.process.stdin.flush()
        self.process.stdout.readline()

    def end(self) -> None:
        self.process.communicate()


@pytest.mark.parametrize("are_mapped", [True, False])
@pytest.mark.parametrize("n_parts", [1, 2])
def test_percent_rises_with_the_bytes_and_stops_short_of_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, are_mapped: bool, n_parts: int
) -> None:
    """Of a split model, whose second part is not begun here, half as far."""
    monkeypatch.setattr("laya.engines.progress.LOOK_EVERY_S", 0.001)
    name = "m-00001-of-00002.gguf" if n_parts == 2 else "m.gguf"
    (tmp_path / name).write_bytes(b"x" * N_BYTES)
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"x" * N_BYTES)
    (tmp_path / "link").mkdir()
    for file in tmp_path.glob("*.gguf"):
        (tmp_path / "link" / file.name).symlink_to(file)
    loader = Loader(MAPS if are_mapped else READS, tmp_path / name)

    async def scenario() -> list[int | None]:
        progress = LoadProgress([tmp_path / "link" / name], are_mapped=are_mapped)
        following = asyncio.ensure_future(progress.follow(loader.process.pid))
        seen = [progress.percent]
        try:
            for share in (0, 0.4, 0.8, 1):
                loader.load(int(N_BYTES * share))
                for _ in range(2000):  # until it has looked, at most 10 s
                    await asyncio.sleep(0.005)
                    if (progress.percent or 0) >= int(99 * share / n_parts) - 1:
                        break
                seen.append(progress.percent)
        finally:
            following.cancel()
        return seen

    try:
        none, zero, *rest = asyncio.run(scenario())
    finally:
        loader.end()
    assert none is None and zero in (0, None)
    wanted = [40, 80, 99] if n_parts == 1 else [20, 40, 50]
    assert rest == sorted(rest) and rest[-1] == pytest.approx(wanted[-1], abs=1)  # type: ignore[type-var]
    for seen, least in zip(rest, wanted, strict=True):  # the kernel maps the neighbours of a page with it
        assert seen is not None and least - 2 <= seen <= min(99, least + 15)


def test_nothing_is_claimed_of_what_is_not_there(tmp_path: Path) -> None:
    async def scenario() -> int | None:
        progress = LoadProgress([tmp_path / "gone.gguf"], are_mapped=True)
        await progress.follow(1)
        return progress.percent

    assert asyncio.run(scenario()) is None
