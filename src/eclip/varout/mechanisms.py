"""The mechanisms by name, their largest lengths, and the conditions for merging two kernels.

Every mechanism but ``EXACT`` allocates a guess and handles the rest at run time. ``EXACT`` is the
baseline that knows the length beforehand, which no program can.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Mechanism(enum.Enum):
    EXACT = "exact"
    MAXIMUM = "maximum"
    DOUBLE_SYMMETRIC = "double-symmetric"
    DOUBLE_CONDITIONAL = "double-conditional"
    SPILL = "spill"
    SWAP = "swap"
    RESIDENT = "resident"
    MERGE = "merge"


WORDS = {
    Mechanism.EXACT: "the length was known: what every other mechanism is measured against",
    Mechanism.MAXIMUM: "allocate for the longest output there can be",
    Mechanism.DOUBLE_SYMMETRIC: "two half-buffers from the start: drain one, fill the other",
    Mechanism.DOUBLE_CONDITIONAL: "two half-buffers once the buffer is full",
    Mechanism.SPILL: "other data makes room for what does not fit, and comes back afterwards",
    Mechanism.SWAP: "suspend the producer, let the consumer drain, resume at the cursor",
    Mechanism.RESIDENT: "swap between two kernels that are both resident",
    Mechanism.MERGE: "one kernel that consumes what it produces",
}


@dataclass(frozen=True)
class StreamKernel:
    """A node of a stream graph. The node reads and writes streams, by name."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    varies: frozenset[str] = frozenset()  # written streams of data-dependent length
    whole: frozenset[str] = frozenset()  # read streams it needs complete, or out of order
    registers: int = 0  # per cluster or thread


def why_not_merge(
    kernels: tuple[StreamKernel, ...], producer: str, consumer: str, most_registers: int = 255
) -> tuple[str, ...]:
    """Every reason against merging two kernels of a stream graph; none means that it is legal."""
    by_name = {kernel.name: kernel for kernel in kernels}
    first, second = by_name[producer], by_name[consumer]
    between = set(first.writes) & set(second.reads)
    if not between:
        return (f"{consumer} reads nothing that {producer} writes",)
    reasons = [
        f"{consumer} needs {stream} complete before it starts: no element can be passed on"
        for stream in sorted(between & second.whole)
    ]
    for kernel in kernels:
        others = between & set(kernel.reads)
        if kernel.name not in (producer, consumer) and others:
            reasons.append(
                f"{kernel.name} reads {', '.join(sorted(others))} too, so it is still written out "
                f"with its varying length"
            )
    if detour := _detour(kernels, first, second):
        reasons.append(
            f"{consumer} also depends on {producer} through {' and '.join(detour)}, which would "
            f"have to run in the middle of the merged kernel"
        )
    for kernel in kernels:
        foreign = set(second.reads) & kernel.varies - between
        if kernel.name != producer and foreign:
            reasons.append(
                f"{consumer} also reads {', '.join(sorted(foreign))} of varying length from "
                f"{kernel.name}: one loop cannot run at both rates"
            )
    if first.registers + second.registers > most_registers:
        reasons.append(
            f"together they need {first.registers + second.registers} registers of {most_registers}"
        )
    return tuple(reasons)


def _detour(
    kernels: tuple[StreamKernel, ...], first: StreamKernel, second: StreamKernel
) -> tuple[str, ...]:
    """The kernels on paths from one to the other that are not the edge between them."""

    def reached(start: StreamKernel, forward: bool) -> set[str]:
        found: set[str] = set()
        todo = [start]
        while todo:
            here = todo.pop()
            ends = set(here.writes if forward else here.reads)
            for kernel in kernels:
                touches = set(kernel.reads if forward else kernel.writes)
                if kernel.name not in found and ends & touches:
                    found.add(kernel.name)
                    todo.append(kernel)
        return found

    inside = reached(first, True) & reached(second, False) - {first.name, second.name}
    return tuple(sorted(inside))
