"""`laya serve` whose free memory is read from a file: the neighbour's appetite without the neighbour's gigabytes.

Run: serve_with_memory.py FILE serve ... . While the file is not there, the machine's own figure counts.
"""

from __future__ import annotations

import sys
from pathlib import Path

from laya.cli.main import main
from laya.memory import Machine

free_memory = Path(sys.argv.pop(1))
read_machine = Machine.available_bytes


def available_bytes(machine: Machine) -> int:
    """The number in the file, or what the kernel says."""
    try:
        return int(free_memory.read_text())
    except (OSError, ValueError):
        return read_machine(machine)


Machine.available_bytes = available_bytes  # type: ignore[method-assign]
sys.exit(main())
