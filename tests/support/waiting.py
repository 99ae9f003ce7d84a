"""Waiting for other processes and threads without assuming how fast this machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

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
