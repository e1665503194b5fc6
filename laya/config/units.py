"""Owns: how users write amounts of memory and spans of time, and what these mean in bytes and seconds."""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta, timezone

from laya.errors import ConfigError
from laya.types import GIB, KIB, MIB

DEFAULT_BUDGET_SHARE = 0.8
TIB = 1024 * GIB
MAX_BYTES = 2**60  # more than any machine has, and still a number of 64 bits
# A bare letter is binary, as it is for systemd and Docker.
BYTES_PER_UNIT = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 10**3,
    "m": MIB, "mib": MIB, "mb": 10**6,
    "g": GIB, "gib": GIB, "gb": 10**9,
    "t": TIB, "tib": TIB, "tb": 10**12,
}  # fmt: skip
SECONDS_PER_UNIT = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

BYTES_PATTERN = r"^\s*\d+(\.\d+)?\s*([kKmMgGtT]([iI]?[bB])?|[bB])?\s*$"
DURATION_PATTERN = r"^\s*(-1|(\d+(\.\d+)?(ms|s|m|h|d)?)+)\s*$"
CACHE_PATTERN = rf"^\s*auto\s*$|{BYTES_PATTERN}"
BUDGET_PATTERN = rf"^\s*\d+(\.\d+)?\s*%\s*$|{BYTES_PATTERN}"


def parse_bytes(value: str | float) -> int:
    """Bytes of `16777216`, `"16MiB"` or `"1.5 GB"`. Raises ConfigError for anything else."""
    if isinstance(value, int):
        return value
    if not isinstance(value, str) or not re.match(BYTES_PATTERN, value):
        raise ConfigError(f"{value!r} is not an amount of memory: write bytes, or for example 16MiB")
    number, unit = re.findall(r"([\d.]+)\s*([a-zA-Z]*)", value)[0]
    n_bytes = float(number) * BYTES_PER_UNIT[unit.lower()]
    if n_bytes > MAX_BYTES:
        raise ConfigError(f"{value!r} is more memory than any machine has")
    return round(n_bytes)


def parse_limit(value: str | float) -> int:
    """Bytes of an amount that a model or a device can be held to. Raises ConfigError for less than a mebibyte."""
    n_bytes = parse_bytes(value)
    if n_bytes < MIB:
        raise _less_than_any_model(value, n_bytes)
    return n_bytes


def parse_cache(value: str | float) -> int | str:
    """Bytes that an engine may keep prompts in, 0 for none, or "auto". Raises ConfigError below a mebibyte."""
    if value == "auto":
        return value
    n_bytes = parse_bytes(value)
    if 0 < n_bytes < MIB:
        raise ConfigError(f"{value!r} is less than the engine can be held to: 1MiB or more, 0 for none, or auto")
    return n_bytes


def parse_duration(value: str | float) -> float:
    """Seconds of `300`, `"5m"`, `"1h30m"`; -1 stands for never. Raises ConfigError for anything else."""
    if isinstance(value, (int, float)):
        seconds = float(value)
    elif re.match(DURATION_PATTERN, value):
        parts = re.findall(r"(-?[\d.]+)(ms|[smhd]?)", value)
        seconds = sum(float(number) * SECONDS_PER_UNIT[unit] for number, unit in parts)
    else:
        raise ConfigError(f"{value!r} is not a time: write seconds, or for example 5m or 1h; -1 is never")
    if not math.isfinite(seconds):
        raise ConfigError(f"{value!r} is not a time: write seconds, or for example 5m or 1h; -1 is never")
    if seconds < 0 and seconds != -1:
        raise ConfigError(f"{value!r} is before now: write seconds, or -1 for never")
    return seconds


def parse_budget(value: str | int | None) -> float | int:
    """A float is a share (0 to 1] of the available memory, an int is bytes. None is 80 %. Raises ConfigError."""
    if value is None:
        return DEFAULT_BUDGET_SHARE
    if isinstance(value, str) and value.strip().endswith("%"):
        return _parse_share(value)
    try:
        budget_bytes = parse_bytes(value)
    except ConfigError:
        raise ConfigError(f"{value!r} is not a budget: write a share such as 80% or an amount such as 12GiB") from None
    if budget_bytes < MIB:
        raise _less_than_any_model(value, budget_bytes)
    return budget_bytes


def _less_than_any_model(value: str | float, n_bytes: int) -> ConfigError:
    hint = f"write a unit, such as {value}GiB" if str(value).isdigit() and n_bytes else "write for example 6GiB"
    return ConfigError(f"{value!r} is {n_bytes} bytes, less than any model: {hint}")


def check_budget(value: str | float) -> str | float:
    """The value as it was written, when `parse_budget` understands it. Raises ConfigError."""
    if isinstance(value, float):
        raise ConfigError(f"{value} is not a budget: write a share such as 80% or an amount such as 12GiB")
    parse_budget(value)
    return value


def _parse_share(value: str) -> float:
    try:
        share = float(value.strip()[:-1]) / 100
    except ValueError:
        raise ConfigError(f"{value!r} is not a budget: write a share such as 80%") from None
    if not 0 < share <= 1:
        raise ConfigError(f"{value!r} is not a share of memory: it must be above 0% and at most 100%")
    return share


def format_duration(seconds: float) -> str:
    """The shortest way to write a span, e.g. `5m`, `90s`."""
    for unit, unit_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= unit_s and seconds % unit_s == 0:
            return f"{seconds / unit_s:g}{unit}"
    return f"{seconds:g}s"


def format_bytes(n_bytes: int) -> str:
    """The shortest way to write an amount, e.g. `16MiB`; bytes alone where they are no whole number of KiB."""
    for unit, unit_bytes in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if n_bytes and n_bytes % unit_bytes == 0:
            return f"{n_bytes // unit_bytes}{unit}"
    return str(n_bytes)


def parse_moment(value: str) -> float:
    """Unix time of `2027-01-31T18:00Z` or `2027-01-31`, which is the end of that day; UTC where no zone is said.

    Raises ConfigError for anything else.
    """
    text = value.strip()
    try:
        moment = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
        moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
        return (moment + timedelta(days=1) if len(text) <= len("2027-01-31") else moment).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(f"{value!r} is no day or moment: write 2027-01-31 or 2027-01-31T18:00Z") from None
