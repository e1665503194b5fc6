"""Owns: the keys of a model that another server serves (`engine: remote`), and what they come to.

Its key is read when its engine is made ready, and is never kept in the configuration.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Meta

from laya.config.program import ProgramKeys
from laya.config.values import Seconds
from laya.errors import ConfigError

_PORTS = {"http": 80, "https": 443}
_SECRET_PARTS = re.compile(r"(?<=//)[^/]*(?=@)|(?<=\?).*|(?<=#).*", re.DOTALL)
_HOST = re.compile(r"[A-Za-z0-9._~-]+|[0-9A-Fa-f:.]+(%[A-Za-z0-9._~-]+)?")


class RemoteKeys(ProgramKeys, kw_only=True, forbid_unknown_fields=True):
    """What only another server needs."""

    url: Annotated[str | None, Meta(description="engine: remote: where OpenAI's API is, such as https://host/v1.")] = (
        None
    )
    urls: Annotated[
        list[str], Meta(description="engine: remote: several such addresses; what one fails another serves.")
    ] = []
    model: Annotated[
        str | None, Meta(description="engine: remote: what the other server calls the model; null = as here.")
    ] = None
    key_env: Annotated[
        str | None, Meta(description="engine: remote: the environment variable that holds the key for it.")
    ] = None
    key_file: Annotated[str | None, Meta(description="engine: remote: the file that holds the key for it.")] = None
    headers: Annotated[dict[str, str], Meta(description="engine: remote: headers to send with each request.")] = {}
    ca_file: Annotated[
        str | None, Meta(description="engine: remote: certificates to trust instead of the system's.")
    ] = None
    connect_timeout_s: Annotated[
        Seconds, Meta(description="engine: remote: seconds that a connection, TLS included, may take to open.")
    ] = 10


REMOTE_KEYS = tuple(name for name in RemoteKeys.__struct_fields__ if name not in ProgramKeys.__struct_fields__)


class RemoteUrl(msgspec.Struct, frozen=True, kw_only=True):
    """An address taken apart."""

    host: str
    port: int
    is_tls: bool
    base_path: str  # "/v1": what the paths of OpenAI's API are behind

    @property
    def text(self) -> str:
        """As it may be shown: nothing of it is secret."""
        port = "" if self.port == _PORTS["https" if self.is_tls else "http"] else f":{self.port}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.is_tls else ''}://{host}{port}{self.base_path}"


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """Another server, every key decided."""

    urls: tuple[RemoteUrl, ...]
    model: str | None
    key_env: str | None
    key_file: Path | None
    headers: tuple[tuple[str, str], ...]
    ca_file: Path | None
    connect_timeout_s: float

    def key(self) -> str | None:
        """The key, as it is now. Raises ConfigError, which never shows it."""
        if self.key_env is not None:
            value = os.environ.get(self.key_env)
            if not value:
                raise ConfigError(f"the environment has no {self.key_env} (key_env)", param="key_env")
        elif self.key_file is not None:
            try:
                value = self.key_file.read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is no text"
                raise ConfigError(f"{self.key_file} cannot be read (key_file): {reason}", param="key_file") from None
        else:
            return None
        if not value.isascii() or not value.isprintable() or " " in value or not value:
            raise ConfigError("the key is empty, or holds what no key does", param="key_file")
        return value


def read_url(text: str) -> RemoteUrl:
    """Raises ConfigError, which shows no secret, for what is no address of an API, or holds a secret."""
    told = _SECRET_PARTS.sub("...", text)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ConfigError(f"{told!r} is no address: write https://host/v1", param="url") from None
    host = _host(parts.hostname or "")
    if parts.scheme not in _PORTS or not host or port == 0:
        raise ConfigError(f"{told!r} is no address: write https://host/v1", param="url")
    if parts.username or parts.password:
        raise ConfigError("an address holds no user and no password: use key_env or key_file", param="url")
    if parts.query or parts.fragment:
        raise ConfigError(f"{told!r} has more than a path: write https://host/v1", param="url")
    if any(not "!" <= letter <= "~" for letter in parts.path):
        raise ConfigError(
            f"the path of {told!r} has letters that must be percent-encoded: {quote(parts.path)}", param="url"
        )
    return RemoteUrl(
        host=host,
        port=port or _PORTS[parts.scheme],
        is_tls=parts.scheme == "https",
        base_path=parts.path.rstrip("/"),
    )


def _host(text: str) -> str:
    """A host as resolvers and certificates know it; "" where none can be called so."""
    try:
        name = text.encode("idna").decode("ascii")
    except UnicodeError:  # an empty label, one that is too long, letters that no host has
        return ""
    return name if _HOST.fullmatch(name) else ""


def read_remote(keys: RemoteKeys) -> Remote:
    """The server of a checked entry. Raises ConfigError for an address that is none."""
    urls = ([keys.url] if keys.url is not None else []) + keys.urls
    return Remote(
        urls=tuple(read_url(text) for text in urls),
        model=keys.model,
        key_env=keys.key_env,
        key_file=Path(keys.key_file) if keys.key_file is not None else None,
        headers=tuple(keys.headers.items()),
        ca_file=Path(keys.ca_file) if keys.ca_file is not None else None,
        connect_timeout_s=keys.connect_timeout_s,
    )
