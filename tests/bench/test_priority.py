"""What `--nice` does to a Laya and its engines: their distance stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys

# A session of its own with a child "laya" and below it an "engine" in another session, as the real ones are.
FAMILY = """
import json, os, subprocess, sys
from pathlib import Path
from laya.bench.both_ways import set_priority
from laya.engines.process import CHILD_NICE

ENGINE = '''
import os, sys, time
from laya.engines.child_start import step_back
step_back(int(sys.argv[1]), 0)
print("up", flush=True)
time.sleep(600)
'''
LAYA = '''
import subprocess, sys
for line in sys.stdin:
    engine = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], start_new_session=True, stdout=subprocess.PIPE)
    engine.stdout.readline()
    print(engine.pid, flush=True)
'''
laya = subprocess.Popen(
    [sys.executable, "-c", LAYA, ENGINE, str(CHILD_NICE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)

def engine():
    print(file=laya.stdin, flush=True)
    return int(laya.stdout.readline())

def seen(pid):
    try:
        group = int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])
    except OSError:
        group = None
    return os.getpriority(os.PRIO_PROCESS, pid), group

engines = [engine()]
set_priority(2, laya.pid)
engines.append(engine())
set_priority(2, laya.pid)
print(json.dumps([seen(pid) for pid in (os.getpid(), laya.pid, *engines)]))
for pid in engines:
    os.kill(pid, 9)
laya.kill()
"""


def test_engines_step_back_behind_laya_by_as_much_as_before_however_often_it_is_said() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAMILY], capture_output=True, text=True, start_new_session=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    for (nice, group), wanted in zip(json.loads(done.stdout), (2, 2, 17, 17), strict=True):
        assert nice == wanted
        assert group in (wanted, None)
