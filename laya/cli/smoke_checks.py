"""Owns: what `laya smoke` tries: one function a part, against the public API of a running server. Knows no output.

A check returns a note. The model may be any chat model, so nothing depends on what it says; it is only expected to
repeat itself at temperature 0.
"""

from __future__ import annotations

import json
import time
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from laya.cli.client import parse_event
from laya.cli.smoke_visit import MAX_TOKENS, Check, Skipped, Visit, Wrong, require
from laya.errors import LayaError, nearest
from laya.models import default_model
from laya.types import MIB

FREE_DEADLINE_S = 5.0  # a slot is free within 1 s of a disconnect; a busy machine gets more before it counts as broken
LOOK_EVERY_S = 0.02
STORY_TOKENS = 256
SCHEMA_TOKENS = 64  # the schema ends the answer; a small vocabulary has a token for each letter of it
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}


def server(visit: Visit) -> str:
    health = visit.client.get("/health")
    require(health.get("status") == "ok", f"/health says {health}")
    who = visit.client.get("/")
    require(who.get("name") == "laya", f"{visit.client.url} is not a Laya server")
    return f"Laya {who['version']} at {visit.client.url}"


def models(visit: Visit) -> str:
    visit.models = visit.client.get("/v1/models")["data"]
    require(visit.models, "no model is here: laya pull smollm2")
    visit.model = _chosen(visit.models, visit.asked)
    window = visit.model["context_length"]
    require(isinstance(window, int) and window > 0, f"'{visit.model_id}' has the context_length {window}")
    one = visit.client.get(f"/v1/models/{visit.model_id}")
    require(one["id"] == visit.model_id, f"/v1/models/{visit.model_id} is '{one['id']}'")
    return f"{len(visit.models)} listed; {visit.model_id}, {window} tokens"


def _chosen(models: list[dict[str, Any]], asked: str | None) -> dict[str, Any]:
    """The model asked for; else a loaded one, the default one, or any, of those that chat."""
    chatting = [model for model in models if model["task"] == "chat"]
    if asked is not None:
        names = {name: model for model in chatting for name in (model["id"], *model["aliases"])}
        close = nearest(asked, names)
        require(asked in names, f"no chat model is named '{asked}'" + (f"; did you mean '{close}'?" if close else ""))
        return names[asked]
    require(chatting, "no chat model is here: laya pull smollm2")
    return max(chatting, key=lambda model: (model["loaded"], default_model() in (model["id"], *model["aliases"])))


def load(visit: Visit) -> str:
    if visit.model["loaded"]:
        return "loaded already"
    status = visit.client.post(f"/admin/models/{visit.model_id}/load", timeout_s=None)
    require(status["state"] == "ready", f"its state is {status['state']}: {status['error']}")
    return f"planned {_planned_bytes(status) / MIB:.0f} MiB"


def whole_answer(visit: Visit) -> str:
    visit.whole = visit.ask("/v1/chat/completions", visit.chat())
    choice = visit.whole["choices"][0]
    require(choice["message"]["role"] == "assistant", f"its role is {choice['message']['role']}")
    require(choice["finish_reason"] in ("stop", "length"), f"finish_reason is {choice['finish_reason']}")
    require(_text(choice["message"]), "the answer is empty")
    return json.dumps(_text(choice["message"]), ensure_ascii=False)


def streamed_answer(visit: Visit) -> str:
    start_s, first_s, last, chunks = time.perf_counter(), 0.0, "", []
    body = visit.chat(stream=True, stream_options={"include_usage": True})
    for field, value in visit.client.stream_events("/v1/chat/completions", body):
        if field != "data":
            continue
        last = value
        if value != "[DONE]":
            chunks.append(parse_event(value))
            if not first_s and _delta(chunks[-1]):
                first_s = time.perf_counter()
    require(last == "[DONE]", f"the stream ended with {last[:60]!r} instead of [DONE]")
    require(first_s, "no text came")
    visit.streamed = chunks
    return f"first token after {1000 * (first_s - start_s):.0f} ms, {len(chunks)} chunks, [DONE]"


def same_text(visit: Visit) -> str:
    whole = _text(visit.whole["choices"][0]["message"])
    streamed = "".join(_delta(chunk) for chunk in visit.streamed)
    require(whole == streamed, f"{whole!r} whole, {streamed!r} streamed")
    return "equal at temperature 0"


def usage(visit: Visit) -> str:
    counted = visit.whole["usage"]
    n_prompt, n_answer = counted["prompt_tokens"], counted["completion_tokens"]
    require(n_prompt > 0 and 0 < n_answer <= MAX_TOKENS, f"{counted} for at most {MAX_TOKENS} tokens")
    require(counted["total_tokens"] == n_prompt + n_answer, f"total_tokens is no sum: {counted}")
    streamed = visit.streamed[-1].get("usage") or {}
    require(streamed.get("prompt_tokens") == n_prompt, f"{n_prompt} prompt tokens whole, {streamed} streamed")
    return f"{n_prompt} + {n_answer} tokens, the same streamed"


def json_schema(visit: Visit) -> str:
    wanted = {"type": "json_schema", "json_schema": {"name": "reply", "strict": True, "schema": SCHEMA}}
    ask = [{"role": "user", "content": "Is the sky blue? Answer as JSON."}]
    body = visit.chat(messages=ask, response_format=wanted, max_tokens=SCHEMA_TOKENS)
    answer = visit.ask("/v1/chat/completions", body)
    content = answer["choices"][0]["message"]["content"]
    try:
        parsed = json.loads(content)
    except (TypeError, ValueError):
        raise Wrong(f"not JSON: {content!r}") from None
    require(parsed in ({"answer": "yes"}, {"answer": "no"}), f"not of the schema: {content}")
    return json.dumps(parsed)


