"""CPU cores that are kept busy beside a measurement."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

# As long as there is somebody to measure beside.
SPINNING = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"


@contextlib.contextmanager
def busy_cores(wanted: bool) -> Iterator[None]:
    """Every CPU core spins while the block lasts."""
    if not wanted:
        yield
        return
    spinning = [sys.executable, "-c", SPINNING, str(os.getpid())]
    burners = [subprocess.Popen(spinning) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
