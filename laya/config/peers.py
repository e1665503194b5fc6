"""Owns: the keys of `peers`, other Laya servers whose models are served here too, and what a name makes of them.

A model of a peer is called `PEER/MODEL`, so that its settings follow from its name: no entry under `models` is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from laya.config.document import Document, KeyPath, dotted
from laya.config.remote import Remote, RemoteUrl, read_url
from laya.config.values import Seconds
from laya.errors import ConfigError

if TYPE_CHECKING:
    from laya.config.schema import Config

_API = "/v1"
_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9_.-]*")


class PeerConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """One entry under `peers`."""

    url: Annotated[str, Meta(description="Where the other Laya listens, such as http://attic:8000.")]
    key_env: Annotated[
        str | None, Meta(description="The environment variable that holds the key for it; its role is peer or admin.")
    ] = None
    key_file: Annotated[str | None, Meta(description="The file that holds the key for it.")] = None
    ca_file: Annotated[str | None, Meta(description="Certificates to trust instead of the system's.")] = None
    connect_timeout_s: Annotated[
        Seconds, Meta(description="Seconds that it may take to connect, and to tell its state.")
    ] = 5


def split_name(peers: Mapping[str, PeerConfig], name: str) -> tuple[str, str] | None:
    """The peer and its own name of the model, of a name that is one of a peer's model."""
    peer, slash, model = name.partition("/")
    return (peer, model) if slash and model and peer in peers else None


def base_url(peer: PeerConfig) -> RemoteUrl:
    """Where its OpenAI API is. Raises ConfigError for what is no address."""
    url = read_url(peer.url)
    if url.base_path.endswith(_API):
        return url
    return msgspec.structs.replace(url, base_path=url.base_path + _API)


def read_peer(peer: PeerConfig, model: str | None = None) -> Remote:
    """The server of a checked entry, as one that serves this model."""
    return Remote(
        urls=(base_url(peer),),
        model=model,
        key_env=peer.key_env,
        key_file=Path(peer.key_file) if peer.key_file is not None else None,
        headers=(),
        ca_file=Path(peer.ca_file) if peer.ca_file is not None else None,
        connect_timeout_s=peer.connect_timeout_s,
    )


def check_peers(config: Config, document: Document) -> None:
    """Raises ConfigError for the first peer that cannot be, or whose models could not be told from others."""
    names: dict[str, KeyPath] = {model_id: ("models", model_id) for model_id in config.models}
    names |= {pool: ("routing", "pools", pool) for pool in config.routing.pools}
    names |= {alias: ("models", model_id) for model_id, entry in config.models.items() for alias in entry.aliases}
    for peer, entry in config.peers.items():
        path: KeyPath = ("peers", peer)
        if not _NAME.fullmatch(peer):
            raise document.error(path, f"{dotted(path)}: the name of a peer is letters, digits and . _ - alone")
        try:
            base_url(entry)
        except ConfigError as error:
            raise document.error((*path, "url"), f"{dotted((*path, 'url'))}: {error.message}") from None
        if entry.key_env is not None and entry.key_file is not None:
            where = (*path, "key_env")
            raise document.error(where, f"{dotted(where)}: key_file is said too: the key is in one place")
        taken = next((name for name in names if name.startswith(f"{peer}/")), None)
        if taken is not None:
            told = f"{dotted(path)}: {taken} is called as a model of this peer would be; rename one of them"
            raise document.error(names[taken], told)
