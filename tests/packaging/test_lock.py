"""lock.txt pins all that this environment has of Laya's requirements, to the last package, at the version that is here.

What pip would install anew is asked by `make check-lock`, which needs the network.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts/lock"))
LOCKED: dict[str, str] = SCRIPT["pinned"]((ROOT / "lock.txt").read_text())
PINNED: dict[str, str] = SCRIPT["pinned"]((ROOT / "constraints.txt").read_text())


def wanted(lines: list[str], extras: tuple[str, ...] = ()) -> Iterator[Requirement]:
    for requirement in map(Requirement, lines):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 gets older versions, which lock.txt leaves out")
def test_what_is_installed_is_what_is_locked() -> None:
    todo = list(wanted([line for line in SCRIPT["requirements"]() if not line.startswith(("cmake", "ninja"))]))
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while todo:
        requirement = todo.pop()
        name, extras = canonicalize_name(requirement.name), tuple(sorted(requirement.extras))
        if (name, extras) in seen or name in SCRIPT["ALWAYS_THERE"]:
            continue
        seen.add((name, extras))
        assert name in LOCKED, f"{requirement} is needed and not in lock.txt: make lock"
        try:
            here = version(name).split("+")[0]
            below = requires(name) or []
        except PackageNotFoundError:  # only the build needs it
            continue
        assert here == LOCKED[name], f"{name} {here} is here and lock.txt says {LOCKED[name]}: make lock"
        todo += wanted(below, extras)
    assert len(seen) > 100


def test_the_lock_and_the_constraints_agree() -> None:
    both = LOCKED.keys() & PINNED.keys()
    assert {name: LOCKED[name] for name in both} == {name: PINNED[name] for name in both}
