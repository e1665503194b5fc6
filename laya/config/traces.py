"""Owns: the `traces` section of config.yaml: whether requests are traced, how many of them, and who gets the spans."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

EXTRA = "pip install 'laya-llm[otel]'"
_EXPORTER = "opentelemetry.exporter.otlp.proto.http"
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+)\s*:\s*([\x20-\x7e]+)")


class TracesConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A trace of each request that is sampled. Never a key, and nothing of what was said."""

    endpoint: Annotated[
        str | None,
        Meta(description="Who gets spans by OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; null = nobody."),
    ] = None
    sample_ratio: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        Meta(description="Share of requests that are traced, where no `traceparent` of theirs says whether."),
    ] = 1
    headers_file: Annotated[
        str | None, Meta(description="File of headers to send with them, such as a key: `name: value`, one a line.")
    ] = None


def endpoint_fault(endpoint: str) -> str | None:
    """What is wrong with the receiver's URL, without showing it: it may hold what is nobody's business."""
    scheme, found, _ = endpoint.partition("://")
    if not found or scheme.lower() not in ("http", "https"):
        return f"expected a URL that begins with http:// or https://, got {scheme if found else 'no scheme'}"
    try:
        parts = urlsplit(endpoint)
        is_somewhere = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_somewhere = False
    if not is_somewhere:
        return "it names no host, or no port that can be"
    if "@" in parts.netloc:
        return "a password does not belong into a URL; put an `authorization` line into headers_file"
    if parts.path in ("", "/"):
        return "it has no path; receivers of OTLP take traces at /v1/traces"
    return None


def is_installed() -> bool:
    """Whether the libraries that send traces are here; they are not loaded for that."""
    try:
        return importlib.util.find_spec(_EXPORTER) is not None
    except ModuleNotFoundError:
        return False


def read_headers(path: Path | None) -> dict[str, str]:
    """The headers in a file; none without one. Empty lines and those that begin with # say nothing.

    Raises OSError, and ValueError with the number of a line that is no header, never with what it says.
    """
    headers: dict[str, str] = {}
    text = path.read_text(encoding="utf-8") if path is not None else ""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _HEADER.fullmatch(line.strip())
        if found is None:
            raise ValueError(f"line {number} is not `name: value`")
        headers[found[1].lower()] = found[2]
    return headers
