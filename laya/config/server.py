"""Owns: the `server` section of config.yaml: the port, who may use it, and how long a client is waited for."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from laya.config.api_key import ApiKey
from laya.config.values import Bytes, Duration, Seconds
from laya.types import MIB


class ServerConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The port, who may use it, and how long a slow client is waited for."""

    host: Annotated[str, Meta(description="Address to listen on; other than loopback needs an API key.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port of the API, the page and the metrics.")] = 8000
    api_keys: Annotated[
        list[ApiKey], Meta(description="Keys by hash, beside those of `laya key`. None of either = loopback only.")
    ] = []
    share_prompt_cache: Annotated[
        bool, Meta(description="Let keys reuse each other's cached prompts: faster, but how fast tells what was asked.")
    ] = False
    max_body_bytes: Annotated[Bytes, Meta(description="Largest request body: bytes, or 16MiB.")] = 16 * MIB
    header_timeout_s: Annotated[Seconds, Meta(description="Seconds a client may take to send a request's head.")] = 10
    body_timeout_s: Annotated[Seconds, Meta(description="Seconds a client may take to send a request's body.")] = 30
    keep_alive_s: Annotated[Seconds, Meta(description="Seconds an idle connection is kept open.")] = 60
    max_keep_alive: Annotated[
        Duration | None,
        Meta(description="Longest `keep_alive` that a request of a user's key may ask for; -1 or null = any."),
    ] = 3600.0
    waiting_note_s: Annotated[
        Annotated[float, Meta(ge=0)],
        Meta(description="Seconds a stream waits in silence; then comments come, and errors as events. 0 = silent."),
    ] = 5
    cors_origins: Annotated[list[str], Meta(description="Origins whose pages may call the API from a browser.")] = []
    drain_timeout_s: Annotated[
        Seconds, Meta(description="Seconds that answers on their way may go on after the server is asked to end.")
    ] = 30
    watch_config: Annotated[
        bool, Meta(description="Read this file again by itself when it changes, as `laya reload` does.")
    ] = False
