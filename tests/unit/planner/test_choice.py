"""Kernels that libraries choose for fewer units: a worker has its own, or those of another profile.

Profiles here are flat, so that what a plan, a simulation or a trial takes tells whose kernels it
had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from eclip.contest.confirm.plans import make_plan
from eclip.core.calibration import Calibration
from eclip.core.device import SourceKind, Window
from eclip.core.load import closed_loop
from eclip.core.measures import measure
from eclip.core.mix import mix_of, parse_mix
from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan
from eclip.core.profile import Profile
from eclip.core.topology import Topology
from eclip.core.trace import with_traces
from eclip.errors import MismatchError, UsageError
from eclip.files import store
from eclip.models.synthetic import synthetic_profile
from eclip.planner.evaluate import SimEvaluator
from eclip.planner.policies import PolicyOptions
from eclip.planner.problem import Problem
from eclip.planner.search.candidates import fitted, search
from eclip.planner.search.correction import Corrected
from eclip.planner.search.objective import Objective, Score
from eclip.planner.search.placement import Home, Placer
from eclip.planner.search.refine import refine
from eclip.planner.search.variants import with_variants
from eclip.rig.rig import Rig
from eclip.rig.trials import Trials
from eclip.sim.device import SimDevice
from simulations import case_of, flat_profile

H200 = store.load_builtin("h200", Topology)
CALIBRATION = store.load_builtin("h200", Calibration)
OWN = (flat_profile("a", [400_000] * 4, H200), flat_profile("b", [200_000] * 6, H200))
OTHERS = (
    flat_profile("a~33", [250_000] * 4, H200),
    flat_profile("a~66", [100_000] * 5, H200),
    flat_profile("b~66", [300_000] * 6, H200),
)
MIX = mix_of([ModelKey("a", 1), ModelKey("b", 1)])
PROBLEM = Problem(MIX, H200, OWN, OTHERS)
WHOLE = Home(0, 1, 16, 0.0, 0)
WINDOW = Window(0.05, 0.01, 0.0)
AIM = Objective(fairness=0.0)


def homes_for(*units: int, most: int = 16) -> tuple[Home, ...]:
    return tuple(Home(0, 1, most, 0.0, 0, kernels_for=each) for each in units)


def plan_for(*units: int, most: int = 16) -> Plan:
    return Placer(PROBLEM).plan(homes_for(*units, most=most), "search", "")


def models_of(plan: Plan) -> list[str]:
    assert plan.mix.models == plan.models
    return [str(model) for model in plan.models]


def stand_with(others: Sequence[Profile] = OTHERS, own: Sequence[Profile] = OWN) -> Rig:
    return Rig(case_of(own, others=others), SimDevice(H200, CALIBRATION))


def predicted_ns(plan: Plan) -> list[int]:
    return [sum(group.predicted_ns for group in part.groups) for part in plan.main.assignments]


def liking(*units: int) -> Any:
    """An evaluation that wants every worker's kernels for so many units, and half the device."""

    def evaluate(plans: Sequence[Plan]) -> list[Score]:
        scores = []
        for plan in plans:
            wanted = PROBLEM.choosing(units).mix.workers
            ratios = tuple(
                0.5
                + 0.3 * (mine.model == other.model)
                - abs(max(plan.units(group.lane) for group in part.groups) - 64) / 1000
                for mine, other, part in zip(
                    plan.mix.workers, wanted, plan.main.assignments, strict=True
                )
            )
            scores.append(Score(ratios, 300.0, (1.0,) * len(ratios)))
        return scores

    return evaluate


# --- The problem ------------------------------------------------------------------------------


def test_worker_can_have_its_own_kernels_or_those_for_fewer_units() -> None:
    assert [PROBLEM.kernels_for(worker) for worker in range(2)] == [[0, 33, 66], [0, 66]]
    assert [Problem(MIX, H200, OWN).kernels_for(worker) for worker in range(2)] == [[0], [0]]


