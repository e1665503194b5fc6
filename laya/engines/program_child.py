"""Owns: the child program `python -m laya.engines.program_child`: it becomes another program, the user's own.

What that program gets (nice, memory group, the signal at our parent's end) it keeps over the exec, and hands on to
whatever it starts itself.
"""

from __future__ import annotations

import errno
import os

from laya.engines.child_start import begin, give_up


def main() -> None:
    """Become the program of the document; exit code 1 after an error line on the report pipe."""
    document, report_fd = begin()
    command: list[str] = document["command"]
    try:
        if document["folder"] is not None:
            os.chdir(document["folder"])
        os.execve(command[0], command, document["environment"])
    except (OSError, ValueError) as error:
        give_up(report_fd, _told(error, command[0]))


def _told(error: OSError | ValueError, program: str) -> Exception:
    """The kernel says that there is no such file also where the one is missing that the first line names."""
    if isinstance(error, FileNotFoundError) and os.path.exists(program):
        return OSError(f"{program} names an interpreter in its first line that is not there, or needs another system")
    if isinstance(error, OSError) and error.errno == errno.ENOEXEC:
        return OSError(f"{program} is no program of this machine, and has no #! line")
    return error


if __name__ == "__main__":
    main()
