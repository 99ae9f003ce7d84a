"""The device contract: every device passes these tests, each exclusion with its reason.

To add a device, add a Candidate and a fixture that makes its bench. Where it cannot run here, its
``missing`` says why; where a test does not apply, ``excluded`` names the test and the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from eclip.lab.alone import alone_rates

import gpu_host
from eclip.artefacts import store
from eclip.artefacts.calibration import Calibration
from eclip.artefacts.mix import mix_of
from eclip.artefacts.model_key import ModelKey
from eclip.artefacts.plan import Plan
from eclip.artefacts.profile import Profile
from eclip.artefacts.runlog import RunLog
from eclip.artefacts.topology import Topology
from eclip.artefacts.trace import Trace, with_traces
from eclip.devices.base import Device, Window
from eclip.devices.cuda.executables import Capture
from eclip.devices.load import CLOSED_LOOP, Load
from eclip.devices.sim.device import SimDevice
from eclip.errors import EclipError, MismatchError, UsageError
from eclip.planning.policies import POLICIES, make_plan
from eclip.planning.problem import Problem
from eclip.runtime.program import Program, lower
from simulations import options_for

MakeProblem = Callable[..., Problem]
WORKERS = 3
TRACE_MS = 20.0
ALONE_RPS = [10.0, 20.0, 30.5]


@dataclass(frozen=True)
class Candidate:
    name: str
    bench: str  # the fixture that makes its bench
    missing: Callable[[], str | None] = lambda: None
    excluded: Mapping[str, str] = field(default_factory=dict)  # test or test[policy] → reason


CANDIDATES = [
    Candidate(name="sim", bench="sim_bench"),
    Candidate(
        name="cuda",
        bench="cuda_bench",
        missing=gpu_host.missing,
        excluded={
            "test_plan_of_every_policy_runs[timeslice]": "it takes a process per model, which this "
            "device does not start",
            "test_modelled_run_repeats_itself_exactly": "its time is real",
        },
    ),
]


@pytest.fixture(params=CANDIDATES, ids=lambda candidate: candidate.name)
def candidate(request: pytest.FixtureRequest) -> Candidate:
    found: Candidate = request.param
    test = getattr(request.node, "originalname", request.node.name)
    policy = request.node.callspec.params.get("policy")
    excluded = found.excluded.get(test) or found.excluded.get(f"{test}[{policy}]")
    if reason := excluded or found.missing():
        pytest.skip(f"{found.name}: {reason}")
    return found


@dataclass(frozen=True)
class Bench:
    """A device with three workers' worth of plans and sources for it."""

    device: Device[Any]
    problem: Problem
    sources: Sequence[Any]
    stand_ins: Callable[[Sequence[Profile]], Sequence[Any]]  # sources that are only looked at
    seconds: float  # of a run: enough requests, and time for the energy counter to move

    @property
    def window(self) -> Window:
        return Window(seconds=self.seconds, warmup_seconds=0.0, trace_ms=TRACE_MS)

    def program(self, policy: str = "eclip") -> Program:
        return lower(self.plan(policy), [profile.trace for profile in self.problem.profiles])

    def plan(self, policy: str = "eclip") -> Plan:
        return make_plan(policy, self.problem, options_for(self.problem))

    def run(self, load: Load, window: Window | None = None, policy: str = "eclip") -> RunLog:
        with self.device.open(self.program(policy), self.sources) as session:
            return session.run(load, window or self.window, ALONE_RPS)


@pytest.fixture
def bench(candidate: Candidate, request: pytest.FixtureRequest) -> Bench:
    made: Bench = request.getfixturevalue(candidate.bench)
    return made


@pytest.fixture(scope="session")
def sim_bench(h200: Topology, make_problem: MakeProblem) -> Bench:
    problem = make_problem(h200, WORKERS)
    device = SimDevice(h200, store.load_builtin(h200.name, Calibration))
    return Bench(device, problem, problem.profiles, list, seconds=0.05)


