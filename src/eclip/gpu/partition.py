"""Partition: the slices of one GPU, dealt to the lanes of this process so that no two share units.

A partition never destroys a stream; a later lane of the same mask gets it again. PyTorch's
allocator may record an event on the stream of a tensor long after the lane was closed.
"""

from __future__ import annotations

import functools
import itertools
import operator
import statistics
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from eclip.core.topology import Mask, Topology
from eclip.errors import UsageError

Counts = tuple[int, ...]  # of slices, by size


class LaneMaker(Protocol):
    """What a vendor's room gives: streams that are bound to masks."""

    @property
    def topology(self) -> Topology: ...

    def make_lane(self, mask: Mask) -> int:
        """A new stream of this mask: its handle."""
        ...

    def wait_for(self, stream: int) -> None:
        """Return when all work on the stream is done."""
        ...

    def units_of(self, mask: Mask, stream: int) -> frozenset[int]:
        """The units of a lane by number."""
        ...


@dataclass(frozen=True)
class Dealt:
    """A mask and a stream on it, held by one lane."""

    mask: Mask
    stream: int


class Partition:
    """The slices of one GPU; safe to call from any thread."""

    def __init__(self, maker: LaneMaker) -> None:
        self.maker = maker
        self.topology = maker.topology
        self._held: set[Dealt] = set()
        self._idle: dict[Mask, list[int]] = {}
        # Lanes whose work may still run. A garbage collector appends here, so there is no lock.
        self._given_back: deque[Dealt] = deque()
        self._lock = threading.Lock()

    def deal(self, units: Sequence[int], overlap: bool = False) -> list[Dealt]:
        """Disjoint lanes of at least so many units each, or an error and no lane.

        ``overlap`` lets them share units with lanes that were dealt before.
        """
        _check(units)
        with self._lock:
            self._take_back()
            taken = Mask() if overlap else self._taken()
            masks = self._masks(units, self.topology.full - taken)
            return [self._open(mask) for mask in masks]

    def give_back(self, dealt: Dealt) -> None:
        """The slices are free as soon as the stream's work is done. Nothing is waited for."""
        self._given_back.append(dealt)

    def settle(self) -> None:
        """Wait for the work of all lanes that were given back."""
        with self._lock:
            self._take_back()

    def _take_back(self) -> None:
        while self._given_back:
            dealt = self._given_back[0]
            self.maker.wait_for(dealt.stream)
            self._given_back.popleft()
            self._held.discard(dealt)
            self._idle.setdefault(dealt.mask, []).append(dealt.stream)

    def _taken(self) -> Mask:
        return functools.reduce(Mask.__or__, (dealt.mask for dealt in self._held), Mask())

    def _open(self, mask: Mask) -> Dealt:
        idle = self._idle.get(mask)
        dealt = Dealt(mask, idle.pop() if idle else self.maker.make_lane(mask))
        self._held.add(dealt)
        return dealt

    def _masks(self, units: Sequence[int], free: Mask) -> list[Mask]:
        asked, name = " + ".join(map(str, units)), self.topology.unit_name
        title, everything = self.topology.title, self.topology.units
        if sum(units) > everything:
            raise UsageError(
                f"{asked} = {sum(units)} {name}s are more than {title} has ({everything}); "
                f"ask for fewer"
            )
        masks = assign(self.topology, units, free)
        if masks is not None:
            return masks
        left = self.topology.units_of(free)
        if left < everything and assign(self.topology, units, self.topology.full) is not None:
            raise UsageError(
                f"open lanes of this process leave {left} of {everything} {name}s, too few for "
                f"{asked}; close lanes, or pass overlap=True"
            )
        sizes = " and ".join(map(str, sorted(set(self.topology.slice_units))))
        rounded = " + ".join(str(self.topology.grant(count)) for count in units)
        raise UsageError(
            f"{asked} {name}s do not fit beside each other: {title} hands out slices of {sizes} "
            f"{name}s, so that they need {rounded} or more, of {everything}; ask for fewer"
        )


def _check(units: Sequence[int]) -> None:
    if not units:
        raise UsageError("say how many units each lane gets, like split(48, 84)")
    for count in units:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UsageError(f"a lane has a whole number of units, at least 1, not {count!r}")


def assign(topology: Topology, units: Sequence[int], free: Mask) -> list[Mask] | None:
    """Disjoint masks of free slices, each of at least so many units; None: they do not fit.

    Of all assignments it is the one that leaves the fewest masks without thread-block clusters, and
    then takes the fewest units.
    """
    stock = Counter(topology.slice_units[index] for index in free)
    sizes = sorted(stock)
    regular = statistics.mode(topology.slice_units)

    def units_in(taken: Counts) -> int:
        return sum(map(operator.mul, sizes, taken))

    def combinations(wanted: int, counts: Counts) -> Iterator[Counts]:
        """How many slices of each size may be taken for at least ``wanted`` units."""
        most = map(min, counts, [-(-wanted // size) for size in sizes])
        for taken in itertools.product(*(range(count + 1) for count in most)):
            if units_in(taken) >= wanted:
                yield taken

    @functools.cache
    def best(lane: int, counts: Counts) -> tuple[int, int, tuple[Counts, ...]] | None:
        """For this lane and those after it: masks without clusters, units, and all they take."""
        if lane == len(units):
            return 0, 0, ()
        options = []
        for taken in combinations(units[lane], counts):
            if others := best(lane + 1, tuple(map(operator.sub, counts, taken))):
                holds_none = regular not in itertools.compress(sizes, taken)
                rest = (others[0] + holds_none, others[1] + units_in(taken), (taken, *others[2]))
                options.append(rest)
        return min(options, default=None)

    chosen = best(0, tuple(stock[size] for size in sizes))
    if chosen is None:
        return None
    left = {
        size: iter([index for index in free if topology.slice_units[index] == size])
        for size in sizes
    }
    return [
        Mask(next(left[size]) for size in Counter(dict(zip(sizes, taken, strict=True))).elements())
        for taken in chosen[2]
    ]
