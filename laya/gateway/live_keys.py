"""Owns: where this server's keys come from: config.yaml, and the store, whose keys come and go while it runs.

`laya key` writes the store directly or through the admin API; either way the store's stamp changes, and the ring has
the new keys within a sweep. Refuses what would lock the owner out; who may write the store can always make a key.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from laya.config import ServerConfig
from laya.config.hosts import is_loopback
from laya.config.keys import grant_of
from laya.errors import ConfigError, Conflict, InvalidRequest, LayaError, StoreError
from laya.gateway.account import Key
from laya.gateway.auth import KeyRing
from laya.store import Store, no_key, secret_taken, stamp_of
from laya.types import KeyGrant

logger = logging.getLogger(__name__)
AGAIN_S = 5.0  # after the store could not be read


class LiveKeys(KeyRing):
    """The ring of a running server. Raises StoreError where there is a store that cannot be read."""

    def __init__(self, server: ServerConfig, database: Path) -> None:
        self._configured = [grant_of(key) for key in server.api_keys]
        self._database = database
        self._stamp = stamp_of(database)
        self._seen_ns = self._stamp_ns()
        self._not_before_s = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        may_be_open = is_loopback(server.host)
        self._kept = read_keys(database)
        super().__init__(self._all(self._kept), server.cors_origins, may_be_open=may_be_open)

    def _all(self, kept: Iterable[KeyGrant]) -> list[KeyGrant]:
        """The config's keys, and those of the store that have a name and digest of their own."""
        names = {grant.name for grant in self._configured}
        digests = {grant.sha256 for grant in self._configured}
        return self._configured + [each for each in kept if each.name not in names and each.sha256 not in digests]

    # changes
    def sweep(self, now_s: float) -> None:
        """A few times a second: has another process changed the store?"""
        is_reading = self._reading is not None and not self._reading.done()
        if not is_reading and self._stamp_ns() != self._seen_ns and now_s >= self._not_before_s:
            self._reading = asyncio.get_running_loop().create_task(self._read_again())

    async def _read_again(self) -> None:
        try:
            async with self._changing:  # what is read now must not come after what a change has read since
                await self.refresh()
        except LayaError as error:
            logger.error("the keys stay as they were: %s", error.message)
            self._not_before_s = time.monotonic() + AGAIN_S

    async def refresh(self) -> None:
        """Read the store again. Raises StoreError, also where it is gone with its keys, and these stay as they were."""
        stamp_ns = self._stamp_ns()
        if self._kept and not self._database.exists():
            raise StoreError(f"{self._database} is gone, and with it the keys: put it back, or start the server anew.")
        self._kept = await asyncio.to_thread(read_keys, self._database)
        self._seen_ns = stamp_ns
        self.replace(self._all(self._kept))

    def check_configured(self, server: ServerConfig) -> None:
        """Raise ConfigError where no key would be left: what needs a key now would be anybody's on this machine."""
        if self.keys and not server.api_keys and not self._kept:
            names = ", ".join(grant.name for grant in self._configured)
            raise ConfigError(
                f"server.api_keys: without {names} no key would be left, and a reload does not open a server: "
                f"`laya key create me` makes a key that stays, or start the server anew without keys.",
                param="server.api_keys",
            )

    def configure(self, server: ServerConfig) -> None:
        """The config's keys are these from now on; those of the store stay."""
        self._configured = [grant_of(key) for key in server.api_keys]
        self.replace(self._all(self._kept))

    async def create(self, grant_for: Callable[[bool], KeyGrant]) -> KeyGrant:
        """A new key, in force when this returns. grant_for: told whether it is the first.

        Raises InvalidRequest, Conflict.
        """
        async with self._changing:
            await self.refresh()
            grant = grant_for(not self.keys)
            check_new(grant, [key.grant for key in self.keys])
            made = await asyncio.to_thread(keep_key, self._database, grant)
            await self.refresh()
            return made

    async def revoke(self, name: str) -> Key:
        """End a key at once for new requests; gives it, with what it still runs. Raises NotFound, Conflict."""
        async with self._changing:
            await self.refresh()
            key = self.find(name)
            check_revocable(key.grant, [each.grant for each in self.keys], may_be_open=self._may_be_open)
            await asyncio.to_thread(drop_key, self._database, name)
            await self.refresh()
            return key

    def find(self, name: str) -> Key:
        """Raises NotFound."""
        for key in self.keys:
            if key.name == name:
                return key
        raise no_key(name, [key.name for key in self.keys])

    def _stamp_ns(self) -> int:
        try:
            return os.stat(self._stamp).st_mtime_ns
        except OSError:
            return 0


def read_keys(database: Path) -> list[KeyGrant]:
    """The keys in the store; none where there is no store. Raises StoreError."""
    if not database.exists():
        return []
    with Store(database) as store:
        return store.api_keys()


def keep_key(database: Path, grant: KeyGrant) -> KeyGrant:
    with Store(database) as store:
        return store.keep_key(grant)


def drop_key(database: Path, name: str) -> None:
    with Store(database) as store:
        store.drop_key(name)


def check_new(grant: KeyGrant, present: list[KeyGrant]) -> None:
    """Raises Conflict for what is taken, InvalidRequest for a first key that is not an unrestricted admin's."""
    for each in present:
        if each.name == grant.name:
            where = "in config.yaml" if each.created_s is None else f"; `laya key revoke {grant.name}` ends it"
            raise Conflict(f"There is a key named '{grant.name}' already{where}.", param="name")
        if each.sha256 == grant.sha256:
            raise secret_taken(each.name)
    if not any(lasts(each) for each in present) and not (grant.role == "admin" and is_unrestricted(grant)):
        command = "laya key create me" + (" --role admin" if present else "")
        raise InvalidRequest(
            f"No admin key is here yet, and the first key must be an admin's, without models, limits or an end: "
            f"`{command}` first, then '{grant.name}'.",
            param="role" if grant.role != "admin" else "name",
        )


def is_unrestricted(grant: KeyGrant) -> bool:
    """Whether it may use every model, as much as it likes, for ever."""
    limits = (grant.expires_s, grant.max_concurrent, grant.requests_per_minute, grant.tokens_per_minute)
    return not grant.models and all(limit is None for limit in limits)


def check_revocable(grant: KeyGrant, present: list[KeyGrant], *, may_be_open: bool) -> None:
    """Raises Conflict for a key of the config, and for the last admin key while others need it."""
    if grant.created_s is None:
        raise Conflict(f"The key '{grant.name}' stands in config.yaml (server.api_keys): take it out there.")
    others = [each for each in present if each.name != grant.name]
    if grant.role != "admin" or any(lasts(each) for each in others):
        return
    if others:
        raise Conflict(
            f"'{grant.name}' is the last admin key while there are others ({', '.join(each.name for each in others)}): "
            f"make another admin key first, or revoke those.",
            param="name",
        )
    if not may_be_open:
        raise Conflict(
            f"'{grant.name}' is the last key of a server that listens to its network, which is never open: "
            f"make another admin key first.",
            param="name",
        )


def lasts(grant: KeyGrant) -> bool:
    """Whether somebody can administer with it, today and later."""
    return grant.role == "admin" and (grant.expires_s is None or grant.expires_s > time.time())