def test_kernels_of_another_batch_serve_nobody() -> None:
    own = synthetic_profile(0, 5, H200, name="a", batch=1)
    other = synthetic_profile(1, 5, H200, name="a~66", batch=8)
    assert Problem(mix_of([ModelKey("a", 1)]), H200, (own,), (other,)).kernels_for(0) == [0]


def test_worker_whose_model_names_its_kernels_keeps_them() -> None:
    mix = parse_mix("a~66:1,a:1")
    problem = Problem(mix, H200, (OTHERS[1], OWN[0]), OTHERS)
    assert [problem.kernels_for(worker) for worker in range(2)] == [[0], [0, 33, 66]]
    found = search(
        problem, SimEvaluator(H200, problem.profiles, CALIBRATION, mix, OTHERS), batches=3
    )
    chosen = {tuple(models_of(one.plan)) for one in found.candidates}
    assert {first for first, _ in chosen} == {"a~66:1"}
    assert {second for _, second in chosen} == {"a:1", "a~33:1", "a~66:1"}


def test_problem_with_chosen_kernels_has_their_profiles_and_everything_else_as_it_was() -> None:
    mix = parse_mix("a:1@30rps,b:1")
    problem = Problem(mix, H200, OWN, OTHERS)
    chosen = problem.choosing([66, 0])
    assert chosen.profiles == (OTHERS[1], OWN[1])
    assert [str(model) for model in chosen.mix.models] == ["a~66:1", "b:1"]
    assert [(w.name, w.rate_rps) for w in chosen.mix.workers] == [("a", 30.0), ("b", None)]
    assert chosen.mix.name == mix.name
    assert set(chosen.fingerprint.traces) == {"a~66:1", "b:1"}
    assert problem.choosing([0, 0]) is problem
    assert problem.choosing([66, 0]) is chosen  # made once: it hashes every kernel


def test_kernels_without_a_profile_cannot_be_chosen() -> None:
    with pytest.raises(MismatchError, match="b needs a profile of b~33:1"):
        PROBLEM.choosing([0, 33])


def test_plan_tells_which_kernels_it_has() -> None:
    for units in ((0, 0), (66, 0), (33, 66)):
        assert PROBLEM.of(plan_for(*units)) is PROBLEM.choosing(units)


# --- Placement and search ---------------------------------------------------------------------


def test_plan_is_for_the_kernels_that_its_homes_name() -> None:
    placer = Placer(PROBLEM)
    plans = [
        placer.plan(homes_for(*units, most=8), "search", "")
        for units in ((0, 0), (66, 0), (66, 66))
    ]
    assert [models_of(plan) for plan in plans] == [
        ["a:1", "b:1"],
        ["a~66:1", "b:1"],
        ["a~66:1", "b~66:1"],
    ]
    assert [predicted_ns(plan) for plan in plans] == [
        [1_600_000, 1_200_000],
        [500_000, 1_200_000],
        [500_000, 1_800_000],
    ]
    assert [plan.workers[0].kernels for plan in plans] == [4, 5, 5]
    assert ["kernels chosen for 66" in plan.workers[0].why for plan in plans] == [False, True, True]
    for plan in plans:
        assert plan.fingerprint.traces.keys() == set(models_of(plan))
        assert plan.mix.as_asked() == MIX


@pytest.mark.parametrize("wanted", [(66, 0), (33, 66), (0, 0)])
def test_search_finds_the_kernels_that_the_evaluation_likes(wanted: tuple[int, int]) -> None:
    found = search(PROBLEM, liking(*wanted), AIM, batches=12, seed=1)
    best = found.candidates[0]
    assert tuple(home.kernels_for for home in best.homes) == wanted
    assert PROBLEM.of(best.plan) is PROBLEM.choosing(wanted)


