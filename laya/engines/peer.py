"""Owns: asking another Laya how it stands: which models it has, what of them is loaded, how many bytes are free.

One question, `/admin/state`, answers for all its models. Of what it says only what is used here is read, so that an
older or a newer Laya is understood too. Decides nothing.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import httpx
import msgspec

from laya.config import Remote
from laya.engines.remote import REFUSED_KEY, tls_of
from laya.errors import ConfigError, EngineFailed
from laya.types import ModelState, Task

ROLE_NEEDED = "peer"
_MOST_STATE_BYTES = 16 * 1024 * 1024


class PeerModel(msgspec.Struct, frozen=True):
    """One model as its own server tells it."""

    id: str
    state: str
    task: str = "chat"
    aliases: tuple[str, ...] = ()
    error: str | None = None
    running: int = 0
    queued: int = 0
    plan: dict[str, Any] | None = None
    extra: dict[str, Any] = {}

    @property
    def is_its_own(self) -> bool:
        """Whether it has the model itself; what it has from a peer of its own is not passed on."""
        return "peer" not in self.extra

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
        tokens = self.plan.get("settings", {}).get("max_seq_len") if self.plan is not None else None
        return tokens if isinstance(tokens, int) else None


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
    headers = {"authorization": f"Bearer {key}"} if key is not None else {}
    timeout = httpx.Timeout(remote.connect_timeout_s)
    # trust_env off: as its requests, it is asked by no proxy
    async with httpx.AsyncClient(verify=tls, timeout=timeout, trust_env=False, follow_redirects=False) as http:
        try:
            response = await http.get(f"{base}/admin/state", headers=headers)
        except httpx.TimeoutException:
            words = f"peer '{name}' at {base}: no answer within {remote.connect_timeout_s:g} s"
            raise PeerFault("silent", words) from None
        except httpx.HTTPError as error:
            words = f"peer '{name}' at {base} cannot be reached: {error or type(error).__name__}"
            raise PeerFault("unreachable", words) from None
    return _read(f"peer '{name}' at {base}", response)


def _read(who: str, response: httpx.Response) -> PeerState:
    if response.status_code in REFUSED_KEY:
        need = f"its key needs the role {ROLE_NEEDED} or admin there: laya key create NAME --role {ROLE_NEEDED}"
        raise PeerFault("refused", f"{who} refuses the key ({response.status_code}); {need}")
    if response.is_redirect:
        raise PeerFault("refused", f"{who} redirects to {response.headers.get('location')}: set url to that")
    if response.status_code >= 500:
        raise PeerFault("silent", f"{who} answers {response.status_code}")
    try:
        if response.status_code != 200 or len(response.content) > _MOST_STATE_BYTES:
            raise msgspec.DecodeError(f"status {response.status_code}")
        return _DECODER.decode(response.content)
    except msgspec.DecodeError as error:
        hint = "another server's model is `engine: remote`"
        raise PeerFault("refused", f"{who} is no Laya, or one of another kind ({error}); {hint}") from None
