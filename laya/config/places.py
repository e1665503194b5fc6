"""Owns: where Laya keeps its files on this machine. Creates nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import platformdirs

DATABASE = "laya.db"  # the store, in the data folder


def data_dir(environ: Mapping[str, str]) -> Path:
    """Folder of pulled models, logs and the database: `$LAYA_HOME`, else the user's data folder."""
    if environ.get("LAYA_HOME"):
        return Path(environ["LAYA_HOME"]).expanduser().absolute()
    return platformdirs.user_data_path("laya", appauthor=False)


def config_path(environ: Mapping[str, str]) -> Path | None:
    """The config file that is used when none is named: `./config.yaml`, else the user's own; None when neither is."""
    user_dir = data_dir(environ) if environ.get("LAYA_HOME") else platformdirs.user_config_path("laya", appauthor=False)
    return next((path for path in (Path("config.yaml"), user_dir / "config.yaml") if path.is_file()), None)
