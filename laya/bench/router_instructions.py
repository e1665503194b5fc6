"""Owns: how many instructions one choose + settle takes, counted by callgrind: no other work on the machine changes it.

Two runs of the native test apart by so many requests differ by what those take; setting up is in neither figure.
Needs valgrind and a C++20 compiler. Run: `python -m laya.bench.router_instructions`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from laya.bench.hardware import hardware

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "native"
CASES = ((10, 10), (10, 30), (10, 10_000), (65_536, 10_000))  # models, endpoints
FEWER, MORE = 20_000, 120_000  # requests


def main() -> int:
    """Prints one line a case, and last one of JSON. 1 where a tool is missing or the build fails."""
    for tool in ("valgrind", "cmake"):
        if shutil.which(tool) is None:
            print(f"{tool} is not installed here: apt install {tool}", file=sys.stderr)
            return 1
    for argv in (["-S", str(ROOT), "-B", str(BUILD), "-DLAYA_NATIVE_TESTS=ON"], ["--build", str(BUILD)]):
        built = subprocess.run(["cmake", *argv], capture_output=True, text=True, check=False)
        if built.returncode:
            print(built.stdout + built.stderr, file=sys.stderr)
            return 1
    cases = []
    for n_models, n_endpoints in CASES:
        more, fewer = (_count(n_requests, n_models, n_endpoints) for n_requests in (MORE, FEWER))
        instructions = (more - fewer) / (MORE - FEWER)
        print(
            f"{n_models:7,} models  {n_endpoints:7,} endpoints  {instructions:6.1f} instructions of one choose + settle"
        )
        cases.append({"models": n_models, "endpoints": n_endpoints, "instructions": instructions})
    print(json.dumps({"bench": "router_instructions", "cases": cases, "hardware": hardware()}))
    return 0


def _count(n_requests: int, n_models: int, n_endpoints: int) -> int:
    counted = [str(BUILD / "test_route_table"), "count", str(n_requests), str(n_models), str(n_endpoints)]
    callgrind = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    done = subprocess.run([*callgrind, *counted], capture_output=True, text=True, check=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found is not None
    return int(found.group(1))


if __name__ == "__main__":
    sys.exit(main())