def stop_sequence(visit: Visit) -> str:
    words = _text(visit.whole["choices"][0]["message"]).split()
    if len(words) < 2:
        raise Skipped("the answer has one word only")
    stop = words[1]
    choice = visit.ask("/v1/chat/completions", visit.chat(stop=[stop]))["choices"][0]
    require(choice["finish_reason"] == "stop", f"finish_reason is {choice['finish_reason']} with the stop {stop!r}")
    require(stop not in _text(choice["message"]), f"{stop!r} is still in {_text(choice['message'])!r}")
    return f"ended before {stop!r}"


def completions(visit: Visit) -> str:
    body = {"model": visit.model_id, "prompt": "The sky is", "max_tokens": 8, "temperature": 0}
    answer = visit.ask("/v1/completions", body)
    require(answer["object"] == "text_completion", f"its object is {answer['object']}")
    require(answer["choices"][0]["text"], "the text is empty")
    return json.dumps(answer["choices"][0]["text"], ensure_ascii=False)


def unknown_model(visit: Visit) -> str:
    error = visit.refusal(visit.chat(model=f"{visit.model_id}-that-is-not-here"))
    return _refused(error, 404, "model_not_found")


def long_prompt(visit: Visit) -> str:
    window = visit.model["context_length"]
    error = visit.refusal(visit.chat(messages=[{"role": "user", "content": " a" * window}]))
    note = _refused(error, 400, "context_length_exceeded")
    require(str(window) in error.message, f"it does not name {window}: {error.message}")
    return note


def _refused(error: LayaError, http_status: int, code: str) -> str:
    said = f"{error.http_status} {error.code}"
    require((error.http_status, error.code) == (http_status, code), f"{said}: {error.message}")
    return said


def disconnect(visit: Visit) -> str:
    before, busy_before = visit.state(), visit.busy_slots()
    story = [{"role": "user", "content": "Tell a very long story about a river."}]
    events = visit.client.stream_events(
        "/v1/chat/completions", visit.chat(messages=story, stream=True, max_tokens=STORY_TOKENS)
    )
    came = any(field == "data" and value != "[DONE]" and _delta(parse_event(value)) for field, value in events)
    require(came, "no text came")
    left_s = time.perf_counter()
    visit.leave(events)
    while True:
        now, n_busy = visit.state(), visit.busy_slots()
        passed_s = time.perf_counter() - left_s
        is_free = now["model"]["running"] <= before["model"]["running"] and n_busy <= busy_before
        if is_free and now["outcomes"]["cancelled"] > before["outcomes"]["cancelled"]:
            return f"slot free after {1000 * passed_s:.0f} ms"
        if passed_s > FREE_DEADLINE_S:
            break
        time.sleep(LOOK_EVERY_S)
    require(is_free, f"{now['model']['running']} running and {n_busy} slots busy {passed_s:.0f} s after it")
    if now["outcomes"]["served"] > before["outcomes"]["served"]:
        raise Skipped("the answer was complete before its client could leave")
    raise Wrong("it is not counted as cancelled")


def metrics(visit: Visit) -> str:
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families("".join(visit.client.stream_text("/metrics"))):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    arrivals, ended = totals["laya_arrivals_total"], totals["laya_requests_total"]
    in_flight = totals["laya_requests_in_flight"]
    require(arrivals == ended + in_flight, f"{arrivals:.0f} arrived, {ended:.0f} ended, {in_flight:.0f} in flight")
    return f"{arrivals:.0f} arrived = {ended:.0f} ended + {in_flight:.0f} in flight"


def memory(visit: Visit) -> str:
    status = visit.state()["model"]
    measured, planned = status["measured_bytes"], _planned_bytes(status)
    require(measured, "nothing was measured")
    require(measured <= planned, f"measured {measured / MIB:.0f} MiB, planned {planned / MIB:.0f}")
    return f"measured {measured / MIB:.0f} of {planned / MIB:.0f} MiB planned"


def embeddings(visit: Visit) -> str:
    model = next((model for model in visit.models if model["task"] == "embed"), None)
    if model is None:
        raise Skipped("no embed model")
    body = {"model": model["id"], "input": "the sky is blue"}
    vector = visit.client.post("/v1/embeddings", body, timeout_s=None)["data"][0]["embedding"]
    require(vector and all(isinstance(value, float) for value in vector), "the vector is empty or not of numbers")
    return f"{model['id']}, {len(vector)} dimensions"


def _planned_bytes(status: dict[str, Any]) -> int:
    return sum(device["total_bytes"] for device in status["plan"]["devices"])


def _text(message: dict[str, Any]) -> str:
    """All that a model wrote, its thoughts too: a short answer of one that thinks may hold nothing else."""
    return f"{message.get('reasoning_content') or ''}{message.get('content') or ''}"


def _delta(chunk: dict[str, Any]) -> str:
    """The text that a chunk adds; "" for one that carries none."""
    return _text(chunk["choices"][0]["delta"]) if chunk["choices"] else ""


CHECKS = (
    Check("server", server, is_essential=True),
    Check("models", models, is_essential=True),
    Check("load", load, is_essential=True),
    Check("whole answer", whole_answer, is_essential=True),
    Check("streamed answer", streamed_answer, is_essential=True),
    Check("same text", same_text),
    Check("usage", usage),
    Check("JSON schema", json_schema),
    Check("stop sequence", stop_sequence),
    Check("completions", completions),
    Check("unknown model", unknown_model),
    Check("long prompt", long_prompt),
    Check("disconnect", disconnect),
    Check("metrics", metrics),
    Check("memory", memory),
    Check("embeddings", embeddings),
)
