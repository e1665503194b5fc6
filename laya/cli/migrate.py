"""Owns: `laya config migrate`: the file in its newest form, written whole or not at all, the old one kept beside it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from laya.cli.output import printable
from laya.config.document import read_document, read_text
from laya.config.load import config_from
from laya.config.migrate import NEWEST, STEPS, Renames, check_version, migrated
from laya.config.places import config_path
from laya.errors import ConfigError


def migrate(
    file: Path | None, *, dry_run: bool = False, steps: Mapping[int, Renames] = STEPS, newest: int = NEWEST
) -> None:
    """Raises ConfigError for a file that is from a newer Laya, is not right, or would not be right afterwards."""
    found = file or config_path(os.environ)
    if found is None:
        print("there is no config.yaml, so there is nothing to migrate")
        return
    document = read_document(found, os.environ)
    version = document.data.get("version", 1)
    if type(version) is not int or not 1 <= version < newest:
        check_version(document, newest)
        print(f"ok: {printable(str(found))} has the newest form, version {newest}")
        return
    text, changes = migrated(read_text(found, hint=""), version, steps, newest)
    if dry_run:
        print(text, end="")
        return
    target = found.resolve()
    kept, new = target.with_name(f"{target.name}.v{version}"), target.with_name(f".{target.name}.new")
    if kept.exists():
        raise ConfigError(f"{kept} is there already: it would be overwritten by what {found} was; move it away first")
    try:
        shutil.copy2(target, new)  # its mode and owner's rights
        new.write_text(text, encoding="utf-8")
        if newest == NEWEST:
            config_from(read_document(new, os.environ))
        os.link(target, kept)
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)
    for change in changes:
        print(f"{printable(str(found))}: {printable(change)}", file=sys.stderr)
    print(f"ok: {printable(str(found))} is version {newest}; what it was is {printable(kept.name)}")
