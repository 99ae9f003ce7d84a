"""How often a host stops a thread that wants to run: what no sharing of a GPU can be blamed for.

    PYTHONPATH=src python3 lab/stalls.py [SECONDS]

Threads read the clock as fast as they can. A gap between two reads is time in which the thread did
not run. With as many threads as cores, other programs and the kernel take their turns; with two
that may not leave their cores, only who stops whole cores is left: the host of a virtual machine.
Linux says how often it took a thread off its core, and how much time the virtual machine was
refused (*stolen*). Gaps without either are the host's.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from eclip.jit import call_c, compiled

SECONDS = 3.0
SHORTEST_NS = 50_000  # of a gap that is noted
MOST_GAPS = 100_000
CLOCK_MONOTONIC = 1

Ints = npt.NDArray[np.int64]


def clock_address() -> np.uint64:
    function = ctypes.CDLL("libc.so.6").clock_gettime
    return np.uint64(ctypes.cast(function, ctypes.c_void_p).value or 0)


@compiled
def watch(clock: np.uint64, for_ns: int, gaps: Ints) -> int:
    """Read the clock for so long; how many gaps there were, and their lengths in ``gaps``."""
    read = np.zeros(2, dtype=np.int64)
    at = np.uint64(read.ctypes.data)
    call_c(clock, np.uint64(CLOCK_MONOTONIC), at, np.uint64(0))
    before = read[0] * 1_000_000_000 + read[1]
    until, found = before + for_ns, 0
    while before < until and found < gaps.shape[0]:
        call_c(clock, np.uint64(CLOCK_MONOTONIC), at, np.uint64(0))
        now = read[0] * 1_000_000_000 + read[1]
        if now - before > SHORTEST_NS:
            gaps[found] = now - before
            found += 1
        before = now
    return found


@dataclass
class Watched:
    """What one thread saw."""

    gaps_ns: Ints
    taken_off: int = 0  # its core, by Linux


def watch_in_thread(seen: Watched, core: int | None, clock: np.uint64, seconds: float) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})  # of this thread
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
    found = watch(clock, round(seconds * 1e9), seen.gaps_ns)
    seen.taken_off = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw - before
    seen.gaps_ns = seen.gaps_ns[:found]


def stolen_ms() -> float:
    """Time that the virtual machine's cores wanted to run and could not, since it started."""
    with Path("/proc/stat").open() as file:
        fields = file.readline().split()
    return 1e3 * float(fields[8]) / os.sysconf("SC_CLK_TCK")


def watch_all(cores: list[int | None], seconds: float) -> tuple[list[Watched], float]:
    """A thread for every entry, which is the core that it stays on; and the time stolen."""
    clock = clock_address()
    watch(clock, 1, np.zeros(1, dtype=np.int64))  # compiles
    every = [Watched(np.zeros(MOST_GAPS, dtype=np.int64)) for _ in cores]
    threads = [
        threading.Thread(target=watch_in_thread, args=(seen, core, clock, seconds))
        for seen, core in zip(every, cores, strict=True)
    ]
    before = stolen_ms()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return every, stolen_ms() - before


def main(seconds: float) -> None:
    mine = sorted(os.sched_getaffinity(0))
    settings: dict[str, list[int | None]] = {
        "one thread": [None],
        "two threads, each on its core": [mine[0], mine[-1]],
        "a thread for every core": [None] * len(mine),
    }
    columns = ("threads", "gaps > 0.1 ms, a thread and second", "> 1 ms", "p50 of these, ms")
    table = Table(*columns, "longest, ms", "taken off, a thread and second", "stolen, ms")
    for name, cores in settings.items():
        every, stolen = watch_all(cores, seconds)
        gaps = np.concatenate([seen.gaps_ns for seen in every]) / 1e6
        long = gaps[gaps > 1.0]
        per = 1 / (seconds * len(cores))
        table.add_row(
            name,
            f"{per * np.count_nonzero(gaps > 0.1):.2f}",
            f"{per * len(long):.2f}",
            f"{np.median(long):.2f}" if len(long) else "",
            f"{gaps.max(initial=0.0):.2f}",
            f"{per * sum(seen.taken_off for seen in every):.2f}",
            f"{stolen:.0f}",
        )
    console = Console(width=160)
    console.print(f"{len(mine)} cores, {seconds:g} s each")
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "seconds", type=float, nargs="?", default=SECONDS, help=f"of each row (default {SECONDS:g})"
    )
    main(parser.parse_args().seconds)
