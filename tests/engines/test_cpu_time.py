"""What a process and its children have computed."""

from __future__ import annotations

import subprocess
import sys
import time

from laya.engines.cpu_time import family_cpu_s, is_runnable
from laya.engines.held_memory import family

BURN = "import time\nwhile time.process_time() < 0.3: pass\nprint('burnt', flush=True)\ninput()"


def until_it_sleeps(pid: int) -> None:
    """A program that has said its last word computes a little longer; on a busy machine much longer."""
    while is_runnable(pid):
        time.sleep(0.02)


def test_what_a_child_of_it_computes_counts_and_rest_does_not() -> None:
    words = ["sh", "-c", f'{sys.executable} -c "{BURN}"; read line']
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "burnt\n"
        until_it_sleeps(process.pid)
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


def test_who_waits_for_a_core_is_told_from_who_waits_for_something_else() -> None:
    """Two that compute on one core, as an engine beside busier programs; one that sleeps; and one that is gone."""
    alone = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nprint(flush=True)\nwhile True: pass"
    programs = [alone, alone, "import time\nprint(flush=True)\ntime.sleep(60)"]
    processes = [subprocess.Popen([sys.executable, "-c", each], stdout=subprocess.PIPE) for each in programs]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline()
        until_it_sleeps(processes[2].pid)
        assert [is_runnable(process.pid) for process in processes] == [True, True, False]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert not is_runnable(processes[0].pid)