@pytest.fixture(scope="session")
def cuda_bench() -> Iterator[Bench]:
    """Chains of our own kernels, captured and profiled on the GPU at hand."""
    from eclip.devices.cuda.device import CudaDevice
    from eclip.devices.cuda.driver import call, cu
    from eclip.devices.cuda.stressors import Stressors
    from eclip.frontends.profiler import measure_profile
    from eclip.frontends.torch import CapturedModule

    with ExitStack() as stack:
        device = stack.enter_context(CudaDevice())
        stressors = Stressors(device.gpu)
        stack.callback(stressors.close)
        scratch = int(call(cu.cuMemAlloc, 1 << 20))
        stack.callback(call, cu.cuMemFree, scratch)
        stack.callback(call, cu.cuCtxSynchronize)
        sources, profiles = [], []
        for worker in range(WORKERS):

            def enqueue(stream: Any, kernels: int = 12 + worker) -> None:
                # Kernels that want the whole device in turn with some that one slice holds, so that
                # a plan has reason to switch lanes.
                for kernel in range(kernels):
                    blocks = 528 if kernel // 3 % 2 == 0 else 8
                    stressors.launch("fma", stream, blocks, 256, scratch, 0, 6 + kernel)

            graph = stack.enter_context(gpu_host.captured_from(enqueue))
            trace = Trace(model=ModelKey(f"m{worker}", 1), kernels=graph.kernels())
            source = Capture(graph, trace, None)
            sources.append(source)
            module = CapturedModule(source, None, (), None)
            profiles.append(measure_profile(device, module, energy_seconds=0.0, stress=False))
        mix = mix_of(profile.model for profile in profiles)
        problem = Problem(mix, device.topology, tuple(profiles))

        def stand_ins(others: Sequence[Profile]) -> Sequence[Any]:
            return [Capture(sources[0].graph, other.trace, None) for other in others]

        yield Bench(device, problem, sources, stand_ins, seconds=0.6)


def closed_loop(seed: int = 0) -> Load:
    return Load(label="closed loop", seed=seed, arrivals=(CLOSED_LOOP,) * WORKERS)


def spaced_arrivals() -> Load:
    """Bursts of five, far enough from the end for all to complete."""
    burst = np.repeat(np.arange(0, 20_000_000, 5_000_000), 5)
    return Load(label="bursts", seed=0, arrivals=(burst,) * WORKERS)


def test_device_says_what_it_is_made_of(bench: Bench) -> None:
    assert bench.device.topology == bench.problem.topology


def test_log_says_what_ran_where_and_for_how_long(bench: Bench) -> None:
    log = bench.run(closed_loop(seed=7))
    assert log.plan == bench.plan()
    assert log.device
    assert (log.load, log.seed) == ("closed loop", 7)
    assert log.duration_ns == pytest.approx(bench.seconds * 1e9, rel=0.01)
    assert list(log.alone_rps) == ALONE_RPS
    assert log.energy_uj > 0
    assert set(log.requests.worker) == set(range(WORKERS))
    rough = "energy is measured over"  # what a GPU says of a run this short
    assert [warning for warning in log.warnings if not warning.startswith(rough)] == []


@pytest.mark.parametrize("policy", POLICIES)
def test_plan_of_every_policy_runs(bench: Bench, policy: str) -> None:
    log = bench.run(closed_loop(), policy=policy)
    assert log.plan.policy == policy
    assert set(log.requests.worker) == set(range(WORKERS))


def test_log_survives_its_file(bench: Bench, tmp_path: Path) -> None:
    log = bench.run(closed_loop())
    store.save(log, tmp_path / "run.json")
    assert store.load(tmp_path / "run.json", RunLog) == log


def test_requests_are_in_order_of_completion_and_within_the_run(bench: Bench) -> None:
    for load in (closed_loop(), spaced_arrivals()):
        log = bench.run(load)
        arrival, start, end = (
            np.array(column)
            for column in (log.requests.arrival_ns, log.requests.start_ns, log.requests.end_ns)
        )
        assert (arrival <= start).all() and (start < end).all()
        assert (np.diff(end) >= 0).all()
        assert end.min() >= 0 and end.max() <= log.duration_ns


