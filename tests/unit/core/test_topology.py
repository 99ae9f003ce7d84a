"""Masks are sets; topologies hand out exactly what was asked; built-in ones are as documented."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.core.topology import Mask, Topology
from eclip.files import store

SLICES = st.frozensets(st.integers(0, 70))
H200 = store.load_builtin("h200", Topology)
MI50 = store.load_builtin("mi50", Topology)


def topology_of(slice_units: list[int], changes: dict[str, object] | None = None) -> Topology:
    fields = {
        "name": "toy",
        "title": "Toy",
        "unit_name": "SM",
        "compute": "0.0",
        "slice_units": slice_units,
        "lane_sizes": [sum(slice_units)],
        "hardware_queues": 8,
        "memory_bytes": 1 << 30,
        "context_bytes": 0,
        "lane_bytes": 0,
        "source": "by hand",
    }
    return msgspec.convert(fields | (changes or {}), Topology)


@settings(deadline=None)
@given(left=SLICES, right=SLICES)
def test_mask_operations_are_set_operations(left: frozenset[int], right: frozenset[int]) -> None:
    a, b = Mask(left), Mask(right)
    assert set(a | b) == left | right
    assert set(a & b) == left & right
    assert set(a - b) == left - right
    assert (a <= b) == (left <= right)
    assert (a == b) == (left == right)
    assert len(a) == len(left)
    assert bool(a) == bool(left)
    assert list(a) == sorted(left)
    assert all((index in a) == (index in left) for index in range(72))
    assert hash(a) == hash(Mask(sorted(left, reverse=True)))


@settings(deadline=None)
@given(slices=st.frozensets(st.integers(0, 9999), min_size=1, max_size=40))
def test_mask_written_and_read_is_the_same_mask(slices: frozenset[int]) -> None:
    mask = Mask(slices)
    assert Mask.parse(str(mask)) == mask


def test_mask_is_written_as_linux_writes_cpu_lists() -> None:
    assert str(Mask([0, 1, 2, 3, 8])) == "0-3,8"
    assert str(Mask([5, 4])) == "4-5"
    assert repr(Mask([7])) == "Mask('7')"
    assert Mask.parse("8,0-3,2") == Mask([0, 1, 2, 3, 8])


def test_mask_differs_from_what_is_no_mask() -> None:
    assert Mask([1]) != {1}
    assert Mask([1]) != "1"


@pytest.mark.parametrize(
    "text",
    ["", " ", "a", "-1", "1-", "1,", ",1", "3-1", "1--2", "0x1", "1.5", "1 - 2", "10000", "٣"],
)
def test_what_is_no_mask_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a mask"):
        Mask.parse(text)


def test_negative_slice_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        Mask([0, -1])


def test_negative_slice_is_in_no_mask() -> None:
    assert -1 not in Mask([0, 1])


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.integers(1, 12), min_size=1, max_size=7),
    data=st.data(),
)
def test_grant_is_the_smallest_sum_of_slices_that_suffices(
    parts: list[int], data: st.DataObject
) -> None:
    wanted = data.draw(st.integers(-1, sum(parts)))
    sums = {
        sum(chosen)
        for count in range(1, len(parts) + 1)
        for chosen in itertools.combinations(parts, count)
    }
    assert topology_of(parts).grant(wanted) == min(total for total in sums if total >= wanted)


def test_grant_beyond_the_device_is_refused() -> None:
    with pytest.raises(ValueError, match="132 units, not 133"):
        H200.grant(133)


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.integers(1, 6), min_size=1, max_size=7),
    data=st.data(),
)
def test_take_prefers_slices_in_their_order_and_is_exact(
    parts: list[int], data: st.DataObject
) -> None:
    topology = topology_of(parts)
    whole = data.draw(st.permutations(range(len(parts))))
    order = whole[: data.draw(st.integers(1, len(parts)))]
    units = data.draw(st.integers(0, sum(parts)))
    # Of all choices that add up, the one that uses the first slice if any does, then the second, …
    best = max(
        (
            pattern
            for pattern in itertools.product([0, 1], repeat=len(order))
            if sum(parts[i] for i, used in zip(order, pattern, strict=True) if used) == units
        ),
        default=None,
    )
    if not units or best is None:
        with pytest.raises(ValueError, match=f"exactly {units} units"):
            topology.take(units, order)
    else:
        taken = topology.take(units, order)
        assert taken == Mask(i for i, used in zip(order, best, strict=True) if used)
        assert topology.units_of(taken) == units


def test_64_units_from_the_end_of_an_h200_leave_out_its_slice_of_12() -> None:
    assert H200.take(64, range(15, -1, -1)) == Mask(range(7, 15))
    assert H200.take(12, range(16)) == Mask([15])


def test_units_of_a_mask_are_those_of_its_slices() -> None:
    assert H200.units_of(H200.full) == H200.units == 132
    assert H200.units_of(Mask([0, 15])) == 20
    assert H200.units_of(Mask()) == 0
    with pytest.raises(ValueError, match="does not have"):
        H200.units_of(Mask([16]))


@pytest.mark.parametrize(
    ("name", "slice_units", "queues"),
    [
        ("h200", (8,) * 15 + (12,), 32),
        ("h100", (8,) * 15 + (12,), 32),
        ("a100", (4,) * 27, 32),
        ("mi50", (15,) * 4, 8),
        ("mi300x", (38,) * 8, 24),
    ],
)
def test_built_in_topologies_have_the_documented_numbers(
    name: str, slice_units: tuple[int, ...], queues: int
) -> None:
    topology = store.load_builtin(name, Topology)
    assert topology.name == name
    assert topology.slice_units == slice_units
    assert topology.hardware_queues == queues
    assert topology.source
    units = {"h200": 132, "h100": 132, "a100": 108, "mi50": 60, "mi300x": 304}
    assert topology.units == topology.lane_sizes[-1] == units[name]


def test_built_in_topologies_are_these_five() -> None:
    assert store.builtin_names(Topology) == ("a100", "h100", "h200", "mi300x", "mi50")
    assert MI50.lane_sizes == (15, 30, 45, 60)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"slice_units": []}, "at least one slice"),
        ({"slice_units": [8, 0]}, "a unit in each"),
        ({"slice_units": [8, -8]}, "a unit in each"),
        ({"hardware_queues": 0}, "hardware_queues"),
        ({"lane_sizes": []}, "largest lane size"),
        ({"lane_sizes": [8]}, "all 16 units"),
        ({"lane_sizes": [16, 8]}, "rise"),
        ({"lane_sizes": [8, 8, 16]}, "rise"),
        ({"lane_sizes": [0, 16]}, "exactly 0 units"),
        ({"lane_sizes": [-8, 16]}, "exactly -8 units"),
        ({"lane_sizes": [9, 16]}, "exactly 9 units"),
        ({"lane_sizes": [16, 24]}, "all 16 units"),
        ({"extra": 1}, "extra"),
    ],
)
def test_impossible_topology_is_refused(changes: dict[str, object], fault: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=fault):
        topology_of([8, 8], changes)


@pytest.mark.parametrize("slice_units", [[2**power for power in range(20)], [10**15]])
def test_topology_too_large_to_count_is_refused(slice_units: list[int]) -> None:
    with pytest.raises(msgspec.ValidationError, match="units"):
        topology_of(slice_units)
