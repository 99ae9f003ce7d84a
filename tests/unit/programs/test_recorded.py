"""Recordings to profiles: what a request is, and that its times add up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from eclip.core.model_key import ModelKey
from eclip.core.topology import Topology
from eclip.core.trace import Kernel
from eclip.errors import ArtefactError, MismatchError
from eclip.programs.recorded import Launches, find_requests, make_profile, read_recording

MODEL = ModelKey("m", 4)


def kernel(name: str) -> Kernel:
    return Kernel(name=name, grid=(1, 1, 1), block=(32, 1, 1))


def launches(names: str, marks: set[int] | None = None, busy: int = 10, gap: int = 2) -> Launches:
    """One kernel a letter."""
    return Launches(
        kernels=[kernel(name) for name in names],
        blocks_per_unit=[1] * len(names),
        busy_ns=[busy + index for index in range(len(names))],
        gap_ns=[gap] * len(names),
        marks=marks or set(),
    )


def request_of(names: str, marks: set[int] | None = None) -> str:
    return "".join(one.name for one in find_requests(launches(names, marks)).kernels)


def test_a_request_is_what_repeats() -> None:
    assert request_of("abcabcabcabc") == "abc"


def test_what_came_before_is_left_out() -> None:
    assert request_of("xyzzy" + "abc" * 6, {5, 8, 11}) == "abc"


def test_repeats_inside_a_request_are_not_requests() -> None:
    assert request_of("sllllh" * 5, {0, 6, 12, 18}) == "sllllh"


def test_a_request_begins_where_the_program_waited() -> None:
    assert request_of("cabcabcabcabcab", {1, 4, 7}) == "abc"


@given(st.text("abcd", min_size=1, max_size=9), st.integers(4, 8), st.text("xyz", max_size=5))
def test_any_repeated_request_is_found_up_to_its_own_period(
    body: str, count: int, before: str
) -> None:
    assume(2 * len(before) <= len(body) * count)  # most of a recording must repeat
    marks = {len(before) + index * len(body) for index in range(count)}
    found = request_of(before + body * count, marks)
    assert body == found * (len(body) // len(found))


def test_an_odd_request_among_the_others_is_left_out() -> None:
    names = "abc" * 4 + "axc" + "abc" * 5
    assert request_of(names, set(range(0, len(names), 3))) == "abc"


@pytest.mark.parametrize("names", ["", "abcdefgh", "abcabc", "abab"])
def test_too_few_repeats_are_refused(names: str) -> None:
    with pytest.raises(MismatchError, match="at least 3 times"):
        find_requests(launches(names))


def test_a_profile_closes_and_keeps_the_kernels(h200: Topology) -> None:
    slow = find_requests(launches("abc" * 5, busy=100))
    fast = find_requests(launches("abc" * 5, busy=50))
    profile = make_profile(MODEL, h200, (64, 132), [slow, fast], "a test")
    assert profile.model == MODEL
    assert profile.sizes == (64, 132)
    assert profile.request_ns[0] > profile.request_ns[1]


def test_kernels_that_are_slow_in_different_requests_are_no_error(h200: Topology) -> None:
    """On a busy machine: each is slow in three of five requests, and no request is slow in all."""
    recorded = launches("abcde" * 6)
    for number, ns in enumerate(recorded.busy_ns):
        request, place = divmod(number, 5)
        recorded.busy_ns[number] = 1000 * ns if (request + place) % 5 < 3 else ns
    requests = find_requests(recorded)
    profile = make_profile(MODEL, h200, (64, 132), [requests, requests], "a test")
    sums = requests.busy_ns.sum(axis=1)
    assert profile.request_ns[0] == pytest.approx(np.median(sums), rel=0.01)
    assert min(map(min, profile.busy_ns)) > 0


def waited(names: str, gaps: dict[int, int], requests: int = 6) -> Launches:
    """Requests in which the program waits before these kernels, and for how long."""
    made = launches(names * requests)
    for request in range(requests):
        for place, gap in gaps.items():
            at = request * len(names) + place
            made.marks.add(at)
            made.gap_ns[at] = gap
    return made


def test_a_request_begins_at_the_same_kernel_at_every_size(h200: Topology) -> None:
    """A server waits before it copies its answer and before the next request; which is longer
    differs from run to run."""
    small = find_requests(waited("abcf", {0: 100, 3: 110}))
    large = find_requests(waited("abcf", {0: 100, 3: 20}))
    assert small.kernels != large.kernels
    profile = make_profile(MODEL, h200, (64, 132), [small, large], "a test")
    assert [one.name for one in profile.trace.kernels] == ["a", "b", "c", "f"]
    # What lies between requests is no part of them; what lies inside is.
    assert profile.gap_ns[2][0] > 100
    assert profile.gap_ns[2][1] < 30
    assert max(profile.gap_ns[3]) < 5


def test_sizes_that_launch_different_kernels_are_refused_with_what_differs(h200: Topology) -> None:
    one = find_requests(launches("abcdefgh" * 5, {0, 8, 16}))
    other = find_requests(launches("ghabcxxdef" * 5, {0, 10, 20}))
    with pytest.raises(MismatchError) as raised:
        make_profile(MODEL, h200, (64, 132), [one, other], "a test")
    message = str(raised.value)
    assert "other kernels on 132 SMs than on 64" in message
    assert "8 kernels on 64 and 10 on 132" in message
    assert "first kernel 3: none on 64, x (grid (1, 1, 1)" in message
    assert "2 of them differ" in message


def test_a_recording_is_read_by_worker(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    path.write_text(
        "C 5\n"
        "K 7 100 0 1 2 3 32 1 1 16 1 4 first kernel<int, 2>\n"
        "K 9 50 3 1 1 1 64 1 1 0 2 8 other\n"
        "S\n"
        "K 7 101 9 1 2 3 32 1 1 16 1 4 first kernel<int, 2>\n"
        "S 9\n"
    )
    first, other = read_recording(path)
    assert [one.name for one in first.kernels] == ["first kernel<int, 2>"] * 2
    assert first.kernels[0].grid == (1, 2, 3)
    assert first.kernels[0].shared_bytes == 16
    assert first.busy_ns == [95, 96]  # without what the events themselves take
    assert first.gap_ns == [0, 9]
    assert first.marks == {1}  # and none where only the other worker waited
    assert other.marks == {1}
    assert other.kernels[0].cluster == 2
    assert other.blocks_per_unit == [8]


@pytest.mark.parametrize("line", ["K 1 2", "K 1 a b 1 1 1 1 1 1 0 1 1 name", "Z", "C many"])
def test_a_damaged_recording_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "recording"
    path.write_text(f"C 0\n{line}\n")
    with pytest.raises(ArtefactError, match="line 2"):
        read_recording(path)
