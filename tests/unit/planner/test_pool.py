"""The pool of lanes: the paper's masks where it prints them, and its rules everywhere else."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from eclip.core.plan import ALL_WORKERS
from eclip.core.topology import Mask, Topology
from eclip.files import store
from eclip.planner.pool import build_pool, slice_orders

MI50 = store.load_builtin("mi50", Topology)
TOPOLOGIES = [store.load_builtin(name, Topology) for name in store.builtin_names(Topology)]
every_topology = pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.name)


def masks_of(topology: Topology, workers: int) -> list[dict[int, str]]:
    pool = build_pool(topology, workers)
    return [
        {size: str(pool.lanes[lane].mask) for size, lane in zip(pool.sizes, lanes, strict=True)}
        for lanes in pool.lane_of
    ]


def test_two_workers_on_an_mi50_get_the_masks_printed_in_the_paper() -> None:
    assert masks_of(MI50, 2) == [
        {15: "0", 30: "0,2", 45: "0-2", 60: "0-3"},
        {15: "3", 30: "1,3", 45: "1-3", 60: "0-3"},
    ]
    pool = build_pool(MI50, 2)
    assert [lane.owner for lane in pool.lanes] == [0, 0, 0, 1, 1, 1, ALL_WORKERS]
    assert pool.lane_of == ((0, 1, 2, 6), (3, 4, 5, 6))


def test_three_workers_on_an_mi50_have_the_papers_sizes() -> None:
    pool = build_pool(MI50, 3)
    assert pool.sizes == (30, 45, 60)
    assert [lane.owner for lane in pool.lanes] == [0, 0, 1, 1, 2, 2, ALL_WORKERS]


@every_topology
@pytest.mark.parametrize("workers", range(1, 33))
def test_pool_keeps_to_the_hardware_and_its_lanes_are_what_they_say(
    topology: Topology, workers: int
) -> None:
    pool = build_pool(topology, workers)
    # One queue stays with the default stream, which is the lane owned by all where there is one.
    owned_by_all = [lane for lane in pool.lanes if lane.owner == ALL_WORKERS]
    assert len(pool.lanes) - len(owned_by_all) <= topology.hardware_queues - 1
    assert len(owned_by_all) <= 1
    assert pool.sizes == topology.lane_sizes[-len(pool.sizes) :]
    assert len(pool.lane_of) == workers
    for worker, lanes in enumerate(pool.lane_of):
        assert len(lanes) == len(pool.sizes)
        masks = [pool.lanes[lane].mask for lane in lanes]
        assert [topology.units_of(mask) for mask in masks] == list(pool.sizes)
        assert all(small <= large for small, large in itertools.pairwise(masks))
        assert masks[-1] == topology.full
        assert all(pool.lanes[lane].owner == worker for lane in lanes[:-1])
        assert pool.lanes[lanes[-1]].owner in (worker, ALL_WORKERS)
    assert {lane for lanes in pool.lane_of for lane in lanes} == set(range(len(pool.lanes)))


@every_topology
def test_one_more_size_per_worker_would_not_fit_the_queues(topology: Topology) -> None:
    for workers in range(1, 33):
        pool = build_pool(topology, workers)
        if len(pool.sizes) < len(topology.lane_sizes):
            assert len(pool.sizes) * workers > topology.hardware_queues - 1


def test_device_with_one_queue_has_one_lane_for_all() -> None:
    pool = build_pool(msgspec.structs.replace(MI50, hardware_queues=1), 3)
    assert [(lane.owner, lane.mask) for lane in pool.lanes] == [(ALL_WORKERS, MI50.full)]
    assert pool.lane_of == ((0,), (0,), (0,))


@pytest.mark.parametrize("slices", [1, 2, 4, 8, 16, 27])
def test_homes_differ_while_slices_suffice_and_orders_name_every_slice_once(slices: int) -> None:
    for workers in range(1, 33):
        orders = slice_orders(slices, workers)
        assert [sorted(order) for order in orders] == [list(range(slices))] * workers
        homes = [order[0] for order in orders]
        assert len(set(homes)) == min(workers, slices)


@pytest.mark.parametrize("slices", [4, 8, 16, 27])
def test_first_slices_of_all_workers_are_disjoint(slices: int) -> None:
    for workers in range(1, slices + 1):
        fair = slices // workers
        firsts = [index for order in slice_orders(slices, workers) for index in order[:fair]]
        assert len(set(firsts)) == len(firsts)


@pytest.mark.parametrize("slices", [4, 8, 16, 27])
def test_lanes_grow_evenly_over_the_slices(slices: int) -> None:
    for workers in range(1, slices + 1):
        orders = slice_orders(slices, workers)
        for size in range(1, slices + 1):
            users = [sum(index in order[:size] for order in orders) for index in range(slices)]
            assert max(users) - min(users) <= 2


def test_lanes_of_two_workers_overlap_no_more_than_they_must() -> None:
    pool = build_pool(MI50, 2)
    for size, (first, second) in zip(pool.sizes, zip(*pool.lane_of, strict=True), strict=True):
        common: Mask = pool.lanes[first].mask & pool.lanes[second].mask
        assert MI50.units_of(common) == max(0, 2 * size - MI50.units)
