"""What processes hold and use, as the kernel tells it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


def cpu_s(pid: int) -> float:
    """Time of a process on all cores, in it and in the kernel for it."""
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


def cpu_ns(pid: int) -> int:
    """The same to the nanosecond, of the threads that it has now."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads)


@dataclass(frozen=True)
class Held:
    """``private_kib``: of its own; memory that it shares with others is theirs, too."""

    private_kib: int
    handles: int
    threads: int


def held(pid: int) -> Held:
    process = Path(f"/proc/{pid}")
    rollup = (process / "smaps_rollup").read_text().splitlines()
    private = [int(line.split()[1]) for line in rollup if line.startswith("Private_")]
    status = (process / "status").read_text().splitlines()
    (threads,) = (int(line.split()[1]) for line in status if line.startswith("Threads:"))
    return Held(sum(private), len(list((process / "fd").iterdir())), threads)


def children(pid: int) -> list[tuple[int, str]]:
    """The processes that a process has started, the oldest first, each with its command."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                command = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append((int(fields[19]), int(stat.parent.name), command))
        except OSError:  # it has ended
            continue
    return [(child, command) for _, child, command in sorted(found)]
