"""Typed decisions: passed on as they are to an engine that speaks their contract, and refused where none does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laya.bench.generated_families import GeneratedShape
from laya.bench.generated_models import generate
from laya.bench.stub_gateway import stub_plan
from laya.types import ModelFile

from .front import CHAT, Front, chat, front, request, until
from .keyed import grant, keep, secret
from .live import Serving, model_state, plain
from .scripted_engine import Call, whole

PATH = "/v1/systemone"
ASKED = {
    "model": "stub",
    "state": {"text": "It rains.", "at": [1, 2.50]},
    "questions": {
        "wet": {"type": "noul", "instructions": "Is it wet?", "criteria": {"true": "rain", "false": None}},
        "sky": {"type": "choice", "instructions": "Which?", "criteria": {"z": "grey", "a": None, "m": "blue"}},
        "how": {"type": "score", "instructions": ["How", "wet?"], "criteria": ["dry", "damp", "soaked"]},
    },
}
DECIDES = {"task": "decide"}


async def decides(call: Call) -> None:
    """An engine of the contract: every question of a request has its answer, under its id; what is wrong is a 400."""
    assert (call.path, call.headers[b"authorization"]) == (PATH, b"Bearer engine-key")
    answers = {}
    for name, question in call.json["questions"].items():
        kind, criteria = question.get("type"), question.get("criteria")
        if kind == "noul":
            answers[name] = {"type": kind, "noul": 0.75}
        elif kind == "choice" and criteria:
            shares = {option: round(0.5**n, 3) for n, option in enumerate(criteria, 1)}
            answers[name] = {"type": kind, "choice": next(iter(criteria)), "probabilities": shares, "confidence": 0.5}
        elif kind == "score" and 2 <= len(criteria) <= 10:
            legend = {str(level): said for level, said in enumerate(criteria)}
            shares = dict.fromkeys(legend, 1 / len(legend))
            answers[name] = {"type": kind, "score": 1.0, "legend": legend, "probabilities": shares, "confidence": 0.0}
        else:
            call.write(whole({"error": {"code": 400, "message": f'questions.{name}: "criteria" are wrong'}}, 400))
            return
    usage = {"input_tokens": 106, "output_tokens": 0}
    call.write(whole({"model": call.json["model"], "answers": answers, "usage": usage}))


def ask(*headers: str, key: str | None = None, **fields: Any) -> bytes:
    given = {} if key is None else {"key": secret(key)}
    return request(ASKED | fields, PATH, headers=headers, **given)


def beside(gate: Front, name: str, home: Path, **settings: Any) -> None:
    """A second model, which is never asked."""
    fleet = gate.gateway.fleet
    file = ModelFile(id=name, path=home, format="gguf", file_bytes=0, origin="config")
    fleet.register(file, msgspec.structs.replace(gate.gateway.config.for_model(name), **settings))
    fleet.plans[name] = stub_plan(4)


@pytest.mark.anyio
async def test_questions_and_answers_pass_as_they_are(tmp_path: Path) -> None:
    async with front(tmp_path, decides, model=DECIDES) as gate:
        answer = await gate.ask(ask())
        assert answer.status == 200 and answer.headers["x-laya-model"] == "stub"
        sent = gate.engine.calls[0].body
        for name in ("state", "questions"):
            assert json.dumps(ASKED[name]).encode() in sent, "byte for byte, the order of options included"
        assert list(answer.json["answers"]) == ["wet", "sky", "how"]
        assert list(answer.json["answers"]["sky"]["probabilities"]) == ["z", "a", "m"]
        assert answer.json["answers"]["how"]["legend"] == {"0": "dry", "1": "damp", "2": "soaked"}
        assert answer.json["usage"] == {"input_tokens": 106, "output_tokens": 0}
        assert await gate.settled() == {"served": 1}
        assert gate.endpoint.stats.tokens_in == 106


@pytest.mark.anyio
async def test_model_may_be_an_alias_and_the_body_come_in_chunks(tmp_path: Path) -> None:
    async with front(tmp_path, decides, model=DECIDES) as gate:
        data = json.dumps(ASKED | {"model": "stub-alias"}).encode()
        head = request(None, PATH, headers=("transfer-encoding: chunked",))
        client = await gate.client()
        for piece in (head, b"%x\r\n%b\r\n" % (20, data[:20]), b"%x\r\n%b\r\n0\r\n\r\n" % (len(data) - 20, data[20:])):
            client.send(piece)
            await asyncio.sleep(0)
        assert (await client.answer()).json["model"] == "stub"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("wrong", "param", "words"),
    [
        ({"questions": {}}, "questions", "missing or empty"),
        ({"questions": [1]}, "questions", "'questions' is"),
        ({"stream": True}, "stream", "come whole"),
        ({"model": None}, "model", "stub"),
        ({"questions": {"sky": {"type": "choice", "instructions": "x", "criteria": {}}}}, None, "questions.sky"),
        ({"state": "rain " * 40_000}, "state", "maximum context length"),
    ],
)
async def test_what_is_wrong_is_a_422_that_names_it(
    tmp_path: Path, wrong: dict[str, Any], param: str | None, words: str
) -> None:
    async with front(tmp_path, decides, model=DECIDES, planned={"task": "decide", "n_ubatch": 512}) as gate:
        answer = await gate.ask(ask(**wrong))
        assert (answer.status, answer.error["param"]) == (422, param), answer.body
        assert words in answer.error["message"] and answer.headers["x-should-retry"] == "false"
        assert await gate.settled() == {"refused": 1}


@pytest.mark.anyio
async def test_state_may_be_null_and_may_not_be_missing(tmp_path: Path) -> None:
    async with front(tmp_path, decides, model=DECIDES) as gate:
        assert (await gate.ask(ask(state=None))).status == 200  # some models take it so: the engine's to say
        stateless = request({name: said for name, said in ASKED.items() if name != "state"}, PATH)
        answer = await gate.ask(stateless)
        assert (answer.status, answer.error["param"]) == (422, "state")


@pytest.mark.anyio
@pytest.mark.parametrize(("said", "status"), [(501, 422), (400, 422), (500, 503), (503, 529)])
async def test_statuses_are_those_that_clients_of_this_api_know(tmp_path: Path, said: int, status: int) -> None:
    async def refuses(call: Call) -> None:
        call.write(whole({"error": {"message": "This model is not a decision model"}}, said))

    async with front(tmp_path, refuses, model=DECIDES) as gate:
        answer = await gate.ask(ask())
        assert answer.status == status and "not a decision model" in answer.error["message"]
        assert ("retry-after" in answer.headers) == (status == 529)


@pytest.mark.anyio
async def test_models_that_can_are_named_to_who_asks_one_that_cannot(tmp_path: Path) -> None:
    async with front(tmp_path) as gate:
        nobody = await gate.ask(ask())
        assert (nobody.status, nobody.error["code"], nobody.error["param"]) == (422, "not_supported", "model")
        assert "No model here has `task: decide`" in nobody.error["message"]
        beside(gate, "judge", tmp_path, task="decide")
        assert "Models here that do: judge" in (await gate.ask(ask())).error["message"]
        chatty = await gate.ask(request(CHAT | {"model": "judge"}))
        assert chatty.status == 501 and "Models here that do: stub" in chatty.error["message"]
        assert not gate.engine.calls and await gate.settled() == {"refused": 3}
        assert (await gate.ask(chat())).status == 200


@pytest.mark.anyio
async def test_keys_limits_and_sizes_are_those_of_every_api(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"), grant("ann", tokens_per_minute=1000), grant("bob", models=("other",)))
    async with front(tmp_path, decides, model=DECIDES, server={"max_body_bytes": 4096}) as gate:
        assert (await gate.ask(ask(key="nobody"))).status == 401
        assert (await gate.ask(ask(key="bob"))).status == 403
        assert (await gate.ask(ask(key="ann", state="x" * 5000))).status == 413
        assert (await gate.ask(ask(key="ann", model="none"))).status == 404
        assert (await gate.ask(ask(key="ann"))).status == 200
        await gate.settled()
        tokens = gate.gateway.keys.find("ann").tokens
        assert tokens is not None and 893 < tokens.level() < 910  # the engine's count, not the body's bound


@pytest.mark.anyio
async def test_busy_is_429_or_529_and_who_leaves_frees_the_engine(tmp_path: Path) -> None:
    never = asyncio.Event()

    async def waits(call: Call) -> None:
        await never.wait()

    async with front(tmp_path, waits, max_num_seqs=1, model=DECIDES | {"queue_size": 1}) as gate:
        runs, queued = await gate.client(), await gate.client()
        runs.send(ask())
        await until(lambda: gate.engine.calls)
        queued.send(ask())
        await until(lambda: gate.endpoint.queue)
        full = await gate.ask(ask())
        assert (full.status, full.error["code"]) == (429, "queue_full") and int(full.headers["retry-after"]) >= 1
        gate.sweep(61)
        late = await queued.answer()
        assert (late.status, late.error["code"]) == (529, "queue_timeout") and int(late.headers["retry-after"]) >= 1
        runs.close()
        await asyncio.wait_for(gate.engine.calls[0].gone.wait(), 5)
        assert await gate.settled() == {"cancelled": 1, "refused": 2}


CONFIG = """
version: 1
n_threads: 1
max_seq_len: 256
models:
  judge: {{source: {path}, task: decide, preload: true}}
  talk: {{source: smollm2}}
  no-judge: {{source: smollm2, task: decide}}
