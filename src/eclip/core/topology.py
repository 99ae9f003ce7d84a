"""Topology and Mask: the slices of a device, and the slices that a lane may use.

A mask is an immutable set of slice indices; ``Topology.units_of`` counts its units. In files a mask
is written as Linux writes CPU lists: ``0-3,8``.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from eclip.core.fingerprint import Fingerprint

_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?", re.ASCII)
_MAX_UNITS = 1 << 16  # far above any device; keeps sums of slices countable


class Mask:
    """An immutable, hashable bit set of slices; ``<=`` means subset."""

    __slots__ = ("_bits",)

    def __init__(self, slices: Iterable[int] = ()) -> None:
        bits = 0
        for index in slices:
            if index < 0:
                raise ValueError(f"a slice index cannot be negative: {index}")
            bits |= 1 << index
        self._bits = bits

    @classmethod
    def parse(cls, text: str) -> Mask:
        slices: list[int] = []
        for part in text.split(","):
            match = _RANGE.fullmatch(part)
            if match is None:
                raise ValueError(f"not a mask: {text!r}; write it like 0-3,8")
            first = int(match[1])
            last = int(match[2] or first)
            if last < first:
                raise ValueError(f"not a mask: {text!r}; {part} runs backwards")
            slices.extend(range(first, last + 1))
        return cls(slices)

    def __iter__(self) -> Iterator[int]:
        return (index for index in range(self._bits.bit_length()) if self._bits >> index & 1)

    def __len__(self) -> int:
        return self._bits.bit_count()

    def __contains__(self, index: int) -> bool:
        return index >= 0 and bool(self._bits >> index & 1)

    def __or__(self, other: Mask) -> Mask:
        return Mask._of_bits(self._bits | other._bits)

    def __and__(self, other: Mask) -> Mask:
        return Mask._of_bits(self._bits & other._bits)

    def __sub__(self, other: Mask) -> Mask:
        return Mask._of_bits(self._bits & ~other._bits)

    def __le__(self, other: Mask) -> bool:
        return self._bits & ~other._bits == 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self._bits == other._bits

    def __hash__(self) -> int:
        return hash(self._bits)

    def __str__(self) -> str:
        runs = []
        # Consecutive indices keep the same distance to their position, which groups them into runs.
        for _, run in itertools.groupby(enumerate(self), key=lambda pair: pair[1] - pair[0]):
            indices = [index for _, index in run]
            runs.append(str(indices[0]) + (f"-{indices[-1]}" if len(indices) > 1 else ""))
        return ",".join(runs)

    def __repr__(self) -> str:
        return f"Mask({str(self)!r})"

    @classmethod
    def _of_bits(cls, bits: int) -> Mask:
        mask = cls()
        mask._bits = bits
        return mask


class Topology(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device's compute resources, slice by slice, and its memory.

    ``lane_sizes`` are the default sizes of lanes, in units.
    """

    name: str
    title: str
    unit_name: str
    compute: str
    slice_units: tuple[int, ...]
    lane_sizes: tuple[int, ...]
    hardware_queues: int
    memory_bytes: int
    context_bytes: int  # memory of an unused process context
    lane_bytes: int  # memory of the context of a lane with fewer than all slices
    source: str

    def __post_init__(self) -> None:
        if not self.slice_units or min(self.slice_units) < 1:
            raise ValueError("a topology needs at least one slice, and a unit in each")
        if self.units > _MAX_UNITS:
            raise ValueError(f"a device has at most {_MAX_UNITS} units, not {self.units}")
        if not 1 <= self.hardware_queues <= _MAX_UNITS:
            raise ValueError(
                f"hardware_queues must be 1 to {_MAX_UNITS}, not {self.hardware_queues}"
            )
        if self.memory_bytes < 1 or self.context_bytes < 0 or self.lane_bytes < 0:
            raise ValueError("memory_bytes starts above 0, context_bytes and lane_bytes at 0")
        if list(self.lane_sizes) != sorted(set(self.lane_sizes)):
            raise ValueError("lane_sizes must rise")
        if not self.lane_sizes or self.lane_sizes[-1] != self.units:
            raise ValueError(f"the largest lane size must be all {self.units} units")
        wrong = [size for size in self.lane_sizes if self.grant(size) != size]
        if wrong:
            raise ValueError(f"no set of slices has exactly {wrong[0]} units")

    @property
    def units(self) -> int:
        return sum(self.slice_units)

    @property
    def full(self) -> Mask:
        return Mask(range(len(self.slice_units)))

    @property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint(
            units=self.units,
            slice_units=self.slice_units,
            compute=self.compute,
            device=self.title,
        )

    def units_of(self, mask: Mask) -> int:
        if not mask <= self.full:
            raise ValueError(f"mask {mask} names slices that {self.title} does not have")
        return sum(self.slice_units[index] for index in mask)

    def holds_clusters(self, mask: Mask) -> bool:
        """True if some slice of the mask holds thread-block clusters of every size.

        A slice of unusual size is left over from splitting the device, with units from several
        places: on an H200 such a slice holds no cluster of four or more blocks.
        """
        regular = statistics.mode(self.slice_units)
        return any(self.slice_units[index] == regular for index in mask)

    def grant(self, units: int) -> int:
        """``units`` rounded up to the total of some set of slices."""
        if units > self.units:
            raise ValueError(f"{self.title} has {self.units} units, not {units}")
        sums = {0}
        for part in self.slice_units:
            sums |= {total + part for total in sums}
        return min(total for total in sums if total >= max(units, 1))

    def take(self, units: int, order: Sequence[int]) -> Mask:
        """A mask of exactly ``units`` units, preferring slices early in ``order``.

        A slice is skipped only if the remaining slices could not complete the size: 64 units from
        the end of an H200 skip its last slice of 12 and use eight slices of 8.
        """
        reachable = [1]  # bit n: the slices from here to the end of the order can add up to n units
        for index in reversed(order):
            reachable.append(reachable[-1] | reachable[-1] << self.slice_units[index])
        chosen: list[int] = []
        missing = units
        for position, index in enumerate(order):
            left = missing - self.slice_units[index]
            if left >= 0 and reachable[len(order) - position - 1] >> left & 1:
                chosen.append(index)
                missing = left
        if missing or not chosen:
            raise ValueError(f"no slices of {self.title} have exactly {units} units together")
        return Mask(chosen)
