"""Copies between host and device: a part of a request that needs the link and no unit.

A request is a sequence of steps: its kernels, and its copies before, between and behind them. A
copy of more than ``PART_BYTES`` is a step for each of its parts. A worker with joints can give way
before and behind every such part, wherever its plan has joints.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

PART_BYTES = 4 << 20  # of a copy that is cut: about 80 us over PCIe


class Copy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    before: int  # the kernel that it comes before; the number of kernels: behind the last
    to_device: bool  # False: to the host
    bytes: int
    ns: int  # that it takes alone, whatever its lane

    def __post_init__(self) -> None:
        if self.before < 0:
            raise ValueError("a copy comes before a kernel or behind the last")
        if self.bytes < 1 or self.ns < 0:
            raise ValueError("a copy has at least 1 byte and takes at least 0 ns")


@dataclass(frozen=True)
class Step:
    """A kernel, or a copy or a part of one."""

    kernel: int  # that it is or goes with: the one behind a copy, or the last
    copy: Copy | None = None
    ns: float = 0.0  # of a copy
    apart: bool = False  # it is a stretch of its own in a worker with joints


def parts_of(size_bytes: int) -> list[range]:
    """Equal parts of a copy, none larger than it should be."""
    count = -(-size_bytes // PART_BYTES)
    ends = [size_bytes * part // count for part in range(count + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def steps_of(kernels: int, copies: Sequence[Copy]) -> list[Step]:
    """A request in order. ``copies`` are those of a profile."""
    steps = []
    for kernel in range(kernels + 1):
        for copy in copies:
            if copy.before == kernel:
                parts = parts_of(copy.bytes)
                for part in parts:
                    ns = copy.ns * len(part) / copy.bytes
                    steps.append(Step(min(kernel, kernels - 1), copy, ns, len(parts) > 1))
        if kernel < kernels:
            steps.append(Step(kernel))
    return steps


def pieces_of(steps: Sequence[Step], joints: Collection[int]) -> list[int]:
    """Where a worker with joints at these kernels may give way: the first step of every piece."""
    begins = [0]
    for index, (last, step) in enumerate(pairwise(steps), 1):
        at_joint = step.kernel in joints and last.kernel != step.kernel
        if at_joint or last.apart or step.apart:
            begins.append(index)
    return begins
