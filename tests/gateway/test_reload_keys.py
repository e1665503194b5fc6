"""Keys of a running gateway stay where what they came from is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from laya.config import ApiKey, ServerConfig
from laya.config.keys import hash_key
from laya.config.places import DATABASE
from laya.errors import ConfigError, StoreError
from laya.gateway.live_keys import LiveKeys

from .keyed import drop, grant, keep

pytestmark = pytest.mark.anyio
CONFIGURED = ServerConfig(api_keys=[ApiKey(name="me", sha256=hash_key("sk-" + "m" * 40))])


async def test_store_that_is_gone_takes_no_key_with_it_and_one_that_was_revoked_goes(tmp_path: Path) -> None:
    keep(tmp_path, grant("admin", role="admin"))
    keys = LiveKeys(ServerConfig(), tmp_path / DATABASE)
    (tmp_path / DATABASE).rename(tmp_path / "away")
    with pytest.raises(StoreError, match="is gone"):
        await keys.refresh()
    assert not keys.is_open
    (tmp_path / "away").rename(tmp_path / DATABASE)
    drop(tmp_path, "admin")
    await keys.refresh()
    assert keys.is_open


async def test_reload_may_take_the_last_key_of_the_config_only_where_the_store_has_one(tmp_path: Path) -> None:
    keys = LiveKeys(CONFIGURED, tmp_path / DATABASE)
    with pytest.raises(ConfigError, match="without me no key would be left"):
        keys.check_configured(ServerConfig())
    keep(tmp_path, grant("admin", role="admin"))
    await keys.refresh()
    keys.check_configured(ServerConfig())
    LiveKeys(ServerConfig(), tmp_path / "none").check_configured(ServerConfig())
