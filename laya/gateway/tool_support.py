"""Owns: which models can be told of tools: those whose chat template knows them. An engine would pass tools over in
silence where the template does not, so such a request is refused, with the names of the models that can.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING

from laya.errors import LayaError, NotSupported
from laya.memory import read_header

if TYPE_CHECKING:
    from laya.gateway.body import ParsedBody
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.fleet import Fleet

_TOOLS = re.compile(r"\btools\b")
_OF_TOOLS = "tokenizer.chat_template.tool_use"  # a second template, which engines take where there are tools


def check_told(fleet: Fleet, endpoint: Endpoint, parsed: ParsedBody) -> None:
    """Raise NotSupported for tools that the model would not be told of, and for what its engine would pass over."""
    if parsed.not_done is not None and endpoint.settings.engine == "llamacpp":
        raise parsed.not_done
    if not parsed.has_tools or knows_tools(fleet, endpoint):
        return
    able = [group[0].model_id for group in fleet.groups()
            if group[0].settings.task == "chat" and knows_tools(fleet, group[0])]  # fmt: skip
    hint = f"Models here that can: {', '.join(able)}." if able else "No model here can."
    raise NotSupported(
        f"The model '{endpoint.model_id}' can't be told of tools: its chat template knows none. {hint} "
        "Another template can be set with `chat_template`.",
        param="tools",
    )


def knows_tools(fleet: Fleet, endpoint: Endpoint) -> bool:
    """Whether the model's template, the config's before the file's own, renders tools. Unread, it counts as one."""
    file = fleet.files[endpoint.model_id]
    said = endpoint.settings.chat_template or file.chat_template
    if said is not None:
        return _TOOLS.search(said) is not None
    try:
        written_ns = file.path.stat().st_mtime_ns
        return file.format != "gguf" or _file_knows(file.path, written_ns)
    except (LayaError, OSError):  # whoever loads it says what is wrong with it
        return True


@functools.lru_cache(maxsize=256)
def _file_knows(path: Path, written_ns: int) -> bool:
    metadata = read_header(path).metadata
    return _OF_TOOLS in metadata or _TOOLS.search(str(metadata.get("tokenizer.chat_template") or "")) is not None