"""


@pytest.fixture(scope="module")
def judging(
    start_server: Callable[..., Any], smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    shape = GeneratedShape(n_layer=2, n_embd=256, n_head=4, n_head_kv=4, n_ff=512, decision_type="nimble")
    path = generate(tmp_path_factory.mktemp("decides") / "nimble.gguf", shape, vocabulary=smollm2_path)
    server = start_server(config=CONFIG.format(path=path))
    yield server
    assert server.stop() == 0


@pytest.mark.engine
def test_real_engine_decides(judging: Serving) -> None:
    with plain(judging) as client:
        answer = client.post(PATH, json=ASKED | {"model": "judge"})
        assert answer.status_code == 200 and answer.json()["model"] == "judge"
        wet, sky, how = answer.json()["answers"].values()
        assert 0 < wet["noul"] < 1
        assert list(sky["probabilities"]) == ["z", "a", "m"] and sky["choice"] in sky["probabilities"]
        assert sum(sky["probabilities"].values()) == pytest.approx(1, abs=1e-4)
        assert 0 <= how["score"] <= 2 and list(how["legend"].values()) == ["dry", "damp", "soaked"]
        assert answer.json()["usage"]["input_tokens"] > 30
        wrong = client.post(PATH, json=ASKED | {"model": "judge", "questions": {"q": {"type": "box"}}})
        assert wrong.status_code == 422 and "questions.q" in wrong.json()["error"]["message"]
        long = client.post(PATH, json=ASKED | {"model": "judge", "state": "tree " * 1000})
        assert (long.status_code, long.json()["error"]["code"]) == (422, "context_length_exceeded")
    state = model_state(judging, "judge")
    assert state["state"] == "ready"
    assert state["measured_bytes"] <= sum(device["total_bytes"] for device in state["plan"]["devices"])


@pytest.mark.engine
def test_real_models_that_do_not_decide_say_who_does(judging: Serving) -> None:
    with plain(judging) as client:
        refused = client.post(PATH, json=ASKED | {"model": "talk"})
        assert refused.status_code == 422 and "judge" in refused.json()["error"]["message"]
        assert client.post("/v1/chat/completions", json=CHAT | {"model": "judge"}).status_code == 501
        wrong = client.post(PATH, json=ASKED | {"model": "no-judge"})
        assert wrong.status_code == 422 and "llama.decision.type" in wrong.json()["error"]["message"]
        listed = {model["id"]: model["task"] for model in client.get("/v1/models").json()["data"]}
        assert (listed["judge"], listed["talk"]) == ("decide", "chat")
