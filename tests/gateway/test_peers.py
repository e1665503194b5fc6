"""Other Laya servers as peers: three real ones in processes of their own, and one that is scripted to fail."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from laya.cli.main import app

from .live import Serving, model_state, plain, sdk, until
from .other_server import KEY, OtherServer

pytestmark = pytest.mark.engine
PROGRAM = Path(__file__).parent.parent / "engines" / "openai_program.py"
USER: Any = [{"role": "user", "content": "Hi"}]
CMD = f"{sys.executable} {PROGRAM} --port ${{PORT}} --model ${{MODEL}}"
SECRETS = {"admin": "sk-admin-of-attic", "peer": "sk-peer-of-attic", "user": "sk-user-of-attic"}
TOLD_S = 15.0  # a peer is asked every few seconds


def models(*names: str) -> str:
    entries = {name: {"engine": "command", "cmd": CMD, "memory": "64MiB"} for name in names}
    return "models:\n" + "".join(f"  {name}: {json.dumps(entry)}\n" for name, entry in entries.items())


def keys() -> str:
    entries = (
        f"    - {{name: {role}, role: {role}, sha256: {hashlib.sha256(secret.encode()).hexdigest()}}}\n"
        for role, secret in SECRETS.items()
    )
    return "server:\n  api_keys:\n" + "".join(entries)


def ids_of(http: httpx.Client) -> set[str]:
    """The models of a server, but for what all have on this disk."""
    ids = {model["id"] for model in http.get("/v1/models").json()["data"]}
    return {each for each in ids if not each.endswith("smollm2-135m")}


class House:
    """The front server and its peers: the attic wants keys, the cellar has more room."""

    def __init__(self, start: Callable[..., Any], folder: Path) -> None:
        self.start = start
        self.folder = folder
        for role, secret in SECRETS.items():
            (folder / role).write_text(secret)
        self.attic_config = keys() + "memory: {budget: 700MiB}\n" + models("small", "both", "shared", "mine")
        self.cellar_config = "memory: {budget: 900MiB}\n" + models("both", "shared")
        self.attic = start(config=self.attic_config)
        self.cellar = start(config=self.cellar_config)
        self.front = start(config=self.front_config())

    def front_config(self, *without: str) -> str:
        peers = {
            "attic": {"url": self.attic.url, "key_file": str(self.folder / "peer")},
            "cellar": {"url": self.cellar.url},
            "lowly": {"url": self.attic.url, "key_file": str(self.folder / "user")},
            "keyless": {"url": self.attic.url},
            "gone": {"url": "http://127.0.0.1:9"},
        }
        said = {name: peer for name, peer in peers.items() if name not in without}
        return f"peers: {json.dumps(said)}\n" + models("mine")

    def reload(self, server: Serving, config: str, key: str | None = None) -> None:
        (server.cwd / "config.yaml").write_text(config)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        httpx.post(f"{server.url}/admin/reload", headers=headers, trust_env=False).raise_for_status()

    def peers(self) -> dict[str, dict[str, Any]]:
        with plain(self.front) as http:
            return {peer["name"]: peer for peer in http.get("/admin/state").json()["peers"]}

    def listed(self) -> set[str]:
        with plain(self.front) as http:
            return ids_of(http)

    def knows(self, model: str, state: str) -> Callable[[], bool]:
        return lambda: model in self.listed() and model_state(self.front, model)["state"] == state


@pytest.fixture(scope="module")
def house(start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    house = House(start_server, tmp_path_factory.mktemp("house"))
    until(lambda: {"attic/small", "cellar/both"} <= house.listed(), TOLD_S)
    yield house
    for server in (house.front, house.attic, house.cellar):
        assert server.stop() == 0


@pytest.fixture
def client(house: House) -> openai.OpenAI:
    return sdk(house.front)


def test_models_of_peers_are_listed_and_served_by_both_names(house: House, client: openai.OpenAI) -> None:
    assert house.listed() == {"mine", "attic/small", "attic/both", "attic/shared", "attic/mine", "cellar/both",
                              "cellar/shared"}  # fmt: skip
    for name in ("attic/small", "small"):
        raw = client.chat.completions.with_raw_response.create(model=name, messages=USER)
        answer = raw.parse()
        assert (answer.model, answer.choices[0].message.content) == ("attic/small", "Hello from a program")
        assert raw.headers["x-laya-engine"] == "remote:attic/small"
    events = list(client.chat.completions.create(model="small", messages=USER, stream=True))
    assert {event.model for event in events} == {"attic/small"}
    with plain(house.front) as http:
        told = http.get("/v1/models/small").json()
    assert (told["id"], told["peer"]) == ("attic/small", "attic")
    assert told["context_length"] is None, "only a program itself knows what it takes"
    until(house.knows("attic/small", "ready"), TOLD_S)
    assert model_state(house.front, "attic/both")["state"] == "unloaded"


def test_what_is_here_keeps_its_name(house: House) -> None:
    with plain(house.front) as http:
        for name in ("mine", "attic/mine"):
            told = http.get("/admin/route/explain", params={"model": name}).json()
            assert [each["name"] for each in told["tried"][0]["candidates"]] == [name]


def test_peer_with_most_room_loads_it_and_then_the_one_that_has_it_serves(house: House, client: openai.OpenAI) -> None:
    peers = house.peers()
    assert peers["cellar"]["free_bytes"] > peers["attic"]["free_bytes"]
    assert client.chat.completions.create(model="both", messages=USER).model == "cellar/both"
    assert model_state(house.cellar, "both")["state"] == "ready"
    with plain(house.attic) as http:
        http.headers["authorization"] = f"Bearer {SECRETS['admin']}"
        http.post("/admin/models/shared/load").raise_for_status()
    until(house.knows("attic/shared", "ready"), TOLD_S)
    for _ in range(3):
        assert client.chat.completions.create(model="shared", messages=USER).model == "attic/shared"
    with plain(house.front) as http:
        told = http.get("/admin/route/explain", params={"model": "shared"}).json()
    assert [each["name"] for each in told["tried"][0]["candidates"]] == ["attic/shared"]


def test_peers_that_cannot_be_used_say_why_and_cost_no_other(house: House) -> None:
    peers = house.peers()
    assert {name for name, peer in peers.items() if peer["state"] == "reachable"} == {"attic", "cellar"}
    assert "needs the role peer or admin there: laya key create NAME --role peer" in peers["lowly"]["error"]
    assert "(403)" in peers["lowly"]["error"] and "(401)" in peers["keyless"]["error"]
    assert "cannot be reached" in peers["gone"]["error"]
    with plain(house.front) as http:
        assert not any(secret in http.get("/admin/state").text for secret in SECRETS.values())
        text = http.get("/admin/events").text
    assert "peer_lost" in text and not any(secret in text for secret in SECRETS.values())


def test_a_peers_key_sees_no_requests_of_others_and_does_nothing_else(house: House) -> None:
    with plain(house.attic) as http:
        http.headers["authorization"] = f"Bearer {SECRETS['peer']}"
        state = http.get("/admin/state").json()
        assert all(model["requests"] == [] for model in state["models"])
        assert http.post("/admin/models/small/unload").status_code == 403


def test_loading_is_the_peers_own_business(house: House) -> None:
    with plain(house.front) as http:
        answer = http.post("/admin/models/attic/small/unload")
    assert answer.status_code == 501 or answer.status_code == 400, answer.text
    assert f"LAYA_URL={house.attic.url}" in answer.json()["error"]["message"]


def test_what_was_drained_here_is_opened_here(house: House, client: openai.OpenAI) -> None:
    with plain(house.front) as http:
        assert http.post("/admin/models/attic/small/drain").status_code == 200
        with pytest.raises(openai.APIStatusError, match="`laya load attic/small` ends that"):
            client.with_options(max_retries=0).chat.completions.create(model="attic/small", messages=USER)
        assert http.post("/admin/models/attic/small/load").status_code == 200
    assert client.chat.completions.create(model="attic/small", messages=USER).model == "attic/small"


def test_ps_and_list_show_them(
    house: House, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAYA_URL", house.front.url)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(house.front.cwd)
    app(args=["ps"], standalone_mode=False)
    told = capsys.readouterr().out
    assert f"peer cellar  {house.cellar.url}  reachable" in told and "unreachable" in told
    row = next(line.split() for line in told.splitlines() if line.startswith("attic/small"))
    assert row[1] == "ready"
    app(args=["list"], standalone_mode=False)
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("cellar/shared"))
    assert "cellar" in row and "unloaded" in row


def test_two_that_are_each_others_peers_pass_nothing_on(house: House) -> None:
    back = json.dumps({"front": {"url": house.front.url}, "myself": {"url": house.cellar.url}})
    house.reload(house.cellar, house.cellar_config + f"peers: {back}\n")
    with plain(house.cellar) as http:
        until(lambda: "front/mine" in http.get("/v1/models").text, TOLD_S)
        assert ids_of(http) == {"both", "shared", "front/mine"}
        peers = {peer["name"]: peer for peer in http.get("/admin/state").json()["peers"]}
        assert "is this server itself" in peers["myself"]["error"]
    assert sdk(house.cellar).chat.completions.create(model="mine", messages=USER).model == "front/mine"
    assert not any("front" in name for name in house.listed())
    house.reload(house.cellar, house.cellar_config)


def test_a_model_that_comes_and_goes_there_comes_and_goes_here(house: House, client: openai.OpenAI) -> None:
    house.reload(house.cellar, house.cellar_config + models("late").removeprefix("models:\n"))
    until(lambda: "cellar/late" in house.listed(), TOLD_S)
    assert client.chat.completions.create(model="late", messages=USER).model == "cellar/late"
    other = json.loads(models("late").partition("late: ")[2]) | {"task": "embed", "aliases": ["both-of-them"]}
    house.reload(house.cellar, house.cellar_config + f"  late: {json.dumps(other)}\n")

    def told() -> Any:
        with plain(house.front) as http:
            return http.get("/v1/models/cellar/late").json()

    until(lambda: (told()["task"], told()["aliases"]) == ("embed", ["cellar/both-of-them"]), TOLD_S)
    with pytest.raises(openai.APIStatusError, match="the task 'embed', not 'chat'"):
        client.chat.completions.create(model="cellar/both-of-them", messages=USER)
    assert client.embeddings.create(model="both-of-them", input="x").data
    house.reload(house.cellar, house.cellar_config)
    until(lambda: "cellar/late" not in house.listed(), TOLD_S)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="late", messages=USER)


def test_a_reload_takes_peers_away_and_brings_them_back(house: House, client: openai.OpenAI) -> None:
    house.reload(house.front, house.front_config("cellar"))
    until(lambda: not any(name.startswith("cellar/") for name in house.listed()), TOLD_S)
    assert client.chat.completions.create(model="both", messages=USER).model == "attic/both"
    house.reload(house.front, house.front_config())
    until(lambda: "cellar/both" in house.listed(), TOLD_S)
    assert client.chat.completions.create(model="cellar/both", messages=USER).model == "cellar/both"


@pytest.fixture(scope="module")
def failing(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[OtherServer, OtherServer, Serving]]:
    """A server with two scripted peers: one that is preferred and fails, and one that has less room."""
    key = tmp_path_factory.mktemp("failing") / "key"
    key.write_text(KEY)
    first, second = OtherServer(), OtherServer()
    for other, reserved_bytes in ((first, 0), (second, 50)):
        memory = {"budget_bytes": 100, "reserved_bytes": reserved_bytes}
        other.state = {"version": "9", "memory": memory, "models": [{"id": "m", "state": "unloaded", "task": "chat"}]}
    said = {name: {"url": other.url, "key_file": str(key)} for name, other in (("first", first), ("second", second))}
    server = start_server(config=f"progress_timeout_s: 2\npeers: {json.dumps(said)}\n")
    yield first, second, server
    server.stop()
    for other in (first, second):
        other.stop()


@pytest.mark.parametrize("mode", ["", "500", "429", "401", "hang", "drop"])
def test_what_one_peer_fails_another_one_serves(failing: tuple[OtherServer, OtherServer, Serving], mode: str) -> None:
    first, second, server = failing
    client = sdk(server)
    first.mode = ""
    with plain(server) as http:
        until(lambda: {"first/m", "second/m"} <= ids_of(http), TOLD_S)
        for _ in range(12):  # a tenth of the requests may be tried a second time
            client.chat.completions.create(model="m", messages=USER)
        until(lambda: model_state(server, "first/m")["state"] == "unloaded")
    first.mode = mode
    answer = client.chat.completions.create(model="m", messages=USER)
    assert answer.choices[0].message.content == "from afar"
    assert answer.model == ("second/m" if mode else "first/m")
    if mode:
        with pytest.raises(openai.APIStatusError):  # who names the peer hears of its failure
            client.chat.completions.create(model="first/m", messages=USER)
        first.mode = ""
        client.chat.completions.create(model="first/m", messages=USER)
    assert not second.mode


def test_a_peer_that_vanishes_is_passed_over_and_one_that_is_back_serves(house: House, client: openai.OpenAI) -> None:
    for model in ("attic/both", "cellar/both"):
        client.chat.completions.create(model=model, messages=USER)
    port = int(house.cellar.url.rpartition(":")[2])
    assert house.cellar.stop() == 0
    for _ in range(6):  # before it is known to be gone, and after
        assert client.chat.completions.create(model="both", messages=USER).model == "attic/both"
    until(lambda: house.peers()["cellar"]["state"] == "unreachable", TOLD_S)
    assert "cellar/both" not in house.listed()
    state = model_state(house.front, "cellar/both")
    assert state["state"] == "failed" and "cannot be reached" in state["error"]
    with pytest.raises(openai.APIStatusError, match=r"peer 'cellar' at .* cannot be reached"):
        client.chat.completions.create(model="cellar/both", messages=USER)
    house.cellar = house.start(config=house.cellar_config, port=port)
    until(lambda: "cellar/both" in house.listed(), TOLD_S)
    assert client.chat.completions.create(model="cellar/both", messages=USER).model == "cellar/both"