def test_worker_has_one_request_at_a_time(bench: Bench) -> None:
    for load in (closed_loop(), spaced_arrivals()):
        log = bench.run(load)
        for worker in range(WORKERS):
            mine = np.array(log.requests.worker) == worker
            start, end = (
                np.array(column)[mine] for column in (log.requests.start_ns, log.requests.end_ns)
            )
            assert (start[1:] >= end[:-1]).all()


def test_every_arrival_completes_or_is_unfinished(bench: Bench) -> None:
    load = spaced_arrivals()
    log = bench.run(load)
    assert log.unfinished == (0,) * WORKERS
    for worker, times in enumerate(load.arrivals):
        assert times is not None
        mine = np.array(log.requests.worker) == worker
        assert np.array(log.requests.arrival_ns)[mine].tolist() == times.tolist()
    short = Window(seconds=0.0152, warmup_seconds=0.0, trace_ms=1.0)
    cut = bench.run(load, short)
    for worker, times in enumerate(load.arrivals):
        assert times is not None
        arrived = np.count_nonzero(times < cut.duration_ns)
        assert cut.requests.worker.count(worker) + cut.unfinished[worker] == arrived
    assert sum(cut.unfinished) > 0


def test_counters_are_those_of_the_requests(bench: Bench) -> None:
    log = bench.run(closed_loop())
    for part, counter in zip(log.plan.main.assignments, log.counters, strict=True):
        done = log.requests.worker.count(part.worker)
        kernels = log.plan.workers[part.worker].kernels
        assert part.switches > 0
        assert done * kernels <= counter.kernels <= (done + 1) * kernels
        assert done * part.switches <= counter.barriers <= (done + 1) * part.switches
        assert log.unfinished[part.worker] == 1


def test_kernels_are_recorded_in_the_trace_window_in_order(bench: Bench) -> None:
    log = bench.run(closed_loop())
    columns = log.kernels
    assert columns.window_ns == 20_000_000
    assert len(columns.worker) > 100
    assert list(columns.end_ns) == sorted(columns.end_ns)
    assert columns.end_ns[0] >= 0 and columns.end_ns[-1] <= columns.window_ns
    routes = bench.program().routes[0]
    last = dict.fromkeys(range(WORKERS), (-1, 0))
    for worker, position, lane, start, end in zip(
        columns.worker,
        columns.position,
        columns.lane,
        columns.start_ns,
        columns.end_ns,
        strict=True,
    ):
        before, free = last[worker]
        assert position == (before + 1) % log.plan.workers[worker].kernels
        assert lane == routes[worker].lane[position]
        assert free <= start < end
        last[worker] = (position, end)


def test_trace_window_of_0_records_no_kernels(bench: Bench) -> None:
    log = bench.run(closed_loop(), Window(seconds=0.01, warmup_seconds=0.0, trace_ms=0.0))
    assert log.kernels.worker == ()
    assert log.kernels.window_ns == 0


def test_session_runs_more_than_once(bench: Bench) -> None:
    with bench.device.open(bench.program(), bench.sources) as session:
        first = session.run(closed_loop(), bench.window, ALONE_RPS)
        other = session.run(spaced_arrivals(), bench.window, ALONE_RPS)
        again = session.run(closed_loop(), bench.window, ALONE_RPS)
    assert len(other.requests.worker) == 20 * WORKERS
    assert len(again.requests.worker) == pytest.approx(len(first.requests.worker), rel=0.1)


def test_modelled_run_repeats_itself_exactly(bench: Bench) -> None:
    log = bench.run(closed_loop(seed=3))
    if not log.modelled:
        pytest.skip("only a model repeats itself exactly")
    assert bench.run(closed_loop(seed=3)) == log


def test_two_sessions_do_not_disturb_each_other(bench: Bench) -> None:
    expected = bench.run(closed_loop())
    with (
        bench.device.open(bench.program("shared"), bench.sources) as one,
        bench.device.open(bench.program(), bench.sources) as other,
    ):
        one.run(closed_loop(), bench.window, ALONE_RPS)
        log = other.run(closed_loop(), bench.window, ALONE_RPS)
    assert log.plan == expected.plan
    assert len(log.requests.worker) == pytest.approx(len(expected.requests.worker), rel=0.1)


