"""Parts: where the time goes until a server is ready, by what was done meanwhile."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from eclip.jit import compiling_s

_LEAST_S = 0.01  # below it a part is not worth a word


class Parts:
    """Seconds by part. What compiled code takes to be compiled is a part of its own, and counts in
    no other."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin_s, compiled_s = time.monotonic(), compiling_s()
        try:
            yield
        finally:
            compiled_s = compiling_s() - compiled_s
            self.add("compiling", compiled_s)
            self.add(name, time.monotonic() - begin_s - compiled_s)

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Those that are worth a word; the next ones begin at zero."""
        found, self._seconds = self._seconds, {}
        return {name: round(took_s, 2) for name, took_s in found.items() if took_s >= _LEAST_S}


def process_age_s() -> float:
    """Since the process was started, to a hundredth: at the beginning of ``main``, what its imports
    took."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return max(now_s - started / os.sysconf("SC_CLK_TCK"), 0.0)
