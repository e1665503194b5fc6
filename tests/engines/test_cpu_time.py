"""What a process and its children have computed."""

from __future__ import annotations

import subprocess
import sys
import time

from laya.engines.cpu_time import family_cpu_s
from laya.engines.held_memory import family

BURN = "import time\nwhile time.process_time() < 0.3: pass\nprint('burnt', flush=True)\ninput()"


def test_what_a_child_of_it_computes_counts_and_rest_does_not() -> None:
    words = ["sh", "-c", f'{sys.executable} -c "{BURN}"; read line']
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "burnt\n"
        burnt_s = family_cpu_s(process.pid)
        assert burnt_s is not None and burnt_s >= 0.28
        time.sleep(0.1)
        assert family_cpu_s(process.pid) == burnt_s
        process.stdin.write("\n")
        process.stdin.flush()
        while len(family(process.pid)) > 1:
            time.sleep(0.02)
        left_s = family_cpu_s(process.pid)
        assert left_s is not None and left_s >= burnt_s, "of one that is gone"
    assert family_cpu_s(process.pid) is None