def test_session_may_be_closed_twice_and_lets_errors_through(bench: Bench) -> None:
    session = bench.device.open(bench.program(), bench.sources)
    with pytest.raises(ZeroDivisionError), session:
        raise ZeroDivisionError
    session.close()


def test_plan_for_another_device_is_refused_with_the_reason(
    bench: Bench, mi50: Topology, make_problem: MakeProblem
) -> None:
    foreign = make_problem(mi50, WORKERS)
    program = lower(make_plan("shared", foreign), [profile.trace for profile in foreign.profiles])
    with pytest.raises(MismatchError, match="different devices: units 60 against 132"):
        bench.device.open(program, bench.stand_ins(foreign.profiles))


def test_plan_from_a_twin_of_the_device_runs_with_a_warning(bench: Bench) -> None:
    plan = bench.plan("shared")
    twin = msgspec.structs.replace(plan.fingerprint, device="NVIDIA H100 SXM")
    plan = msgspec.structs.replace(plan, fingerprint=twin)
    program = lower(plan, [profile.trace for profile in bench.problem.profiles])
    with bench.device.open(program, bench.sources) as session:
        log = session.run(closed_loop(), bench.window, ALONE_RPS)
    assert any("H100" in warning and "H200" in warning for warning in log.warnings)


def test_wrong_number_of_sources_is_refused(bench: Bench) -> None:
    for sources in ([], bench.sources[:-1], [*bench.sources, bench.sources[0]]):
        with pytest.raises(MismatchError, match=f"{WORKERS} workers"):
            bench.device.open(bench.program(), sources)


def test_sources_in_another_order_are_refused(bench: Bench) -> None:
    with pytest.raises(MismatchError):
        bench.device.open(bench.program(), list(bench.sources)[::-1])


def test_source_of_other_kernels_is_refused(
    bench: Bench, make_problem: MakeProblem, h200: Topology
) -> None:
    same_name = make_problem(h200, WORKERS, seed=50)
    with pytest.raises(MismatchError):
        bench.device.open(bench.program(), bench.stand_ins(same_name.profiles))
    profile = same_name.profiles[0]
    trace = msgspec.structs.replace(profile.trace, model="stranger")
    stranger = msgspec.structs.replace(
        profile,
        trace=trace,
        fingerprint=with_traces(profile.fingerprint, [trace]),
    )
    strangers = bench.stand_ins([stranger, *bench.problem.profiles[1:]])
    with pytest.raises(MismatchError):
        bench.device.open(bench.program(), strangers)


def test_load_for_another_number_of_workers_is_refused(bench: Bench) -> None:
    with bench.device.open(bench.program(), bench.sources) as session:
        for workers in (WORKERS - 1, WORKERS + 1):
            load = Load(label="", seed=0, arrivals=(CLOSED_LOOP,) * workers)
            with pytest.raises(UsageError, match=f"{workers} workers, not {WORKERS}"):
                session.run(load, bench.window, ALONE_RPS)


def test_rates_alone_for_another_number_of_workers_are_refused(bench: Bench) -> None:
    with (
        bench.device.open(bench.program(), bench.sources) as session,
        pytest.raises((EclipError, ValueError), match="alone_rps"),
    ):
        session.run(closed_loop(), bench.window, [1.0])


def test_device_without_work_uses_energy_and_completes_nothing(bench: Bench) -> None:
    idle = Load(label="idle", seed=0, arrivals=(np.empty(0, dtype=np.int64),) * WORKERS)
    log = bench.run(idle)
    assert log.energy_uj > 0
    assert log.requests.worker == log.kernels.worker == ()
    assert {counter.kernels for counter in log.counters} == {0}
    assert log.energy_uj < bench.run(closed_loop()).energy_uj


def test_rates_alone_are_measured_once_per_model_and_are_no_slower_than_shared(
    bench: Bench,
) -> None:
    profiles = bench.problem.profiles
    rates = alone_rates(bench.device, [*profiles, profiles[0]], [*bench.sources, bench.sources[0]])
    assert rates[0] == rates[-1]
    log = bench.run(closed_loop(), policy="shared")
    for worker, rate in enumerate(rates[:-1]):
        assert log.requests.worker.count(worker) / bench.seconds <= rate * 1.05
