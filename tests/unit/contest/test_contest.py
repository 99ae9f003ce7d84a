"""A contest's order, statistics and failures, on the simulator and with stand-ins for processes."""

from __future__ import annotations

import collections
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import eclip
from eclip.contest.confirm.explore import Verification
from eclip.contest.confirm.plans import simulated_promises
from eclip.contest.contest import (
    CompareOptions,
    Contest,
    ContestOptions,
    _process_plans,
    known_policies,
    usual_policies,
)
from eclip.contest.outcome import observations_of, outcome_of
from eclip.core.device import Capability, Closing, SourceKind, Window
from eclip.core.load import CLOSED_LOOP, Load
from eclip.core.measures import measure, measure_together
from eclip.core.mix import parse_mix
from eclip.core.plan import Lanes, Plan, Processes, Sharing
from eclip.core.profile import Profile
from eclip.core.runlog import RunLog
from eclip.core.trace import with_traces
from eclip.cuda.processes.child import Job
from eclip.cuda.processes.session import Host, ProcessSession, ProcessSets
from eclip.errors import DeviceError, PlanningError, StoppedError, UsageError
from eclip.planner.policies import PolicyOptions, make_plan
from eclip.planner.problem import Problem
from eclip.planner.search.objective import Objective
from eclip.planner.tiers import FOR_SERVICES
from eclip.progress import Progress
from eclip.reports.chapters import Named, chapters_of
from eclip.rig.arrivals import Arrivals, long_enough
from eclip.rig.rig import Rig
from eclip.rig.rounds import rotation
from eclip.sim.device import SimDevice
from eclip.tune.fit import Replay
from heard import Heard
from punctual import run_in_time
from simulations import CALIBRATIONS, H200, case_of, flat_profile
from standins import ENTRY, SteadyCounter, install_control, processes_with, trace_of

CALIBRATION = CALIBRATIONS["h200"]
UUID = f"GPU-of-contest-{os.getpid()}"
# Spelt otherwise than eclip would: so sessions for the rates alone are told from the contest's.
MIX = parse_mix("steady:2, steady:5")


def steady(batch: int, model: str = "steady", kernel_ns: int = 300_000) -> Profile:
    """What a stand-in process of this batch serves, as a profile for the simulator."""
    flat = flat_profile(model, [batch * kernel_ns] * 3, H200)
    trace = trace_of(model, batch)
    return msgspec.structs.replace(
        flat, trace=trace, fingerprint=with_traces(H200.fingerprint, [trace])
    )


SETTINGS = {"trials", "processes", "reopen"}


class Stage:
    """What a device noted: who ran, under which arrivals; and how it is to fail."""

    def __init__(self) -> None:
        self.profiles = (steady(2), steady(5))
        self.others: tuple[Profile, ...] = ()  # that a search may choose
        self.planned: tuple[Profile, ...] = ()  # of plans from files
        self.ran: list[str] = []
        self.loads: list[Any] = []
        self.logs: list[RunLog] = []
        self.trials: list[RunLog] = []
        self.windows: list[Window] = []
        self.opened: list[str] = []
        self.alone: list[Load] = []  # of the runs that measure rates alone
        self.slower: Sequence[float] = ()  # how much, each time that these are measured
        self.refuse: Sequence[int] = ()  # which masks do not open, counted from 1
        self.fail: dict[str, BaseException] = {}  # by policy, from its second run on
        self.counter = SteadyCounter()

    def contest(
        self,
        *policies: str,
        plans: dict[str, Plan] | None = None,
        processes_run: bool = False,
        seconds: float = 0.1,
        part: float | None = None,
        requests: int = 2000,
        progress: Progress | None = None,
        **options: Any,
    ) -> Contest:
        """Without policies all that can run take part."""
        window = Window(seconds=seconds, warmup_seconds=0.02, trace_ms=10.0)
        device = ProcessDevice(self) if processes_run else StagedDevice(self)
        repeats = options.pop("repeats", 1)
        settings: dict[str, Any] = {"seed": 3, "trials": 4, "trial_seconds": 0.05}
        settings |= {name: options.pop(name) for name in SETTINGS & options.keys()}
        case = case_of(self.profiles, mix=MIX, others=self.others)
        return Contest(
            Rig(case, device, self.planned),
            Arrivals(MIX, window, repeats=repeats, seed=3, part=part, requests=requests),
            ContestOptions(
                policies=policies or None,
                plans=plans or {},
                repeats=repeats,
                policy=PolicyOptions(batches=0),
                settings=CompareOptions(**settings),
                **({"objectives": (Objective(),)} | options),
            ),
            progress or Progress(),
        )


