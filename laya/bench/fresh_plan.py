"""Owns: planning one large model in a process of its own, some times over: seconds, and the peak of all it imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

RUNS = 5

_PLAN = r"""
import json, re, sys, time
from pathlib import Path
from laya.memory import Budget, plan_source
from laya.types import GIB, AskedSettings
budget = Budget(bytes=4096 * GIB, limit="memory available", memory_bytes=4096 * GIB)
start = time.perf_counter()
plan = plan_source(Path(sys.argv[1]), AskedSettings(), budget, model_id="terabyte")
seconds = time.perf_counter() - start
peak_kib = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
print(json.dumps({"seconds": seconds, "peak_mib": peak_kib / 1024, "weights_bytes": plan.devices[0].terms["weights"]}))
"""


def plan_in_a_fresh_process(path: Path) -> dict[str, float]:
    """Seconds, peak MiB of the process with all it imports, and the weights the plan counted."""
    command = [sys.executable, "-c", _PLAN, str(path)]
    figures: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return figures


def report(bench: str, path: Path) -> str:
    """RUNS plans of the model at `path`; the median as one JSON line."""
    runs = sorted((plan_in_a_fresh_process(path) for _ in range(RUNS)), key=lambda run: run["seconds"])
    return json.dumps({"bench": bench, "runs": RUNS, **runs[RUNS // 2]})
