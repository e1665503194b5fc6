"""Owns: one line of `laya doctor`: how bad it is, what was seen, and the command that mends it. Knows no probe."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "warn", "FIX"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """FIX: Laya works badly or not at all until it is mended. warn: worth a thought."""

    level: Level
    topic: str
    seen: str
    fix: str | None = None  # a command, or what to change; always there for warn and FIX


def ok(topic: str, seen: str, fix: str | None = None) -> Finding:
    return Finding(level="ok", topic=topic, seen=seen, fix=fix)


def warn(topic: str, seen: str, fix: str) -> Finding:
    return Finding(level="warn", topic=topic, seen=seen, fix=fix)


def must_fix(topic: str, seen: str, fix: str) -> Finding:
    return Finding(level="FIX", topic=topic, seen=seen, fix=fix)
