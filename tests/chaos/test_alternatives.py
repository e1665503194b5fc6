"""In a small group the default model is refused at large settings; each alternative that is printed then loads."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laya.types import MIB
from tests.conftest import PROGRAM, ROOT, RunningServer

from .conftest import Group, assert_nothing_killed, chat, measured_answers

LIMIT_BYTES = 448 * MIB
ASKED = ("--max-num-seqs", "8", "--max-seq-len", "8192", "--n-threads", "1")
HARDWARE = {"--gpu-memory", "--memory"}  # what another machine would need to have


def planned(group: Group, home: Path, *words: str) -> dict[str, Any]:
    """`laya plan ... --json` inside the group; it says that it does not fit."""
    done = subprocess.run(
        group.program(*PROGRAM, "plan", *words, "--json"),
        env=os.environ | {"LAYA_HOME": str(home), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def test_every_alternative_of_a_refusal_and_of_a_plan_loads_in_the_group(
    make_limited: Callable[[int], Group], serve: Callable[..., RunningServer], laya_home: Path
) -> None:
    group = make_limited(LIMIT_BYTES)
    server = serve(config="version: 1\nmax_num_seqs: 8\nmax_seq_len: 8192\n", group=group)
    error = chat(server, "smollm2").json()["error"]
    server.stop()
    print(f"\nsmollm2 8 x 8192 in {LIMIT_BYTES / MIB:.0f} MiB: {error['message']}")
    assert error["code"] == "insufficient_memory" and len(error["suggestions"]) >= 3
    assert error["need_bytes"] > error["available_bytes"] and "cgroup" in error["limit"]
    lines = [shlex.join([*shlex.split(flags), "--n-threads", "1"]) for flags in error["suggestions"]]
    for each in planned(group, laya_home, "smollm2", *ASKED)["alternatives"]:
        words = shlex.split(each["command"])
        if HARDWARE & set(words):
            print(f"  {each['command']}: for another machine, not loaded here")
            continue
        assert words[:3] == ["laya", "plan", "smollm2"]
        lines.append(shlex.join(words[3:]))
    each_once = map(shlex.split, dict.fromkeys(lines))
    measured_answers(serve, "smollm2", "smollm2-135m", (["smollm2", *words] for words in each_once), group=group)
    assert_nothing_killed(group)