class StagedDevice(SimDevice):
    def __init__(self, stage: Stage) -> None:
        super().__init__(H200, CALIBRATION)
        self.stage = stage

    def open(self, program: Any, sources: Any, *, brief: bool = False) -> Any:
        if program.plan.mix.name == MIX.name:
            self.stage.opened.append(program.plan.policy)
            refused = self.stage.refuse
            if program.plan.policy == "masks" and self.stage.opened.count("masks") in refused:
                raise DeviceError("clusters do not fit")
        session = super().open(program, sources, brief=brief)
        return StagedSession(self.stage, session, program.plan)


class ProcessDevice(StagedDevice):
    """As a GPU: what shares it by turns or processes runs in processes, which are stand-ins."""

    capabilities = StagedDevice.capabilities | {Capability.PROCESSES}
    driver = "1.0"  # type: ignore[assignment]
    modelled = False

    def source_kind(self, sharing: Sharing) -> SourceKind:
        return SourceKind.PROFILE if isinstance(sharing, Lanes) else SourceKind.JOB

    def start(self, plans: Sequence[Plan], jobs: Sequence[Sequence[Job]]) -> ProcessSets:
        host = Host(UUID, "a GPU", H200, self.stage.counter)
        standins = [[Job(ENTRY, job.model) for job in wanted] for wanted in jobs]
        return ProcessSets(host, plans, standins)


class StagedSession(Closing):
    def __init__(self, stage: Stage, inner: Any, plan: Plan) -> None:
        self.stage, self.inner, self.plan = stage, inner, plan

    def run(self, load: Load, window: Window) -> RunLog:
        stage, policy = self.stage, self.plan.policy
        if self.plan.mix.name != MIX.name:
            return self._run_alone(load, window)
        log: RunLog = self.inner.run(load, window)
        if window.seconds <= 0.06:
            stage.trials.append(log)
            return log
        error = stage.fail.get(policy)
        if error is not None and policy in stage.ran:
            raise error
        stage.ran.append(policy)
        stage.loads.append(load)
        stage.windows.append(window)
        stage.logs.append(log)
        return log

    def _run_alone(self, load: Load, window: Window) -> RunLog:
        log: RunLog = self.inner.run(load, window)
        time = len(self.stage.alone) // len(self.plan.workers)
        self.stage.alone.append(load)
        if not self.stage.slower:
            return log
        ends = [round(end * self.stage.slower[time]) for end in log.requests.end_ns]
        requests = msgspec.structs.replace(log.requests, end_ns=tuple(ends))
        return msgspec.structs.replace(log, requests=requests)

    def close(self) -> None:
        self.inner.close()


def with_rates_alone(log: RunLog, contest: Contest) -> RunLog:
    return msgspec.structs.replace(log, alone_rps=contest.rig.alone_rps)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(ProcessSession, "run", run_in_time)
    return Stage()


@pytest.fixture
def no_process_left() -> Iterator[None]:
    yield
    assert processes_with(f"CUDA_VISIBLE_DEVICES={UUID}") == []


@pytest.fixture
def mps_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_control(tmp_path, "working")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.parametrize("sessions", range(1, 14))
def test_over_as_many_rounds_as_sessions_each_has_every_place_once(sessions: int) -> None:
    order = np.array([session for _, session in rotation(sessions, sessions)])
    rounds = order.reshape(sessions, sessions)
    everybody = np.arange(sessions)
    assert (np.sort(rounds, axis=0) == everybody[:, None]).all(), "every place once"
    assert (np.sort(rounds, axis=1) == everybody).all(), "once a round"


@pytest.mark.parametrize("sessions", range(2, 14))
def test_nobody_keeps_running_after_the_same_one(sessions: int) -> None:
    order = [session for _, session in rotation(sessions, sessions)]
    after = collections.Counter(
        pair for place, pair in enumerate(itertools.pairwise(order), 1) if place % sessions
    )
    assert max(after.values()) == (2 if sessions % 2 else 1)


