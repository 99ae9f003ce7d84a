"""Busy cores beside a measurement: they end with it, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys

from waiting import has_ended, until

BENCH = """
import os, time
from pathlib import Path
from lab.support.cores import busy_cores
with busy_cores(True):
    print(Path(f"/proc/self/task/{os.getpid()}/children").read_text(), flush=True)
    time.sleep(600)
"""


def test_cores_are_free_again_when_the_bench_is_killed() -> None:
    bench = subprocess.Popen([sys.executable, "-c", BENCH], stdout=subprocess.PIPE, text=True)
    assert bench.stdout is not None
    with bench.stdout:
        pids = [int(word) for word in bench.stdout.readline().split()]
    bench.send_signal(signal.SIGKILL)
    bench.wait()
    assert pids and until(lambda: all(has_ended(pid) for pid in pids))