def test_search_begins_with_own_kernels_and_with_those_that_fit_the_lanes() -> None:
    found = search(PROBLEM, liking(0, 0), AIM, batches=0)
    begun = [tuple(home.kernels_for for home in one.homes) for one in found.candidates]
    assert set(begun) == {(0, 0), (33, 66), (66, 66)}
    assert begun.count((0, 0)) == len(begun) / 2
    own = search(Problem(MIX, H200, OWN), liking(0, 0), AIM, batches=0)
    assert len(own.candidates) == len(begun) / 2


def test_fitted_leaves_those_who_have_no_others() -> None:
    problem = Problem(MIX, H200, OWN, OTHERS[:2])
    assert fitted((WHOLE, WHOLE), problem) == homes_for(66, 0)


@pytest.mark.parametrize(("most", "kernels"), [(1, 33), (6, 33), (7, 66), (15, 66), (16, 66)])
def test_fitted_takes_the_kernels_nearest_to_the_largest_lane(most: int, kernels: int) -> None:
    mine, other = fitted(homes_for(0, 0, most=most), PROBLEM)
    assert (mine.kernels_for, other.kernels_for) == (kernels, 66)


def test_fitted_takes_a_share_where_everybody_has_everything() -> None:
    four = Problem(mix_of([ModelKey("a", 1)] * 4), H200, OWN[:1] * 4, OTHERS)
    assert [home.kernels_for for home in fitted((WHOLE,) * 4, four)] == [33] * 4


def test_masks_with_other_kernels_are_no_static_masks() -> None:
    found = search(PROBLEM, liking(33, 66), AIM, batches=0)
    assert any(home.kernels_for for home in found.candidates[0].homes)
    assert found.static
    assert not any(home.kernels_for for one in found.static for home in one.homes)


def test_variants_keep_the_chosen_kernels_and_know_their_times() -> None:
    plan = plan_for(66, 0, most=8)

    def alike(plans: Sequence[Plan], active: tuple[int, ...]) -> list[Score]:
        return [Score((0.5,) * len(active), 100.0, (1.0,) * len(active)) for _ in plans]

    full = with_variants(plan, PROBLEM, alike)
    (alone,) = (one for one in full.variants if one.active == (0,))
    assert [(g.kernels, g.predicted_ns) for g in alone.assignments[0].groups] == [(5, 500_000)]
    assert models_of(full) == ["a~66:1", "b:1"]


# --- What plans with other kernels give -------------------------------------------------------


def test_evaluation_takes_the_kernels_of_the_plan_and_rates_alone_of_the_own_ones() -> None:
    own, other = OWN[0], OTHERS[1]
    mix = mix_of([ModelKey("a", 1)])
    placer = Placer(Problem(mix, H200, (own,), (other,)))
    evaluate = SimEvaluator(H200, (own,), CALIBRATION, mix, (other,))
    scores = evaluate([placer.plan(homes_for(units), "search", "") for units in (0, 66)])
    assert [score.ratios[0] for score in scores] == pytest.approx([1.0, 3.2], rel=0.03)


def test_simulated_plan_runs_as_it_was_evaluated() -> None:
    """Against the rates alone of the own kernels, unless the mix itself asks for others."""
    plan = plan_for(66, 66, most=8)
    (said,) = SimEvaluator(H200, OWN, CALIBRATION, MIX, OTHERS)([plan])
    window, load = Window(0.5, 0.05, 0.0), closed_loop(2)
    log = stand_with().run_once(plan, load, window)
    ran = [worker.ratio for worker in measure(log).workers]
    assert ran == pytest.approx(said.ratios, rel=0.03)
    against_itself = stand_with((), PROBLEM.of(plan).profiles).run_once(plan, load, window)
    assert against_itself.alone_rps[0] == pytest.approx(3.2 * log.alone_rps[0], rel=0.03)


