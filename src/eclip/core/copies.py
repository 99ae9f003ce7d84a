"""Copies between host and device: parts of a request that need the link and no unit.

A request is a sequence of steps: its kernels, and its copies before, between and behind them. A
copy of more than ``PART_BYTES`` is a step for each of its parts: a worker with joints can give way
before and behind each part, even where its plan has no joint.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

PART_BYTES = 4 << 20  # of a copy that is cut: about 80 us over PCIe
NO_LINK, TO_DEVICE, TO_HOST = range(3)
LINKS = 2  # a copy to the device and one to the host do not hinder each other

Ints = npt.NDArray[np.int64]


class Copy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    before: int  # the kernel after the copy; the number of kernels: behind the last
    to_device: bool  # False: to the host
    bytes: int
    ns: int  # its time alone, the same on every lane

    def __post_init__(self) -> None:
        if self.before < 0:
            raise ValueError("a copy comes before a kernel or behind the last")
        if self.bytes < 1 or self.ns < 0:
            raise ValueError("a copy has at least 1 byte and takes at least 0 ns")


class StepTable(NamedTuple):
    """A request in order: kernels, copies, and the parts of long copies."""

    kernel: Ints  # of every step; for a copy the kernel behind it, or the last
    link: Ints  # that a copy needs; NO_LINK: a kernel
    copy_ns: npt.NDArray[np.float64]  # 0 of kernels
    apart: npt.NDArray[np.bool_]  # parts of long copies: stretches of their own

    def firsts(self, kernels: npt.ArrayLike) -> Ints:
        """The first step of each of these kernels, its copies included."""
        return np.searchsorted(self.kernel, kernels).astype(np.int64)

    def pieces(self, joints: npt.ArrayLike) -> Ints:
        """The first step of every stretch of a worker with these joints."""
        begins = np.zeros(len(self.kernel), dtype=np.bool_)
        begins[0] = True
        begins[self.firsts(joints)] = True
        begins[self.apart] = True
        begins[1:] |= self.apart[:-1]
        return np.flatnonzero(begins)


def taken_of_gaps(copies: Sequence[Copy], kernels: int) -> npt.NDArray[np.float64]:
    """The time of copies in the gap after every kernel; the last gap includes copies before the
    first kernel."""
    taken = np.zeros(kernels)
    for copy in copies:
        taken[copy.before - 1] += copy.ns
    return taken


def parts_of(size_bytes: int) -> list[range]:
    """Equal parts of a copy, each of ``PART_BYTES`` at most."""
    count = -(-size_bytes // PART_BYTES)
    ends = [size_bytes * part // count for part in range(count + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def steps_of(kernels: int, copies: Sequence[Copy]) -> StepTable:
    """The steps of a request. Several copies before one kernel keep their order."""
    parts = [
        (copy, len(part), copy.bytes > PART_BYTES)
        for copy in copies
        for part in parts_of(copy.bytes)
    ]
    before = np.array([copy.before for copy, *_ in parts], dtype=np.int64)
    order = np.argsort(np.append(2 * before, 2 * np.arange(kernels) + 1), kind="stable")
    none = np.zeros(kernels, dtype=np.int64)
    return StepTable(
        kernel=np.append(np.minimum(before, kernels - 1), np.arange(kernels))[order],
        link=np.append([TO_DEVICE if copy.to_device else TO_HOST for copy, *_ in parts], none)[
            order
        ].astype(np.int64),
        copy_ns=np.append([copy.ns * size / copy.bytes for copy, size, _ in parts], none)[order],
        apart=np.append([long for *_, long in parts], none)[order].astype(np.bool_),
    )
