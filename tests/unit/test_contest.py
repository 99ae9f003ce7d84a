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

from eclip.artefacts import store
from eclip.artefacts.calibration import Calibration
from eclip.artefacts.measures import measure, measure_together
from eclip.artefacts.mix import mix_of
from eclip.artefacts.profile import Profile
from eclip.artefacts.runlog import RunLog
from eclip.artefacts.topology import Topology
from eclip.cli import wiring
from eclip.cli.contest import Contest
from eclip.cli.contest_options import ContestOptions, known_policies
from eclip.cli.outcome import observations_of
from eclip.cli.verification import Verification
from eclip.devices.base import Window
from eclip.devices.cuda.processes import Host, ProcessSession, ProcessSets, Sharing
from eclip.devices.load import long_enough
from eclip.devices.sim.device import SimDevice
from eclip.errors import DeviceError, PlanningError, UsageError
from eclip.lab.fit import Replay
from eclip.lab.rounds import rotation
from eclip.planning.policies import PolicyOptions, make_plan
from eclip.planning.problem import Problem
from eclip.planning.search.objective import Objective
from punctual import run_in_time
from simulations import flat_profile, problem_of
from standins import ENTRY, SteadyCounter, install_control, processes_with, trace_of

H200 = store.load_builtin(Topology, "h200")
CALIBRATION = store.load_builtin(Calibration, "h200")
UUID = f"GPU-of-contest-{os.getpid()}"


def steady(batch: int, model: str = "steady", kernel_ns: int = 300_000) -> Profile:
    """What a stand-in process of this batch serves, as a profile for the simulator."""
    flat = flat_profile(model, [batch * kernel_ns] * 3, H200)
    trace = trace_of(model, batch)
    return msgspec.structs.replace(
        flat,
        trace=trace,
        fingerprint=msgspec.structs.replace(H200.fingerprint, traces={trace.key: trace.digest}),
    )


