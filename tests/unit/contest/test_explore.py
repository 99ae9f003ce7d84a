"""A search that goes on on a device, and what trials there say; the device is the simulator."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from eclip.contest.confirm.explore import Verification
from eclip.contest.confirm.finals import confirm
from eclip.core.device import Window
from eclip.core.load import closed_loop
from eclip.core.measures import measure, steady_rates
from eclip.errors import UsageError
from eclip.files.observations import ObservedHome, ObservedRun
from eclip.planner.policies import make_plan
from eclip.planner.problem import Problem
from eclip.planner.search.decision import PLAIN, STATIC
from eclip.planner.search.objective import Objective
from eclip.planner.search.placement import Home, groups_of
from eclip.rig.arrivals import at_rates
from eclip.rig.trials import score_of
from exploring import (
    MIX,
    OTHERS,
    PROFILES,
    QUIET,
    WINDOW,
    Looks,
    Refusing,
    WithPriorities,
    explorer_of,
    plans_of,
    stand_on,
    trials_on,
)
from heard import Heard
from simulations import H200


@pytest.fixture
def device() -> Refusing:
    return Refusing()


def test_trial_tells_what_a_run_gives_and_a_plan_is_tried_once(device: Refusing) -> None:
    trials = trials_on(stand_on(device))
    whole, half = plans_of([Home(0, 1, 16, 0.0, 0)] * 2, [Home(0, 1, 8, 0.0, 0)] * 2)
    first, second = trials([whole, half])
    assert first.ratios != second.ratios
    assert trials([half, whole, half]) == [second, first, second]
    assert len(device.opened) == 2
    assert 0 < min(first.ratios) <= max(first.ratios) <= 1.01


def test_placements_that_come_to_the_same_plan_are_tried_once(device: Refusing) -> None:
    """Both have all units, one counted up and the other down: only their words differ."""
    up, down = plans_of([Home(0, 1, 16, 0.0, 0)] * 2, [Home(15, -1, 16, 0.0, 0)] * 2)
    assert (up.lanes, up.variants) == (down.lanes, down.variants) and up != down
    first, second = trials_on(stand_on(device))([up, down])
    assert first == second
    assert len(device.opened) == 1


def test_plan_that_the_device_refuses_gives_nothing(device: Refusing) -> None:
    trials = trials_on(stand_on(device))
    (score,) = trials(plans_of([Home(0, 1, 1, 0.0, 0), Home(4, 1, 8, 0.0, 0)]))
    assert score.ratios == (0.0, 0.0)
    assert "clusters" in str(trials.refused)


def test_rates_of_a_short_closed_loop_are_between_completions(device: Refusing) -> None:
    shared = make_plan("shared", Problem(MIX, H200, PROFILES))
    log = stand_on(device).run_once(shared, closed_loop(2), WINDOW)
    for found, worker, alone in zip(
        score_of(log).ratios, measure(log).workers, log.alone_rps, strict=True
    ):
        assert found * alone == pytest.approx(worker.rate_rps, abs=1.01 / WINDOW.seconds)
    assert score_of(log).ratios == tuple(
        rate / alone for rate, alone in zip(steady_rates(log), log.alone_rps, strict=True)
    )


@pytest.mark.parametrize("kind", ["throughput", "energy"])
def test_search_goes_on_on_the_device_and_the_best_there_is_the_plan(
    device: Refusing, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eclip.planner.search.refine.time", Looks())
    searching = explorer_of(Verification(finalists=2, refine_seconds=5.0))
    aim = Objective(kind, fairness=0.1)
    found = searching.simulate(aim, QUIET)
    known = (Home(1, 1, 13, 0.0, 0), Home(3, 1, 13, 0.0, 0))
    rig = stand_on(device)
    exploring, deciding = Heard(), Heard()
    trials = trials_on(rig)
    searching.explore(found, aim, rig, trials, exploring, [known])
    assert exploring.parts == pytest.approx([0.2, 0.4, 0.6, 0.8])  # a thought after each
    plan = confirm(searching, found, aim, rig, trials, WINDOW, deciding)
    evidence = plan.evidence
    assert evidence is not None
    assert evidence.tried > 10
    assert [trial.label for trial in evidence.trials] == [PLAIN, STATIC, "search 1", "search 2"]
    (chosen,) = [trial for trial in evidence.trials if trial.chosen]
    if kind == "throughput":
        assert sum(chosen.ratios) == max(sum(trial.ratios) for trial in evidence.trials)
    assert len(plan.variants) == (3 if chosen.label != PLAIN else 1)
    for progress in (exploring, deciding):
        assert progress.parts[0] >= 0 and progress.parts[-1] <= 1
        assert progress.parts == sorted(progress.parts)
    kinds = [run.kind for run in searching.observed]
    assert {"finalist", "random", "static"} <= set(kinds)
    assert sum(one == "static" for one in kinds) == 1
    assert all(min(run.rates_rps) > 0 for run in searching.observed)
    ran = {groups_of(plan) for plan in device.opened}
    assert {run.routes for run in searching.observed} <= ran


def test_what_was_tried_for_one_objective_is_not_tried_again_for_another(device: Refusing) -> None:
    searching = explorer_of(Verification(finalists=1, refine_seconds=1e-6))
    rig = stand_on(device)
    found = searching.simulate(Objective(), QUIET)
    trials = trials_on(rig)
    searching.explore(found, Objective(), rig, trials, QUIET)
    before = len(device.opened)
    searching.explore(found, Objective("energy"), rig, trials, QUIET)
    assert len(device.opened) == before
    confirm(searching, found, Objective(), rig, trials, WINDOW, QUIET)
    runs_in_turns = 3
    assert len(device.opened) - before == runs_in_turns
    other = dataclasses.replace(found, candidates=found.candidates[::-1])
    searching.explore(other, Objective("energy"), rig, trials, QUIET)
    homes = [run.homes for run in searching.observed]
    assert len(homes) == len(set(homes)) > 10  # what is noted twice would be predicted from itself


def test_search_on_the_device_begins_with_priorities_for_those_who_get_little() -> None:
    searching = explorer_of(Verification(finalists=1, refine_seconds=1e-6))
    rig = stand_on(WithPriorities())
    found = searching.simulate(Objective(), QUIET)
    found = dataclasses.replace(
        found, plain=dataclasses.replace(found.plain, ratios=(0.3, 0.7)), candidates=()
    )
    trials = trials_on(rig)
    known = (Home(1, 1, 13, 0.0, 0), Home(3, 1, 13, 0.0, 0))
    searching.explore(found, Objective(), rig, trials, QUIET, [known])
    begun = [run for run in searching.observed if run.kind == "priorities"]
    assert [[home.priority for home in run.homes] for run in begun] == [[1, 0]] * 2
    assert {run.homes[0].most for run in begun} == {16, 13}
    for run in searching.observed:  # what was measured, not what is expected
        (score,) = trials(plans_of([Home(**msgspec.structs.asdict(one)) for one in run.homes]))
        ratios = [rate / alone for rate, alone in zip(run.rates_rps, run.alone_rps, strict=True)]
        assert ratios == pytest.approx(score.ratios, rel=1e-12)


@pytest.mark.parametrize("refine_seconds", [0.0, 1e-6])
def test_search_on_the_device_begins_with_other_kernels_and_may_deploy_them(
    device: Refusing, refine_seconds: float
) -> None:
    searching = explorer_of(Verification(finalists=1, refine_seconds=refine_seconds), others=OTHERS)
    rig = stand_on(device)
    found = searching.simulate(Objective(), QUIET)
    trials = trials_on(rig)
    known = [(Home(0, 1, most, 0.0, 0), Home(15, -1, most, 0.0, 0)) for most in (13, 12, 11)]
    searching.explore(found, Objective(), rig, trials, QUIET, known)
    plan = confirm(searching, found, Objective(), rig, trials, WINDOW, QUIET)
    assert [str(model) for model in plan.models] == ["a~66:1", "b~66:1"]
    assert plan.evidence is not None
    (chosen,) = [trial for trial in plan.evidence.trials if trial.chosen]
    assert sum(chosen.ratios) > 2  # of the rates alone with the own kernels
    begun = [run for run in searching.observed if run.kind == "fewer units"]
    if refine_seconds:
        assert [[home.kernels_for for home in run.homes] for run in begun] == [[66, 66]] * 3
        assert {run.homes[0].most for run in begun} == {16, 13, 12}  # the best two, and all


def test_search_on_the_device_goes_on_from_an_earlier_one(device: Refusing) -> None:
    """The best of it that are fair enough are tried first; the same file serves every objective."""

    def run(first: int, rates: tuple[float, float], power_w: float) -> ObservedRun:
        return ObservedRun(
            mix="a:1,b:1",
            kind="refined",
            homes=(ObservedHome(first, 1, 11), ObservedHome(first, -1, 5)),
            routes=(((11, 2), (4, 2)), ((5, 6),)),
            alone_rps=(100.0, 100.0),
            rates_rps=rates,
            power_w=power_w,
            seconds=0.2,
        )

    good = [run(first, (80.0, 78.0), 400.0) for first in range(4)]
    unfair = [run(first, (99.0, 20.0), 400.0) for first in range(4, 8)]
    frugal = [run(first, (70.0, 69.0), 200.0) for first in range(8, 12)]
    earlier = (*unfair, *good, *frugal, *good)  # some of them twice
    for kind, wanted in (("throughput", good), ("energy", frugal)):
        searching = explorer_of(Verification(2, refine_seconds=0.01, earlier=earlier))
        aim = Objective(kind)
        found = searching.simulate(aim, QUIET)
        rig = stand_on(device)
        trials = trials_on(rig)
        searching.explore(found, aim, rig, trials, QUIET)
        begun = [run.homes for run in searching.observed if run.kind == "earlier"]
        assert set(begun) == {run.homes for run in wanted}
        # It learns from the plans as they ran, and plans their homes anew.
        assert {groups_of(plan) for _, plan, _ in searching._earlier} == {good[0].routes}
        assert all(len(route) == 1 for run in searching.observed for route in run.routes)
        assert confirm(searching, found, aim, rig, trials, WINDOW, QUIET).evidence


def test_earlier_search_and_trials_that_measure_nothing_say_so(device: Refusing) -> None:
    """And do not divide by what plain streams gave."""
    run = ObservedRun(
        mix="a:1,b:1",
        kind="static",
        homes=(ObservedHome(0, 1, 11), ObservedHome(4, -1, 5)),
        alone_rps=(100.0, 100.0),
        rates_rps=(50.0, 50.0),
        power_w=400.0,
        seconds=0.2,
    )
    searching = explorer_of(Verification(2, refine_seconds=0.01, earlier=(run,)))
    found = searching.simulate(Objective(), QUIET)
    rig = stand_on(device)
    trials = trials_on(rig, window=Window(seconds=1e-3, warmup_seconds=0.0, trace_ms=0.0))
    with pytest.raises(UsageError, match="measured nothing"):
        searching.explore(found, Objective(), rig, trials, QUIET)


def test_search_without_other_kernels_begins_with_none(device: Refusing) -> None:
    searching = explorer_of(Verification(finalists=1, refine_seconds=1e-6))
    rig = stand_on(device)
    found = searching.simulate(Objective(), QUIET)
    trials = trials_on(rig)
    searching.explore(found, Objective(), rig, trials, QUIET)
    assert searching.observed
    assert not any(home.kernels_for for run in searching.observed for home in run.homes)


def test_only_busy_workers_are_searched_on_the_device() -> None:
    with pytest.raises(UsageError, match="refine"):
        explorer_of(Verification(1, 1.0)).simulate(Objective("slo"), QUIET)
    arriving = at_rates(MIX, [50.0, None])
    with pytest.raises(UsageError, match="refine"):
        explorer_of(Verification(1, 1.0), arriving).simulate(Objective(), QUIET)


@pytest.mark.parametrize("wrong", [{"finalists": 0}, {"finalists": 1, "refine_seconds": -1.0}])
def test_senseless_verification_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Verification(**wrong)
