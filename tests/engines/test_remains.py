"""What an engine left: only what was its own is looked for, and killed."""

from __future__ import annotations

import subprocess

import psutil
import pytest

from laya.engines import remains as remains_module
from laya.engines.remains import SeenRemains


def test_what_another_program_started_under_the_same_id_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"]) as strangers_child, subprocess.Popen(["sleep", "600"]) as engine:
        remains = SeenRemains(engine.pid)
        engine.kill()
        engine.wait()
        # the kernel has given its id to another program, which has a child
        monkeypatch.setattr(remains_module, "family", lambda pid: [pid, strangers_child.pid])
        assert remains.kill()
        assert psutil.Process(strangers_child.pid).status() != psutil.STATUS_ZOMBIE
        strangers_child.kill()