class Stage:
    """A device that notes who ran, under which arrivals, and may fail or be interrupted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.profiles = (steady(2), steady(5))
        self.others: tuple[Profile, ...] = ()  # that a search may choose
        self.planned: tuple[Profile, ...] = ()  # of plans from files
        self.ran: list[str] = []
        self.loads: list[Any] = []
        self.logs: list[RunLog] = []
        self.trials: list[RunLog] = []
        self.windows: list[Window] = []
        self.opened: list[str] = []
        self.refuse: Sequence[int] = ()  # which masks do not open, counted from 1
        self.fail: dict[str, BaseException] = {}  # by policy, from its second run on
        self.counter = SteadyCounter()
        monkeypatch.setattr(wiring, "make_device", lambda *_: StagedDevice(self))
        monkeypatch.setattr(wiring.Sources, "_make", lambda _, profile: profile)
        monkeypatch.setattr(wiring, "open_sets", self.open_sets)
        monkeypatch.setattr(ProcessSession, "run", run_in_time)

    def open_sets(self, device: Any, sharings: Sequence[Sharing]) -> ProcessSets:
        host = Host(UUID, "a GPU", H200, self.counter)
        return ProcessSets(host, ENTRY, sharings, wait=False)

    def contest(
        self,
        device: str = "sim",
        seconds: float = 0.1,
        arrivals: Path | None = None,
        **options: Any,
    ) -> Contest:
        window = Window(seconds=seconds, warmup_seconds=0.02, trace_ms=10.0)
        run = wiring.RunOptions(device=device, window=window, seed=3, arrivals=arrivals)
        given = {"trials": 4, "trial_seconds": 0.05, **options}
        mix = mix_of([("steady", 2), ("steady", 5)])
        return Contest(
            mix,
            H200,
            CALIBRATION,
            self.profiles,
            PolicyOptions(batches=0, others=self.others),
            run,
            ContestOptions(**given),
            lambda _: None,
            self.planned,
        )


class StagedDevice(SimDevice):
    def __init__(self, stage: Stage) -> None:
        super().__init__(H200, CALIBRATION)
        self.stage = stage

    def open(self, program: Any, sources: Any) -> Any:
        if len(program.plan.workers) > 1:
            self.stage.opened.append(program.plan.policy)
            refused = self.stage.refuse
            if program.plan.policy == "masks" and self.stage.opened.count("masks") in refused:
                raise DeviceError("clusters do not fit")
        return StagedSession(self.stage, super().open(program, sources), program.plan)


class StagedSession:
    def __init__(self, stage: Stage, inner: Any, plan: Any) -> None:
        self.stage, self.inner, self.plan = stage, inner, plan

    def run(self, load: Any, window: Window, alone_rps: Sequence[float]) -> RunLog:
        log: RunLog = self.inner.run(load, window, alone_rps)
        if len(self.plan.workers) > 1 and window.seconds > 0.06:
            error = self.stage.fail.get(self.plan.policy)
            if error is not None and self.plan.policy in self.stage.ran:
                raise error
            self.stage.ran.append(self.plan.policy)
            self.stage.loads.append(load)
            self.stage.windows.append(window)
            self.stage.logs.append(log)
        elif len(self.plan.workers) > 1:
            self.stage.trials.append(log)
        return log

    def close(self) -> None:
        self.inner.close()

    def __enter__(self) -> StagedSession:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


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
    contest = stage.contest(repeats=3)
    contest.hold(["shared", "model", "eclip"], {})
    assert stage.ran == [
        *("shared", "model", "eclip"),
        *("model", "eclip", "shared"),
        *("eclip", "shared", "model"),
    ]  # fmt: skip
    assert [len(entrant.logs) for entrant in contest.entrants] == [3, 3, 3]
    assert stage.opened == ["shared", "model", "eclip"], "sessions are opened once"


def test_sessions_are_opened_anew_if_asked(stage: Stage) -> None:
    stage.contest(repeats=2, reopen=True).hold(["shared", "model"], {})
    assert stage.opened == ["shared", "model", "shared", "model", "model", "shared"]


def test_arrivals_are_the_same_for_all_policies_and_others_in_every_round(stage: Stage) -> None:
    stage.contest(repeats=2, load_part=0.5, requests=200).hold(["shared", "model"], {})
    assert stage.ran[1:] == ["shared", "model", "model", "shared"]  # after the rates under shared
    drawn = [[times.tolist() for times in load.arrivals] for load in stage.loads[1:]]
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    assert [load.seed for load in stage.loads[1:]] == [3, 3, 4, 4]
    assert {load.label for load in stage.loads[1:]} == {
        "Poisson at 50% of the closed-loop rates under shared"
    }


def test_load_is_a_part_of_the_rates_under_shared_and_as_long_as_needed(stage: Stage) -> None:
    contest = stage.contest(seconds=1.0, repeats=2, load_part=0.5, requests=400)
    contest.hold(["shared", "timeslice"], {})
    arrived = [sum(len(times) for times in load.arrivals) for load in stage.loads[1:]]
    assert 400 <= arrived[0] + arrived[2] <= 500
    served = measure_together(contest.entrants[0].logs)
    assert stage.windows[0].seconds == 1.0
    base = measure(stage.logs[0])
    for worker, plain in zip(served.workers, base.workers, strict=True):
        assert worker.rate_rps == pytest.approx(0.5 * plain.rate_rps, rel=0.25)


def test_search_for_a_load_is_verified_under_that_load(stage: Stage) -> None:
    contest = stage.contest(
        seconds=0.2, load_part=0.5, requests=100, verification=Verification(1, 9.0)
    )
    contest.hold(["shared", "search"], {})
    search = contest.measured[-1]
    assert search.policy == "search"
    assert search.plan.mix == contest.mix
    evidence = search.plan.evidence
    assert evidence is not None
    assert evidence.objective == "latency"
    assert [trial.label for trial in evidence.trials][:1] == ["plain streams"]
    tried = [log for log in stage.logs if log.duration_ns == 2_000_000_000]
    assert len(tried) == 2 * len(evidence.trials)
    assert all("rps" in log.load or "Poisson" in log.load for log in tried)


def test_slowest_worker_has_a_tenth_of_the_requests() -> None:
    assert long_enough([100.0, 100.0], 2000) == pytest.approx(11.0)
    assert long_enough([1000.0, 10.0], 2000) == pytest.approx(22.0)


def test_kernels_are_recorded_in_the_last_round_only(stage: Stage) -> None:
    stage.contest(repeats=2).hold(["shared"], {})
    assert [window.trace_ms for window in stage.windows] == [0.0, 10.0]


def test_best_of_the_masks_tried_enters(stage: Stage) -> None:
    contest = stage.contest(trials=6)
    contest.hold(["masks"], {})
    (masks,) = contest.entrants
    assert 2 <= len(masks.trials) <= 6
    plain = measure(next(log for log in stage.trials if log.plan.policy == "shared"))
    floor = max(0.7, min(plain.fairness - 0.05, 0.9))
    fair = [trial for trial in masks.trials if trial.fairness >= floor]
    best = max(fair or masks.trials, key=lambda trial: trial.stp if fair else trial.fairness)
    assert masks.setting == best.setting
    assert "SMs" in masks.setting
    assert masks.plan.policy == "masks"


def test_sweeps_and_searches_enter_once_for_every_objective(stage: Stage) -> None:
    contest = stage.contest(
        objectives=(Objective(), Objective("energy")), verification=Verification(1, 0.2)
    )
    contest.hold(["shared", "masks", "search"], {})
    names = [entrant.policy for entrant in contest.measured]
    assert names[0] == "shared"
    assert set(names) >= {"masks", "search", "search-energy"}
    assert set(names) <= {"shared", "masks", "masks-energy", "search", "search-energy"}
    assert all(entrant.logs[0].plan.policy == entrant.policy for entrant in contest.measured)
    # The search knows all masks that were swept, and tries none of them again.
    swept = {log.plan.lanes for log in stage.trials if log.plan.policy == "masks"}
    searched = [log.plan.lanes for log in stage.trials if log.plan.policy == "search"]
    assert len(swept) == 8
    # Each of its own was tried once; the finals are two rounds.
    assert all(searched.count(lanes) % 2 == (lanes not in swept) for lanes in searched)
    assert sum(run.kind == "static" for run in contest.observed) == 8


def test_masks_that_do_not_fit_are_passed_over(stage: Stage) -> None:
    stage.refuse = (1, 3)
    contest = stage.contest(trials=5)
    contest.hold(["masks"], {})
    assert len(contest.entrants[0].trials) == 3
    stage.opened.clear()
    stage.refuse = range(1, 100)
    with pytest.raises(DeviceError, match="masks: clusters do not fit"):
        stage.contest(trials=5).hold(["masks"], {})


def test_plan_from_a_file_takes_part_under_its_name(stage: Stage) -> None:
    plan = make_plan("model", problem_of(stage.profiles, H200))
    contest = stage.contest()
    contest.hold(["shared"], {"mine": plan})
    assert [entrant.policy for entrant in contest.entrants] == ["shared", "mine"]
    assert stage.ran == ["shared", "mine"]


def test_plan_for_other_workers_is_refused(stage: Stage) -> None:
    plan = make_plan("model", problem_of((steady(2),), H200))
    with pytest.raises(UsageError, match=r"the plan mine is for steady:2"):
        stage.contest().hold(["shared"], {"mine": plan})


QUICK = (steady(2, "steady~66", 100_000), steady(5, "steady~66", 100_000))


def test_plan_with_other_kernels_takes_part_and_its_rates_are_of_the_own_alone(
    stage: Stage,
) -> None:
    chosen = Problem(mix_of([("steady", 2), ("steady", 5)]), H200, stage.profiles, QUICK)
    plan = make_plan("shared", chosen.choosing([66, 66]))
    stage.planned = QUICK
    contest = stage.contest()
    contest.hold(["shared"], {"mine": plan})
    plain, mine = (measure(entrant.logs[0]) for entrant in contest.measured)
    assert mine.stp > 2 * plain.stp
    assert contest.measured[0].logs[0].alone_rps == contest.measured[1].logs[0].alone_rps
    stage.planned = ()
    with pytest.raises(UsageError, match="mine: the plan needs the profile of steady~66:2"):
        stage.contest().hold(["shared"], {"mine": plan})


@pytest.mark.parametrize("verification", [None, Verification(1, 0.1)])
def test_search_enters_with_the_kernels_it_chose(
    stage: Stage, verification: Verification | None
) -> None:
    stage.others = QUICK
    contest = stage.contest(verification=verification)
    contest.hold(["search"], {})
    (search,) = contest.measured
    models = [worker.model for worker in search.plan.workers]
    assert models == ["steady~66:2", "steady~66:5"]
    assert search.plan.mix.as_asked() == contest.mix
    assert measure(search.logs[0]).stp > 2
    # The only plan has other kernels; what was tried was with these and with the own ones.
    assert set(contest.fingerprint.traces) == {"steady:2", "steady:5", *models}
    if verification is not None:
        observed = observations_of(contest)
        assert {run.mix for run in observed.runs} == {contest.mix.name}
        begun = [run for run in observed.runs if run.kind == "other kernels"]
        assert [home.kernels_for for run in begun for home in run.homes] == [66, 66]
        profiles = {one.key: one for one in (*stage.profiles, *QUICK)}
        replay = Replay(observed, H200, profiles)
        for run, found in zip(
            observed.runs, replay.simulate(range(len(observed.runs)), CALIBRATION), strict=True
        ):
            assert run.rates_rps == pytest.approx(found.rates_rps, rel=0.1)


def test_search_for_a_load_keeps_the_kernels_it_chose(stage: Stage) -> None:
    stage.others = QUICK
    contest = stage.contest(seconds=0.2, load_part=0.5, requests=100)
    contest.hold(["shared", "search"], {})
    plan = contest.measured[-1].plan
    assert [worker.model for worker in plan.workers] == ["steady~66:2", "steady~66:5"]
    assert [worker.rate_rps for worker in plan.mix.workers] == [None, None]
    plain, search = (measure_together(entrant.logs) for entrant in contest.measured)
    assert (search.workers[0].p50_ms or 0) < 0.6 * (plain.workers[0].p50_ms or 0)


def test_interrupt_between_rounds_keeps_what_was_measured(stage: Stage) -> None:
    contest = stage.contest(repeats=3)
    stage.fail["model"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        contest.hold(["shared", "model"], {})
    assert [(one.policy, len(one.logs)) for one in contest.measured] == [
        ("shared", 1),
        ("model", 1),
    ]


def test_policy_that_fails_is_left_out_where_all_run_and_an_error_where_named(
    stage: Stage,
) -> None:
    stage.fail["kernel"] = DeviceError("a launch failed")
    contest = stage.contest(repeats=2)
    contest.hold(None, {})
    assert contest.left_out["kernel"] == "a launch failed"
    assert {one.policy: len(one.logs) for one in contest.measured}["kernel"] == 1
    assert {one.policy: len(one.logs) for one in contest.measured}["eclip"] == 2
    stage.ran.clear()
    contest = stage.contest(repeats=2)
    with pytest.raises(DeviceError, match="kernel: a launch failed"):
        contest.hold(["shared", "kernel"], {})
    assert [len(one.logs) for one in contest.measured] == [1, 1]


def test_search_that_fails_before_its_turn_is_left_out_where_all_run(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise PlanningError("nothing fits")

    monkeypatch.setattr("eclip.cli.verification.Verifier.simulate", fail)
    contest = stage.contest(verification=Verification(1))
    contest.hold(None, {})
    assert contest.left_out["search"] == "nothing fits"
    assert "shared" in [entrant.policy for entrant in contest.measured]
    with pytest.raises(PlanningError, match="search: nothing fits"):
        stage.contest(verification=Verification(1)).hold(["shared", "search"], {})


def test_simulator_leaves_out_what_it_cannot_show(stage: Stage) -> None:
    contest = stage.contest()
    contest.hold(None, {})
    assert set(contest.left_out) == {"priority", "mps", "mps-model"}
    ran = [entrant.policy for entrant in contest.entrants]
    assert ran == [name for name in known_policies() if name not in contest.left_out]
    with pytest.raises(UsageError, match="mps: the simulator has no processes"):
        stage.contest().hold(["shared", "mps"], {})


def test_runs_together_are_as_one_long_run(stage: Stage) -> None:
    contest = stage.contest(repeats=2, seconds=0.3)
    contest.hold(["model"], {})
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
        {"trials": 0},
        {"trial_seconds": 0.0},
        {"load_part": 0.0},
        {"requests": 0},
        {"processes": 0},
    ],
)
def test_senseless_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ContestOptions(**wrong)


def test_load_and_arrivals_exclude_each_other(stage: Stage, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave --arrivals"):
        stage.contest(arrivals=tmp_path / "a.csv", load_part=0.6)


# Processes: the whole of a GPU's contest, with stand-ins for the models


@pytest.mark.slow
@pytest.mark.usefixtures("mps_control", "no_process_left")
def test_processes_take_turns_with_plans_and_the_best_share_enters(stage: Stage) -> None:
    contest = stage.contest("cuda", seconds=0.2, repeats=2, processes=8)
    contest.hold(["shared", "timeslice", "mps", "mps-model"], {})
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
    monkeypatch.setattr("eclip.cli.contest.known_policies", lambda: ["shared", "timeslice", "mps"])
    contest = stage.contest("cuda", processes=8)
    contest.hold(None, {})
    assert "no such GPU" in contest.left_out["mps"]
    assert [entrant.policy for entrant in contest.measured] == ["shared", "timeslice"]
    with pytest.raises(DeviceError, match="mps: the MPS daemon did not start"):
        stage.contest("cuda", processes=8).hold(["shared", "mps"], {})


@pytest.mark.usefixtures("no_process_left")
def test_interrupt_ends_all_processes(stage: Stage) -> None:
    contest = stage.contest("cuda", repeats=3)
    stage.fail["shared"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        contest.hold(["shared", "timeslice"], {})
    assert [len(one.logs) for one in contest.measured] == [1, 2]