def test_policies_take_turns_and_every_round_begins_with_another(stage: Stage) -> None:
    contest = stage.contest("shared", "model", "eclip", repeats=3)
    contest.hold()
    assert stage.ran == [
        *("shared", "model", "eclip"),
        *("model", "eclip", "shared"),
        *("eclip", "shared", "model"),
    ]  # fmt: skip
    assert [len(entrant.logs) for entrant in contest.entrants] == [3, 3, 3]
    assert stage.opened == ["shared", "model", "eclip"], "sessions are opened once"


def test_sessions_are_opened_anew_if_asked(stage: Stage) -> None:
    stage.contest("shared", "model", repeats=2, reopen=True).hold()
    assert stage.opened == ["shared", "model", "shared", "model", "model", "shared"]


def test_arrivals_are_the_same_for_all_policies_and_others_in_every_round(stage: Stage) -> None:
    stage.contest("shared", "model", repeats=2, part=0.5, requests=200).hold()
    assert stage.ran[1:] == ["shared", "model", "model", "shared"]  # after the rates under shared
    drawn = [[times.tolist() for times in load.arrivals] for load in stage.loads[1:]]
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    assert [load.seed for load in stage.loads[1:]] == [3, 3, 4, 4]
    assert {load.label for load in stage.loads[1:]} == {
        "Poisson at 50% of the closed-loop rates under shared"
    }


def test_load_is_a_part_of_the_rates_under_shared_and_as_long_as_needed(stage: Stage) -> None:
    contest = stage.contest("shared", "timeslice", seconds=1.0, repeats=2, part=0.5, requests=400)
    contest.hold()
    arrived = [sum(len(times) for times in load.arrivals) for load in stage.loads[1:]]
    assert 400 <= arrived[0] + arrived[2] <= 500
    served = measure_together(contest.entrants[0].logs)
    assert stage.windows[0].seconds == 1.0
    base = measure(with_rates_alone(stage.logs[0], contest))
    for worker, plain in zip(served.workers, base.workers, strict=True):
        assert worker.rate_rps == pytest.approx(0.5 * plain.rate_rps, rel=0.25)


def test_search_at_a_part_load_is_for_busy_workers_and_not_continued_on_the_device(
    stage: Stage,
) -> None:
    contest = stage.contest(
        "shared", "search", seconds=0.2, part=0.5, requests=100, verification=Verification(1, 9.0)
    )
    contest.hold()
    search = contest.measured[-1]
    evidence = search.plan.evidence
    assert evidence is not None
    assert (search.plan.mix, evidence.objective, evidence.tried) == (MIX, "throughput", 0)
    assert search.logs[-1].load.startswith("Poisson at 50%")


def test_slowest_worker_has_a_tenth_of_the_requests() -> None:
    assert long_enough([100.0, 100.0], 2000) == pytest.approx(11.0)
    assert long_enough([1000.0, 10.0], 2000) == pytest.approx(22.0)


def test_kernels_are_recorded_in_the_last_round_only(stage: Stage) -> None:
    stage.contest("shared", repeats=2).hold()
    assert [window.trace_ms for window in stage.windows] == [0.0, 10.0]


def test_best_of_the_masks_tried_enters(stage: Stage) -> None:
    contest = stage.contest("masks", trials=6)
    contest.hold()
    (masks,) = contest.entrants
    assert 2 <= len(masks.trials) <= 6
    tried = next(log for log in stage.trials if log.plan.policy == "shared")
    plain = measure(with_rates_alone(tried, contest))
    floor = max(0.7, min(plain.fairness - 0.05, 0.9))
    fair = [trial for trial in masks.trials if trial.fairness >= floor]
    best = max(fair or masks.trials, key=lambda trial: trial.stp if fair else trial.fairness)
    assert masks.setting == best.setting
    assert "SMs" in masks.setting
    assert masks.plan.policy == "masks"


