"""The allocation solver: brute force, the ILP and the priced dynamic programme give one optimum."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.core.profile import Times
from eclip.errors import PlanningError
from eclip.planner.exact import Allocation, allocate, best_route, count_switches
from eclip.planner.problem import Choice
from ilp import allocate_by_ilp

SIZES = (15, 30, 45, 60)
# The seed's worked example: µs at 15, 30, 45 and 60 CUs.
WORKED = np.array([[50, 30, 25, 24], [20, 12, 11, 11], [40, 26, 21, 20], [10, 7, 6, 6]], float)
# Ties where they hurt: small integers, equal ones among them.
INTEGERS = st.integers(1, 6).map(float)
FLOATS = st.floats(1.0, 1e6, allow_nan=False)


@st.composite
def tables(draw: st.DrawFn, max_kernels: int = 4, sizes: int = 3) -> Times:
    kernels = draw(st.integers(1, max_kernels))
    cell = draw(st.sampled_from([INTEGERS, FLOATS]))
    # Some sizes a kernel cannot take at all, but never the last.
    impossible = st.just(np.inf) if draw(st.booleans()) else cell
    row = st.tuples(*[cell | impossible] * (sizes - 1), cell)
    return np.array(draw(st.lists(row, min_size=kernels, max_size=kernels)))


@st.composite
def instances(
    draw: st.DrawFn, max_workers: int = 3, max_kernels: int = 4
) -> tuple[list[Times], tuple[int, ...], int, int]:
    """Times, sizes, units and switch budget of a small allocation problem."""
    count = draw(st.integers(1, 3))
    sizes = sorted(draw(st.sets(st.integers(1, 60), min_size=count, max_size=count)))
    workers = draw(st.integers(1, max_workers))
    times = [draw(tables(max_kernels, count)) for _ in range(workers)]
    return times, tuple(sizes), sizes[-1], draw(st.integers(0, max_kernels))


@functools.cache
def routes(kernels: int, sizes: int, switch_max: int) -> Choice:
    """Every way through the sizes within the budget, one a row."""
    every = np.array(list(itertools.product(range(sizes), repeat=kernels)), dtype=np.int64)
    within: Choice = every[np.count_nonzero(np.diff(every, axis=1), axis=1) <= switch_max]
    return within


def route_times(table: Times, switch_max: int) -> Times:
    ways = routes(*table.shape, switch_max)
    total: Times = table[np.arange(len(table)), ways].sum(axis=1)
    return total


def brute_force(times: Sequence[Times], sizes: Sequence[int], units: int, switch_max: int) -> float:
    """The lowest (1 + α)·T over all combinations of all workers' routes."""
    alpha: Times = np.zeros(1)
    total: Times = np.zeros(1)
    for table in times:
        averages = np.array(sizes)[routes(*table.shape, switch_max)].mean(axis=1) / units
        alpha = np.add.outer(alpha, averages).ravel()
        total = np.add.outer(total, route_times(table, switch_max)).ravel()
    return float(((1 + alpha) * total).min())


def objective_of(
    choices: Sequence[Choice], times: Sequence[Times], sizes: Sequence[int], units: int
) -> tuple[float, float]:
    """α and T of an allocation, from their definitions."""
    alpha = sum(float(np.array(sizes)[choice].mean()) / units for choice in choices)
    total = sum(
        float(table[np.arange(len(table)), choice].sum())
        for table, choice in zip(times, choices, strict=True)
    )
    return alpha, total


def check_claims(
    best: Allocation, times: Sequence[Times], sizes: Sequence[int], units: int, switch_max: int
) -> None:
    """What an allocation says of itself is what its choices give, and it keeps to the budget."""
    assert [len(choice) for choice in best.choices] == [len(table) for table in times]
    assert all(count_switches(choice) <= switch_max for choice in best.choices)
    alpha, total = objective_of(best.choices, times, sizes, units)
    assert best.alpha == pytest.approx(alpha, rel=1e-12)
    assert best.total_ns == pytest.approx(total, rel=1e-12)
    assert best.objective == pytest.approx((1 + alpha) * total, rel=1e-12)


def test_worked_example_without_alpha_takes_all_units_for_61() -> None:
    best = allocate([WORKED], SIZES, 60, switch_max=2, with_alpha=False)
    assert best.choices[0].tolist() == [3, 3, 3, 3]
    assert best.total_ns == best.objective == 61


def test_worked_example_with_alpha_costs_108() -> None:
    best = allocate([WORKED], SIZES, 60, switch_max=2)
    assert best.objective == pytest.approx(108.0, rel=1e-12)
    check_claims(best, [WORKED], SIZES, 60, switch_max=2)
    assert brute_force([WORKED], SIZES, 60, switch_max=2) == pytest.approx(108.0, rel=1e-12)
    assert allocate_by_ilp([WORKED], SIZES, 60, switch_max=2)[1] == pytest.approx(108.0, rel=1e-9)


@settings(max_examples=300, deadline=None)
@given(instance=instances())
def test_exact_is_the_brute_force_optimum(
    instance: tuple[list[Times], tuple[int, ...], int, int],
) -> None:
    best = allocate(*instance)
    check_claims(best, *instance)
    assert best.objective == pytest.approx(brute_force(*instance), rel=1e-11)


