"""Owns: which requests take the hot path, by their target."""

from __future__ import annotations

from laya.types import EndpointKind

HOT_PATHS = {
    b"/v1/chat/completions": EndpointKind.CHAT,
    b"/v1/completions": EndpointKind.COMPLETION,
    b"/v1/embeddings": EndpointKind.EMBEDDING,
    b"/v1/rerank": EndpointKind.RERANK,
    b"/rerank": EndpointKind.RERANK,
}


def hot_kind(method: bytes, target: bytes) -> EndpointKind | None:
    """The endpoint that a request line names, or None where it is not for the hot path."""
    if method != b"POST":
        return None
    path = target.partition(b"?")[0]
    if not path.startswith(b"/"):  # as to a proxy: http://host/path
        path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
    return HOT_PATHS.get(path)