def test_sweeps_and_searches_enter_once_for_every_objective(stage: Stage) -> None:
    contest = stage.contest(
        "shared",
        "masks",
        "search",
        objectives=(Objective(), Objective("energy")),
        verification=Verification(1, 0.2),
    )
    contest.hold()
    names = [entrant.policy for entrant in contest.measured]
    assert names[0] == "shared"
    assert set(names) >= {"masks", "search", "search-energy"}
    assert set(names) <= {"shared", "masks", "masks-energy", "search", "search-energy"}
    assert all(entrant.logs[0].plan.policy == entrant.policy for entrant in contest.measured)

    # The search knows all masks that were swept, and tries none of them again.
    def tried(policy: str) -> list[Any]:
        plans = [log.plan for log in stage.trials if log.plan.policy == policy]
        return [(plan.lanes, plan.main.assignments) for plan in plans]

    swept, searched = set(tried("masks")), tried("search")
    assert len(swept) == 8
    # Each of its own was tried once; the finals are two rounds.
    assert all(searched.count(plan) % 2 == (plan not in swept) for plan in searched)
    assert sum(run.kind == "static" for run in contest.observed) == 8


def test_masks_that_do_not_fit_are_passed_over(stage: Stage) -> None:
    stage.refuse = (1, 3)
    contest = stage.contest("masks", trials=5)
    contest.hold()
    assert len(contest.entrants[0].trials) == 3
    stage.opened.clear()
    stage.refuse = range(1, 100)
    with pytest.raises(DeviceError, match="masks: clusters do not fit"):
        stage.contest("masks", trials=5).hold()


def test_plan_from_a_file_takes_part_under_its_name(stage: Stage) -> None:
    plan = make_plan("model", Problem(MIX, H200, stage.profiles))
    contest = stage.contest("shared", plans={"mine": plan})
    contest.hold()
    assert [entrant.policy for entrant in contest.entrants] == ["shared", "mine"]
    assert stage.ran == ["shared", "mine"]


def test_plan_made_without_promises_is_held_to_those_of_the_mix() -> None:
    mix = "bert:1@300rps/20ms,vgg19:32@background/floor=0.2"
    given = {"mine": eclip.plan("bert:1@100rps,vgg19:32", "model")}
    outcome = eclip.compare(mix, "yield", plans=given, seconds=0.2)
    assert outcome.comparison.bounds_ms == (20.0, None)
    bounds = [[one.bound_ms for one in each.workers] for each in outcome.measures.values()]
    assert bounds == [[20.0, None]] * 2
    assert outcome.plans["mine"].mix == eclip.parse_mix(mix)
    (found,) = chapters_of([Named(outcome.comparison), *map(Named, outcome.logs.values())])
    assert len(found.ways) == 2


def test_plan_for_other_workers_is_refused() -> None:
    plan = eclip.plan("bert:8", "shared")
    with pytest.raises(UsageError, match=r"the plan mine is for bert:8, not bert:8,albert:8"):
        eclip.compare("bert:8,albert:8", "shared", plans={"mine": plan})


@pytest.mark.parametrize("name", ["shared", "a name", ""])
def test_plan_under_a_policys_name_or_none_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a plan"):
        eclip.compare("bert:8", "shared", plans={name: eclip.plan("bert:8", "model")})


QUICK = (steady(2, "steady~66", 100_000), steady(5, "steady~66", 100_000))


def test_plan_with_other_kernels_takes_part_and_its_rates_are_of_the_own_alone(
    stage: Stage,
) -> None:
    chosen = Problem(MIX, H200, stage.profiles, QUICK)
    plan = make_plan("shared", chosen.choosing([66, 66]))
    stage.planned = QUICK
    contest = stage.contest("shared", plans={"mine": plan})
    contest.hold()
    plain, mine = (measure(entrant.logs[0]) for entrant in contest.measured)
    assert mine.stp > 2 * plain.stp
    assert contest.measured[0].logs[0].alone_rps == contest.measured[1].logs[0].alone_rps
    stage.planned = ()
    with pytest.raises(UsageError, match="mine: the plan needs the profile of steady~66:2"):
        stage.contest("shared", plans={"mine": plan}).hold()


