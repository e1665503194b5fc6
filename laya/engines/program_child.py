"""Owns: the child program `python -m laya.engines.program_child`: it becomes another program, the user's own.

What that program gets (nice, memory group, the signal at our parent's end) it keeps over the exec, and hands on to
whatever it starts itself.
"""

from __future__ import annotations

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
    except OSError as error:
        give_up(report_fd, error)


if __name__ == "__main__":
    main()
