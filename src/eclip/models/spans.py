"""Traced kernels to a profile that closes: from when each ran to busy time, gap and spread."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from eclip.core.copies import Copy, taken_of_gaps
from eclip.errors import DeviceError

_MOST_OVERLAP = 1.15  # programmatic dependent launches overlap more without tracing

Table = npt.NDArray[np.float64]  # kernel × size


def close_spans(
    spans: npt.NDArray[np.int64],
    request_ns: npt.NDArray[np.float64],
    copies: Sequence[Copy] = (),
) -> tuple[Table, Table, Table]:
    """Busy time, gap and spread, kernel × size, whole nanoseconds that add up to the request.

    ``copies``, which were fitted, keep their time, and the rest of the gaps is scaled.
    """
    exclusive, idle = _exclusive_and_idle(spans)
    busy, gap = np.median(exclusive, axis=1).T, np.median(idle, axis=1).T
    low, high = np.percentile(exclusive, [10, 90], axis=1)
    spread = (high - low).T
    left_over = request_ns - busy.sum(axis=0)
    # Where gaps cannot give enough, kernels shrink as one: they overlap more untraced than traced,
    # or each was slow in other repeats, and the sum of medians is more than the median of sums.
    busy = np.maximum(np.rint(busy * np.minimum(1.0, request_ns / busy.sum(axis=0))), 1)
    copied = taken_of_gaps(copies, len(gap))[:, None]
    weight = np.maximum(gap - copied, 0) + 1.0
    spare = np.maximum(left_over - copied.sum(), 0)
    gap = copied + np.maximum(np.floor(weight / weight.sum(axis=0) * spare), 0)
    return busy, gap, np.rint(spread)


def refuse_slow_tracing(spans: npt.NDArray[np.int64], request_ns: npt.NDArray[np.float64]) -> None:
    """For requests that were measured untraced, in runs of their own."""
    exclusive, _ = _exclusive_and_idle(spans)
    if (np.median(exclusive, axis=1).sum(axis=1) > _MOST_OVERLAP * request_ns).any():
        raise DeviceError(
            "kernels took much longer traced than untraced, so their times would mean nothing; "
            "profile again on an idle GPU"
        )


def fit_copies(
    copies: Sequence[Copy], spans: npt.NDArray[np.int64], request_ns: npt.NDArray[np.float64]
) -> tuple[Copy, ...]:
    """The copies, measured alone, with no more time than requests of any size have for them.

    Between two kernels that is the gap that was traced: a copy may run beside a kernel. Before the
    first kernel and behind the last nothing is traced, so there it is what else is left.
    """
    exclusive, idle = _exclusive_and_idle(spans)
    room = np.median(idle, axis=1).min(axis=0)
    left = max(float((request_ns - np.median(exclusive, axis=1).sum(axis=1)).min()), 0.0)
    asked = taken_of_gaps(copies, len(room))
    room[-1] = max(left - np.minimum(asked, room)[:-1].sum(), 0.0)
    given = np.minimum(asked, room)
    given *= min(1.0, left / max(given.sum(), 1.0))
    part = given / np.maximum(asked, 1.0)
    return tuple(
        msgspec.structs.replace(copy, ns=int(copy.ns * part[copy.before - 1])) for copy in copies
    )


def _exclusive_and_idle(
    spans: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of every kernel, size × repeat × kernel, its own time and the idle time after it.

    A kernel that starts before its predecessor ended (programmatic dependent launch) is busy from
    that end on, so that no time counts twice.
    """
    start, end = spans[..., 0], np.maximum.accumulate(spans[..., 1], axis=-1)
    before = np.concatenate([start[..., :1], end[..., :-1]], axis=-1)
    exclusive = np.maximum(end - np.maximum(start, before), 1)
    idle = np.maximum(start[..., 1:] - end[..., :-1], 0)
    idle = np.concatenate([idle, np.zeros_like(start[..., :1])], axis=-1)
    return exclusive, idle


def even_shares(request_ns: Sequence[float], kernels: int) -> tuple[Table, Table, Table]:
    """The same for requests whose kernels could not be told apart: each gets an equal part.

    Such a request runs whole on one lane, where only its sum matters.
    """
    busy = np.maximum(np.rint(np.array([request_ns] * kernels) / kernels), 1.0)
    return busy, np.zeros_like(busy), np.zeros_like(busy)


def rows_of(table: Table) -> tuple[tuple[int, ...], ...]:
    """As a profile has it."""
    return tuple(map(tuple, table.astype(np.int64).tolist()))
