"""Devices that the conformance suite holds to the contract, each with workers and plans for it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import gpu_host
import hip_bench
import hip_chains
from eclip.core.calibration import Calibration
from eclip.core.device import Capability, Device, SourceKind, Window
from eclip.core.load import CLOSED_LOOP, Load
from eclip.core.mix import mix_of
from eclip.core.model_key import ModelKey
from eclip.core.plan import Lanes, Plan
from eclip.core.profile import Profile
from eclip.core.program import Program, lower
from eclip.core.runlog import RunLog
from eclip.core.topology import Topology
from eclip.files import store
from eclip.gpu.executables import Capture
from eclip.hip.device import HipDevice
from eclip.models.synthetic import synthetic_profile
from eclip.planner.policies import make_plan
from eclip.planner.problem import Problem
from eclip.sim.device import SimDevice
from simulations import options_for

WORKERS = 3
TRACE_MS = 20.0
# Policies whose plans cannot be opened without it.
WAYS = {
    "timeslice": Capability.TURNS,
    "mps": Capability.PROCESSES,
    "mps-model": Capability.PROCESSES,
}


def with_needs(policy: str, needs: Mapping[str, Capability], mark: str = "needs") -> Any:
    """A policy as a test's parameter, with the mark of what it needs."""
    marks = [getattr(pytest.mark, mark)(needs[policy])] if policy in needs else []
    return pytest.param(policy, marks=marks)


@dataclass(frozen=True)
class Bench:
    """A device with three workers' worth of plans and sources for it."""

    device: Device
    problem: Problem
    sources: Mapping[SourceKind, Sequence[Any]]
    stand_ins: Callable[[Sequence[Profile]], Sequence[Any]]  # sources that are only looked at
    another: Callable[[], Device]  # the same device once more, to be closed
    seconds: float  # of a run: enough requests, and time for the energy counter to move
    # A worker whose kernels have thread blocks that must be resident together.
    clustered: tuple[Problem, Any] | None = None
    # By how much a run may differ from itself: more where kernels are a busy host's.
    tolerance: float = 0.1
    # Replaces the host's clock for a test, where the device has one that a busy host cannot slow.
    use_its_clock: Callable[[pytest.MonkeyPatch], None] = lambda monkeypatch: None
    calibration: Calibration | None = None  # for the search, where there is none of its name

    @property
    def window(self) -> Window:
        records = Capability.TRACE in self.device.capabilities
        return Window(
            seconds=self.seconds, warmup_seconds=0.0, trace_ms=TRACE_MS if records else 0.0
        )

    @property
    def plain(self) -> Sequence[Any]:
        """What workers run from in one process."""
        return self.sources[self.device.source_kind(Lanes())]

    def plan(self, policy: str = "eclip") -> Plan:
        return make_plan(policy, self.problem, options_for(self.problem, self.calibration))

    def program(self, policy: str = "eclip") -> Program:
        return self.program_of(self.plan(policy))

    def program_of(self, plan: Plan) -> Program:
        return lower(plan, [profile.trace for profile in self.problem.profiles])

    def sources_of(self, plan: Plan) -> Sequence[Any]:
        return self.sources[self.device.source_kind(plan.sharing)]

    def run(self, load: Load, window: Window | None = None, policy: str = "eclip") -> RunLog:
        return self.run_plan(self.plan(policy), load, window)

    def run_plan(self, plan: Plan, load: Load, window: Window | None = None) -> RunLog:
        with self.device.open(self.program_of(plan), self.sources_of(plan)) as session:
            return session.run(load, window or self.window)


@dataclass(frozen=True)
class Candidate:
    """A device that is to pass the suite.

    What it lacks for good is not here: its ``capabilities`` say so, and tests that need them are
    skipped with their names. ``expected_failures`` are tests that it should pass and does not, by
    name or ``name[policy]``, each with the reason; one that passes after all fails the suite.
    """

    name: str
    make: Callable[[], Any]  # a context manager that gives its bench
    missing: Callable[[], str | None] = lambda: None  # what this host lacks to have the device
    host_lacks: Callable[[Capability], str | None] = lambda capability: None
    expected_failures: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def sim_bench(kind: type[SimDevice] = SimDevice) -> Iterator[Bench]:
    topology = store.load_builtin("h200", Topology)
    calibration = store.load_builtin("h200", Calibration)
    profiles = tuple(
        synthetic_profile(worker, 12 + worker, topology, name=f"m{worker}")
        for worker in range(WORKERS)
    )
    problem = Problem(mix_of(profile.model for profile in profiles), topology, profiles)
    yield Bench(
        device=kind(topology, calibration),
        problem=problem,
        sources={SourceKind.PROFILE: profiles},
        stand_ins=list,
        another=lambda: kind(topology, calibration),
        seconds=0.05,
    )


