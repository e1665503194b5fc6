"""What comes to and leaves models_dir while the server runs: listed, found by its exact name, and dropped again."""

from __future__ import annotations

from pathlib import Path

import pytest

from laya.gateway import roster
from laya.gateway.roster import NAMES_LEARNED_LIMIT
from laya.models import pull
from laya.types import EndpointKind

from .front import Front, front, request

pytestmark = pytest.mark.anyio
FILE = b"GGUF\x03\x00\x00\x00" + bytes(100)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """models_dir, which exists already, and is looked at whenever it may be."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(roster, "RESCAN_EVERY_S", 0.0)
    (tmp_path / "models").mkdir()
    (tmp_path / "home").mkdir()
    return tmp_path / "models"


async def get(gate: Front, path: str) -> object:
    answer = await gate.ask(request(method="GET", path=path))
    assert answer.status == 200, answer
    return answer.json


async def listed(gate: Front) -> list[str]:
    answer = await gate.ask(request(method="GET", path="/v1/models"))
    return [model["id"] for model in answer.json["data"]]


async def named(gate: Front, name: str) -> str:
    answer = await gate.ask(request(method="GET", path=f"/v1/models/{name}"))
    return str(answer.json["id"]) if answer.status == 200 else str(answer.error["code"])


async def test_files_are_listed_as_they_come_and_go(tmp_path: Path, folder: Path) -> None:
    async with front(tmp_path / "home") as gate:
        assert await listed(gate) == ["stub"]
        (folder / "new.gguf").write_bytes(FILE)
        assert await listed(gate) == ["stub", "new"]
        (folder / "new.gguf").rename(folder / "other.gguf")
        assert await listed(gate) == ["stub", "other"]
        assert await named(gate, "new") == "model_not_found"
        (folder / "new.gguf").write_bytes(FILE)
        (folder / "other.gguf").unlink()
        await get(gate, "/admin/state")
        assert await named(gate, "new.gguf") == "new"
        assert await listed(gate) == ["stub", "new"]


async def test_model_with_requests_stays_though_its_file_is_gone(tmp_path: Path, folder: Path) -> None:
    (folder / "busy.gguf").write_bytes(FILE)
    async with front(tmp_path / "home") as gate:
        assert await named(gate, "busy") == "busy"
        router = gate.gateway.router
        index = router.choose("busy", session=None, kind=EndpointKind.CHAT, streaming=False, tokens=1, n_seqs=1)
        (folder / "busy.gguf").unlink()
        assert "busy" in await listed(gate)
        router.settle(index, 1, 1)
        assert "busy" not in await listed(gate)


async def test_exact_name_of_a_file_wins_over_a_name_in_another_case(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(FILE)
    pull(str(tmp_path / "tiny.gguf"), home=tmp_path / "home")
    async with front(tmp_path / "home") as gate:
        assert await named(gate, "TINY") == "tiny"
        (folder / "TINY.gguf").write_bytes(FILE)
        gate.sweep(0)  # sees that the folder is another
        assert sorted(await listed(gate)) == ["TINY", "stub", "tiny"]
        assert await named(gate, "TINY") == "TINY"
        assert await named(gate, "tiny") == "tiny"
        (folder / "Tiny.gguf").write_bytes(FILE)
        assert await named(gate, "Tiny") == "Tiny"
    async with front(tmp_path / "home") as again:
        again.gateway.fleet.scan()
        assert [await named(again, name) for name in ("TINY", "tiny", "Tiny")] == ["TINY", "tiny", "Tiny"]


async def test_file_called_as_another_model_has_its_file_name(tmp_path: Path, folder: Path) -> None:
    (folder / "stub-alias.gguf").write_bytes(FILE)
    async with front(tmp_path / "home") as gate:
        assert await listed(gate) == ["stub", "stub-alias.gguf"]
        assert await named(gate, "stub-alias") == "stub"


async def test_names_in_other_cases_are_learned_up_to_a_limit(tmp_path: Path, folder: Path) -> None:
    (folder / "a-name-of-letters.gguf").write_bytes(FILE)
    name = "a-name-of-letters"
    cases = [name[:at] + name[at:].upper() for at in range(len(name))] + [
        name[:at].upper() + name[at:] for at in range(2, len(name))
    ]
    async with front(tmp_path / "home") as gate:
        answers = [await named(gate, case) for case in dict.fromkeys([*cases, *(case + ".gguf" for case in cases)])]
        assert answers.count(name) <= NAMES_LEARNED_LIMIT + 2
        assert "model_not_found" in answers
