"""A new configuration in a running gateway: what is compared, what is in force, and whose requests go on."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laya.config import ApiKey, Config, load_config
from laya.errors import ConfigError, EngineFailed, MemoryBusy, ModelRemoved
from laya.gateway.endpoint import Endpoint
from laya.gateway.operating import ConfigSource
from laya.gateway.reload import Reloader
from laya.gateway.reload_diff import Report, adopt, model_changed, needs_restart, settings_changed
from laya.gateway.reload_watch import ConfigWatch
from laya.types import EngineAddress, ModelFile

from .fleet_world import World, WorldEngine, in_world, plans_of  # noqa: F401

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("in_world")]


class Place:
    """A folder with a config.yaml, models that are files there, and the fleet over it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        (folder / "home").mkdir()
        (folder / "models").mkdir()
        for name in ("a", "b", "c"):
            (folder / f"{name}.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(100))
        self.n_in_force = 0
        self.write()
        self.world = plans_of(World(folder / "home", {}, total_bytes=1000, config=self.read()), monkeypatch)
        self.world.needs.update(dict.fromkeys(("a", "b", "c"), 100))
        self.fleet = self.world.fleet
        self.fleet.scan()
        self.reloader = Reloader(self.fleet, self.read, self._count)

    def _count(self, config: Config) -> None:
        self.n_in_force += 1

    def write(self, text: str = "", **models: str) -> None:
        """config.yaml with these models: name -> its settings, in braces' inner form."""
        models = models or {"a": ""}
        entries = "".join(
            f"  {name}: {{source: {self.folder}/{name}.gguf{', ' if more else ''}{more}}}\n"
            for name, more in models.items()
        )
        (self.folder / "config.yaml").write_text(f"models_dir: {self.folder}/models\n{text}\nmodels:\n{entries}")

    def read(self) -> Config:
        return load_config(self.folder / "config.yaml", {})

    async def reload(self, **kwargs: Any) -> Report:
        return await self.reloader.reload(**kwargs)

    def ids(self) -> list[str]:
        return [group[0].model_id for group in self.fleet.served()]

    async def settled(self) -> None:
        """Until every engine follows."""
        while self.fleet._tasks:
            await asyncio.sleep(0.01)

    def pids(self) -> dict[str, int | None]:
        return {status.id: status.pid for status in self.world.supervisor.status() if status.pid is not None}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


async def test_reload_of_the_same_file_changes_nothing(place: Place) -> None:
    await place.world.load("a")
    pids = place.pids()
    report = await place.reload()
    await place.settled()
    assert not report.has_changes and report == Report(dry_run=False)
    assert place.pids() == pids
    assert place.world.events() == []


async def test_dry_run_says_all_and_does_nothing(place: Place) -> None:
    place.write("max_seq_len: 64\nserver: {port: 9}", a="ttl: 5m", b="")
    report = await place.reload(dry_run=True)
    assert report.dry_run and report.has_changes
    assert report.added == ("b",)
    (change,) = report.changed
    assert (change.id, change.restarts) == ("a", True)
    assert {each.name: each.now for each in change.settings} == {"ttl": 300.0, "max_seq_len": 64}
    assert [each.name for each in report.needs_server_restart] == ["server.port"]
    assert place.ids() == ["a"] and place.n_in_force == 0
    assert place.fleet.find("a").settings.ttl_s is None


async def test_added_models_are_known_and_removed_ones_are_not(place: Place) -> None:
    await place.world.load("a")
    place.write(b="aliases: [bee]")
    report = await place.reload()
    assert (report.added, report.removed) == (("b",), ("a",))
    assert place.ids() == ["b"] and place.fleet.find("bee").model_id == "b"
    assert place.fleet.router.resolve("a") is None
    await place.settled()
    assert place.pids() == {}
    assert "a" not in place.fleet.files and len(place.fleet.endpoints) == 1
    assert not (await place.reload()).has_changes


async def test_settings_that_need_no_engine_anew_keep_it(place: Place) -> None:
    await place.world.load("a")
    pids = place.pids()
    place.write(a="ttl: 5m, aliases: [x], queue_size: 3, pinned: true, policy: session, limits: {max_concurrent: 4}")
    (change,) = (await place.reload()).changed
    await place.settled()
    assert not change.restarts and place.pids() == pids
    settings = place.fleet.find("x").settings
    assert (settings.ttl_s, settings.queue_size, settings.pinned, settings.policy) == (300.0, 3, True, "session")
    endpoint = place.fleet.find("a")
    assert endpoint.use is not None and endpoint.use.is_limited
    place.write(a="")
    await place.reload()
    assert endpoint.use is None


async def test_changed_model_that_was_loaded_is_loaded_anew_and_another_is_not_touched(place: Place) -> None:
    place.write(a="", b="", c="")
    await place.reload()
    await place.world.load("a")
    await place.world.load("b")
    pids = place.pids()
    place.write(a="max_seq_len: 64", b="", c="max_seq_len: 64")
    report = await place.reload()
    assert [(each.id, each.restarts) for each in report.changed] == [("a", True), ("c", True)]
    await place.settled()
    now = place.pids()
    assert now["b"] == pids["b"] and now["a"] not in (None, pids["a"])
    assert "c" not in now  # it was not loaded, so it is not now
    assert place.fleet.started_with["a"][0].max_seq_len == 64


async def three_replicas(place: Place, settings: str = "replicas: 3") -> dict[str, int | None]:
    """A model with so many engines, all ready, and every later start noted with who serves beside it."""
    place.write(a=settings)
    await place.reload()
    await place.world.load("a")
    await place.settled()
    return place.pids()


async def test_replicas_are_loaded_anew_one_after_another_and_two_of_three_serve_all_the_while(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = await three_replicas(place)
    serving, start = [], WorldEngine.start

    async def noted(engine: WorldEngine) -> EngineAddress:
        serving.append(sum(each.takes_new for each in place.fleet.replicas(place.fleet.find("a"))))
        return await start(engine)

    monkeypatch.setattr(WorldEngine, "start", noted)
    place.write(a="replicas: 3, max_seq_len: 64")
    (told,) = (await place.reload(dry_run=True)).changed
    (change,) = (await place.reload()).changed
    assert told == change and (change.restarts, change.is_rolling, change.at_once) == (True, True, None)
    await place.settled()
    assert serving == [2, 2, 2]
    now = place.pids()
    assert len(now) == 3 and not set(now.values()) & set(pids.values())
    assert all(place.fleet.started_with[name][0].max_seq_len == 64 for name in now)


async def test_replicas_without_room_for_a_new_one_are_loaded_anew_at_once_and_the_diff_says_so(place: Place) -> None:
    pids = await three_replicas(place, "replicas: 2")
    place.world.needs["a"] = 720  # of 800; one old engine holds 100
    place.write(a="replicas: 2, max_seq_len: 64")
    (change,) = (await place.reload()).changed
    assert not change.is_rolling and change.at_once is not None
    assert "a new one needs" in change.at_once and "beside the others there is room for" in change.at_once
    await place.settled()
    (left,) = place.pids().values()  # the second one has no room beside the first
    assert left not in pids.values()


async def test_end_of_the_server_while_a_model_is_loaded_anew_is_no_failed_reload(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place.world.load("a")
    is_loading = asyncio.Event()

    async def loads(engine: WorldEngine) -> EngineAddress:
        is_loading.set()
        await asyncio.Event().wait()
        raise AssertionError("it is cancelled")

    monkeypatch.setattr(WorldEngine, "start", loads)
    place.write(a="max_seq_len: 64")
    await place.reload()
    await is_loading.wait()
    await place.world.supervisor.shutdown()
    await place.settled()
    assert [event for event in place.world.events() if event.kind == "reload_failed"] == []


async def test_load_of_a_model_that_is_taken_out_ends_at_once_and_holds_up_no_other(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, is_loading = WorldEngine.start, asyncio.Event()

    async def hangs(engine: WorldEngine) -> EngineAddress:
        if engine.model_id != "a":
            return await starts(engine)
        is_loading.set()
        await asyncio.Event().wait()
        raise AssertionError("it is cancelled")

    monkeypatch.setattr(WorldEngine, "start", hangs)
    endpoint = place.fleet.find("a")
    loading = asyncio.create_task(place.fleet.load(endpoint))
    await is_loading.wait()
    place.write(b="")
    await place.reload()
    with pytest.raises(ModelRemoved, match="'a' was taken out of the configuration before it was loaded"):
        await loading
    await place.world.load("b")
    await place.settled()
    assert list(place.pids()) == ["b"] and len(place.fleet.endpoints) == 1
    place.world.check_books()


async def test_new_engine_that_fails_leaves_the_others_as_they_are(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = await three_replicas(place)

    async def fails(engine: WorldEngine) -> EngineAddress:
        engine.exit("it knows no such argument")
        raise EngineFailed("it knows no such argument")

    monkeypatch.setattr(WorldEngine, "start", fails)
    place.write(a="replicas: 3, max_seq_len: 64")
    await place.reload()
    await place.settled()
    (event,) = [event for event in place.world.events() if event.kind == "reload_failed"]
    assert "it knows no such argument" in event.text
    assert len([each for each in place.fleet.replicas(place.fleet.find("a")) if each.is_serving]) == 2
    assert len(set(place.pids().values()) & set(pids.values())) == 2


async def test_many_quick_edits_give_one_engine_with_the_last_settings(place: Place) -> None:
    await place.world.load("a")
    for tokens in range(64, 80):
        place.write(a=f"max_seq_len: {tokens}")
        await asyncio.gather(*(place.reload() for _ in range(3)))
        alive = [engine for engine in place.world.engines.values() if not engine.exited.done()]
        assert len(alive) <= 1
    await place.settled()
    assert len(place.pids()) == 1
    assert place.fleet.started_with["a"][0].max_seq_len == 79
    place.world.check_books()


async def test_model_that_is_taken_out_and_back_keeps_its_engine(place: Place) -> None:
    await place.world.load("a")
    pids = place.pids()
    endpoint = place.fleet.find("a")
    endpoint.n_counting = 1  # it has something to do
    place.write(b="")
    await place.reload()
    assert place.ids() == ["b"]
    assert {status.id: status.state for status in place.fleet.statuses()} == {"a": "draining", "b": "unloaded"}
    place.write(a="", b="")
    await place.reload()
    endpoint.n_counting = 0
    await place.settled()
    assert place.fleet.find("a") is endpoint and place.pids() == pids


async def test_replicas_come_and_go(place: Place) -> None:
    await place.world.load("a")
    place.write(a="replicas: 3")
    await place.reload()
    await place.settled()
    assert len(place.pids()) == 3
    place.write(a="replicas: 1")
    await place.reload()
    await place.settled()
    assert list(place.pids()) == ["a"] and len(place.fleet.endpoints) == 1


async def test_replica_that_is_taken_away_while_another_loads_is_not_loaded(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write(a="replicas: 3")
    await place.reload()
    await place.settled()
    ready = place.fleet.ready

    async def reload_meanwhile(endpoint: Endpoint) -> EngineAddress:
        address = await ready(endpoint)
        place.write(a="replicas: 1")
        await place.reload()
        while len(place.fleet.endpoints) > 1:
            await asyncio.sleep(0)
        return address

    monkeypatch.setattr(place.fleet, "ready", reload_meanwhile)
    await place.world.load("a")
    await place.settled()
    assert list(place.pids()) == ["a"] and place.world.n_starts == 2
    place.world.check_books()


async def test_scan_that_a_reload_overtakes_is_forgotten(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.folder / "models" / "found.gguf").write_bytes((place.folder / "a.gguf").read_bytes())
    roster = place.fleet.roster
    on_disk, is_read, may_go_on = roster.on_disk, threading.Event(), threading.Event()

    def read_slowly() -> list[ModelFile]:
        found = on_disk()
        is_read.set()
        may_go_on.wait(10)
        return found

    monkeypatch.setattr(roster, "on_disk", read_slowly)
    monkeypatch.setattr(roster, "is_scan_due", lambda: True)
    scan = asyncio.ensure_future(place.fleet.refresh())
    while not is_read.is_set():
        await asyncio.sleep(0.001)
    (place.folder / "elsewhere").mkdir()
    text = (place.folder / "config.yaml").read_text().replace("/models\n", "/elsewhere\n")
    (place.folder / "config.yaml").write_text(text)
    await place.reload()
    may_go_on.set()
    await scan
    assert place.ids() == ["a"], "its models were in a folder that is not read any more"


async def test_window_of_a_model_that_is_gone_meanwhile_is_none(place: Place) -> None:
    endpoint = place.fleet.find("a")
    place.write(b="")
    await place.reload()
    await place.settled()
    assert await place.fleet.window(endpoint) is None


async def test_preload_loads_what_came(place: Place) -> None:
    (place.folder / "models" / "found.gguf").write_bytes((place.folder / "a.gguf").read_bytes())
    place.world.needs["found"] = 100
    place.write("preload: true", a="preload: false", b="")  # of what the file names, as at a start
    assert (await place.reload()).added == ("b", "found")
    await place.settled()
    assert list(place.pids()) == ["b"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("max_seq_len: many", "max_seq_len"),
        ("colour: red", "colour"),
        ("routing: {pools: {b: [b]}}", "pools"),
        ("server: {api_keys: [{name: x, sha256: no}]}", "api_keys"),
        ("replicas: [", "config.yaml"),
    ],
)
async def test_wrong_file_changes_nothing_and_says_why(place: Place, text: str, word: str) -> None:
    await place.world.load("a")
    before = place.pids(), msgspec.to_builtins(place.fleet.config, enc_hook=str)
    place.write(text, b="ttl: 1")
    with pytest.raises(ConfigError, match=word):
        await place.reload()
    assert place.ids() == ["a"] and place.n_in_force == 0
    assert (place.pids(), msgspec.to_builtins(place.fleet.config, enc_hook=str)) == before
    await place.reloader.reload_and_tell()
    (event,) = place.world.events()
    assert event.kind == "reload_failed" and word in event.text


async def test_name_that_a_pool_of_the_file_has_is_refused_before_anything_changes(place: Place) -> None:
    (place.folder / "models" / "found.gguf").write_bytes((place.folder / "a.gguf").read_bytes())
    place.write("routing: {pools: {found: [a, b]}}", a="", b="")
    with pytest.raises(ConfigError, match="found"):
        await place.reload()
    assert place.ids() == ["a"] and place.fleet.router.resolve("a") == "a"


async def test_pools_and_rules_follow(place: Place) -> None:
    place.write("routing: {pools: {both: [a, b]}}", a="", b="")
    await place.reload()
    assert place.fleet.router.resolve("both") == "both"
    place.write("routing: {pools: {a2: [a]}}", a="", both="")
    (place.folder / "both.gguf").write_bytes((place.folder / "a.gguf").read_bytes())
    await place.reload()
    assert sorted(place.fleet.router.known_names()) == ["a", "a2", "both"]


async def test_pool_prefers_the_members_that_are_loaded_as_long_as_nobody_waits_there(place: Place) -> None:
    place.write("routing: {pools: {both: [a, b]}}", a="", b="")
    await place.reload()
    fleet, loaded = place.fleet, place.fleet.find("b")

    def chosen() -> set[str]:
        found = [fleet.router.choose("both") for _ in range(8)]
        for index in found:
            fleet.router.settle(index, 0)
        return {fleet.endpoints[index].model_id for index in found}

    assert chosen() == {"a", "b"}
    await place.world.load("b")
    assert chosen() == {"b"}
    waiting: Any = type("Waiting", (), {"key_name": None, "read_s": 0.0})()
    loaded.queue.add(waiting, "default")
    fleet.pools.update()
    assert chosen() == {"a", "b"}, "one is not enough"
    loaded.queue.discard(waiting)
    fleet.pools.update()
    assert chosen() == {"b"}
    await fleet.unload(loaded)
    assert chosen() == {"a", "b"}
    place.write("policy: round_robin\nrouting: {pools: {both: [a, b]}}", a="", b="")
    await place.reload()
    await place.settled()
    await place.world.load("b")
    assert chosen() == {"a", "b"}, "its policy says otherwise"


async def test_first_requests_of_a_pool_load_one_member_until_its_line_is_full_or_it_has_no_room(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = "policy: least_tokens\nqueue_size: 2\nrouting: {pools: {both: [a, b, c], other: [b, c]}}"
    place.write(pools, a="", b="", c="")
    await place.reload()
    router, fleet = place.fleet.router, place.fleet
    first, second = fleet.find("a"), fleet.find("b")

    async def loads_for_long(endpoint: Endpoint) -> bool:
        return False

    monkeypatch.setattr(fleet.room, "take_turn_for_queue", loads_for_long)
    waiting: list[Any] = [type("Waiting", (), {"key_name": None, "read_s": 0.0})() for _ in range(3)]
    first.queue.add(waiting[0], "default")
    fleet.wake(first)
    assert router.preferred["both"] == {first.index} and not router.preferred["other"]
    first.queue.add(waiting[1], "default")
    fleet.pools.update()
    assert not router.preferred["both"], "there is no place for one more"
    first.queue.discard(waiting[1])
    first.no_room = MemoryBusy("others have it", 1.0)
    fleet.pools.update()
    assert not router.preferred["both"], "another member may fit"
    first.no_room = None
    await place.world.load("b")
    assert router.preferred["both"] == {second.index}, "loaded, and nobody waits there"
    second.queue.add(waiting[2], "default")
    fleet.pools.update()
    assert router.preferred["both"] == {first.index, second.index}, "while one is coming, no third is loaded"
    fleet.pools.open_to_all("both")
    assert "both" not in router.preferred and "other" in router.preferred
    for each, exchange in ((first, waiting[0]), (second, waiting[2])):
        each.queue.discard(exchange)
    await place.settled()


async def test_pool_is_served_by_the_members_that_are_not_drained(place: Place) -> None:
    place.write("routing: {pools: {both: [a, b]}}", a="", b="")
    await place.reload()
    router = place.fleet.router
    place.fleet.draining.begin(place.fleet.find("a"))
    chosen = {place.fleet.endpoints[router.choose("both", session=f"s{n}")].model_id for n in range(50)}
    assert chosen == {"b"} and router.choose("a") < 0
    place.fleet.draining.check("b")
    place.fleet.draining.undo(place.fleet.find("a"))
    assert router.choose("a") >= 0


async def test_drained_model_is_not_loaded_by_a_reload(place: Place) -> None:
    await place.world.load("a")
    place.fleet.draining.begin(place.fleet.find("a"))
    await place.settled()
    assert place.pids() == {}
    place.write(a="max_seq_len: 64")
    await place.reload()
    await place.settled()
    assert place.pids() == {}
    await place.world.load("a")
    assert list(place.pids()) == ["a"]


def test_what_an_engine_is_started_with_needs_one_anew() -> None:
    was = Config().for_model("m")
    for name, value in {"max_seq_len": 64, "args": {"x": 1}, "task": "embed", "kv_cache_dtype": "q8_0"}.items():
        assert needs_restart(was, msgspec.structs.replace(was, **{name: value})), name
    for name, value in {"ttl_s": 1.0, "replicas": 2, "queue_size": 1, "defaults": {"top_k": 1}}.items():
        assert not needs_restart(was, msgspec.structs.replace(was, **{name: value})), name
    said = msgspec.structs.replace(was, fixed=frozenset({"kv_cache_dtype"}))  # the default, which may not change now
    change = model_changed(was, said, is_other_file=False)
    assert change is not None and change.restarts and [each.name for each in change.settings] == ["kv_cache_dtype"]


def test_keys_are_told_by_name_and_secrets_not_at_all() -> None:
    was, now = Config(), Config()
    now.server.api_keys = [ApiKey(name="me", sha256="ab" * 32)]
    now.store.url = "postgresql://me:secret@host/db"
    live, later = settings_changed(was, now)
    text = repr((live, later))
    assert "me" in text and "abab" not in text and "secret" not in text
    adopt(was, now)
    assert was.server.api_keys == now.server.api_keys and was.store.url is None


async def test_watch_tells_once_of_several_edits(tmp_path: Path) -> None:
    file, told = tmp_path / "config.yaml", 0
    file.write_text("version: 1")
    is_on = True

    async def changed() -> None:
        nonlocal told
        told += 1

    watch = ConfigWatch(lambda: file, lambda: is_on, changed)
    await watch.look()
    assert told == 0
    for number in range(3):  # an edit between any two looks
        file.write_text("# " + "x" * number)
        await watch.look()
    assert told == 0
    await watch.look()
    await watch.look()
    assert told == 1
    file.unlink()
    await watch.look()
    await watch.look()
    assert told == 1
    is_on = False
    file.write_text("version: 1  ")
    for _ in range(3):
        await watch.look()
    assert told == 1


def test_source_of_no_file_has_no_path() -> None:
    assert ConfigSource(Config).path() is None
