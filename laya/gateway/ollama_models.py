"""Owns: models as Ollama's API lists and shows them: names with a tag, details from the file's header, what runs.

A model without a tag in its name is told with `:latest`, and found by both. Headers are read in a thread and kept.
"""

from __future__ import annotations

import asyncio
import math
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import laya
from laya.errors import BadModelFile
from laya.gateway.account import Key
from laya.gateway.desk import reply, small_body
from laya.gateway.endpoint import Endpoint
from laya.gateway.fields import read_fields
from laya.gateway.fleet import Fleet
from laya.gateway.roles import key_of
from laya.gateway.tool_support import knows_tools
from laya.memory import GgufHeader, read_header
from laya.memory.ggml import FILE_TYPES
from laya.types import ModelFile

VERSION = "0.35.0"  # whose API this is; clients look for a version that is new enough
LATEST = ":latest"
_NEVER = datetime(9999, 1, 1, tzinfo=timezone.utc)
_SMALL = (1e9, "M", 1e6), (1e12, "B", 1e9), (float("inf"), "T", 1e12)


class Show(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/show."""

    model: str | None = None
    name: str | None = None  # its older name
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: dict[str, Any] | None = None


class Names:
    """The names of models as Ollama's clients write them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def of(self, name: str) -> str:
        """The name that this server knows."""
        if name.endswith(LATEST) and self._fleet.roster.id_of(name) is None:
            return name.removesuffix(LATEST)
        return name

    def find(self, name: str, key: Key | None) -> Endpoint:
        """Raises ForbiddenModel, and what the fleet says of a name that it does not know."""
        name, id_of = self.of(name), self._fleet.roster.id_of
        if key is not None and not key.may_use(name, id_of(name), id_of):
            raise key.forbidden_model(name)
        return self._fleet.find(name)


def tagged(model_id: str) -> str:
    return model_id if ":" in model_id else model_id + LATEST


class OllamaModels:
    """The handlers."""

    def __init__(self, fleet: Fleet, names: Names) -> None:
        self._fleet = fleet
        self._names = names
        self._headers: dict[Path, tuple[float, GgufHeader | None]] = {}

    def routes(self) -> list[Route]:
        return [
            Route("/api/version", self.version),
            Route("/api/tags", self.tags),
            Route("/api/ps", self.running),
            Route("/api/show", self.show, methods=["POST"]),
        ]

    async def version(self, request: Request) -> Response:
        return reply({"version": VERSION, "laya": laya.__version__})

    async def tags(self, request: Request) -> Response:
        await self._fleet.refresh()
        return reply({"models": [await self._listed(each) for each in self._seen_by(key_of(request))]})

    async def running(self, request: Request) -> Response:
        """Models with an engine. What is on cards is `size_vram`."""
        found = []
        for endpoint in self._seen_by(key_of(request)):
            live = [each for each in self._fleet.replicas(endpoint) if each.pool is not None]
            plans = [self._fleet.plans[each.name] for each in live if each.name in self._fleet.plans]
            devices = [device for plan in plans for device in plan.devices]
            if not live:
                continue
            found.append(
                await self._listed(endpoint)
                | {
                    "size": sum(device.total_bytes for device in devices),
                    "size_vram": sum(device.total_bytes for device in devices if device.device != "cpu"),
                    "context_length": await self._fleet.window(endpoint),
                    "expires_at": _expires(live),
                }
            )
        return reply({"models": found})

    async def show(self, request: Request) -> Response:
        asked = read_fields(await small_body(request), Show, "/api/show")
        endpoint = self._names.find(asked.model or asked.name or "", key_of(request))
        file, settings = self._fleet.files[endpoint.model_id], endpoint.settings
        header = await self._header(file)
        metadata = header.metadata if header is not None else {}
        template = settings.chat_template or file.chat_template or metadata.get("tokenizer.chat_template") or ""
        parameters = "\n".join(f"{name} {value}" for name, value in settings.defaults.items())
        return reply(
            {
                "modelfile": f"FROM {file.path.name}\n",
                "parameters": parameters,
                "template": template,
                "license": metadata.get("general.license", ""),
                "details": _details(file, header),
                "model_info": {name: each for name, each in metadata.items() if isinstance(each, (str, int, float))},
                "capabilities": await asyncio.to_thread(self._capabilities, endpoint, str(template)),
                "modified_at": await asyncio.to_thread(_modified, file.path),
                "context_length": await self._fleet.window(endpoint),
            }
        )

    def _capabilities(self, endpoint: Endpoint, template: str) -> list[str]:
        settings = endpoint.settings
        if settings.task != "chat":
            return [{"embed": "embedding", "rerank": "rerank", "decide": "decision"}[settings.task]]
        found = ["completion"]
        found += ["tools"] if knows_tools(self._fleet, endpoint) else []
        found += ["thinking"] if "<think>" in template or "enable_thinking" in template else []
        return found + (["vision"] if settings.mmproj is not None else [])

    def _seen_by(self, key: Key | None) -> list[Endpoint]:
        id_of = self._fleet.roster.id_of
        found = [group[0] for group in self._fleet.groups()]
        return [each for each in found if key is None or key.may_use(each.model_id, each.model_id, id_of)]

    async def _listed(self, endpoint: Endpoint) -> dict[str, Any]:
        file = self._fleet.files[endpoint.model_id]
        name = tagged(endpoint.model_id)
        return {
            "name": name,
            "model": name,
            "modified_at": await asyncio.to_thread(_modified, file.path),
            "size": file.file_bytes,
            "digest": "",
            "details": _details(file, await self._header(file)),
        }

    async def _header(self, file: ModelFile) -> GgufHeader | None:
        """None of a model that is none, or whose file is broken."""
        if file.format != "gguf":
            return None
        return await asyncio.to_thread(self._read, file.path)

    def _read(self, path: Path) -> GgufHeader | None:
        try:
            stamp_s = path.stat().st_mtime
            known = self._headers.get(path)
            if known is None or known[0] != stamp_s:
                known = self._headers[path] = (stamp_s, read_header(path))
        except (OSError, BadModelFile):
            return None
        return known[1]


def _modified(path: Path) -> str:
    try:
        stamp_s = path.stat().st_mtime
    except OSError:  # it has just gone
        stamp_s = time.time()
    return datetime.fromtimestamp(stamp_s, timezone.utc).isoformat()


def _details(file: ModelFile, header: GgufHeader | None) -> dict[str, Any]:
    family = str(header.metadata.get("general.architecture", "")) if header is not None else ""
    return {
        "parent_model": "",
        "format": {"gguf": "gguf", "hf": "safetensors"}.get(file.format, ""),
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _size_text(header),
        "quantization_level": ""
        if header is None
        else FILE_TYPES.get(header.metadata.get("general.file_type", -1), ""),
    }


def _size_text(header: GgufHeader | None) -> str:
    """Parameters, as "134.52M"."""
    if header is None:
        return ""
    n_parameters = sum(math.prod(tensor.shape) for tensor in header.tensors)
    unit, divisor = next((unit, divisor) for limit, unit, divisor in _SMALL if n_parameters < limit)
    return f"{n_parameters / divisor:.2f}{unit}"


def _expires(live: list[Endpoint]) -> str:
    ttl_s, now = live[0].ttl_s, datetime.now(timezone.utc)
    if ttl_s is None or ttl_s > (_NEVER - now).total_seconds():  # no calendar may have that day
        return _NEVER.isoformat()
    idle_s = time.monotonic() - max(each.last_used_s for each in live)
    return (now + timedelta(seconds=max(0.0, ttl_s - idle_s))).isoformat()
