"""What a process and all it started hold."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from laya.engines.held_memory import _is_one_memory, family, read_family, read_memory
from laya.types import MIB

CLONE_VM = 0x100


def test_libraries_of_one_program_count_once_and_what_is_its_own_for_each() -> None:
    code = (
        "import mmap, subprocess, sys\n"
        "held = bytearray(int(sys.argv[2]) << 20)\n"
        "shared = mmap.mmap(-1, 8 << 20); shared.write(bytes(8 << 20))\n"
        "more = sys.argv[3:]\n"
        "if more: subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[1], *more])\n"
        "else: print('held', flush=True)\n"
        "input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, code, "16", "32"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "held\n"
        whole, parent = read_family(process.pid), read_memory(process.pid)
        assert whole is not None and parent is not None
        assert whole.anonymous_bytes > 48 * MIB
        files_and_shared = whole.resident_bytes - whole.anonymous_bytes
        parents = parent.resident_bytes - parent.anonymous_bytes
        assert 8 * MIB <= files_and_shared - parents < 8 * MIB + parents / 4  # the child's shared memory, no library
        assert whole.peak_bytes >= whole.resident_bytes
        process.stdin.close()
    assert read_family(process.pid) is None


@pytest.mark.skipif(not _is_one_memory(os.getpid(), os.getpid()), reason="this kernel, or its filter, has no kcmp")
def test_what_is_being_started_does_not_count_the_memory_of_who_starts_it() -> None:
    """As after vfork: a process more, and not a byte."""
    code = (
        "import ctypes, os\n"
        "held = bytearray(64 << 20); libc = ctypes.CDLL(None); stack = ctypes.create_string_buffer(65536)\n"
        "top = ctypes.c_void_p(ctypes.addressof(stack) + 65536 & ~15)\n"
        f"pid = libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), top, {CLONE_VM | signal.SIGCHLD}, None)\n"
        "print(pid, flush=True); input(); os.kill(pid, 9)"
    )
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        twin = int(process.stdout.readline())
        whole = read_family(process.pid)
        assert family(process.pid) == [process.pid, twin]
        assert whole is not None and 64 * MIB <= whole.anonymous_bytes < 100 * MIB
        process.stdin.write("\n")
