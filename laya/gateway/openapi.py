"""Owns: the OpenAPI document of the admin API, served at /admin/openapi.json: each route, what it takes and answers.

The document is also the check: a query parameter that it does not name is refused, on every route of the admin API.
Schemas come from the types that requests are read by and answers are made of. Knows no handler.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import laya
from laya.errors import InvalidRequest, nearest
from laya.gateway import openapi_answers as answers
from laya.gateway.desk import reply
from laya.gateway.expert_measuring import AskedExperts
from laya.gateway.explaining import PROMPT_TOKENS_MOST
from laya.gateway.fields import WHOLE_NUMBER_MOST
from laya.gateway.key_desk import AskedKey
from laya.gateway.trial import Trial
from laya.routing.told import Told
from laya.types import PRIORITIES, EndpointKind, ModelStatus

PREFIX = "/admin/"
PATH = PREFIX + "openapi.json"
TEXT = "text/plain"
_REF = "#/components/schemas/{name}"
_SWITCH: dict[str, Any] = {"type": "string", "enum": ["true", "false", "1", "0"], "default": "false"}
_DAY: dict[str, Any] = {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}
_FLAGS: dict[str, Any] = {"type": "string", "pattern": "^(--[a-z-]+( [A-Za-z0-9_.,]+)?( |$))*$"}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": WHOLE_NUMBER_MOST}
_HEADER: dict[str, Any] = {"type": "string", "pattern": "^[A-Za-z][A-Za-z-]*: ?[A-Za-z0-9 ]+$"}
_EVERYWHERE = {
    400: "A parameter that is unknown, said twice or out of range",
    401: "No key, or none of this server's",
    403: "The key's role is not admin, or a server without keys was asked from elsewhere",
    500: "A fault of Laya's own, or of its store",
}
_NO_MODEL = {404: "No such model"}
_NO_KEY = {404: "No such key"}
_NO_LOAD = {
    408: "The body did not arrive in time",
    422: "It does not fit, its file or the flags are wrong, or its engine asked for more memory than it may have",
    502: "Its engine ended while it was loaded",
    503: "Its engine cannot be started, or memory is short or held by others: `retry-after` says when to try again",
}


class Operation(NamedTuple):
    """One method of one path. query: name -> schema; a list may be said several times. answer: a type, or TEXT."""

    summary: str
    answer: Any
    query: Mapping[str, Mapping[str, Any]] = {}
    errors: Mapping[int, str] = {}
    required: Collection[str] = ()
    body: Any = None
    status: int = 200


_EXPLAIN: dict[str, dict[str, Any]] = {
    "model": {"type": "string", "minLength": 1},
    "header": {"type": "array", "items": _HEADER},
    "key": {"type": "string"},
    "kind": {"type": "string", "enum": [kind.name.lower() for kind in EndpointKind], "default": "chat"},
    "priority": {"type": "string", "enum": list(PRIORITIES)},
    "session": {"type": "string"},
    "prompt": {"type": "string"},
    "prompt_tokens": {"type": "integer", "minimum": 0, "maximum": PROMPT_TOKENS_MOST},
}
_MODEL = PREFIX + "models/{model_id}"
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", PATH): Operation("This document", dict[str, Any]),
    ("GET", "/admin/state"): Operation("Devices, the ledger, every model with its plan and requests", answers.State),
    ("GET", "/admin/events"): Operation(
        "What the guard did and which engines ended, the last 500; `after`: younger than the event with this id",
        answers.Happened,
        {"after": _COUNT | {"default": 0}},
    ),
    ("GET", "/admin/usage"): Operation(
        "Requests and tokens by day (UTC), model and key, or summed by one of these",
        answers.Used,
        {"by": {"type": "string", "enum": ["model", "key", "day"]}, "since": _DAY},
    ),
    ("GET", "/admin/route/explain"): Operation(
        "Which engine would get a request like this one now, and why", Told, _EXPLAIN, _NO_MODEL, ("model",)
    ),
    ("GET", "/admin/fit"): Operation(
        "What a load would do now: its plan, who would leave, changes that fit; also of a catalogue model not here",
        Trial,
        {"model": {"type": "string", "minLength": 1}, "flags": _FLAGS},
        _NO_MODEL | {422: "Its file is broken, or the flags are wrong", 501: "It takes no memory of this machine"},
        ("model",),
    ),
    ("GET", "/admin/headroom"): Operation("What each device still has room for, in a sentence", answers.Headrooms),
    ("GET", "/admin/history"): Operation(
        "The memory of each device over the last ten minutes; `after`: samples younger than this, Unix seconds",
        answers.Past,
        {"after": {"type": "string", "pattern": r"^[0-9]{1,12}(\.[0-9]{1,6})?$", "default": "0"}},
    ),
    ("GET", "/admin/catalogue"): Operation("Models of the catalogue that are not served here", answers.Catalogue),
    ("POST", "/admin/pause"): Operation(
        "Let new requests of all models wait, or let them in again; what runs goes on", answers.Paused, {"on": _SWITCH}
    ),
    ("POST", "/admin/reload"): Operation(
        "Read config.yaml again and bring it into force; a wrong one changes nothing",
        answers.Reloaded,
        {"dry_run": _SWITCH},
        {422: "A model's file is broken"},
    ),
    ("POST", _MODEL + "/load"): Operation(
        "Load the model, or end its draining; `anyway`: also where it does not fit, under the ceiling of what is free; "
        "`flags`: with these settings, such as `--max-seq-len 4096`, until the configuration is read again",
        ModelStatus,
        {"anyway": _SWITCH, "flags": _FLAGS},
        _NO_MODEL | _NO_LOAD,
    ),
    ("POST", _MODEL + "/unload"): Operation("Unload the model when it has nothing to do", ModelStatus, {}, _NO_MODEL),
    ("POST", _MODEL + "/drain"): Operation(
        "Take nothing new for the model and unload it when it is done; does not wait", ModelStatus, {}, _NO_MODEL
    ),
    ("POST", _MODEL + "/pin"): Operation(
        "Keep the model when another one needs room, or not; until the configuration is read again",
        answers.Pinned,
        {"on": _SWITCH},
        _NO_MODEL,
    ),
    ("POST", _MODEL + "/experts"): Operation(
        "Which experts of each layer the model chooses for a text, measured in a process of its own beside the engine",
        answers.ExpertShares,
        {},
        _NO_MODEL
        | {
            408: "The body did not arrive in time",
            413: "The body is too large",
            415: "The body is compressed",
            422: "There is no room to measure now",
            501: "Its engine does not tell, or it has no experts",
            503: "llama.cpp could not compute it",
        },
        body=AskedExperts,
    ),
    ("GET", _MODEL + "/slots"): Operation(
        "What its engines say of their sequences", answers.Slots, {}, _NO_MODEL | {503: "Its engine does not answer"}
    ),
    ("GET", _MODEL + "/logs"): Operation(
        "The last `lines` of its engine's log; `follow`: those to come too, until the client leaves",
        TEXT,
        {"replica": _COUNT | {"minimum": 1, "default": 1}, "follow": _SWITCH, "lines": _COUNT},
        _NO_MODEL,
    ),
    ("GET", "/admin/keys"): Operation("Every key, without its secret", answers.Keys),
    ("POST", "/admin/keys"): Operation(
        "Make a key, in force at once; the answer is the only place where its secret is told",
        answers.ShownKey,
        {},
        {
            408: "The body did not arrive in time",
            409: "The name is taken",
            413: "The body is too large",
            415: "The body is compressed",
        },
        body=AskedKey,
        status=201,
    ),
    ("GET", "/admin/keys/{name}"): Operation(
        "One key, and what it has left of this minute", answers.ListedKey, {}, _NO_KEY
    ),
    ("DELETE", "/admin/keys/{name}"): Operation(
        "End a key; `cancel`: also what it runs",
        answers.RevokedKey,
        {"cancel": _SWITCH},
        _NO_KEY | {409: "It stands in config.yaml, or is the last admin key"},
    ),
}


async def answer(request: Request) -> Response:
    """The document. Put together when it is asked for: few ask."""
    return reply(document())


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    types = {kind for each in OPERATIONS.values() for kind in (each.answer, each.body) if kind not in (None, TEXT)}
    listed = sorted(types | {answers.Error, answers.Doing}, key=str)
    schemas, components = msgspec.json.schema_components(listed, ref_template=_REF)
    of = dict(zip(listed, schemas, strict=True))
    _complete(components)
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation, of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Laya's admin API",
            "version": laya.__version__,
            "description": "Needs a key of the role admin; none on a server that has no keys, which answers to its own "
            "machine alone.",
        },
        "security": [{"bearer": []}, {"x-api-key": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": components,
        },
    }


def _complete(components: dict[str, Any]) -> None:
    """What the types do not say of themselves."""
    models = components["State"]["properties"]["models"]
    models["items"] = {"allOf": [models["items"], {"$ref": _REF.format(name="Doing")}]}
    asked = components["AskedKey"]
    more_urgent = itertools.combinations(PRIORITIES, 2)  # a key's own priority is none that it may not ask for
    asked["allOf"] = [{"not": _both(priority=own, max_priority=most)} for own, most in more_urgent]


def _both(**values: str) -> dict[str, Any]:
    return {"required": list(values), "properties": {name: {"const": value} for name, value in values.items()}}


def _operation(method: str, path: str, operation: Operation, of: Mapping[Any, Any]) -> dict[str, Any]:
    """One operation in OpenAPI's words. of: the schema of each type."""
    answer = {TEXT: {"schema": {"type": "string"}}} if operation.answer is TEXT else _json(of[operation.answer])
    fault, errors = _json(of[answers.Error]), {**_EVERYWHERE, **operation.errors}
    steps = path.replace(".", "_").split("/")[2:]
    told: dict[str, Any] = {
        "operationId": "_".join([method.lower(), *(step.strip("{}") for step in steps)]),
        "summary": operation.summary,
        "parameters": [
            {"name": step.strip("{}"), "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for step in steps
            if step.startswith("{")
        ]
        + [
            {"name": name, "in": "query", "required": name in operation.required, "schema": dict(schema)}
            for name, schema in operation.query.items()
        ],
        "responses": {str(operation.status): {"description": "Done", "content": answer}}
        | {str(status): {"description": words, "content": fault} for status, words in errors.items()},
    }
    if operation.body is not None:
        told["requestBody"] = {"required": True, "content": _json(of[operation.body])}
    return told


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


class StrictQuery:
    """ASGI: refuses a query parameter that the document does not name, or that is said twice, before the handler."""

    def __init__(self, app: Any, path: str) -> None:
        """path: the route's, as Starlette spells it."""
        self._app = app
        self._path = documented(path)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        operation = OPERATIONS.get((scope["method"].replace("HEAD", "GET"), self._path))
        if scope["query_string"] and operation is not None:
            query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
            _check_names([name for name, _ in query], operation)
        await self._app(scope, receive, send)


def documented(path: str) -> str:
    """A route's path as the document spells it."""
    return path.replace(":path}", "}")


def _check_names(names: Iterable[str], operation: Operation) -> None:
    seen = set()
    for name in names:
        schema = operation.query.get(name)
        if schema is None:
            close = nearest(name, operation.query)
            hint = f" Did you mean '{close}'?" if close else f" There are: {', '.join(operation.query) or 'none'}."
            raise InvalidRequest(f"'{name[:64]}' is no parameter here.{hint}", param=name[:64])
        if name in seen and schema["type"] != "array":
            raise InvalidRequest(f"'{name}' is said twice.", param=name)
        seen.add(name)
