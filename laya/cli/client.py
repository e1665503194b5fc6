"""Owns: speaking to a running Laya server for every verb that needs one. Knows no verb.

Faults come out as LayaError: no server there (exit code 4), the server's own error as it was said, or a server that is
not Laya's.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

import laya
from laya.config import load_config
from laya.config.hosts import is_loopback
from laya.errors import ConfigError, LayaError, NoServer

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 30.0
_OF_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # an open address, and where to reach it from here
_PATH_SAFE = "/:@!$&'()*+,;=~"


class ServerClient:
    """A client of one server: `url`, else `$LAYA_URL`, else where `laya serve` here would listen.

    The key comes from `$LAYA_API_KEY`. Raises ConfigError for an address that is none or a broken config file.
    Paths are given unquoted. `timeout_s=None` waits for as long as it takes. Raises NoServer where nothing listens.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None) -> None:
        self.url = base_url(url or os.environ.get("LAYA_URL") or _configured_url())
        key = api_key or os.environ.get("LAYA_API_KEY")
        if key and not (key.isascii() and key.isprintable()):
            raise ConfigError("LAYA_API_KEY is no key: it has characters that no key has.", param="LAYA_API_KEY")
        headers = {"user-agent": f"laya/{laya.__version__}"} | ({"authorization": f"Bearer {key}"} if key else {})
        # A proxy of the environment stands outside; it cannot reach this machine's loopback.
        try:
            self._http = httpx.Client(
                base_url=self.url, headers=headers, trust_env=not _is_loopback(self.url), follow_redirects=False
            )
        except (httpx.InvalidURL, UnicodeError):
            raise _no_address(self.url) from None

    def get(
        self,
        path: str,
        params: Mapping[str, str] | list[tuple[str, str]] | None = None,
        *,
        timeout_s: float | None = ANSWER_TIMEOUT_S,
    ) -> Any:
        """The JSON at `path`."""
        return self._ask("GET", path, params=params, timeout_s=timeout_s)

    def post(
        self,
        path: str,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        *,
        timeout_s: float | None = ANSWER_TIMEOUT_S,
    ) -> Any:
        """The JSON answer to `body`."""
        return self._ask("POST", path, json=body, params=params, timeout_s=timeout_s)

    def delete(
        self, path: str, params: Mapping[str, str] | None = None, *, timeout_s: float | None = ANSWER_TIMEOUT_S
    ) -> Any:
        """The JSON answer to a DELETE."""
        return self._ask("DELETE", path, params=params, timeout_s=timeout_s)

    def stream_text(self, path: str, params: Mapping[str, str] | None = None) -> Iterator[str]:
        """The text at `path`, piece by piece as it comes."""
        with self._stream("GET", path, params=params) as response:
            yield from response.iter_text()

    def stream_events(self, path: str, body: Any) -> Iterator[tuple[str, str]]:
        """The lines of a server-sent stream as (field, value): ("data", ...), ("event", ...), ("", comment).

        Closing the iterator closes the connection, so that the server stops working on the answer.
        """
        with self._stream("POST", path, json=body) as response:
            for line in _lines(response.iter_bytes()):
                field, _, value = line.partition(":")
                if line:
                    yield field, value.removeprefix(" ")

    def close(self) -> None:
        """Close idle connections."""
        self._http.close()

    def _ask(self, method: str, path: str, *, timeout_s: float | None, **request: Any) -> Any:
        with self._faults():
            response = self._http.request(method, _quoted(path), timeout=_timeout(timeout_s), **request)
        return self._json(response)

    @contextlib.contextmanager
    def _stream(self, method: str, path: str, **request: Any) -> Iterator[httpx.Response]:
        """An open answer; the time between two pieces is the server's business."""
        with (
            self._faults(),
            self._http.stream(method, _quoted(path), timeout=_timeout(None), **request) as response,
        ):
            if response.status_code >= 400:
                response.read()
                self._json(response)
            yield response

    def _json(self, response: httpx.Response) -> Any:
        try:
            body = response.json()
        except ValueError:
            body = None
        if response.status_code < 400 and (body is not None or response.content == b"null"):
            return body
        if isinstance(body, dict) and isinstance(body.get("error"), dict):
            raise error_from(body["error"], response.status_code)
        raise LayaError(
            f"{self.url} answered {response.status_code} without the words of a Laya server: what listens there? "
            f"LAYA_URL names another address."
        )

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise NoServer(
                f"No server at {self.url} ({error}). Start one with `laya serve`; LAYA_URL names another address."
            ) from error
        except httpx.TimeoutException as error:
            raise LayaError(f"The server at {self.url} did not answer in time.") from error
        except httpx.TransportError as error:
            raise LayaError(f"The connection to {self.url} broke: {error}") from error


def error_from(error: Mapping[str, Any], http_status: int) -> LayaError:
    """The LayaError that a server's error object stands for, with the exit code of its kind."""
    code = str(error.get("code") or "server_error")
    details = {key: value for key, value in error.items() if key not in ("message", "type", "param", "code")}
    message = str(error.get("message") or f"the server answered {http_status}")
    if code == "invalid_api_key":
        message += " Set LAYA_API_KEY to a key of this server."
    raised = LayaError(message, param=error.get("param"), **details)
    raised.code, raised.type, raised.http_status = code, str(error.get("type") or "server_error"), http_status
    kind = next((kind for kind in _kinds(LayaError) if kind.code == code), LayaError)
    raised.exit_code = kind.exit_code
    return raised


def _kinds(kind: type[LayaError]) -> Iterator[type[LayaError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _kinds(child)


def _configured_url() -> str:
    """Where `laya serve` would listen with the config file it would use in this folder."""
    server = load_config(None, os.environ).server
    if server.port == 0:
        raise ConfigError("server.port is 0, any free port: LAYA_URL must say which one the server took.")
    host = _OF_ANY.get(server.host, server.host)
    return f"http://[{host}]:{server.port}" if ":" in host else f"http://{host}:{server.port}"


def base_url(url: str) -> str:
    """The address without the /v1 that OpenAI's clients want at its end."""
    written = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(written)
        is_right = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 0) >= 0
    except ValueError:
        is_right = False
    if not is_right:
        raise _no_address(url)
    return written.rstrip("/").removesuffix("/v1")


def _no_address(url: str) -> ConfigError:
    return ConfigError(f"LAYA_URL {url!r} is not an address: write it like {DEFAULT_URL}", param="LAYA_URL")


def _quoted(path: str) -> str:
    """The bytes of the command line as they were typed, UTF-8 or not."""
    return quote(path, _PATH_SAFE, errors="surrogateescape")


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return is_loopback(host)


def _timeout(answer_s: float | None) -> httpx.Timeout:
    return httpx.Timeout(answer_s, connect=CONNECT_TIMEOUT_S)


def _lines(pieces: Iterator[bytes]) -> Iterator[str]:
    """Lines ended by a line feed only: JSON text may hold the other characters that str.splitlines breaks at."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode("utf-8", "replace")


def parse_event(data: str) -> dict[str, Any]:
    """One event's JSON object. Raises LayaError for an error event or for what is no JSON object."""
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise LayaError(f"The server sent an event that is not JSON: {data[:80]}")
    if event.get("error"):
        raise error_from(event["error"] if isinstance(event["error"], dict) else {"message": event["error"]}, 500)
    return event