@pytest.mark.parametrize("verification", [None, Verification(1, 0.1)])
def test_search_enters_with_the_kernels_it_chose(
    stage: Stage, verification: Verification | None
) -> None:
    stage.others = QUICK
    contest = stage.contest("search", verification=verification)
    contest.hold()
    (search,) = contest.measured
    models = [str(model) for model in search.plan.models]
    assert models == ["steady~66:2", "steady~66:5"]
    assert search.plan.mix.as_asked() == MIX
    assert measure(search.logs[0]).stp > 2
    if verification is not None:
        observed = observations_of(contest)
        # The only plan has other kernels; what was tried was with these and with the own ones.
        assert set(observed.fingerprint.traces) == {"steady:2", "steady:5", *models}
        assert {run.mix for run in observed.runs} == {MIX.name}
        begun = [run for run in observed.runs if run.kind == "fewer units"]
        assert [home.kernels_for for run in begun for home in run.homes] == [66, 66]
        profiles = {one.model: one for one in (*stage.profiles, *QUICK)}
        replay = Replay(observed, H200, profiles)
        for run, found in zip(
            observed.runs, replay.simulate(range(len(observed.runs)), CALIBRATION), strict=True
        ):
            assert run.rates_rps == pytest.approx(found.rates_rps, rel=0.1)


def test_search_for_a_load_keeps_the_kernels_it_chose(stage: Stage) -> None:
    stage.others = QUICK
    contest = stage.contest("shared", "search", seconds=0.2, part=0.5, requests=100)
    contest.hold()
    plan = contest.measured[-1].plan
    assert [str(model) for model in plan.models] == ["steady~66:2", "steady~66:5"]
    assert [worker.rate_rps for worker in plan.mix.workers] == [None, None]
    plain, search = (measure_together(entrant.logs) for entrant in contest.measured)
    assert (search.workers[0].p50_ms or 0) < 0.6 * (plain.workers[0].p50_ms or 0)


