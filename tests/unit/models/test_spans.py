"""Traced kernels become a profile that closes against the untraced request."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.core.copies import Copy, taken_of_gaps
from eclip.errors import DeviceError
from eclip.models.spans import close_spans, fit_copies, refuse_slow_tracing


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
        refuse_slow_tracing(spans_of([(0, 1000)]), np.array([800.0]))
    refuse_slow_tracing(spans_of([(0, 1000)]), np.array([900.0]))


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


def copy(before: int, ns: int) -> Copy:
    return Copy(before=before, to_device=True, bytes=1, ns=ns)


def test_copies_keep_their_time_and_the_rest_of_the_gaps_is_scaled() -> None:
    """800 ns of a copy in the first gap, 300 of one behind the last kernel, where nothing is
    traced; tracing made the gaps of 20 ns 40 long."""
    spans = spans_of([(0, 100), (940, 1040), (1080, 1180)])
    request_ns = np.array([100 * 3 + 800 + 300 + 40.0])
    copies = fit_copies([copy(1, 800), copy(3, 300)], spans, request_ns)
    assert [one.ns for one in copies] == [800, 300]
    _, gap, _ = close_spans(spans, request_ns, copies)
    assert gap[:, 0] == pytest.approx([820, 20, 300], abs=2)


def test_copy_takes_no_more_than_the_gap_that_it_comes_in() -> None:
    """It ran beside the kernel before it, or alone it is slower."""
    spans = spans_of([(0, 100), (150, 250)])
    copies = fit_copies([copy(1, 60), copy(1, 40), copy(0, 500)], spans, np.array([290.0]))
    assert [one.ns for one in copies] == [30, 20, 40]


@settings(max_examples=200, deadline=None)
@given(
    kernels=st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 1000)), min_size=1, max_size=8),
    request_ns=st.floats(1, 20_000),
    data=st.data(),
)
def test_gaps_have_room_for_their_copies_at_every_size(
    kernels: list[tuple[int, int]], request_ns: float, data: st.DataObject
) -> None:
    ends = np.cumsum([busy + gap for busy, gap in kernels]).tolist()
    spans = spans_of(
        [(end - busy - gap, end - gap) for end, (busy, gap) in zip(ends, kernels, strict=True)]
    )
    places = st.tuples(st.integers(0, len(kernels)), st.integers(0, 2000))
    asked = [copy(*place) for place in data.draw(st.lists(places, max_size=5))]
    wanted = np.array([max(request_ns, sum(busy for busy, _ in kernels))])
    copies = fit_copies(asked, spans, wanted)
    busy, gap, _ = close_spans(spans, wanted, copies)
    assert (gap[:, 0] >= taken_of_gaps(copies, len(kernels))).all()
    assert all(given.ns <= one.ns for given, one in zip(copies, asked, strict=True))
    assert busy.sum() + gap.sum() == pytest.approx(wanted[0], abs=len(kernels) + 1)