@contextmanager
def cuda_bench() -> Iterator[Bench]:
    """Chains of our own kernels, captured and profiled on the GPU at hand."""
    from chains import CLUSTERED, Chains, job_of
    from eclip.capture.profiler import measure_profile
    from eclip.capture.torch import CapturedModule
    from eclip.cuda.device import CudaDevice

    with ExitStack() as stack:
        device = stack.enter_context(CudaDevice())
        chains = stack.enter_context(Chains(device.gpu))

        def problem_of(*captures: Capture) -> Problem:
            profiles = tuple(
                measure_profile(
                    device,
                    CapturedModule(one, None, (), None),
                    energy_seconds=0.0,
                    stress=False,
                )
                for one in captures
            )
            mix = mix_of(profile.model for profile in profiles)
            return Problem(mix, device.topology, profiles)

        captures = [chains.capture(ModelKey(f"m{worker}", 1)) for worker in range(WORKERS)]
        clustered = chains.capture(CLUSTERED)
        yield Bench(
            device=device,
            problem=problem_of(*captures),
            sources={
                SourceKind.CAPTURE: captures,
                SourceKind.JOB: [job_of(one.trace.model) for one in captures],
            },
            stand_ins=lambda others: [
                Capture(captures[0].graph, other.trace, None) for other in others
            ],
            another=CudaDevice,
            seconds=0.6,
            clustered=(problem_of(clustered), clustered),
        )


@contextmanager
def hip_standin_bench() -> Iterator[Bench]:
    """The stand-in for HIP, whose kernels take what synthetic profiles say."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stand_in = stack.enter_context(hip_bench.standing_in(folder, own=True))
        device = stack.enter_context(stand_in.device())
        problem = hip_bench.make_problem(device.topology, WORKERS)
        sources = [
            stand_in.capture(device.gpu, number, profile)
            for number, profile in enumerate(problem.profiles)
        ]
        yield Bench(
            device=device,
            problem=problem,
            sources={SourceKind.CAPTURE: sources},
            stand_ins=lambda others: [Capture(sources[0].graph, other.trace) for other in others],
            another=stand_in.device,
            seconds=0.5,
            use_its_clock=stand_in.use_its_clock,
            calibration=_any_calibration(device.topology),
        )


@contextmanager
def hip_bench_real() -> Iterator[Bench]:
    """Kernels of our own on an AMD GPU."""
    with HipDevice() as device:
        problem, sources = hip_chains.make_sources(device, WORKERS)
        yield Bench(
            device=device,
            problem=problem,
            sources={SourceKind.CAPTURE: sources},
            stand_ins=lambda others: [Capture(sources[0].graph, other.trace) for other in others],
            another=HipDevice,
            seconds=0.6,
            calibration=_any_calibration(device.topology),
        )


def _any_calibration(topology: Topology) -> Calibration:
    """For the search on a device that has none of its own."""
    known = store.load_builtin("mi300x", Calibration)
    return msgspec.structs.replace(known, fingerprint=topology.fingerprint)


def _cuda_host_lacks(capability: Capability) -> str | None:
    if capability is Capability.PROCESSES and shutil.which("nvidia-cuda-mps-control") is None:
        return "this host has no nvidia-cuda-mps-control"
    return None


CANDIDATES = (
    Candidate(name="sim", make=sim_bench),
    Candidate(name="cuda", make=cuda_bench, missing=gpu_host.missing, host_lacks=_cuda_host_lacks),
    Candidate(name="hip", make=hip_bench_real, missing=hip_chains.missing),
    Candidate(name="hip-standin", make=hip_standin_bench, missing=hip_bench.missing),
)


def closed_loop(seed: int = 0) -> Load:
    return Load(label="closed loop", seed=seed, arrivals=(CLOSED_LOOP,) * WORKERS)


def spaced_arrivals() -> Load:
    """Bursts of five, far enough from the end for all to complete."""
    burst = np.repeat(np.arange(0, 20_000_000, 5_000_000), 5)
    return Load(label="bursts", seed=0, arrivals=(burst,) * WORKERS)
