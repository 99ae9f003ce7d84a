"""Swept baselines: what is tried, and which of it is called the best."""

from __future__ import annotations

import pytest

from eclip.contest.confirm.sweep import MOST_CLIENTS, equal_shares
from eclip.core.topology import Topology
from eclip.planner.policies import make_plan
from eclip.planner.search.masks import StaticMasks, best_setting, masks_setting
from eclip.planner.search.objective import Objective, Score
from simulations import H200, MI50, flat_profile, problem_of


def score(stp: float, fairness: float = 0.9, efficiency: float = 1.0) -> Score:
    """Two workers with this much together, the first with ``fairness`` of the second's."""
    second = stp / (1 + fairness)
    return Score(ratios=(stp - second, second), power_w=1000 * stp / efficiency, p99_ms=(1.0, 1.0))


def best(kind: str, plain: Score, *scores: Score) -> int:
    return best_setting(scores, Objective(kind=kind), plain)


def test_most_throughput_that_is_fair_enough_wins() -> None:
    scores = [score(1.5, fairness=0.69), score(1.3, fairness=0.71), score(1.2, fairness=1.0)]
    assert best("throughput", score(1.0, 0.5), *scores) == 1
    assert best("throughput", score(1.0, 1.0), *scores) == 2  # plain streams are fairer than that


def test_where_none_is_fair_enough_the_fairest_wins() -> None:
    assert best("throughput", score(1.0, 0.5), score(1.5, 0.1), score(1.0, 0.3), score(2, 0.2)) == 1


def test_energy_is_saved_at_the_throughput_of_plain_streams() -> None:
    scores = [score(1.0, efficiency=3.0), score(1.2, efficiency=2.5), score(1.4, efficiency=2.0)]
    assert best("energy", score(1.1), *scores) == 1
    assert best("energy", score(0.9), *scores) == 0
    assert best("throughput", score(1.1), *scores) == 2


@pytest.mark.parametrize("topology", [H200, MI50])
@pytest.mark.parametrize("workers", [1, 2, 4, 6])
def test_static_masks_are_many_different_and_the_same_again(
    topology: Topology, workers: int
) -> None:
    def draw(seed: int) -> list[str]:
        problem = problem_of([flat_profile(f"m{n}", [1000], topology) for n in range(workers)],
                             topology)  # fmt: skip
        masks = StaticMasks(problem, 24, seed)
        first = None
        plans = []
        for _ in range(24):
            homes = masks.propose(first)
            if homes is None:
                break
            first = first or homes
            plan = masks.plan(homes)
            assert all(part.switches == 0 for part in plan.main.assignments)
            plans.append(" ".join(str(lane.mask) for lane in plan.lanes))
        return plans

    plans = draw(1)
    assert len(set(plans)) == len(plans)
    assert len(plans) == 24 or (workers, topology) == (1, MI50)
    assert draw(1) == plans
    if workers > 1:
        assert draw(2) != plans


def test_right_sized_disjoint_and_overlapping_masks_are_among_the_first() -> None:
    problem = problem_of([flat_profile(f"m{n}", [1000], H200) for n in range(3)], H200)
    masks = StaticMasks(problem, 24, 0)
    plans = []
    for _ in range(10):
        homes = masks.propose(None)
        assert homes is not None
        plans.append(masks.plan(homes))
    kinds = {masks_setting(plan).rpartition(", ")[2] for plan in plans}
    assert kinds == {"disjoint", "overlapping"}
    model = make_plan("model", problem)
    assert [lane.mask for lane in model.lanes] in [
        [lane.mask for lane in plan.lanes] for plan in plans
    ]


def test_later_masks_are_neighbours_of_the_best() -> None:
    problem = problem_of([flat_profile(f"m{n}", [1000], H200) for n in range(3)], H200)
    masks = StaticMasks(problem, 10, 0)
    best = masks.propose(None)
    assert best is not None
    for _ in range(5):
        masks.propose(best)
    for _ in range(4):
        homes = masks.propose(best)
        assert homes is not None
        changed = [(old, new) for old, new in zip(best, homes, strict=True) if old != new]
        assert len(changed) == 1
        old, new = changed[0]
        assert abs(old.most - new.most) <= 3
        assert (new.first - old.first) % 16 in (0, 1, 2, 3, 13, 14, 15)


def test_setting_names_the_units_of_every_worker() -> None:
    problem = problem_of([flat_profile(f"m{n}", [1000], H200) for n in range(2)], H200)
    assert masks_setting(make_plan("shared", problem)) == "132+132 SMs, overlapping"


@pytest.mark.parametrize("workers", range(1, 33))
def test_mps_sweep_fits_the_clients_and_wastes_no_units(workers: int) -> None:
    for sets in range(1, 12):
        shares = equal_shares(workers, sets)
        assert len(shares) <= sets
        assert len(shares) * workers <= MOST_CLIENTS
        assert all(share * workers >= 100 - workers for share in shares)
        assert list(shares) == sorted(set(shares), reverse=True)
        assert min(shares) >= 1 and max(shares) <= 100


def test_thinned_mps_sweep_keeps_what_counts_most() -> None:
    assert equal_shares(3, 99) == (100, 85, 75, 60, 50, 40, 33)
    assert equal_shares(4, 3) == (100, 60, 25)
    assert equal_shares(6, 1) == (60,)