@settings(max_examples=150, deadline=None)
@given(instance=instances())
def test_without_alpha_every_worker_is_as_fast_as_its_budget_allows(
    instance: tuple[list[Times], tuple[int, ...], int, int],
) -> None:
    times, sizes, units, switch_max = instance
    best = allocate(times, sizes, units, switch_max, with_alpha=False)
    fastest = sum(float(route_times(table, switch_max).min()) for table in times)
    assert best.objective == best.total_ns == pytest.approx(fastest, rel=1e-12)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(instance=instances())
def test_ilp_is_the_brute_force_optimum(
    instance: tuple[list[Times], tuple[int, ...], int, int],
) -> None:
    times, sizes, units, switch_max = instance
    choices, objective = allocate_by_ilp(*instance)
    lowest = brute_force(*instance)
    alpha, total = objective_of(choices, times, sizes, units)
    assert all(count_switches(choice) <= switch_max for choice in choices)
    assert (1 + alpha) * total == pytest.approx(lowest, rel=1e-7)
    assert objective == pytest.approx(lowest, rel=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*range(1, 6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 41))]
)
def test_exact_and_ilp_agree_on_3_workers_of_40_kernels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    times = []
    for _ in range(3):
        work = rng.lognormal(np.log(20_000), 0.8, 40)[:, None]
        saturation = rng.uniform(8, 60, 40)[:, None]
        times.append(np.rint(1_500 + work * np.maximum(1.0, saturation / np.array(SIZES))))
    best = allocate(times, SIZES, 60, switch_max=5)
    check_claims(best, times, SIZES, 60, switch_max=5)
    choices, _ = allocate_by_ilp(times, SIZES, 60, switch_max=5)
    alpha, total = objective_of(choices, times, SIZES, 60)
    assert all(count_switches(choice) <= 5 for choice in choices)
    assert best.objective == pytest.approx((1 + alpha) * total, rel=1e-9)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), sizes=st.integers(1, 3))
def test_best_route_is_the_cheapest_and_of_the_cheapest_the_one_with_fewest_switches(
    data: st.DataObject, sizes: int
) -> None:
    kernels = data.draw(st.integers(1, 6))
    row = st.lists(INTEGERS, min_size=sizes, max_size=sizes)
    cost = np.array(data.draw(st.lists(row, min_size=kernels, max_size=kernels)))
    switch_max = data.draw(st.integers(0, 7))
    route = best_route(cost, switch_max)
    ways = routes(kernels, sizes, switch_max)
    totals = route_times(cost, switch_max)
    fewest = np.count_nonzero(np.diff(ways[totals == totals.min()], axis=1), axis=1).min()
    assert cost[np.arange(kernels), route].sum() == totals.min()
    assert count_switches(route) == fewest


@settings(max_examples=60, deadline=None)
@given(instance=instances(max_kernels=6))
def test_a_larger_budget_is_never_worse(
    instance: tuple[list[Times], tuple[int, ...], int, int],
) -> None:
    times, sizes, units, _ = instance
    objectives = [allocate(times, sizes, units, budget).objective for budget in range(7)]
    assert all(more <= less * (1 + 1e-12) for less, more in itertools.pairwise(objectives))


@pytest.mark.parametrize("with_alpha", [True, False])
@pytest.mark.parametrize("switch_max", [0, 1, 100])
def test_equal_costs_everywhere_need_no_switch(switch_max: int, with_alpha: bool) -> None:
    times = [np.full((50, 4), 7.0)] * 3
    best = allocate(times, SIZES, 60, switch_max, with_alpha)
    assert [count_switches(choice) for choice in best.choices] == [0, 0, 0]
    if with_alpha:
        assert {int(index) for choice in best.choices for index in choice} == {0}


def test_without_budget_every_worker_stays_on_one_size() -> None:
    best = allocate([WORKED, WORKED[::-1].copy()], SIZES, 60, switch_max=0)
    assert [count_switches(choice) for choice in best.choices] == [0, 0]


def test_budget_beyond_the_kernels_is_no_limit_at_all() -> None:
    zigzag = np.array([[1.0, 9.0], [9.0, 1.0]] * 5)
    best = allocate([zigzag], (1, 2), 2, switch_max=1_000_000, with_alpha=False)
    assert best.total_ns == 10
    assert count_switches(best.choices[0]) == 9


def test_single_kernel_and_single_size_leave_no_choice() -> None:
    best = allocate([np.array([[5.0]])], (60,), 60, switch_max=14)
    assert best.choices[0].tolist() == [0]
    assert (best.alpha, best.total_ns, best.objective) == (1.0, 5.0, 10.0)


def test_negative_budget_is_refused() -> None:
    with pytest.raises(PlanningError, match="-1"):
        allocate([WORKED], SIZES, 60, switch_max=-1)


def test_kernel_that_fits_no_size_at_all_is_refused() -> None:
    with pytest.raises(PlanningError, match="largest lane"):
        allocate([np.array([[1.0, np.inf]])], (1, 2), 2, switch_max=1)
