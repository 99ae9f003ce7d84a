"""Which slices lanes are given: disjoint, enough, with room for clusters, and as few as can be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.core.topology import Mask, Topology
from eclip.gpu.partition import assign

EIGHTS = (8,) * 15 + (12,)


def topology_of(*slices: int) -> Topology:
    return Topology(
        name="t",
        title="T",
        unit_name="SM",
        compute="9.0",
        slice_units=slices,
        lane_sizes=(sum(slices),),
        hardware_queues=32,
        memory_bytes=1,
        context_bytes=0,
        lane_bytes=0,
        source="a test",
    )


def cost(topology: Topology, masks: list[Mask]) -> tuple[int, int]:
    without = sum(not topology.holds_clusters(mask) for mask in masks)
    return without, sum(map(topology.units_of, masks))


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ((48, 84), (48, 84)),
        ((84, 48), (84, 48)),
        ((60, 60), (60, 64)),  # a single lane can have the odd slice
        ((12,), (16,)),  # the odd slice alone holds no clusters
        ((12, 112), (20, 112)),
        ((100, 32), (100, 32)),
        ((1, 131), None),
        ((8,) * 14 + (20,), (8,) * 14 + (20,)),
        ((8,) * 16, (8,) * 15 + (12,)),
    ],
)
def test_an_h200_is_divided_like_this(asked: tuple[int, ...], given: tuple[int, ...]) -> None:
    topology = topology_of(*EIGHTS)
    masks = assign(topology, asked, topology.full)
    if given is None:
        assert masks is None
    else:
        assert masks is not None
        assert sorted(map(topology.units_of, masks)) == sorted(given)


@settings(max_examples=200)
@given(
    slices=st.lists(st.sampled_from([2, 3, 5]), min_size=1, max_size=5),
    asked=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    taken=st.sets(st.integers(0, 4)),
)
def test_the_assignment_is_the_best_of_all(
    slices: list[int], asked: list[int], taken: set[int]
) -> None:
    topology = topology_of(*slices)
    free = topology.full - Mask(taken)
    owners = itertools.product(range(len(asked) + 1), repeat=len(free))
    every = [
        [Mask(slot for slot, own in zip(free, owner, strict=True) if own == lane)
         for lane in range(len(asked))]
        for owner in owners
    ]  # fmt: skip
    possible = [
        cost(topology, masks)
        for masks in every
        if all(topology.units_of(mask) >= units for mask, units in zip(masks, asked, strict=True))
    ]
    masks = assign(topology, asked, free)
    if masks is None:
        assert not possible
        return
    assert all(mask <= free for mask in masks)
    assert not any(one & other for one, other in itertools.combinations(masks, 2))
    assert all(topology.units_of(mask) >= units for mask, units in zip(masks, asked, strict=True))
    assert cost(topology, masks) == min(possible)
