"""Roles: every path of the app against every role, from the app's own table of routes; what a key may see and end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from laya.config.routing import RouteRule, RoutingConfig
from laya.gateway.app import Guard
from laya.gateway.heads import HOT_PATHS
from laya.gateway.key_desk import AskedKey, make
from laya.gateway.live_keys import read_keys
from laya.types import KeyGrant

from .front import CHAT, KEY, Front, front, request, until
from .keyed import chat_as, drop, get_as, grant, keep, secret
from .scripted_engine import STREAM_HEAD, Call, chunk, delta, hello, progress

pytestmark = pytest.mark.anyio

ROLES = ("user", "metrics", "peer", "admin")
# What each role may do; a route that is new and stands in no line of this table is for admins alone.
OPEN = {"/", "/health", "/ready"}  # and the page's own files
FOR_METRICS = {"/metrics", "/metrics/engines"}
FOR_USERS = ("/v1/", "/api/", "/tokenize", "/detokenize")


def routes_of(gateway: Front) -> list[Route]:
    """Every route of the app that this gateway serves."""
    app: Any = gateway.app
    while not isinstance(app, Guard):
        app = app.app
    return app._routes


def examples(route: Route) -> list[tuple[str, str]]:
    path = route.path.replace("{model_id:path}", "stub").replace("{name:path}", "nobody")
    path = path.replace("{request_id:path}", "none").replace("{response_id}", "none").replace("{path:path}", "x")
    assert "{" not in path, f"say in this test what stands for the parameter of {path}"
    return [(method, path) for method in sorted(route.methods or ()) if method != "HEAD"]


def expected(path: str) -> set[str]:
    if path in OPEN or path.startswith("/page/"):
        return {"nobody", *ROLES}
    if path in FOR_METRICS:
        return {"metrics", "admin"}
    if path == "/admin/state":
        return {"peer", "admin"}
    return {"user", "peer", "admin"} if path.startswith(FOR_USERS) else {"admin"}


async def test_every_route_answers_only_the_roles_it_is_for(tmp_path: Path) -> None:
    keep(tmp_path, *(grant(role, role=role) for role in ROLES))
    n_admin = 0
    async with front(tmp_path) as gateway:
        for method, path in [each for route in routes_of(gateway) for each in examples(route)]:
            if (method == "DELETE" and path.startswith("/admin/")) or path.endswith("/unload"):
                continue  # the same check stands before it; what it does is not wanted here
            n_admin += path.startswith("/admin/")
            for who in ("nobody", *ROLES):
                answer = await gateway.ask(
                    get_as(None if who == "nobody" else who, path, method, b"" if method == "POST" else None)
                )
                refused = answer.status == (401 if who == "nobody" else 403)
                assert refused == (who not in expected(path)), (method, path, who, answer.status, answer.body[:200])
                if answer.status == 403:
                    told = answer.json if path.startswith("/api/") else answer.error  # there, the error is a text
                    assert (told["code"], told["role"]) == ("forbidden", who)
                    assert told["needed"] == sorted(expected(path))
        assert n_admin >= 8


async def test_every_admin_route_is_closed_to_users_also_the_ones_that_change_something(tmp_path: Path) -> None:
    keep(tmp_path, grant("user"), grant("admin", role="admin"))
    async with front(tmp_path) as gateway:
        for route in routes_of(gateway):
            for method, path in examples(route):
                if path.startswith(("/admin/", "/upstream/")):
                    answer = await gateway.ask(get_as("user", path, method, b"" if method == "POST" else None))
                    assert (answer.status, answer.error["code"]) == (403, "forbidden"), (method, path)
        assert gateway.endpoint.pool is not None  # nothing was unloaded


async def test_inference_is_for_users_peers_and_admins(tmp_path: Path) -> None:
    keep(tmp_path, *(grant(role, role=role) for role in ROLES))
    async with front(tmp_path) as gateway:
        for path in HOT_PATHS:
            for who in ROLES:
                answer = await gateway.ask(request(CHAT, path.decode(), key=secret(who)))
                assert (answer.status == 403) == (who == "metrics"), (path, who, answer)
            assert (await gateway.ask(request(CHAT, path.decode(), key=None))).status == 401
        assert len(gateway.engine.calls) == 3  # a chat for each


async def test_key_of_the_config_is_an_admin_by_default(tmp_path: Path) -> None:
    async with front(tmp_path) as gateway:
        assert (await gateway.ask(request(None, "/admin/state", method="GET", key=KEY))).status == 200


async def test_without_keys_everything_is_open_on_loopback(tmp_path: Path) -> None:
    async with front(tmp_path, keys=False) as gateway:
        for path in ("/admin/state", "/metrics", "/v1/models", "/v1/requests", "/admin/keys"):
            assert (await gateway.ask(get_as(None, path))).status == 200
        foreign = request(None, "/metrics", method="GET", key=None, host="evil.example")
        assert (await gateway.ask(foreign)).status == 403


async def test_a_path_that_is_nowhere_is_404_for_every_key(tmp_path: Path) -> None:
    keep(tmp_path, *(grant(role, role=role) for role in ROLES))
    async with front(tmp_path) as gateway:
        for who in ROLES:
            assert (await gateway.ask(get_as(who, "/metric"))).status == 404


# models
async def test_key_with_a_list_of_models_uses_those_alone(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("kid", models=("other",)), grant("ok", models=("stub-alias",)))
    async with front(tmp_path) as gateway:
        for headers in ((), ("x-laya-model: stub",)):
            refused = await gateway.ask(chat_as("kid", *headers))
            assert refused.status == 403
            assert refused.error["code"] == "forbidden_model"
            assert refused.error["models"] == ["other"]
            assert "'kid' may not use the model 'stub'; it may use: other" in refused.error["message"]
        assert (await gateway.ask(chat_as("ok"))).status == 200
        assert (await gateway.ask(chat_as("ok", model="stub-alias"))).status == 200
        assert await gateway.settled() == {"refused": 2, "served": 2}


@pytest.mark.parametrize("cancels_whole", [True, False])
async def test_the_plain_lane_asks_for_the_model_too(tmp_path: Path, cancels_whole: bool) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("kid", models=("other",)), grant("ok", models=("stub",)))
    async with front(tmp_path, cancels_whole=cancels_whole) as gateway:
        client = await gateway.client()
        for who, status in (("admin", 200), ("admin", 200), ("kid", 403), ("ok", 200), ("kid", 403)):
            assert (await client.ask(chat_as(who))).status == status, who
        await gateway.settled()


async def test_a_forbidden_model_is_forbidden_whether_it_is_there_or_not(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("kid", models=("other",)))
    async with front(tmp_path) as gateway:
        for name in ("stub", "no-such-model", "smollm2"):
            answer = await gateway.ask(chat_as("kid", model=name))
            assert (answer.status, answer.error["code"]) == (403, "forbidden_model")
        missing = await gateway.ask(chat_as("kid", model="other"))  # on its list, and not here
        assert (missing.status, missing.error["code"]) == (404, "model_not_found")
        nameless = await gateway.ask(chat_as("kid", model=None))
        assert nameless.status == 400
        assert "This key may use: other" in nameless.error["message"]
        embed = await gateway.ask(request({"model": "stub", "input": "x"}, "/v1/embeddings", key=secret("kid")))
        assert embed.error["code"] == "forbidden_model"  # before it is told that it is no embedding model


async def test_models_of_others_are_not_listed(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("kid", models=("other",)), grant("ok", models=("stub-alias",)))
    async with front(tmp_path) as gateway:
        shown = {}
        for who in ("admin", "kid", "ok"):
            answer = await gateway.ask(get_as(who, "/v1/models"))
            shown[who] = [model["id"] for model in answer.json["data"]]
        assert "stub" in shown["admin"] and shown["kid"] == [] and shown["ok"] == ["stub"]
        assert (await gateway.ask(get_as("kid", "/v1/models/stub"))).error["code"] == "forbidden_model"
        assert (await gateway.ask(get_as("kid", "/v1/models/nothing"))).error["code"] == "forbidden_model"
        assert (await gateway.ask(get_as("ok", "/v1/models/stub"))).json["id"] == "stub"


# own requests
def held(until_set: asyncio.Event) -> Callable[[Call], Any]:
    """An engine that reads the prompt, says a word and goes on when it is told to."""

    async def script(call: Call) -> None:
        call.write(STREAM_HEAD + chunk(progress(9, 9)) + chunk(delta(role="assistant", content=None)))
        call.write(chunk(delta(content="Hel")))
        await until_set.wait()

    return script


async def test_user_sees_and_cancels_only_its_own_requests(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("ann"), grant("bob"))
    never = asyncio.Event()
    async with front(tmp_path, held(never)) as gateway:
        ann, bob = await gateway.client(), await gateway.client()
        ann.send(chat_as("ann", "x-request-id: of-ann", stream=True))
        bob.send(chat_as("bob", "x-request-id: of-bob"))
        await until(lambda: len(gateway.engine.calls) == 2)
        await ann.head()

        async def seen(who: str) -> list[str]:
            answer = await gateway.ask(get_as(who, "/v1/requests"))
            return [each["id"] for each in answer.json["data"]]

        assert (await seen("ann"), await seen("bob"), sorted(await seen("admin"))) == (
            ["of-ann"], ["of-bob"], ["of-ann", "of-bob"],
        )  # fmt: skip
        for request_id in ("of-bob", "none"):  # another's, and nobody's: the same answer
            answer = await gateway.ask(get_as("ann", f"/v1/requests/{request_id}", "DELETE"))
            assert answer.status == 404
            assert f"'{request_id}'" in answer.error["message"]
        assert (await gateway.ask(get_as("bob", "/v1/requests/of-bob", "DELETE"))).json["cancelled"]
        ended = await bob.answer()
        assert (ended.status, ended.error["code"], ended.headers["x-should-retry"]) == (
            499,
            "request_cancelled",
            "false",
        )
        assert (await gateway.ask(get_as("admin", "/v1/requests/of-ann", "DELETE"))).status == 200
        pieces = await ann.broken_body()
        assert b'"code":"request_cancelled"' in pieces
        assert b"[DONE]" not in pieces
        for call in gateway.engine.calls:
            await asyncio.wait_for(call.gone.wait(), 10)  # their engine was told
        assert await gateway.settled() == {"cancelled": 2}


async def test_a_request_that_waits_can_be_cancelled(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("ann"), grant("bob"))
    never = asyncio.Event()
    async with front(tmp_path, held(never), max_num_seqs=1) as gateway:
        first, second = await gateway.client(), await gateway.client()
        first.send(chat_as("ann", "x-request-id: runs"))
        await until(lambda: gateway.engine.calls)
        second.send(chat_as("bob", "x-request-id: waits"))
        await until(lambda: gateway.endpoint.queue)
        (shown,) = (await gateway.ask(get_as("bob", "/v1/requests"))).json["data"]
        assert (shown["id"], shown["phase"], shown["model"], shown["key"]) == ("waits", "queued", "stub", "bob")
        assert (await gateway.ask(get_as("bob", "/v1/requests/waits", "DELETE"))).status == 200
        assert (await second.answer()).status == 499
        assert not gateway.endpoint.queue
        first.close()
        assert await gateway.settled() == {"cancelled": 2}


# live
async def test_keys_come_and_go_while_the_server_runs(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"))
    async with front(tmp_path) as gateway:
        client = await gateway.client()
        assert (await client.ask(chat_as("late"))).status == 401
        keep(tmp_path, grant("late", max_concurrent=1))  # another process, such as `laya key`
        gateway.sweep(0.0)
        await until(lambda: len(gateway.gateway.keys.keys) == 3)
        assert (await client.ask(chat_as("late"))).status == 200
        drop(tmp_path, "late")
        gateway.sweep(0.0)
        await until(lambda: len(gateway.gateway.keys.keys) == 2)
        assert (await client.ask(chat_as("late"))).status == 401  # on the same connection


async def test_keys_that_were_read_before_one_was_revoked_do_not_bring_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("ann"))
    has_read, go_on = threading.Event(), threading.Event()

    def slow_once(database: Path) -> list[KeyGrant]:
        found = read_keys(database)
        if not has_read.is_set():
            has_read.set()
            assert go_on.wait(10)
        return found

    async with front(tmp_path) as gateway:
        keys = gateway.gateway.keys
        keep(tmp_path, grant("bob"))
        monkeypatch.setattr("laya.gateway.live_keys.read_keys", slow_once)
        gateway.sweep(0.0)
        await until(has_read.is_set)
        revoking = asyncio.create_task(keys.revoke("ann"))
        await asyncio.wait({revoking}, timeout=0.2)
        go_on.set()
        await revoking
        assert keys._reading is not None
        await keys._reading
        assert [key.name for key in keys.keys] == ["tests", "admin", "bob"]


async def test_revoked_key_finishes_what_it_runs_unless_that_is_cancelled(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("ann"), grant("bob"))
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        await go_on.wait()
        await hello(call)

    async with front(tmp_path, script) as gateway:
        ann, bob = await gateway.client(), await gateway.client()
        ann.send(chat_as("ann"))
        bob.send(chat_as("bob"))
        await until(lambda: len(gateway.engine.calls) == 2)
        assert (await gateway.ask(get_as("admin", "/admin/keys/ann"))).json["running"] == 1
        kept = await gateway.ask(get_as("admin", "/admin/keys/ann", "DELETE"))
        assert (kept.status, kept.json["cancelled"]) == (200, 0)
        ended = await gateway.ask(get_as("admin", "/admin/keys/bob?cancel=true", "DELETE"))
        assert ended.json["cancelled"] == 1
        assert (await bob.answer()).error["code"] == "request_cancelled"
        go_on.set()
        assert (await ann.answer()).status == 200
        assert (await ann.ask(chat_as("ann"))).status == 401
        assert await gateway.settled() == {"served": 1, "cancelled": 1, "refused": 1}


async def test_admin_makes_a_key_that_is_shown_once(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"))
    async with front(tmp_path) as gateway:
        asked = {"name": "kid", "models": ["stub"], "tokens_per_minute": 9000, "expires": "30d"}
        made = await gateway.ask(get_as("admin", "/admin/keys", "POST", asked))
        assert made.status == 201
        assert "warnings" not in made.json
        other = {"name": "other", "models": ["stubb"]}
        warned = (await gateway.ask(get_as("admin", "/admin/keys", "POST", other))).json["warnings"]
        assert warned == ["No model here is called 'stubb' now. Did you mean 'stub'?"]
        assert (made.json["role"], made.json["tokens_per_minute"], made.json["origin"]) == ("user", 9000, "store")
        key = made.json["key"]
        assert (await gateway.ask(request(CHAT, key=key))).status == 200
        listed = (await gateway.ask(get_as("admin", "/admin/keys"))).body
        assert key.encode() not in listed and b'"name":"kid"' in listed
        assert key.encode() not in (await gateway.ask(get_as("admin", "/admin/keys/kid"))).body
        assert key.encode() not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"name": "a/b"}, "name"),
        ({"name": ""}, "name"),
        ({"name": "x", "role": "root"}, "role"),
        ({"name": "x", "max_concurrent": 0}, "max_concurrent"),
        ({"name": "x", "max_conc": 1}, "max_conc"),
        ({"name": "x", "expires": "yesterday"}, "yesterday"),
        ({"name": "x", "expires": "2001-01-01"}, "past"),
        ({"name": "x", "sha256": "abc"}, "sha256"),
        ({}, "name"),
        ({"name": "x", "expires": "99999999d"}, "year 9999"),
        ({"name": "x", "max_concurrent": 1.5}, "max_concurrent"),
        ([], "describes no key"),
    ],
)
async def test_a_key_that_cannot_be_is_refused_by_name(tmp_path: Path, asked: Any, word: str) -> None:
    keep(tmp_path, grant("admin", role="admin"))
    async with front(tmp_path) as gateway:
        answer = await gateway.ask(get_as("admin", "/admin/keys", "POST", asked))
        assert answer.status == 400
        assert word in answer.error["message"]


async def test_a_name_that_is_taken_is_a_conflict(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"))
    async with front(tmp_path) as gateway:
        for name, where in (("admin", "'admin' already"), ("tests", "in config.yaml")):
            answer = await gateway.ask(get_as("admin", "/admin/keys", "POST", {"name": name}))
            assert (answer.status, answer.error["code"]) == (409, "conflict")
            assert answer.headers["x-should-retry"] == "false"  # SDKs would ask again
            assert where in answer.error["message"]
        whole = await gateway.ask(get_as("admin", "/admin/keys", "POST", {"name": "x", "max_concurrent": 5.0}))
        assert (whole.status, whole.json["max_concurrent"]) == (201, 5)


async def test_the_first_key_is_an_admin_and_says_what_changes(tmp_path: Path) -> None:
    async with front(tmp_path, keys=False) as gateway:
        refused = await gateway.ask(get_as(None, "/admin/keys", "POST", {"name": "kid", "role": "user"}))
        assert refused.status == 400
        assert "`laya key create me` first" in refused.error["message"]
        limited = await gateway.ask(get_as(None, "/admin/keys", "POST", {"name": "kid", "models": ["stub"]}))
        assert (limited.status, limited.error["param"]) == (400, "name")
        made = await gateway.ask(get_as(None, "/admin/keys", "POST", {"name": "me"}))
        assert made.json["role"] == "admin"
        assert "LAYA_API_KEY" in made.json["notice"]
        assert (await gateway.ask(get_as(None, "/admin/state"))).status == 401
        admin = made.json["key"]
        kid = await gateway.ask(request({"name": "kid"}, "/admin/keys", key=admin))
        assert (kid.status, kid.json["role"], "notice" in kid.json) == (201, "user", False)
        # the last admin key stays while there are others
        last = await gateway.ask(request(None, "/admin/keys/me", method="DELETE", key=admin))
        assert (last.status, "last admin key" in last.error["message"]) == (409, True)
        assert (await gateway.ask(request(None, "/admin/keys/kid", method="DELETE", key=admin))).status == 200
        gone = await gateway.ask(request(None, "/admin/keys/me", method="DELETE", key=admin))
        assert (gone.status, gone.json["is_open"]) == (200, True)
        assert (await gateway.ask(get_as(None, "/admin/state"))).status == 200


async def test_of_two_keys_that_are_made_at_once_one_is_the_first(tmp_path: Path) -> None:
    async with front(tmp_path, keys=False) as gateway:
        keys = gateway.gateway.keys
        made = await asyncio.gather(*(make(keys, AskedKey(name=name), ()) for name in ("me", "kid")))
        assert sorted((each["role"], "notice" in each) for each in made) == [("admin", True), ("user", False)]


async def test_key_of_the_config_is_not_revoked_here(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"))
    async with front(tmp_path) as gateway:
        answer = await gateway.ask(get_as("admin", "/admin/keys/tests", "DELETE"))
        assert (answer.status, "config.yaml" in answer.error["message"]) == (409, True)
        nobody = await gateway.ask(get_as("admin", "/admin/keys/test", "DELETE"))
        assert (nobody.status, "Did you mean 'tests'" in nobody.error["message"]) == (404, True)


async def test_store_that_cannot_be_read_leaves_the_keys_as_they_are(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"))
    async with front(tmp_path) as gateway:
        (tmp_path / "laya.db").write_bytes(b"not a database" * 100)
        for name in ("laya.db-wal", "laya.db-shm"):
            (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / "laya.db-keys").unlink()
        gateway.sweep(0.0)
        reading = gateway.gateway.keys._reading
        assert reading is not None
        await reading
        assert (await gateway.ask(get_as("admin", "/admin/state"))).status == 200
        assert (await gateway.ask(get_as("admin", "/admin/keys", "POST", {"name": "x"}))).error[
            "code"
        ] == "store_failed"


async def test_a_name_that_is_no_model_allows_what_the_rules_make_of_it(tmp_path: Path) -> None:
    rules = [RouteRule(model="auto", to="stub"), RouteRule(model="other", to="stub")]
    keep(tmp_path, grant("admin", role="admin"), grant("kid", models=("auto",)), grant("ann", models=("stub",)))
    async with front(tmp_path, routing=RoutingConfig(rules=rules)) as gateway:
        for who, name, status in (
            ("kid", "auto", 200), ("kid", "stub", 403), ("kid", "other", 403),
            ("ann", "auto", 200), ("ann", "stub", 200), ("ann", "other", 200),  # by the model that serves it
            ("ann", "nothing", 403),
        ):  # fmt: skip
            answer = await gateway.ask(chat_as(who, model=name))
            assert answer.status == status, (who, name, answer)
        await gateway.settled()
