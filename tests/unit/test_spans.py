"""Traced kernels become a profile that closes against the untraced request."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.errors import DeviceError
from eclip.frontends.spans import close_spans


def spans_of(kernels: list[tuple[int, int]], repeats: int = 3) -> npt.NDArray[np.int64]:
    """One size, a few equal repeats of kernels given as (start, end)."""
    return np.array([[kernels] * repeats])


def test_gaps_take_what_the_untraced_request_leaves() -> None:
    busy, gap, spread = close_spans(spans_of([(0, 100), (150, 250)]), np.array([260.0]))
    assert busy[:, 0].tolist() == [100, 100]
    assert gap[:, 0].sum() == pytest.approx(60, abs=2)
    assert gap[0, 0] > 10 * gap[1, 0]  # the gap was traced after the first kernel
    assert spread[:, 0].tolist() == [0, 0]


def test_overlapping_kernels_count_no_time_twice() -> None:
    busy, gap, _ = close_spans(spans_of([(0, 100), (60, 180), (90, 170)]), np.array([181.0]))
    assert busy[:, 0].tolist() == [100, 80, 1]  # the third ends inside the second
    assert gap.sum() <= 1


def test_kernels_that_overlap_more_untraced_shrink_as_one() -> None:
    busy, gap, _ = close_spans(spans_of([(0, 1000), (1000, 3000)]), np.array([2850.0]))
    assert busy[:, 0].tolist() == [950, 1900]
    assert gap.sum() == 0


def test_spread_is_between_the_10th_and_90th_percentile_of_the_repeats() -> None:
    repeats = np.array([[[(0, 100 + 10 * repeat)] for repeat in range(11)]])
    _, _, spread = close_spans(repeats, np.array([200.0]))
    assert spread[0, 0] == 80


def test_tracing_that_stretched_kernels_is_refused() -> None:
    with pytest.raises(DeviceError, match="traced"):
        close_spans(spans_of([(0, 1000)]), np.array([800.0]))


@settings(max_examples=200, deadline=None)
@given(
    busy=st.lists(st.integers(1, 10_000), min_size=1, max_size=40),
    data=st.data(),
    stretch=st.floats(0.9, 3.0),
)
def test_every_profile_closes_within_1_percent(
    busy: list[int], data: st.DataObject, stretch: float
) -> None:
    gaps = data.draw(st.lists(st.integers(-500, 3000), min_size=len(busy), max_size=len(busy)))
    kernels, now = [], 0
    for length, gap in zip(busy, gaps, strict=True):
        start = max(0, now + gap)
        kernels.append((start, start + length))
        now = start + length
    span = max(end for _, end in kernels) - min(start for start, _ in kernels)
    request_ns = np.array([float(max(span * stretch, 1000))])
    times, gap_ns, _ = close_spans(spans_of(sorted(kernels)), request_ns)
    assert times.min() >= 1 and gap_ns.min() >= 0
    # Rounding: at most half a nanosecond up or down for busy times, one down for gaps.
    assert (times + gap_ns).sum() == pytest.approx(request_ns[0], rel=0.01, abs=2 * len(busy))
