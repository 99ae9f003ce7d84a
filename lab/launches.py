"""Claim of docs/results/programs.md: what libeclip adds to a launch, on a driver that does nothing.

CPU time of the launching thread. A burst without libeclip is timed after every burst with it. Rows
are run in turn, many times. Where a host gives the other half of a core to somebody else, all takes
twice as long for seconds, the native launch too. So a row has the median over its runs, and its
quietest run, by which it is judged.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

NATIVE = Path(__file__).parents[1] / "native"
ROUNDS = 15

# What is launched, how, and the most nanoseconds it may add, where that is promised.
ROWS: tuple[tuple[str, str, float | None], ...] = (
    ("hook: a kernel that no plan has", "--place home", 40),
    ("one lane", "--place lane", None),
    ("switching lanes", "--place switch", 60),
    ("switching lanes, two threads", "--place switch --threads 2", 80),
    ("hook, 512 streams", "--place home --streams 512", 40),
    ("one lane a stream, 512 streams", "--place switch --streams 512", 60),
    ("switching among 32 lanes", "--place switch --lanes 32", 60),
    ("hook, 400 kernels", "--place home --kernels 400", 40),
    ("hook, 4000 kernels", "--place home --kernels 4000", 40),
    ("switching lanes, 4000 kernels", "--place switch --kernels 4000", 60),
    ("hook, 64 threads", "--place home --threads 64", 40),
    ("one lane, 64 threads", "--place lane --threads 64", None),
    ("one lane, blocking stream", "--place lane --kind blocking", None),
    ("one lane, default stream", "--place lane --kind legacy", None),
    ("hook and a cuMemFree", "--place home --free 1", None),
    ("hook of a service", "--place home --tier service", None),
    ("hook of background", "--place home --tier background", None),
    ("hook of background, 400 kernels", "--place home --tier background --kernels 400", None),
)


def measure(words: str) -> list[float]:
    """With libeclip, without, the difference, and the tenth percentile of differences."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [NATIVE / "build" / "cost" / "cost", *words.split(), "--bursts", "100"],
            env={
                **os.environ,
                "LD_PRELOAD": str(NATIVE / "build" / "release" / "libeclip.so"),
                "ECLIP_TABLE": str(Path(folder) / "table"),
                "ECLIP_BOARD": folder,
            },
            capture_output=True,
            text=True,
            check=True,
        )
    return [float(word) for word in done.stdout.split()]


def main() -> int:
    subprocess.run(["make", "-s", "-C", str(NATIVE), "cost"], check=True)
    runs: dict[str, list[list[float]]] = {name: [] for name, _, _ in ROWS}
    for _ in range(ROUNDS):
        for name, words, _ in ROWS:
            runs[name].append(measure(words))
    table = Table("launch, ns", "native", "under libeclip", "more", "median more", "at most")
    missed = []
    for name, _, most in ROWS:
        quietest = min(runs[name], key=lambda run: run[2])
        median = statistics.median(run[2] for run in runs[name])
        with_it, native, more, _ = quietest
        shown = (native, with_it, more, median)
        table.add_row(name, *(f"{value:.0f}" for value in shown), f"{most:g}" if most else "")
        if most is not None and more > most:
            missed.append(name)
    Console().print(table)
    if missed:
        print(f"missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
