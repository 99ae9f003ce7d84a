"""What a device confirms of a search: finalists run in turns, and the best is the plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import eclip
from commands import Cli
from eclip.contest.confirm import finals
from eclip.contest.confirm.explore import Verification, check_measured
from eclip.contest.confirm.finals import confirm, search_and_confirm
from eclip.contest.confirm.plans import make_plan
from eclip.core.device import Window
from eclip.core.load import Load, load_of_mix
from eclip.core.measures import measure
from eclip.core.mix import parse_mix
from eclip.core.runlog import RunLog
from eclip.errors import DeviceError, UsageError
from eclip.files import store
from eclip.planner.policies import PolicyOptions
from eclip.planner.problem import Problem
from eclip.planner.search.decision import OTHER_KERNELS, PLAIN, STATIC, decide, shortlist
from eclip.planner.search.objective import Objective, Score
from eclip.planner.search.placement import Home
from eclip.progress import Progress
from eclip.rig.arrivals import at_rates
from eclip.rig.rig import Rig
from eclip.rig.trials import Trials
from eclip.sim.device import SimDevice, SimSession
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
from simulations import H200, case_of


@pytest.fixture
def device() -> Refusing:
    return Refusing()


def test_what_was_tried_for_one_objective_may_win_for_another(device: Refusing) -> None:
    searching = explorer_of(Verification(finalists=1, refine_seconds=1e-6))
    rig = stand_on(device)
    found = searching.simulate(Objective(), QUIET)
    trials = trials_on(rig)
    # For throughput only one mask each of a few slices is tried, for energy the good ones.
    poor = [one for one in found.candidates if max(home.most for home in one.homes) <= 4]
    worse = dataclasses.replace(found, candidates=tuple(poor))
    searching.explore(worse, Objective(), rig, trials, QUIET)
    first = confirm(searching, worse, Objective(), rig, trials, WINDOW, QUIET)
    searching.explore(found, Objective("energy"), rig, trials, QUIET)
    second = confirm(searching, worse, Objective(), rig, trials, WINDOW, QUIET)
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

    def noting(self: SimSession, load: Load, window: Window) -> RunLog:
        seconds.append(window.seconds)
        return run(self, load, window)

    searching = explorer_of(Verification(finalists=1, refine_seconds=1e-6))
    rig = stand_on(device)
    found = searching.simulate(Objective(), QUIET)
    monkeypatch.setattr(SimSession, "run", noting)
    trials = trials_on(rig)
    for kind, wanted in (("throughput", 0.5), ("energy", 1.0)):
        confirm(searching, found, Objective(kind), rig, trials, WINDOW, QUIET)
        assert seconds[-1] == wanted


def test_plain_streams_with_other_kernels_are_in_the_finals_once() -> None:
    searching = explorer_of(Verification(finalists=1), others=OTHERS)
    problem = Problem(MIX, H200, PROFILES, OTHERS)
    found = searching.simulate(Objective(), QUIET)
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


def test_device_that_refuses_all_masks_has_plain_streams(
    device: Refusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_plain(program: Any, sources: Any, *, brief: bool = False) -> Any:
        if any(lane.mask != H200.full for lane in program.plan.lanes):
            raise DeviceError("no masks here")
        return SimDevice.open(device, program, sources, brief=brief)

    searching = explorer_of(Verification(finalists=2, refine_seconds=1e-6))
    rig = stand_on(device)
    found = searching.simulate(Objective(), QUIET)
    monkeypatch.setattr(device, "open", open_plain)
    trials = trials_on(rig)
    searching.explore(found, Objective(), rig, trials, QUIET)
    plan = confirm(searching, found, Objective(), rig, trials, WINDOW, QUIET)
    assert all(lane.mask == H200.full for lane in plan.lanes)


@pytest.mark.parametrize("refine_seconds", [0.0, 0.1])
def test_runs_too_short_for_anybody_say_so(
    device: Refusing, refine_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(finals._SECONDS, "throughput", 0.0)
    searching = explorer_of(Verification(1, refine_seconds))
    rig = stand_on(device)
    found = searching.simulate(Objective(), QUIET)
    moment = Window(seconds=1e-3, warmup_seconds=0.0, trace_ms=0.0)
    trials = trials_on(rig, window=moment)
    with pytest.raises(UsageError, match="measured nothing"):
        searching.explore(found, Objective(), rig, trials, QUIET)
        confirm(searching, found, Objective(), rig, trials, moment, QUIET)


def test_objective_that_counts_only_who_completed_nothing_says_so() -> None:
    plain = Score((0.0, 0.5), 300.0, (float("inf"), 1.0))
    check_measured(plain, [Objective(weights=(1.0, 1.0))], 0.3)
    with pytest.raises(UsageError, match="measured nothing"):
        check_measured(plain, [Objective(), Objective(weights=(1.0, 0.0))], 0.3)


def test_finalist_that_the_device_refuses_is_left_out_of_the_finals(device: Refusing) -> None:
    searching = explorer_of(Verification(finalists=3))
    found = searching.simulate(Objective(), QUIET)
    (narrow,) = plans_of([Home(0, 1, 1, 0.0, 0), Home(4, 1, 8, 0.0, 0)])
    liked, *others = found.candidates
    refused = dataclasses.replace(
        liked, homes=(Home(0, 1, 1, 0.0, 4), liked.homes[1]), plan=narrow, value=liked.value + 1
    )
    spoilt = dataclasses.replace(found, candidates=(refused, *others))
    rig = stand_on(device)
    trials = trials_on(rig)
    plan = confirm(searching, spoilt, Objective(), rig, trials, WINDOW, QUIET)
    assert plan.evidence is not None
    labels = [trial.label for trial in plan.evidence.trials]
    assert "search 1" not in labels
    assert labels[:2] == [PLAIN, STATIC] and "search 2" in labels
    assert sum(trial.chosen for trial in plan.evidence.trials) == 1


def test_plan_that_was_chosen_without_knowing_its_power_says_nothing_of_it() -> None:
    problem = Problem(MIX, H200, PROFILES)
    found = explorer_of(Verification(1)).simulate(Objective(), QUIET)
    entries = shortlist(found, problem, 1, Objective())
    scores = [dataclasses.replace(entry.found, power_w=0.0) for entry in entries]
    plan = decide(entries, scores, found, Objective(), seed=0, device="a GPU", modelled=False)
    assert "STP" in plan.why and "kJ" not in plan.why


# One floor for finding and verifying


def test_readme_example_deploys_a_finalist_just_above_the_floor_and_explains_what_it_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = eclip.search("paper/3", "energy", batches=3, verify=1)
    assert plan.evidence is not None
    fairness = {
        trial.label: min(trial.ratios) / max(trial.ratios) for trial in plan.evidence.trials
    }
    refused = {trial.label: trial.refused for trial in plan.evidence.trials}
    assert 0.70 <= fairness["search 1"] <= 0.72
    assert refused["search 1"] == ()
    assert [trial.label for trial in plan.evidence.trials if trial.chosen] == ["search 1"]
    assert plan.evidence.missed == ()
    words = f"fairness {fairness[PLAIN]:.4f}, at least 0.7000 wanted"
    assert refused[PLAIN] == (words,)
    path = tmp_path / "plan.json"
    store.save(plan, path)
    cli = Cli(monkeypatch, capsys)
    said = " ".join(cli("explain", path).out.split())
    assert f"Refused: {PLAIN}: {words}" in said
    assert "Refused: search 1" not in said
    trials = cli("explain", path, "--json").data["evidence"]["trials"]
    assert {trial["label"]: tuple(trial["refused"]) for trial in trials} == refused


# Promises that are not kept


def test_mix_that_is_offered_more_than_any_plan_serves_is_overloaded_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = eclip.plan("bert:8@99999rps,albert:8@10rps", "search", batches=0)
    assert plan.evidence is not None
    assert plan.evidence.objective == "throughput"
    (planned,) = plan.evidence.missed
    assert planned.startswith("bert is overloaded: 99999 requests/s are offered")
    (ran,) = eclip.measure(eclip.run(plan, seconds=0.2)).missed
    assert ran.startswith("bert is overloaded:")
    path = tmp_path / "plan.json"
    store.save(plan, path)
    said = " ".join(Cli(monkeypatch, capsys)("explain", path).out.split())
    assert "Not kept: bert is overloaded: 99999 requests/s are offered" in said


@pytest.mark.parametrize("verified", [False, True])
def test_bounds_that_a_search_for_throughput_misses_are_said(verified: bool) -> None:
    case = case_of(PROFILES, mix=parse_mix("a:1@150rps/1.7ms,b:1"))
    options = PolicyOptions(batches=0, objective=Objective())
    with Rig(case, Refusing()) as rig:
        if verified:
            plan = search_and_confirm(rig, options, Verification(1), QUIET)
        else:
            plan = make_plan(case, "search", options)
        log = rig.run_once(plan, load_of_mix(plan.mix, 0.5, 0.05, 0), Window(0.5))
    assert plan.evidence is not None
    said = [words for words in plan.evidence.missed if "misses its bound" in words]
    (ran,) = (words for words in measure(log).missed if "bound" in words)
    for words in (*said, ran):
        assert words.startswith("a misses its bound: p99 ")
        assert words.endswith("at most 1.70 ms wanted")
    assert len(said) == 1


# Stop requests


def test_stop_before_all_finalists_ran_leaves_the_decision_to_the_search(device: Refusing) -> None:
    searching = explorer_of(Verification(finalists=2))
    found = searching.simulate(Objective(), QUIET)
    rig, progress = stand_on(device), Heard(stop_at=0.3)
    trials = trials_on(rig)
    plan = confirm(searching, found, Objective(), rig, trials, WINDOW, progress)
    assert plan.evidence is not None
    assert (plan.evidence.device, plan.evidence.modelled) == ("the simulator", True)
    assert plan.evidence.tried == 0
    assert plan.main == shortlist(found, searching.problem, 1, Objective())[2].plan.main
    later = Heard(stop_at=0.6)  # in the second round: everybody ran once
    plan = confirm(searching, found, Objective(), rig, trials, WINDOW, later)
    assert plan.evidence is not None
    assert plan.evidence.device == device.title


@pytest.mark.parametrize("phase", ["searching", "searching on the device", "trying the finalists"])
def test_stop_in_any_phase_of_a_search_returns_the_best_so_far(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eclip.planner.search.refine.time", Looks())
    progress = Heard(stop_at=0.0, stop_in=phase)
    rig = Rig(case_of(PROFILES), Refusing(Progress(progress)))
    options = PolicyOptions(batches=400 if phase == "searching" else 1)
    plan = search_and_confirm(rig, options, Verification(1, refine_seconds=5.0), progress)
    assert progress.stopped
    assert phase in progress.phases
    assert plan.evidence is not None
    assert plan.evidence.batches <= 1
    assert sum(trial.chosen for trial in plan.evidence.trials) == 1


def test_stop_before_the_finals_asks_nothing_of_the_device_and_still_tells_of_overload() -> None:
    progress = Heard(stop_at=0.0, stop_in="searching")
    device = WithPriorities(Progress(progress))
    rig = Rig(case_of(PROFILES, mix=at_rates(MIX, [300.0, 99999.0])), device)
    options = PolicyOptions(batches=400)
    plan = search_and_confirm(rig, options, Verification(1), progress)
    assert progress.stopped
    assert device.opened == []
    assert plan.evidence is not None
    assert plan.evidence.missed[0].startswith("b is overloaded: 99999 requests/s are offered")


@pytest.mark.parametrize("after", range(4))
def test_stop_in_the_middle_of_a_run_on_the_device_keeps_what_the_search_found(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run raises that it was stopped, or is cut short; neither may cost the plan."""
    progress, runs = Progress(), 0
    searching = explorer_of(Verification(1, refine_seconds=1e-6))
    found = searching.simulate(Objective(), progress)
    rig = stand_on(Refusing(Progress(progress)))
    run = SimSession.run

    def stopping(self: SimSession, load: Load, window: Window) -> RunLog:
        nonlocal runs
        if runs == after:
            progress.stop()
        runs += 1
        return run(self, load, window)

    monkeypatch.setattr(SimSession, "run", stopping)
    trials = Trials(rig, window=WINDOW, progress=progress)
    searching.explore(found, Objective(), rig, trials, progress)
    plan = confirm(searching, found, Objective(), rig, trials, WINDOW, progress)
    assert runs == after + 1
    assert plan.evidence is not None
    assert plan.evidence.device == "the simulator"