def test_plans_that_differ_only_in_their_kernels_are_tried_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their groups may be alike to the nanosecond."""
    trace = msgspec.structs.replace(OWN[0].trace, model=ModelKey("a", 1, 66))
    twin = msgspec.structs.replace(
        OWN[0],
        trace=trace,
        fingerprint=with_traces(H200.fingerprint, [trace]),
    )
    placer = Placer(Problem(MIX, H200, OWN, (twin,)))
    first, second = (placer.plan(homes_for(units, 0), "search", "") for units in (0, 66))
    assert (first.lanes, first.variants) == (second.lanes, second.variants)
    tried: list[list[str]] = []
    rig = stand_with([twin])
    opened = rig.open

    def open_noting(plan: Plan, *, brief: bool = False) -> Any:
        tried.append(models_of(plan))
        return opened(plan, brief=brief)

    monkeypatch.setattr(rig, "open", open_noting)
    trials = Trials(rig, window=WINDOW)
    trials([first, second, first, second])
    assert tried == [["a:1", "b:1"], ["a~66:1", "b:1"]]


def test_sources_are_made_once_for_every_worker_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def make(kind: SourceKind, profile: Profile, _: object) -> Profile:
        assert kind is SourceKind.PROFILE
        made.append(str(profile.model))
        return profile

    monkeypatch.setattr("eclip.rig.rig.make_source", make)
    rig = stand_with()
    rig.prepare()
    assert made == ["a:1", "b:1"]
    for units in ((0, 0), (66, 0), (66, 66), (0, 0)):
        rig.open(plan_for(*units)).close()
    assert made[2:] == ["a~66:1", "b~66:1"]
    made.clear()
    stand_with((), (OWN[0], OWN[0])).prepare()
    assert made == ["a:1", "a:1"]  # a worker of its own has buffers of its own


def test_plan_whose_profile_is_not_there_says_which() -> None:
    with pytest.raises(UsageError, match=r"needs the profile of a~66:1; .* as profiles"):
        stand_with(()).open(plan_for(66, 0))


def test_policy_search_may_choose_other_kernels_if_it_is_given_any() -> None:
    def made(*others: Profile) -> Plan:
        options = PolicyOptions(batches=2, objective=AIM)
        return make_plan(case_of(OWN, others=others), "search", options)

    quick = (flat_profile("a~66", [100_000] * 5, H200), flat_profile("b~66", [70_000] * 6, H200))
    assert models_of(made(*quick)) == ["a~66:1", "b~66:1"]
    assert models_of(made()) == ["a:1", "b:1"]


# --- On the device ----------------------------------------------------------------------------


def test_what_was_learnt_with_other_kernels_says_little_of_plans_with_the_own_ones() -> None:
    simulated = liking(0, 0)
    other, own = plan_for(66, 66), plan_for(0, 0)
    corrected = Corrected(simulated)
    said = simulated([other, own])
    faster = dataclasses.replace(said[0], ratios=tuple(1.2 * ratio for ratio in said[0].ratios))
    corrected.learn([other, own], [faster, said[1]])
    found = corrected.expected([other, own])
    errors = [np.divide(one.ratios, two.ratios) for one, two in zip(found, said, strict=True)]
    assert errors[0].min() > 1.05 * errors[1].max()


def test_search_on_the_device_changes_kernels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the simulation finds all kernels alike, and the device does not."""
    device, runs = liking(66, 0), 0

    def trials(plans: Sequence[Plan]) -> list[Score]:
        nonlocal runs
        runs += len(plans)
        scores: list[Score] = device(plans)
        return scores

    def simulated(plans: Sequence[Plan]) -> list[Score]:
        unlike = [PROBLEM.choosing((0, 0)).mix.workers != plan.mix.workers for plan in plans]
        return [Score((0.6 + 0.02 * one,) * 2, 300.0, (1.0, 1.0)) for one in unlike]

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return float(runs)

    monkeypatch.setattr("eclip.planner.search.refine.time", Clock)
    starts = [homes_for(0, 0), homes_for(0, 0, most=8)]
    found = refine(Placer(PROBLEM), simulated, trials, AIM, starts=starts, seconds=60)
    assert tuple(home.kernels_for for home in found.candidates[0].homes) == (66, 0)
