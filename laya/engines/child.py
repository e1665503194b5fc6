"""Owns: one child process of any kind: spawn, its two pipes, signals to it and what it started, and its exit, which is
told once all that it started is gone too. Knows no engine.

The child is spawned with `subprocess` and watched through a pidfd instead of asyncio's own subprocesses: reaping is
then ours on every loop, what is left of the child's process group can be killed while its id cannot yet be reused (what
has left that group is remains.py's), and the pipes are drained by protocols from the first byte. The document for its
stdin travels in an anonymous file, so nothing blocks and nothing shows in `ps`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laya.engines.remains import GroupRemains, Remains, SeenRemains

logger = logging.getLogger(__name__)

REMAINS_LOOK_EVERY_S = 0.01
REMAINS_WAIT_S = 10.0  # a process that the kernel holds for longer is told, and waited for no more
PIPE_END_WAIT_S = 1.0  # after the exit, for the last lines, should something still hold the pipe
_lasting = {threading.main_thread()}  # threads that end only with this process


def spawn_from_this_thread() -> None:
    """The current thread, too, ends only with this process, so that children may be spawned from it."""
    _lasting.add(threading.current_thread())


class Child:
    """A running child, leader of its own session. `exited` becomes the return code once it is reaped."""

    def __init__(
        self,
        command: list[str],
        *,
        document: bytes,
        environment: dict[str, str],
        on_stdout: Callable[[bytes], None],
        on_stderr: Callable[[bytes], None],
        control_group: Path | None = None,
    ) -> None:
        """Raises OSError when no process can be made. `on_stdout` gets whole lines, `on_stderr` bytes as they come.

        control_group: the folder of the one that the child enters, before it starts anything.
        """
        # PR_SET_PDEATHSIG fires when the *thread* that forked ends, so it has to be the one that ends last.
        assert threading.current_thread() in _lasting, "children are spawned from a thread that lasts"
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self._stderr_ended: asyncio.Future[None] = self._loop.create_future()
        with contextlib.ExitStack() as opened_for_child, contextlib.ExitStack() as opened_for_us:
            stdin = os.memfd_create("laya-child-stdin")
            opened_for_child.callback(os.close, stdin)
            os.write(stdin, document)
            os.lseek(stdin, 0, os.SEEK_SET)
            stdout, stdout_write = _pipe(opened_for_us, opened_for_child)
            stderr, stderr_write = _pipe(opened_for_us, opened_for_child)
            self._popen = subprocess.Popen(
                command, stdin=stdin, stdout=stdout_write, stderr=stderr_write, env=environment, start_new_session=True
            )
            opened_for_us.pop_all()
        self.pid = self._popen.pid
        self._remains: Remains = SeenRemains(self.pid) if control_group is None else GroupRemains(control_group)
        self._read(stdout, _Lines(on_stdout))
        self._read(stderr, _Pipe(on_stderr, self._stderr_ended))
        pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(pidfd, self._on_exit, pidfd)

    def signal_group(self, signum: int) -> None:
        """Signal the child and its process group, and with SIGKILL all else that it started; nothing when it is reaped
        already."""
        # Until the child is reaped, the id of its group cannot belong to anybody else.
        if self._popen.returncode is None:
            self._remains.look()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signum)
            if signum == signal.SIGKILL:
                self._remains.kill()

    def look(self) -> None:
        """Remember what it has started; now and then, while it runs."""
        self._remains.look()

    @property
    def has_ended(self) -> bool:
        """Whether it is reaped; what it started may still be ending."""
        return self._popen.returncode is not None

    async def wait(self, timeout_s: float | None = None) -> bool:
        """True once the child is reaped, False when the time is over before."""
        await asyncio.wait({self.exited}, timeout=timeout_s)
        return self.exited.done()

    def _read(self, fd: int, protocol: asyncio.Protocol) -> None:
        pipe = os.fdopen(fd, "rb", buffering=0)
        connecting = self._loop.create_task(self._connect(pipe, protocol))
        connecting.add_done_callback(_log_exception)

    async def _connect(self, pipe: Any, protocol: asyncio.Protocol) -> None:
        await self._loop.connect_read_pipe(lambda: protocol, pipe)

    def _on_exit(self, pidfd: int) -> None:
        """The child has ended and is not reaped yet."""
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        self.signal_group(signal.SIGKILL)  # whatever it started goes with it
        self._popen.wait()
        self._end_remains(self._loop.time() + REMAINS_WAIT_S)

    def _end_remains(self, until_s: float) -> None:
        """Kill what is left until nothing is."""
        if not self._remains.kill():
            if self._loop.time() < until_s:
                self._loop.call_later(REMAINS_LOOK_EVERY_S, self._end_remains, until_s)
                return
            logger.error("what process %s started is not gone %g s after SIGKILL", self.pid, REMAINS_WAIT_S)
        timer = self._loop.call_later(PIPE_END_WAIT_S, self._finish)
        self._stderr_ended.add_done_callback(lambda _: self._finish())
        self.exited.add_done_callback(lambda _: timer.cancel())

    def _finish(self) -> None:
        if not self.exited.done():
            self.exited.set_result(self._popen.returncode)


class _Lines(asyncio.Protocol):
    """Whole lines of a pipe that has few."""

    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        self._on_line = on_line
        self._partial = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._on_line(line)


class _Pipe(asyncio.Protocol):
    """A pipe that is always drained and never paused: a full one would stop the child."""

    def __init__(self, on_data: Callable[[bytes], None], ended: asyncio.Future[None]) -> None:
        self._on_data = on_data
        self._ended = ended

    def data_received(self, data: bytes) -> None:
        self._on_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


def _pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    read_fd, write_fd = os.pipe()
    reader.callback(os.close, read_fd)
    writer.callback(os.close, write_fd)
    return read_fd, write_fd


def _log_exception(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a pipe of a child process could not be read", exc_info=error)
