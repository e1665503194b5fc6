"""Owns: another server as an engine: no child, no bytes. It is ready when it answers, and gone when it no longer does.

What it is asked for is its list of models, which costs nobody a token. Any answer but that of a wrong key says that it
is there; three silences in a row end the engine. Whoever wants it next has it tried again, after a pause that grows.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx

from laya.engines.ceiling import LimitHit
from laya.engines.held_memory import MemoryReading
from laya.engines.log import EngineLog
from laya.engines.settings import RemoteSettings
from laya.errors import ConfigError, EngineFailed
from laya.types import EngineAddress

ASK_EVERY_S = 15.0
SILENCES = 3  # in a row, after which it is gone
IDLE_LIMIT_S = 50.0  # of a kept connection: servers and what stands before them close after a minute
REFUSED_KEY = (401, 403)


class RemoteEngine:
    """See hooks.Engine; started once."""

    pid: int | None = None
    limit_hit: LimitHit | None = None
    load_percent: int | None = None

    def __init__(self, settings: RemoteSettings, log: EngineLog) -> None:
        self._settings = settings
        self._log = log
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> EngineAddress:
        """Its address, once it has answered. Raises EngineFailed, ConfigError; the key is in neither."""
        settings, url = self._settings, self._settings.url
        self._log.begin(f"{settings.engine_name} is {url.text}")
        try:
            address = self._address()
            fault = None if settings.is_watched else await self._fault(address)
        except ConfigError as error:
            raise EngineFailed(f"'{settings.engine_name}' at {url.text}: {error.message}", param="model") from None
        if fault is not None:
            self._log.note(fault)
            raise EngineFailed(f"'{settings.engine_name}' at {url.text}: {fault}", param="model", retry_after_s=1.0)
        if not settings.is_watched:
            self._watching = asyncio.get_running_loop().create_task(self._watch(address))
        return address

    async def stop(self) -> bool:
        self._end("asked to stop")
        return True

    def kill(self) -> None:
        self._end("asked to stop")

    async def wait_exit(self) -> str:
        return await asyncio.shield(self._gone)

    def measure(self) -> MemoryReading | None:
        """It holds nothing here."""
        return None

    def _address(self) -> EngineAddress:
        url, remote = self._settings.url, self._settings.remote
        return EngineAddress(
            host=url.host,
            port=url.port,
            api_key=remote.key(),
            cancels_whole=True,
            dialect="openai",
            model=remote.model,
            renames=True,
            alive_path=None,
            is_remote=True,
            tls=tls_of(remote.ca_file) if url.is_tls else None,
            base_path=url.base_path,
            headers=remote.headers,
            connect_timeout_s=remote.connect_timeout_s,
            idle_limit_s=IDLE_LIMIT_S,
        )

    async def _watch(self, address: EngineAddress) -> None:
        n_silences = 0
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            fault = await self._fault(address)
            n_silences = n_silences + 1 if fault is not None else 0
            if fault is not None:
                self._log.note(fault)
            if n_silences >= SILENCES:
                self._end(f"{self._settings.url.text}: {fault}")

    async def _fault(self, address: EngineAddress) -> str | None:
        """Why it cannot be used now; None: it can."""
        try:
            response = await asyncio.wait_for(self._ask(address), address.connect_timeout_s)
        except (httpx.TimeoutException, asyncio.TimeoutError):
            return f"no answer within {address.connect_timeout_s:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return f"it cannot be reached: {error or type(error).__name__}"
        if response.status_code in REFUSED_KEY:
            return f"it refused the key ({response.status_code})"
        if response.is_redirect:
            return (
                f"it redirects to {response.headers.get('location')}, and redirects are not followed: set url to that"
            )
        if response.status_code >= 500:
            return f"it answers {response.status_code}"
        return None

    async def _ask(self, address: EngineAddress) -> httpx.Response:
        """What it answers, but for the body, which nobody reads: it may have no end."""
        headers = dict(address.headers)
        if address.api_key is not None:
            headers["authorization"] = f"Bearer {address.api_key}"
        verify = address.tls if address.tls is not None else False
        # trust_env off: requests go where the address says, and by no proxy, so that this does too
        async with (
            httpx.AsyncClient(verify=verify, timeout=None, trust_env=False, follow_redirects=False) as http,
            http.stream("GET", f"{self._settings.url.text}/models", headers=headers) as response,
        ):
            return response

    def _end(self, reason: str) -> None:
        if not self._gone.done():
            self._log.note(f"engine ended: {reason}")
            self._gone.set_result(reason)
        if self._watching is not None and self._watching is not asyncio.current_task():
            self._watching.cancel()


def tls_of(ca_file: Path | None) -> ssl.SSLContext:
    """Verifies certificate and name, always. Raises ConfigError for a file of certificates that is none."""
    try:
        return ssl.create_default_context(cafile=str(ca_file) if ca_file is not None else None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{ca_file} holds no certificates (ca_file): {error}", param="ca_file") from None
