"""Owns: the `request_log` section of config.yaml: whether requests are written down, where, and how much of them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from laya.types import MIB

Size = Annotated[int, Meta(ge=4096, extra={"unit": "bytes"}, extra_json_schema={"x-unit": "bytes"})]


class RequestLogConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One JSON line for each request. Never a key; nothing of what was said unless `content` is true."""

    path: Annotated[
        str | None, Meta(description="The file, such as requests.jsonl; readable by its owner only. null = no log.")
    ] = None
    max_bytes: Annotated[
        Size, Meta(description="Size at which the file is put aside as PATH.1 and a new one begun.")
    ] = 16 * MIB
    keep_files: Annotated[int, Meta(ge=0, le=100, description="Files put aside that are kept: PATH.1, PATH.2, ...")] = 3
    content: Annotated[
        bool,
        Meta(description="Write the messages of requests too, up to 4 KiB each. Whoever reads the file reads them."),
    ] = False
