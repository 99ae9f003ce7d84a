"""Waiting for other processes and threads without assuming how fast this machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

# Ends what hangs, before the limit of a test does; says nothing about how fast something is.
PATIENCE_S = 480.0


def until(
    condition: Callable[[], bool], pause_s: float = 0.01, patience_s: float = PATIENCE_S
) -> bool:
    """Whether it comes true: as soon as it does, however busy the machine is."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return True


def state_of(pid: int) -> str:
    """Of a process, as the kernel writes it: T stopped, Z ended and not yet waited for."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def has_ended(pid: int) -> bool:
    """Also where nobody has waited for it yet, as init does for those that lost their parent."""
    try:
        return state_of(pid) == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
