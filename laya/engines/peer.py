"""Owns: asking another Laya how it stands: which models it has, what of them is loaded, how many bytes are free.

One question, `/admin/state`, answers for all its models. Of what it says only what is used here is read, so that an
older or a newer Laya is understood too. Decides nothing.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Literal, get_args

import httpx
import msgspec

from laya.config import Remote
from laya.engines.remote import REFUSED_KEY, tls_of
from laya.errors import ConfigError, EngineFailed
from laya.types import ModelState, Task

ROLE_NEEDED = "peer"
_MOST_STATE_BYTES = 16 * 1024 * 1024
_MOST_MODELS = 1000
_LONGEST_NAME = 200  # characters


class PeerModel(msgspec.Struct, frozen=True):
    """One model as its own server tells it."""

    id: str
    state: str
    task: str = "chat"
    aliases: tuple[str, ...] = ()
    error: str | None = None
    running: int = 0
    queued: int = 0
    plan: Any = None  # of whatever form its version gives it
    extra: dict[str, Any] = {}

    @property
    def is_served(self) -> bool:
        """Whether it can be a model here: the peer has it itself, and its name and task are such as models here have.
        What it has from a peer of its own is not passed on."""
        return "peer" not in self.extra and self.known_task is not None and _is_name(self.id)

    @property
    def known_aliases(self) -> tuple[str, ...]:
        return tuple(alias for alias in self.aliases if _is_name(alias))

    @property
    def known_state(self) -> ModelState:
        return self.state if self.state in get_args(ModelState) else "ready"  # type: ignore[return-value]

    @property
    def known_task(self) -> Task | None:
        """None: a kind of model that this Laya cannot serve."""
        return self.task if self.task in get_args(Task) else None  # type: ignore[return-value]

    @property
    def window(self) -> int | None:
        """Tokens of a request, where it is loaded."""
        settings = self.plan.get("settings") if isinstance(self.plan, dict) else None
        tokens = settings.get("max_seq_len") if isinstance(settings, dict) else None
        return tokens if type(tokens) is int and tokens > 0 else None


def _is_name(text: str) -> bool:
    return 0 < len(text) <= _LONGEST_NAME and text.isprintable() and text == text.strip()


class _Memory(msgspec.Struct, frozen=True):
    budget_bytes: int
    reserved_bytes: int


class PeerState(msgspec.Struct, frozen=True):
    """All of it that is used here."""

    version: str
    memory: _Memory
    models: tuple[PeerModel, ...]
    instance: str = ""  # of one start of a server; "": it does not tell

    @property
    def free_bytes(self) -> int:
        return max(0, self.memory.budget_bytes - self.memory.reserved_bytes)


_DECODER = msgspec.json.Decoder(PeerState)


class PeerFault(EngineFailed):
    """Why a peer cannot be used. `kind`: unreachable (nothing answers there), silent (an answer is late), refused."""

    def __init__(self, kind: Literal["unreachable", "silent", "refused"], words: str) -> None:
        super().__init__(words, retry_after_s=5.0)
        self.kind = kind


async def ask_peer(name: str, remote: Remote) -> PeerState:
    """How it stands now. Raises PeerFault, in words that never hold the key."""
    url = remote.urls[0]
    base = url.text.removesuffix("/v1")
    try:
        key, tls = remote.key(), tls_of(remote.ca_file) if url.is_tls else False
    except ConfigError as error:
        raise PeerFault("refused", f"peer '{name}': {error.message}") from None
    headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key is not None else {})
    try:
        # One limit for all of it: what drips byte by byte would keep each single read within its own.
        asked = _get(f"{base}/admin/state", headers, tls)
        response, body = await asyncio.wait_for(asked, remote.connect_timeout_s)
    except (asyncio.TimeoutError, httpx.TimeoutException):
        words = f"peer '{name}' at {base}: no answer within {remote.connect_timeout_s:g} s"
        raise PeerFault("silent", words) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        words = f"peer '{name}' at {base} cannot be reached: {error or type(error).__name__}"
        raise PeerFault("unreachable", words) from None
    return _read(f"peer '{name}' at {base}", response, body, has_key=key is not None)


async def _get(url: str, headers: dict[str, str], tls: ssl.SSLContext | bool) -> tuple[httpx.Response, bytes]:
    """The answer and its body, as it came over the wire; no more of that than may be."""
    body = bytearray()
    # trust_env off: as its requests, it is asked by no proxy
    async with (
        httpx.AsyncClient(verify=tls, timeout=None, trust_env=False, follow_redirects=False) as http,
        http.stream("GET", url, headers=headers) as response,
    ):
        if response.status_code == 200:
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > _MOST_STATE_BYTES:
                    break
    return response, bytes(body)


def _read(who: str, response: httpx.Response, body: bytes, *, has_key: bool) -> PeerState:
    if response.status_code in REFUSED_KEY:
        does = "refuses the key" if has_key else "wants a key (key_env or key_file)"
        need = f"its key needs the role {ROLE_NEEDED} or admin there: laya key create NAME --role {ROLE_NEEDED}"
        raise PeerFault("refused", f"{who} {does} ({response.status_code}); {need}")
    if response.is_redirect:
        raise PeerFault("refused", f"{who} redirects to {response.headers.get('location')}: set url to that")
    if response.status_code >= 500:
        raise PeerFault("silent", f"{who} answers {response.status_code}")
    try:
        if response.status_code != 200:
            raise msgspec.DecodeError(f"status {response.status_code}")
        if len(body) > _MOST_STATE_BYTES:
            raise msgspec.DecodeError(f"more than {_MOST_STATE_BYTES // 1024**2} MiB of state")
        state = _DECODER.decode(body)
        if len(state.models) > _MOST_MODELS:
            raise msgspec.DecodeError(f"{len(state.models)} models, more than {_MOST_MODELS}")
        return state
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "another server's model is `engine: remote`"
        raise PeerFault("refused", f"{who} is no Laya, or one of another kind ({error}); {hint}") from None