def test_interrupt_between_rounds_keeps_what_was_measured(stage: Stage) -> None:
    contest = stage.contest("shared", "model", repeats=3)
    stage.fail["model"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        contest.hold()
    assert [(one.policy, len(one.logs)) for one in contest.measured] == [
        ("shared", 1),
        ("model", 1),
    ]


def test_policy_that_fails_is_left_out_where_all_run_and_an_error_where_named(
    stage: Stage,
) -> None:
    stage.fail["kernel"] = DeviceError("a launch failed")
    contest = stage.contest(repeats=2)
    contest.hold()
    assert contest.left_out["kernel"] == "a launch failed"
    assert {one.policy: len(one.logs) for one in contest.measured}["kernel"] == 1
    assert {one.policy: len(one.logs) for one in contest.measured}["eclip"] == 2
    stage.ran.clear()
    contest = stage.contest("shared", "kernel", repeats=2)
    with pytest.raises(DeviceError, match="kernel: a launch failed"):
        contest.hold()
    assert [len(one.logs) for one in contest.measured] == [1, 1]


def test_logs_before_a_failure_have_one_set_of_rates_alone(stage: Stage) -> None:
    stage.slower = (1.0, 1.3)
    stage.fail["kernel"] = DeviceError("a launch failed")
    contest = stage.contest("shared", "kernel", repeats=2)
    with pytest.raises(DeviceError):
        contest.hold()
    alone = {log.alone_rps for entrant in contest.measured for log in entrant.logs}
    assert alone == {contest.rig.alone_rps}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"policies": "shared,magic"}, "magic"),
        ({"options": CompareOptions(refine=1.0)}, "refine needs verify"),
        ({"options": CompareOptions(verify=1, refine=1.0), "objective": "slo"}, "refine searches"),
    ],
)
def test_what_needs_no_device_to_be_refused_opens_none(
    arguments: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("eclip.contest.compare.open_device", lambda name, *_: opened.append(name))
    with pytest.raises(UsageError, match=words):
        eclip.compare("bert:8,albert:8", **arguments)
    assert opened == []


def test_search_that_fails_before_its_turn_is_left_out_where_all_run(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise PlanningError("nothing fits")

    monkeypatch.setattr("eclip.contest.confirm.explore.Explorer.simulate", fail)
    contest = stage.contest(verification=Verification(1))
    contest.hold()
    assert contest.left_out["search"] == "nothing fits"
    assert "shared" in [entrant.policy for entrant in contest.measured]
    with pytest.raises(PlanningError, match="search: nothing fits"):
        stage.contest("shared", "search", verification=Verification(1)).hold()


def test_simulator_leaves_out_what_it_cannot_show_with_the_reason(stage: Stage) -> None:
    contest = stage.contest()
    contest.hold()
    reasons = {"priority": "priorities", "mps": "processes", "mps-model": "processes"}
    assert contest.left_out == {
        policy: f"simulator of NVIDIA H200 has no {what}" for policy, what in reasons.items()
    }
    ran = [entrant.policy for entrant in contest.entrants]
    usual = [name for name in known_policies() if name not in FOR_SERVICES]
    assert ran == [name for name in usual if name not in contest.left_out]
    comparison = outcome_of(contest, None, "a test").comparison
    assert "priority: simulator of NVIDIA H200 has no priorities" in comparison.left_out


@pytest.mark.parametrize(("policy", "missing"), [("priority", "priorities"), ("mps", "processes")])
def test_named_policy_that_the_device_cannot_run_is_refused(policy: str, missing: str) -> None:
    words = rf"{policy}: simulator of .* has no {missing}"
    with pytest.raises(UsageError, match=words):
        eclip.compare("bert:8,albert:8", f"shared,{policy}", seconds=0.1)


# Rates alone


def test_rates_alone_are_measured_with_all_others_there_but_idle(stage: Stage) -> None:
    stage.contest("shared").hold()
    assert len(stage.alone) == 2
    for worker, load in enumerate(stage.alone):
        assert load.arrivals[worker] is CLOSED_LOOP
        (other,) = (times for times in load.arrivals if times is not CLOSED_LOOP)
        assert len(other) == 0


def test_rates_alone_are_measured_again_every_round_and_their_median_counts(stage: Stage) -> None:
    """Also in the logs of earlier rounds: a device's speed changes with time."""
    usual = stage.contest("shared").rig.alone_rps
    stage.alone.clear()
    stage.slower = (1.0, 1.25, 2.0)
    contest = stage.contest("shared", "model", repeats=3)
    contest.hold()
    assert len(stage.alone) == 3 * 2
    for entrant in contest.measured:
        for log in entrant.logs:
            assert log.alone_rps == pytest.approx([rate / 1.25 for rate in usual], rel=1e-3)


# Stop requests


def test_stop_between_runs_keeps_those_that_ran_and_says_how_many_are_left(stage: Stage) -> None:
    progress = Heard(stop_at=0.5, stop_in="measuring")
    contest = stage.contest("shared", "model", repeats=3, progress=progress)
    contest.hold()
    assert stage.ran == ["shared", "model", "model"]
    assert [(one.policy, len(one.logs)) for one in contest.measured] == [
        ("shared", 1),
        ("model", 2),
    ]
    outcome = outcome_of(contest, None, "a test")
    assert outcome.runs_left == 3
    assert set(outcome.plans) == set(outcome.logs) == set(outcome.measures) == {"shared", "model"}
    assert outcome.comparison.repeats == 3
    assert [len(entry.runs) for entry in outcome.comparison.entries] == [1, 2]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("raises", [True, False])
def test_run_that_a_stop_cut_short_does_not_count_and_leaves_nobody_out(
    stage: Stage, named: bool, raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device raises in the warm-up, and later returns what it has."""
    monkeypatch.setattr("eclip.contest.contest.known_policies", lambda: ["shared", "model"])
    progress, run = Progress(), StagedSession.run
    contest = stage.contest(*(["shared", "model"] if named else []), repeats=2, progress=progress)

    def stopping(self: StagedSession, load: Load, window: Window) -> RunLog:
        log = run(self, load, window)
        if len(stage.ran) == 2:
            progress.stop()
            if raises:
                raise StoppedError("stopped before the run began to be measured")
        return log

    monkeypatch.setattr(StagedSession, "run", stopping)
    contest.hold()
    assert [(one.policy, len(one.logs)) for one in contest.measured] == [("shared", 1)]
    assert contest.left_out == {}
    assert outcome_of(contest, None, "a test").runs_left == 3


@pytest.mark.parametrize("during", range(3))
def test_stop_in_a_sweep_is_no_fault_of_the_masks(
    stage: Stage, during: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress, run = Progress(), StagedSession.run

    def stopping(self: StagedSession, load: Load, window: Window) -> RunLog:
        if self.plan.policy == "masks" and len(stage.trials) >= during:
            progress.stop()
        return run(self, load, window)

    monkeypatch.setattr(StagedSession, "run", stopping)
    contest = stage.contest("masks", trials=6, progress=progress)
    contest.hold()
    assert contest.left_out == {}
    with pytest.raises(StoppedError, match="before anything was measured"):
        outcome_of(contest, None, "a test")


def test_stop_before_anything_was_measured_says_so(stage: Stage) -> None:
    progress = Progress()
    progress.stop()
    contest = stage.contest("shared", "model", progress=progress)
    contest.hold()
    assert stage.ran == []
    with pytest.raises(StoppedError, match="before anything was measured"):
        outcome_of(contest, None, "a test")
    with pytest.raises(StoppedError):
        eclip.compare("bert:8,albert:8", "shared", seconds=0.1, progress=progress)


def test_comparison_that_is_stopped_returns_what_it_has() -> None:
    progress = Heard(stop_at=0.2, stop_in="measuring")
    outcome = eclip.compare(
        "bert:8,albert:8", ["shared", "model"], seconds=0.05, repeats=3, progress=progress
    )
    assert [entry.policy for entry in outcome.comparison.entries] == ["shared", "model"]
    assert outcome.runs_left == 4


# What is searched and swept for


def test_comparison_of_a_mix_with_rates_is_for_throughput_unless_told() -> None:
    rates = "bert:8@60rps,albert:8@60rps"
    options = CompareOptions(batches=0)
    outcome = eclip.compare(rates, ["shared", "search"], seconds=0.3, options=options)
    assert outcome.comparison.objective == "throughput"
    evidence = outcome.plans["search"].evidence
    assert evidence is not None and evidence.missed == ()  # fairness is no plan's


def test_overload_of_a_policy_is_said_in_the_comparison() -> None:
    outcome = eclip.compare("bert:8@99999rps,albert:8", "shared,model", seconds=0.1)
    assert [words.partition(" is overloaded")[0] for words in outcome.missed] == [
        "shared: bert",
        "model: bert",
    ]
    assert outcome.missed == outcome.comparison.missed


def test_runs_together_are_as_one_long_run(stage: Stage) -> None:
    contest = stage.contest("model", repeats=2, seconds=0.3)
    contest.hold()
    logs = contest.entrants[0].logs
    together, apart = measure_together(logs), [measure(log) for log in logs]
    assert together.seconds == pytest.approx(0.6)
    assert together.stp == pytest.approx(np.mean([one.stp for one in apart]))
    assert together.energy_j == pytest.approx(sum(one.energy_j for one in apart))
    for index, worker in enumerate(together.workers):
        parts = [one.workers[index] for one in apart]
        assert worker.requests == sum(part.requests for part in parts)
        tails = [part.p99_ms for part in parts if part.p99_ms is not None]
        assert worker.p99_ms is not None and min(tails) <= worker.p99_ms <= max(tails)


@pytest.mark.parametrize(
    "wrong",
    [
        {"repeats": 0},
        {"settings": {"trials": 0}},
        {"settings": {"trial_seconds": 0.0}},
        {"settings": {"processes": 0}},
        {"objectives": ()},
        {"objectives": (Objective(), Objective())},
        {"policies": ("shared", "fastest")},
    ],
)
def test_senseless_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        if "settings" in wrong:
            wrong = {"settings": CompareOptions(**wrong["settings"])}
        ContestOptions(**({"objectives": (Objective(),)} | wrong))


# Processes: the whole of a GPU's contest, with stand-ins for the models


@pytest.mark.slow
@pytest.mark.usefixtures("mps_control", "no_process_left")
def test_processes_take_turns_with_plans_and_the_best_share_enters(stage: Stage) -> None:
    names = ("shared", "timeslice", "mps", "mps-model")
    contest = stage.contest(*names, processes_run=True, seconds=0.2, repeats=2, processes=8)
    contest.hold()
    by_policy = {entrant.policy: entrant for entrant in contest.entrants}
    assert list(by_policy) == ["shared", "timeslice", "mps", "mps-model"]
    mps = by_policy["mps"]
    assert [trial.setting for trial in mps.trials] == ["mps 100%", "mps 60%"]  # 8 processes in all
    assert mps.setting in ("mps 100%", "mps 60%")
    assert by_policy["mps-model"].setting.startswith("mps ")
    assert by_policy["timeslice"].setting == ""
    for entrant in contest.entrants:
        assert [log.plan.policy for log in entrant.logs] == [entrant.policy] * 2
        assert all(log.requests.worker for log in entrant.logs)


@pytest.mark.usefixtures("no_process_left")
def test_without_mps_the_others_run(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_control(tmp_path, "failing")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(
        "eclip.contest.contest.known_policies", lambda: ["shared", "timeslice", "mps"]
    )
    contest = stage.contest(processes_run=True, processes=8)
    contest.hold()
    assert "no such GPU" in contest.left_out["mps"]
    assert [entrant.policy for entrant in contest.measured] == ["shared", "timeslice"]
    with pytest.raises(DeviceError, match="mps: the MPS daemon did not start"):
        stage.contest("shared", "mps", processes_run=True, processes=8).hold()


@pytest.mark.usefixtures("no_process_left")
def test_interrupt_ends_all_processes(stage: Stage) -> None:
    contest = stage.contest("shared", "timeslice", processes_run=True, repeats=3)
    stage.fail["shared"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        contest.hold()
    assert [len(one.logs) for one in contest.measured] == [1, 2]


# --- Services ---------------------------------------------------------------------------------

PROFILES = (flat_profile("a", [100_000] * 8, H200), flat_profile("b", [150_000] * 6, H200))
SERVED = parse_mix("a:1@200rps/2x,b:1@background")


def test_bounds_of_times_alone_are_the_same_for_all_policies_and_rounds() -> None:
    case = case_of(PROFILES, mix=SERVED)
    options = ContestOptions(
        policies=("shared", "yield"), objectives=(Objective("slo"),), repeats=2
    )
    window = Window(0.5, 0.05, 0.0)
    with Rig(case, SimDevice(H200, CALIBRATIONS["h200"])) as rig:
        contest = Contest(rig, Arrivals(SERVED, window, repeats=2), options, Progress())
        contest.hold()
    promises = {entrant.plan.workers[0].promise for entrant in contest.entrants}
    (promise,) = promises
    assert promise is not None
    assert promise == simulated_promises(case)[0]
    assert len(contest.alone) == 2
    for entrant in contest.entrants:
        assert {log.plan.workers[0].promise for log in entrant.logs} == promises


class Measured(SimDevice):
    """A simulator that says that it measures."""

    modelled = False


def test_bound_of_times_alone_is_of_the_times_that_a_device_gave_alone() -> None:
    """The p99 of few arrivals is far from that of many; the times of their requests are not."""
    mix = parse_mix("a:1@700rps/1.3x,b:1@background")
    options = ContestOptions(policies=("yield",), objectives=(Objective("slo"),))
    case = case_of(PROFILES, mix=mix)
    with Rig(case, Measured(H200, CALIBRATIONS["h200"])) as rig:
        contest = Contest(rig, Arrivals(mix, Window(0.05, 0.0, 0.0)), options, Progress())
        contest.hold()
    promise = contest.entrants[0].plan.workers[0].promise
    assert promise is not None
    assert promise.bound_ns == pytest.approx(simulated_promises(case)[0].bound_ns, rel=1e-3)


def test_under_mps_services_have_all_units_and_background_a_share() -> None:
    case = case_of(PROFILES, mix=SERVED)
    options = ContestOptions(objectives=(Objective("slo"),))
    shares = {
        plan.sharing.shares
        for plan in _process_plans(case, options, "mps", 1)
        if isinstance(plan.sharing, Processes)
    }
    assert {(100, 50), (100, 25), (60, 60)} <= shares
    closed = case_of(PROFILES)
    plans = _process_plans(closed, options, "mps", 1)
    assert all(len({*plan.sharing.shares}) == 1 for plan in plans)  # type: ignore[union-attr]


def test_who_takes_part_depends_on_services() -> None:
    assert {"yield", "move", "launches-4-2", "mps"} <= {*usual_policies(SERVED)}
    assert not {"kernel", "eclip"} & {*usual_policies(SERVED)}
    assert not {*FOR_SERVICES} & {*usual_policies(MIX)}
