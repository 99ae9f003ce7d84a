"""Profile: a trace with every kernel's cost at every lane size, and its demand for memory.

A profile closes: for every size, busy times and gaps add up to ``request_ns``, the request's time
measured without tracing. The maker of a profile adds any rest to the gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from eclip.core.copies import NO_LINK, Copy, StepTable, steps_of, taken_of_gaps
from eclip.core.fingerprint import Fingerprint
from eclip.core.footprint import Footprint
from eclip.core.model_key import ModelKey
from eclip.core.trace import Trace
from eclip.errors import MismatchError

Table = tuple[tuple[int, ...], ...]  # kernel × size
Times = npt.NDArray[np.float64]

_WHOLE = 0.75  # how far a last wave counts as a full one, however few blocks it has


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long every kernel of a model takes on lanes of every size, measured or modelled."""

    trace: Trace
    fingerprint: Fingerprint
    modelled: bool
    source: str  # a sentence on how the numbers were made
    sizes: tuple[int, ...]  # units, rising; the last is the whole device
    request_ns: tuple[int, ...]  # per size
    busy_ns: Table
    gap_ns: Table  # idle time after the kernel, before the next may start
    spread_ns: Table  # between the 10th and 90th percentile of the repeats
    dram_bytes: tuple[int, ...]  # per kernel, as are the following; all 0: not counted
    l2_bytes: tuple[int, ...]
    blocks_per_unit: tuple[int, ...]  # resident at once
    # None only where the program's memory cannot be seen, as by ``eclip record``.
    footprint: Footprint | None
    illegal: tuple[tuple[int, int], ...] = ()  # (kernel, size) pairs that the device refuses
    energy_uj: tuple[int, ...] = ()  # of a request alone, per size; empty: not measured
    slowdown_beside: dict[str, float] = {}  # on half the units, a stressor of "dram" or "l2" beside
    # A row for every kernel in trace.lengths, whose busy_ns is its expected time: the busy time at
    # the length that 99% of requests do not exceed. Empty: not known.
    tail_ns: Table = ()
    # Between host and device, in order. A copy's time is a part of its gap; a copy before the first
    # kernel is in the gap after the last kernel.
    copies: tuple[Copy, ...] = ()

    def __post_init__(self) -> None:
        kernels = len(self.trace.kernels)
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise ValueError("sizes must rise from at least 1 unit")
        if sum(self.fingerprint.slice_units) != self.fingerprint.units:
            raise ValueError("the fingerprint's slices do not add up to its units")
        if self.fingerprint.traces != {str(self.model): self.trace.digest}:
            raise ValueError("the fingerprint is not that of the profile's own trace")
        if self.sizes[-1] != self.fingerprint.units:
            raise ValueError(f"the last size must be the whole device, {self.fingerprint.units}")
        if len(self.request_ns) != len(self.sizes):
            raise ValueError("request_ns needs one entry per size")
        for name in ("busy_ns", "gap_ns", "spread_ns"):
            table: Table = getattr(self, name)
            if len(table) != kernels or any(len(row) != len(self.sizes) for row in table):
                raise ValueError(f"{name} must be {kernels} kernels × {len(self.sizes)} sizes")
            if min(map(min, table)) < 0:
                raise ValueError(f"{name} holds a negative time")
        for name in ("dram_bytes", "l2_bytes", "blocks_per_unit"):
            column: tuple[int, ...] = getattr(self, name)
            if len(column) != kernels or min(column) < 0:
                raise ValueError(
                    f"{name} needs one entry of at least 0 for each of {kernels} kernels"
                )
        if self.tail_ns and (
            len(self.tail_ns) != len(self.trace.lengths)
            or any(len(row) != len(self.sizes) or min(row) < 1 for row in self.tail_ns)
        ):
            raise ValueError("tail_ns needs a row of times for each kernel in the trace's lengths")
        if self.energy_uj and (len(self.energy_uj) != len(self.sizes) or min(self.energy_uj) < 0):
            raise ValueError("energy_uj needs one entry of at least 0 per size")
        for kernel, size in self.illegal:
            if not (0 <= kernel < kernels and 0 <= size < len(self.sizes) - 1):
                raise ValueError(f"illegal names kernel {kernel} at size {size}, which cannot be")
        if any(copy.before > kernels for copy in self.copies):
            raise ValueError(f"copies come before one of {kernels} kernels or behind the last")
        if self.copies and (np.array(self.gap_ns) < self.copied_ns()[:, None]).any():
            raise ValueError("copies take longer than the gap that they come in")
        if min(map(min, self.busy_ns)) < 1:
            raise ValueError("every kernel is busy for at least 1 ns")
        for index, size in enumerate(self.sizes):
            total = sum(row[index] for row in self.busy_ns) + sum(row[index] for row in self.gap_ns)
            if total != self.request_ns[index]:
                raise ValueError(
                    f"times do not add up at {size} units: kernels and gaps take {total} ns, the "
                    f"request {self.request_ns[index]} ns"
                )

    @property
    def model(self) -> ModelKey:
        return self.trace.model

    @property
    def steps(self) -> StepTable:
        return steps_of(len(self.trace.kernels), self.copies)

    def at_tail(self) -> Profile:
        """The same model with its variable-output kernels at their tail times."""
        if not self.tail_ns:
            return self
        busy = list(self.busy_ns)
        for one, row in zip(self.trace.lengths, self.tail_ns, strict=True):
            busy[one.kernel] = row
        longer = [
            sum(new[size] - old[size] for new, old in zip(busy, self.busy_ns, strict=True))
            for size in range(len(self.sizes))
        ]
        return msgspec.structs.replace(
            self,
            busy_ns=tuple(busy),
            request_ns=tuple(
                time + more for time, more in zip(self.request_ns, longer, strict=True)
            ),
            energy_uj=(),  # measured at the expected lengths only
        )

    def busy_at(self, units: int) -> Times:
        """Busy time of every kernel on a lane of any size.

        Below the smallest profiled size the time grows with the kernel's waves: twice for half the
        units, and not at all if all blocks find room.
        """
        measured = self._measured(units)
        busy = self._at(measured, self.busy_ns, self._waves)
        if units < measured:
            busy *= np.maximum(self.waves_at(units), 1) / np.maximum(self.waves_at(measured), 1)
        return busy

    def gap_at(self, units: int) -> Times:
        """The gap after every kernel. Below the smallest profiled size gaps do not grow."""
        return self._at(self._measured(units), self.gap_ns, lambda size: np.float64(1 / size))

    def step_ns_at(self, units: int) -> Times:
        """The time of every step on a lane of any size; a kernel's includes the idle time after
        it."""
        steps = self.steps
        took = steps.copy_ns.copy()
        took[steps.link == NO_LINK] = self.busy_at(units) + self.gap_at(units) - self.copied_ns()
        return took

    def copied_ns(self) -> Times:
        """The time of copies in the gap after every kernel."""
        return taken_of_gaps(self.copies, len(self.trace.kernels))

    def waves_at(self, units: int) -> Times:
        """How often every kernel's blocks fill a lane of this size."""
        blocks = np.array([kernel.blocks for kernel in self.trace.kernels], dtype=np.float64)
        waves: Times = blocks / (units * np.maximum(self.blocks_per_unit, 1))
        return waves

    def _waves(self, units: int) -> Times:
        """The number of waves of every kernel; a kernel's time is linear in it.

        A last wave may leave units idle and takes nearly as long as a full wave: 66 blocks that
        fill a unit each take twice as long on 64 units as on 80, and need one wave on 66 or more.
        The last wave counts as three quarters full, which predicts profiled sizes from others best
        (docs/results/simulator.md).
        """
        waves = self.waves_at(units)
        mixed: Times = _WHOLE * np.ceil(waves) + (1 - _WHOLE) * waves
        return mixed

    def _measured(self, units: int) -> int:
        """``units``, or the smallest profiled size if ``units`` is below.

        A profile of the whole device alone is not enough: there power may hold kernels back.
        """
        if units < self.sizes[0] and len(self.sizes) == 1:
            raise MismatchError(
                f"{self.model} was profiled at {self.sizes[0]} units only, so its time at {units} "
                f"is not known; profile it at more sizes"
            )
        return max(units, self.sizes[0])

    def _at(
        self, units: int, rows: Sequence[Sequence[int]], along: Callable[[int], Times | np.float64]
    ) -> Times:
        """The column of a profiled size; between two profiled sizes a linear interpolation."""
        table = np.asarray(rows, dtype=np.float64)
        if units > self.sizes[-1]:
            raise ValueError(f"{self.model} was profiled up to {self.sizes[-1]} units, not {units}")
        if units in self.sizes:
            return table[:, self.sizes.index(units)]
        high = int(np.searchsorted(self.sizes, units))
        low = high - 1
        x, x_low, x_high = along(units), along(self.sizes[low]), along(self.sizes[high])
        weight = (x - x_high) / (x_low - x_high)
        mixed: Times = table[:, low] * weight + table[:, high] * (1 - weight)
        return mixed
