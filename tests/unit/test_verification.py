"""A search that goes on on a device, and what the device confirms; the device is the simulator."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from eclip.artefacts import store
from eclip.artefacts.calibration import Calibration
from eclip.artefacts.measures import measure, steady_rates
from eclip.artefacts.mix import Mix, mix_of
from eclip.artefacts.observations import ObservedHome, ObservedRun
from eclip.artefacts.plan import Plan
from eclip.artefacts.profile import Profile
from eclip.artefacts.topology import Topology
from eclip.cli import verification, wiring
from eclip.cli.verification import Opened, Verification, Verifier, check_measured
from eclip.devices.base import Window
from eclip.devices.load import at_rates
from eclip.devices.sim.device import SimDevice, SimSession
from eclip.errors import DeviceError, UsageError
from eclip.lab.alone import alone_rates
from eclip.lab.trials import Trials, score_of
from eclip.planning.policies import PolicyOptions, make_plan
from eclip.planning.problem import Problem
from eclip.planning.search.decision import OTHER_KERNELS, PLAIN, STATIC, decide, shortlist
from eclip.planning.search.objective import Objective, Score
from eclip.planning.search.placement import Home, Placer, groups_of
from simulations import flat_profile

H200 = store.load_builtin(Topology, "h200")
CALIBRATION = store.load_builtin(Calibration, "h200")
PROFILES = (flat_profile("a", [400_000] * 4, H200), flat_profile("b", [150_000] * 6, H200))
OTHERS = (flat_profile("a~66", [150_000] * 5, H200), flat_profile("b~66", [50_000] * 6, H200))
MIX = mix_of([("a", 1), ("b", 1)])
WINDOW = Window(seconds=0.05, warmup_seconds=0.01, trace_ms=0.0)


class Refusing(SimDevice):
    """Counts what it opens, and refuses plans with a lane of one slice."""

    def __init__(self) -> None:
        super().__init__(H200, CALIBRATION)
        self.opened: list[Plan] = []

    def open(self, program: Any, sources: Any) -> Any:
        if any(len(lane.mask) == 1 for lane in program.plan.lanes):
            raise DeviceError("clusters do not fit")
        self.opened.append(program.plan)
        return super().open(program, sources)


@pytest.fixture
def device() -> Refusing:
    return Refusing()


def opened_on(device: Refusing) -> Opened:
    sources = wiring.Sources((*OTHERS, *PROFILES), "sim")
    opened = Opened(device, sources, alone_rates(device, PROFILES, PROFILES))
    device.opened.clear()
    return opened


def trials_on(device: Refusing) -> Trials:
    return opened_on(device).trials(MIX, window=WINDOW)


def verifier(how: Verification, mix: Mix = MIX, others: tuple[Profile, ...] = ()) -> Verifier:
    problem = Problem(mix, H200, PROFILES, others)
    evaluate = wiring.make_evaluator(problem, CALIBRATION)
    return Verifier(problem, evaluate, PolicyOptions(batches=1), how)


def plans_of(*homes: Sequence[Home]) -> list[Plan]:
    placer = Placer(Problem(MIX, H200, PROFILES))
    return [placer.plan(tuple(one), "search", "") for one in homes]


def test_trial_tells_what_a_run_gives_and_a_plan_is_tried_once(device: Refusing) -> None:
    trials = trials_on(device)
    whole, half = plans_of([Home(0, 1, 16, 0.0, 0)] * 2, [Home(0, 1, 8, 0.0, 0)] * 2)
    first, second = trials([whole, half])
    assert first.ratios != second.ratios
    assert trials([half, whole, half]) == [second, first, second]
    assert len(device.opened) == 2
    assert 0 < min(first.ratios) <= max(first.ratios) <= 1.01


def test_plan_that_the_device_refuses_gives_nothing(device: Refusing) -> None:
    trials = trials_on(device)
    (score,) = trials(plans_of([Home(0, 1, 1, 0.0, 0), Home(4, 1, 8, 0.0, 0)]))
    assert score.ratios == (0.0, 0.0)
    assert "clusters" in str(trials.refused)


def test_rates_of_a_short_closed_loop_are_between_completions(device: Refusing) -> None:
    shared = make_plan("shared", Problem(MIX, H200, PROFILES))
    options = wiring.RunOptions("sim", WINDOW, 0, None)
    (log,) = wiring.run_plans([shared], PROFILES, CALIBRATION, options, lambda _: None)
    for found, worker, alone in zip(
        score_of(log).ratios, measure(log).workers, log.alone_rps, strict=True
    ):
        assert found * alone == pytest.approx(worker.rate_rps, abs=1.01 / WINDOW.seconds)
    assert score_of(log).ratios == tuple(
        rate / alone for rate, alone in zip(steady_rates(log), log.alone_rps, strict=True)
    )


@pytest.mark.parametrize("kind", ["throughput", "energy"])
def test_search_goes_on_on_the_device_and_the_best_there_is_the_plan(
    device: Refusing, kind: str
) -> None:
    searching = verifier(Verification(finalists=2, refine_seconds=0.5))
    aim = Objective(kind, least_fairness=0.1)
    found = searching.simulate(aim, lambda _: None)
    known = (Home(1, 1, 13, 0.0, 0), Home(3, 1, 13, 0.0, 0))
    opened = opened_on(device)
    seen: list[float] = []
    trials = opened.trials(MIX, window=WINDOW)
    searching.explore(found, aim, opened, trials, lambda part: seen.append(part - 1), [known])
    plan = searching.confirm(found, aim, opened, trials, WINDOW, seen.append)
    evidence = plan.evidence
    assert evidence is not None
    assert evidence.tried > 10
    assert [trial.label for trial in evidence.trials] == [PLAIN, STATIC, "search 1", "search 2"]
    (chosen,) = [trial for trial in evidence.trials if trial.chosen]
    if kind == "throughput":
        assert sum(chosen.ratios) == max(sum(trial.ratios) for trial in evidence.trials)
    assert len(plan.variants) == (3 if chosen.label != PLAIN else 1)
    assert seen == sorted(seen)
    kinds = [run.kind for run in searching.observed]
    assert {"finalist", "random", "static"} <= set(kinds)
    assert sum(one == "static" for one in kinds) == 1
    assert all(min(run.rates_rps) > 0 for run in searching.observed)
    ran = {groups_of(plan) for plan in device.opened}
    assert {run.routes for run in searching.observed} <= ran


def test_what_was_tried_for_one_objective_is_not_tried_again_for_another(device: Refusing) -> None:
    searching = verifier(Verification(finalists=1, refine_seconds=1e-6))
    opened = opened_on(device)
    found = searching.simulate(Objective(), lambda _: None)
    trials = opened.trials(MIX, window=WINDOW)
    searching.explore(found, Objective(), opened, trials, lambda _: None)
    before = len(device.opened)
    searching.explore(found, Objective("energy"), opened, trials, lambda _: None)
    assert len(device.opened) == before
    searching.confirm(found, Objective(), opened, trials, WINDOW, lambda _: None)
    runs_in_turns = 3
    assert len(device.opened) - before == runs_in_turns
    other = dataclasses.replace(found, candidates=found.candidates[::-1])
    searching.explore(other, Objective("energy"), opened, trials, lambda _: None)
    homes = [run.homes for run in searching.observed]
    assert len(homes) == len(set(homes)) > 10  # what is noted twice would be predicted from itself


def test_what_was_tried_for_one_objective_may_win_for_another(device: Refusing) -> None:
    searching = verifier(Verification(finalists=1, refine_seconds=1e-6))
    opened = opened_on(device)
    found = searching.simulate(Objective(), lambda _: None)
    trials = opened.trials(MIX, window=WINDOW)
    # For throughput only one mask each of a few slices is tried, for energy the good ones.
    poor = [one for one in found.candidates if max(home.most for home in one.homes) <= 4]
    worse = dataclasses.replace(found, candidates=tuple(poor))
    searching.explore(worse, Objective(), opened, trials, lambda _: None)
    first = searching.confirm(worse, Objective(), opened, trials, WINDOW, lambda _: None)
    searching.explore(found, Objective("energy"), opened, trials, lambda _: None)
    second = searching.confirm(worse, Objective(), opened, trials, WINDOW, lambda _: None)
    stp = []
    for plan in (first, second):
        assert plan.evidence is not None
        stp += [sum(one.ratios) for one in plan.evidence.trials if one.label == "search 1"]
    assert stp[1] > stp[0]


def test_decision_falls_in_runs_beyond_short_bursts_and_of_many_ticks(
    device: Refusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds: list[float] = []
    run = SimSession.run

    def noting(self: SimSession, load: Any, window: Window, *rest: Any) -> Any:
        seconds.append(window.seconds)
        return run(self, load, window, *rest)

    searching = verifier(Verification(finalists=1, refine_seconds=1e-6))
    opened = opened_on(device)
    found = searching.simulate(Objective(), lambda _: None)
    monkeypatch.setattr(SimSession, "run", noting)
    trials = opened.trials(MIX, window=WINDOW)
    for kind, wanted in (("throughput", 0.5), ("energy", 1.0)):
        searching.confirm(found, Objective(kind), opened, trials, WINDOW, lambda _: None)
        assert seconds[-1] == wanted


def test_search_on_the_device_begins_with_priorities_for_those_who_get_little(
    device: Refusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    searching = verifier(Verification(finalists=1, refine_seconds=1e-6))
    opened = opened_on(device)
    found = searching.simulate(Objective(), lambda _: None)
    found = dataclasses.replace(
        found, plain=dataclasses.replace(found.plain, ratios=(0.3, 0.7)), candidates=()
    )
    monkeypatch.setattr(wiring, "priority_levels", lambda _: 3)
    trials = opened.trials(MIX, window=WINDOW)
    known = (Home(1, 1, 13, 0.0, 0), Home(3, 1, 13, 0.0, 0))
    searching.explore(found, Objective(), opened, trials, lambda _: None, [known])
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
    searching = verifier(Verification(finalists=1, refine_seconds=refine_seconds), others=OTHERS)
    opened = opened_on(device)
    found = searching.simulate(Objective(), lambda _: None)
    trials = opened.trials(MIX, window=WINDOW)
    known = [(Home(0, 1, most, 0.0, 0), Home(15, -1, most, 0.0, 0)) for most in (13, 12, 11)]
    searching.explore(found, Objective(), opened, trials, lambda _: None, known)
    plan = searching.confirm(found, Objective(), opened, trials, WINDOW, lambda _: None)
    assert [worker.model for worker in plan.workers] == ["a~66:1", "b~66:1"]
    assert plan.evidence is not None
    (chosen,) = [trial for trial in plan.evidence.trials if trial.chosen]
    assert sum(chosen.ratios) > 2  # of the rates alone with the own kernels
    begun = [run for run in searching.observed if run.kind == "other kernels"]
    if refine_seconds:
        assert [[home.kernels_for for home in run.homes] for run in begun] == [[66, 66]] * 3
        assert {run.homes[0].most for run in begun} == {16, 13, 12}  # the best two, and all


def test_plain_streams_with_other_kernels_are_in_the_finals_once() -> None:
    searching = verifier(Verification(finalists=1), others=OTHERS)
    problem = Problem(MIX, H200, PROFILES, OTHERS)
    found = searching.simulate(Objective(), lambda _: None)
    unmasked = found.unmasked
    assert unmasked and all(lane.mask == H200.full for lane in unmasked[0].plan.lanes)
    masked = [one for one in found.candidates if one not in unmasked]
    own = dataclasses.replace(found, candidates=(*masked, *unmasked))
    (*others, last) = shortlist(own, problem, 1, Objective())
    assert (last.label, last.plan) == (OTHER_KERNELS, unmasked[0].plan)
    assert [entry.label for entry in others] == [PLAIN, STATIC, "search 1"]
    first = dataclasses.replace(found, candidates=(*unmasked, *masked))
    labels = [entry.label for entry in shortlist(first, problem, 1, Objective())]
    assert labels == [PLAIN, STATIC, "search 1"]  # it is the finalist


@pytest.mark.slow
@pytest.mark.parametrize(("levels", "others"), [(3, ()), (3, OTHERS), (1, OTHERS)])
@pytest.mark.parametrize("short", [3.0, math.inf])  # infinite: nobody asked it anything
def test_who_waits_longest_goes_first_in_finals_for_latency(
    levels: int,
    others: tuple[Profile, ...],
    short: float,
    device: Refusing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arriving = at_rates(MIX, [150.0, 300.0])
    searching = verifier(Verification(finalists=1), arriving, others)
    aim = Objective("latency")
    found = searching.simulate(aim, lambda _: None)
    opened = opened_on(device)
    # Against their lengths the second waits longer, though its tail is the shorter.
    tails = tuple(wait / rate for wait, rate in zip((short, 4.0), opened.alone_rps, strict=True))
    found = dataclasses.replace(found, plain=dataclasses.replace(found.plain, p99_ms=tails))
    monkeypatch.setattr(wiring, "priority_levels", lambda _: levels)
    trials = opened.trials(arriving, window=WINDOW)
    plan = searching.confirm(found, aim, opened, trials, WINDOW, lambda _: None)
    assert plan.evidence is not None
    labels = [trial.label for trial in plan.evidence.trials if trial.label.endswith("first")]
    plain = [PLAIN, OTHER_KERNELS] if others else [PLAIN]
    assert labels == ([f"{label}, b first" for label in plain] if levels > 1 else [])
    tried = [one for one in device.opened if any(lane.priority for lane in one.lanes)]
    assert len(tried) == len(labels)
    for one in tried:
        assert [lane.priority for lane in one.lanes] == [0, 1]


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
        searching = verifier(Verification(2, refine_seconds=0.01, earlier=earlier))
        aim = Objective(kind)
        found = searching.simulate(aim, lambda _: None)
        opened = opened_on(device)
        trials = opened.trials(MIX, window=WINDOW)
        searching.explore(found, aim, opened, trials, lambda _: None)
        begun = [run.homes for run in searching.observed if run.kind == "earlier"]
        assert set(begun) == {run.homes for run in wanted}
        # It learns from the plans as they ran, and plans their homes anew.
        assert {groups_of(plan) for _, plan, _ in searching._earlier} == {good[0].routes}
        assert all(len(route) == 1 for run in searching.observed for route in run.routes)
        assert searching.confirm(found, aim, opened, trials, WINDOW, lambda _: None).evidence


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
    searching = verifier(Verification(2, refine_seconds=0.01, earlier=(run,)))
    found = searching.simulate(Objective(), lambda _: None)
    opened = opened_on(device)
    trials = opened.trials(MIX, window=Window(seconds=1e-4, warmup_seconds=0.0, trace_ms=0.0))
    with pytest.raises(UsageError, match="measured nothing"):
        searching.explore(found, Objective(), opened, trials, lambda _: None)


def test_search_without_other_kernels_begins_with_none(device: Refusing) -> None:
    searching = verifier(Verification(finalists=1, refine_seconds=1e-6))
    opened = opened_on(device)
    found = searching.simulate(Objective(), lambda _: None)
    trials = opened.trials(MIX, window=WINDOW)
    searching.explore(found, Objective(), opened, trials, lambda _: None)
    assert searching.observed
    assert not any(home.kernels_for for run in searching.observed for home in run.homes)


def test_device_that_refuses_all_masks_has_plain_streams(
    device: Refusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_plain(program: Any, sources: Any) -> Any:
        if any(lane.mask != H200.full for lane in program.plan.lanes):
            raise DeviceError("no masks here")
        return SimDevice.open(device, program, sources)

    searching = verifier(Verification(finalists=2, refine_seconds=1e-6))
    opened = opened_on(device)
    found = searching.simulate(Objective(), lambda _: None)
    monkeypatch.setattr(device, "open", open_plain)
    trials = opened.trials(MIX, window=WINDOW)
    searching.explore(found, Objective(), opened, trials, lambda _: None)
    plan = searching.confirm(found, Objective(), opened, trials, WINDOW, lambda _: None)
    assert all(lane.mask == H200.full for lane in plan.lanes)


@pytest.mark.parametrize("refine_seconds", [0.0, 0.1])
def test_runs_too_short_for_anybody_say_so(
    device: Refusing, refine_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(verification._SECONDS, "throughput", 0.0)
    searching = verifier(Verification(1, refine_seconds))
    opened = opened_on(device)
    found = searching.simulate(Objective(), lambda _: None)
    moment = Window(seconds=1e-4, warmup_seconds=0.0, trace_ms=0.0)
    trials = opened.trials(MIX, window=moment)
    with pytest.raises(UsageError, match="measured nothing"):
        searching.explore(found, Objective(), opened, trials, lambda _: None)
        searching.confirm(found, Objective(), opened, trials, moment, lambda _: None)


def test_objective_that_counts_only_who_completed_nothing_says_so() -> None:
    plain = Score((0.0, 0.5), 300.0, (float("inf"), 1.0))
    check_measured(plain, [Objective(weights=(1.0, 1.0))], 0.3)
    with pytest.raises(UsageError, match="measured nothing"):
        check_measured(plain, [Objective(), Objective(weights=(1.0, 0.0))], 0.3)


def test_finalist_that_the_device_refuses_is_left_out_of_the_finals(device: Refusing) -> None:
    searching = verifier(Verification(finalists=3))
    found = searching.simulate(Objective(), lambda _: None)
    (narrow,) = plans_of([Home(0, 1, 1, 0.0, 0), Home(4, 1, 8, 0.0, 0)])
    liked, *others = found.candidates
    refused = dataclasses.replace(
        liked, homes=(Home(0, 1, 1, 0.0, 4), liked.homes[1]), plan=narrow, value=liked.value + 1
    )
    spoilt = dataclasses.replace(found, candidates=(refused, *others))
    opened = opened_on(device)
    trials = opened.trials(MIX, window=WINDOW)
    plan = searching.confirm(spoilt, Objective(), opened, trials, WINDOW, lambda _: None)
    assert plan.evidence is not None
    labels = [trial.label for trial in plan.evidence.trials]
    assert "search 1" not in labels
    assert labels[:2] == [PLAIN, STATIC] and "search 2" in labels
    assert sum(trial.chosen for trial in plan.evidence.trials) == 1


def test_plan_that_was_chosen_without_knowing_its_power_says_nothing_of_it() -> None:
    problem = Problem(MIX, H200, PROFILES)
    found = verifier(Verification(1)).simulate(Objective(), lambda _: None)
    entries = shortlist(found, problem, 1, Objective())
    scores = [dataclasses.replace(entry.found, power_w=0.0) for entry in entries]
    plan = decide(entries, scores, found, Objective(), seed=0, device="a GPU", modelled=False)
    assert "STP" in plan.why and "kJ" not in plan.why


def test_only_busy_workers_are_searched_on_the_device() -> None:
    with pytest.raises(UsageError, match="--refine"):
        verifier(Verification(1, 1.0)).simulate(Objective("latency"), lambda _: None)
    some = mix_of([("a", 1), ("b", 1)])
    workers = (msgspec.structs.replace(some.workers[0], rate_rps=50.0), some.workers[1])
    arriving = msgspec.structs.replace(some, workers=workers)
    with pytest.raises(UsageError, match="--refine"):
        verifier(Verification(1, 1.0), arriving).simulate(Objective(), lambda _: None)


@pytest.mark.parametrize("wrong", [{"finalists": 0}, {"finalists": 1, "refine_seconds": -1.0}])
def test_senseless_verification_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Verification(**wrong)


def test_margin_lies_above_the_floors() -> None:
    plain = Score((0.6, 0.6), 400.0, (1.0, 1.0))
    close = Score((0.705, 1.0), 400.0, (1.0, 1.0))
    aim = Objective(least_fairness=0.7)
    assert aim.value(close, Score((0.3, 0.9), 400.0, (1.0, 1.0))) > 0
    careful = dataclasses.replace(aim, rough=True)
    assert careful.value(close, Score((0.3, 0.9), 400.0, (1.0, 1.0))) < 0
    energy = dataclasses.replace(Objective("energy"), rough=True)
    same = Score((0.601, 0.601), 300.0, (1.0, 1.0))
    assert energy.value(same, plain) < Objective("energy").value(same, plain) - 0.2
    more = Score((0.606, 0.606), 300.0, (1.0, 1.0))
    assert energy.value(more, plain) == Objective("energy").value(more, plain)
