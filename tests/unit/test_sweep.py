"""Swept baselines: what is tried, and which of it is called the best."""

from __future__ import annotations

import pytest

from eclip.comparison import Trial
from eclip.devices.cuda.mps import MOST_CLIENTS, equal_shares
from eclip.errors import UsageError
from eclip.planning.policies import make_plan
from eclip.planning.sweep import StaticMasks, best_trial, masks_setting
from eclip.topology import Topology
from simulations import H200, MI50, flat_profile, problem_of


def trial(stp: float, fairness: float = 0.9, efficiency: float = 1.0) -> Trial:
    return Trial(setting="", stp=stp, fairness=fairness, efficiency_per_kj=efficiency)


def test_most_throughput_at_the_floor_wins() -> None:
    trials = [trial(1.5, fairness=0.69), trial(1.3, fairness=0.7), trial(1.2, fairness=1.0)]
    assert best_trial(trials, "throughput", 0.7) == 1
    assert best_trial(trials, "throughput", 0.0) == 0


def test_where_none_is_fair_enough_the_fairest_wins() -> None:
    assert best_trial([trial(1.5, 0.1), trial(1.0, 0.3), trial(2.0, 0.2)], "throughput", 0.7) == 1


def test_energy_is_saved_at_the_throughput_of_plain_streams() -> None:
    trials = [trial(1.0, efficiency=3.0), trial(1.2, efficiency=2.5), trial(1.4, efficiency=2.0)]
    assert best_trial(trials, "energy", 0.7, plain=trial(1.1)) == 1
    assert best_trial(trials, "energy", 0.7, plain=trial(1.5)) == 0
    assert best_trial(trials, "energy", 0.7) == 0
    assert best_trial(trials, "throughput", 0.7, plain=trial(1.1)) == 2


def test_unknown_objective_lists_the_right_ones() -> None:
    with pytest.raises(UsageError, match="throughput, energy"):
        best_trial([trial(1.0)], "speed", 0.7)


@pytest.mark.parametrize("topology", [H200, MI50])
@pytest.mark.parametrize("workers", [1, 2, 4, 6])
def test_static_masks_are_many_different_and_the_same_again(
    topology: Topology, workers: int
) -> None:
    def draw(seed: int) -> list[str]:
        problem = problem_of([flat_profile(f"m{n}", [1000], topology) for n in range(workers)],
                             topology)  # fmt: skip
        masks = StaticMasks(problem, 24, seed)
        best = None
        plans = []
        for _ in range(24):
            homes = masks.propose(best)
            if homes is None:
                break
            best = best or homes
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
