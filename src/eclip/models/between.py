"""Profiles of batches that were not measured, from two batches that were.

Busy time, L2 traffic and energy of a request lie on straight lines in the batch, through the two
measured batches. The model only divides them among its kernels. A line predicts a measured batch
that was left out better than the model does, also if the model is scaled to the measured batches
(docs/results/simulator.md). A larger batch takes no less time, if that holds for the two measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from eclip.core.profile import Profile, Table, Times
from eclip.models.spans import rows_of


def align(modelled: Profile, measured: Sequence[Profile]) -> Profile:
    """The modelled profile with its totals on the lines through the nearest measured batches.

    ``measured`` are of the same model at other batches, with the same sizes. Fewer than two give no
    line, and the profile stays as it is.
    """
    if len(measured) < 2:
        return modelled
    batch = modelled.model.batch
    low, high = _nearest(batch, measured)

    def line(at_low: Times, at_high: Times) -> Times:
        return _on_line(batch, low.model.batch, at_low, high.model.batch, at_high)

    busy = np.array(modelled.busy_ns, dtype=np.float64)
    busy *= line(_sum(low.busy_ns), _sum(high.busy_ns)) / busy.sum(axis=0)
    busy = np.maximum(_whole(busy), 1)
    # Gaps come with kernels, and a larger batch has no more of them: beyond the two they stay.
    part = np.clip((batch - low.model.batch) / (high.model.batch - low.model.batch), 0, 1)
    gap_ns = _sum(low.gap_ns) * (1 - part) + _sum(high.gap_ns) * part
    gap = _whole(np.full(busy.shape, gap_ns / len(busy)))

    traffic = np.array([modelled.dram_bytes, modelled.l2_bytes], dtype=np.float64)
    if any(low.l2_bytes) and any(high.l2_bytes):
        # DRAM keeps its part. Its bytes lie on no line: small batches find most of theirs in L2.
        traffic *= line(_sum(low.l2_bytes), _sum(high.l2_bytes)) / traffic[1].sum()
    dram_bytes, l2_bytes = rows_of(np.rint(traffic))
    energy_uj: tuple[int, ...] = ()
    if low.energy_uj and high.energy_uj:
        energy = line(np.array(low.energy_uj, float), np.array(high.energy_uj, float))
        energy_uj = tuple(np.rint(energy).astype(int).tolist())
    return msgspec.structs.replace(
        modelled,
        source=(
            f"{modelled.source} Its request times are on a straight line through the measured "
            f"batches {low.model.batch} and {high.model.batch}."
        ),
        request_ns=tuple((busy + gap).sum(axis=0).astype(int).tolist()),
        busy_ns=rows_of(busy),
        gap_ns=rows_of(gap),
        dram_bytes=dram_bytes,
        l2_bytes=l2_bytes,
        energy_uj=energy_uj,
    )


def _nearest(batch: int, measured: Sequence[Profile]) -> tuple[Profile, Profile]:
    """The two around a batch; beyond all of them, the last two on that side."""
    rising = sorted(measured, key=lambda profile: profile.model.batch)
    smaller = sum(profile.model.batch < batch for profile in rising)
    first = min(max(smaller - 1, 0), len(rising) - 2)
    return rising[first], rising[first + 1]


def _on_line(batch: int, low: int, at_low: Times, high: int, at_high: Times) -> Times:
    """Beyond both batches no line goes back, and none grows by more than the batch does."""
    line: Times = at_low + (at_high - at_low) * (batch - low) / (high - low)
    if batch > high:
        return np.clip(line, at_high, at_high * batch / high)
    if batch < low:
        return np.clip(line, at_low * batch / low, at_low)
    return line


def _whole(table: Times) -> Times:
    """In whole numbers, so that every column adds up to its sum."""
    return np.diff(np.rint(table.cumsum(axis=0)), axis=0, prepend=0)


def _sum(rows: Table | tuple[int, ...]) -> Times:
    """Over all kernels."""
    total: Times = np.array(rows, dtype=np.float64).sum(axis=0)
    return total
