"""One process per model on a GPU: time-slicing and MPS, and that nothing of them stays behind."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from eclip.core.device import Window
from eclip.core.load import Load, closed_loop
from eclip.core.measures import measure
from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan, Processes, Turns
from eclip.core.program import lower, program_of
from eclip.core.runlog import RunLog
from eclip.cuda.device import CudaDevice
from eclip.cuda.processes.child import Job
from eclip.cuda.processes.session import ProcessSets
from eclip.errors import DeviceError, UsageError
from eclip.files import store
from eclip.gpu.executables import Capture
from eclip.planner.policies import with_shares

torch = pytest.importorskip("torch", reason="tests/gpu needs the Python package torch")

pytestmark = pytest.mark.alone

MODELS = (ModelKey("vgg19", 8), ModelKey("shufflenet", 8))
ENTRY = "eclip.capture.served:open_model"
HALF = 50
WINDOW = Window(seconds=1.5, warmup_seconds=0.2, trace_ms=0.0)
CLOSED = closed_loop(len(MODELS))
PlanOf = Callable[..., Plan]


@pytest.fixture(scope="module")
def captures(device: CudaDevice) -> list[Capture]:
    from eclip.capture.named import build
    from eclip.capture.torch import capture

    return [capture(*build(model), model).capture for model in MODELS]


@pytest.fixture(scope="module")
def shared(device: CudaDevice, captures: list[Capture], plan_of: PlanOf) -> Plan:
    traces = [source.trace for source in captures]
    full = [[device.topology.full]] * len(traces)
    plan: Plan = plan_of(device.topology, traces, full, [[0] * len(one.kernels) for one in traces])
    return msgspec.structs.replace(plan, policy="shared")


def in_turns(shared: Plan) -> Plan:
    return msgspec.structs.replace(shared, policy="timeslice", sharing=Turns())


def jobs_of(plan: Plan) -> list[Job]:
    return [Job(ENTRY, model) for model in plan.models]


def label_of(plan: Plan) -> str:
    sharing = plan.sharing
    return f"mps {sharing.label}" if isinstance(sharing, Processes) else plan.policy


def needs_mps() -> None:
    if shutil.which("nvidia-cuda-mps-control") is None:
        pytest.skip("this host has no nvidia-cuda-mps-control")


@pytest.fixture(scope="module")
def sets(device: CudaDevice, shared: Plan) -> Iterator[ProcessSets]:
    """Time-slicing, MPS with everything for everybody, and MPS with halves."""
    needs_mps()
    plans = [in_turns(shared), with_shares(shared, (100, 100)), with_shares(shared, (HALF, HALF))]
    begun = time.monotonic()
    with device.start(plans, [jobs_of(plan) for plan in plans]) as made:
        made.wait()
        print(f"{len(plans) * len(MODELS)} processes in {time.monotonic() - begun:.1f} s")
        yield made
        folders = [session._daemon.pipes for session in made.sessions if session._daemon]
    assert not any(folder.exists() for folder in folders)


def rate_of(log: RunLog) -> float:
    ends = log.requests.end_ns
    return (len(ends) - 1) * 1e9 / (ends[-1] - ends[0])


@pytest.fixture(scope="module")
def logs(
    device: CudaDevice, captures: list[Capture], shared: Plan, sets: ProcessSets
) -> dict[str, RunLog]:
    """By how the GPU is shared; rates alone are those in a process of one's own, others idle."""
    program = lower(shared, [source.trace for source in captures])
    alone = tuple(
        rate_of(sets.sessions[0].run(closed_loop(len(MODELS), only=worker), WINDOW))
        for worker in range(len(MODELS))
    )
    with device.open(program, captures) as session:
        found = {"shared": session.run(CLOSED, WINDOW)}
    for one in sets.sessions:
        found[label_of(one.plan)] = one.run(CLOSED, WINDOW)
    for label, log in found.items():
        found[label] = msgspec.structs.replace(log, alone_rps=alone)
        got = measure(found[label])
        print(f"{label}: STP {got.stp:.3f} fairness {got.fairness:.2f} {got.power_w:.0f} W")
        print(f"  warnings: {log.warnings}")
    for one in sets.sessions:
        print(label_of(one.plan), one.facts)
    return found


@pytest.mark.xfail(
    reason="shufflenet is 6 to 8% faster where it is the process's only model (H200, 2026-11-15)",
    strict=False,
)
def test_a_process_of_its_own_is_as_fast_as_a_session(
    device: CudaDevice, captures: list[Capture], shared: Plan, logs: dict[str, RunLog]
) -> None:
    """Alone, the same graph takes the same time, whichever process launches it."""
    program = lower(shared, [source.trace for source in captures])
    for worker, apart in enumerate(logs["shared"].alone_rps):
        with device.open(program, captures) as session:
            inside = rate_of(session.run(closed_loop(len(MODELS), only=worker), WINDOW))
        assert apart == pytest.approx(inside, rel=0.03)


def test_sharing_shows_in_the_figures(logs: dict[str, RunLog]) -> None:
    """Time-slicing gains nothing; MPS does; halves are fairer than everything for everybody."""
    found = {label: measure(log) for label, log in logs.items()}
    assert 0.7 <= found["timeslice"].stp <= 1.05
    assert found["mps 100%"].stp >= found["timeslice"].stp + 0.05
    assert found["mps 50%"].fairness > found["mps 100%"].fairness
    for label, one in found.items():
        assert 60 <= one.power_w <= 800, label
        assert min(logs[label].requests.worker.count(worker) for worker in (0, 1)) > 50


def test_clients_of_mps_have_their_share_of_units(device: CudaDevice, sets: ProcessSets) -> None:
    plain, full, half = sets.sessions
    assert [found.mps for found in plain.facts + full.facts + half.facts] == [False] * 2 + [
        True
    ] * 4
    assert {found.units for found in plain.facts + full.facts} == {device.topology.units}
    for found in half.facts:
        assert found.units == pytest.approx(device.topology.units * HALF / 100, abs=8)


def test_no_stranger_is_seen_on_the_gpu(logs: dict[str, RunLog]) -> None:
    for label, log in logs.items():
        assert not any("other processes" in warning for warning in log.warnings), label
        assert not any("late" in warning for warning in log.warnings), label


def test_arrivals_are_the_same_as_in_a_session(
    device: CudaDevice, captures: list[Capture], shared: Plan, sets: ProcessSets
) -> None:
    random = np.random.default_rng(1)
    times = tuple(np.sort(random.integers(-200_000_000, 1_500_000_000, 300)) for _ in MODELS)
    load = Load(label="by hand", seed=1, arrivals=times)
    program = lower(shared, [source.trace for source in captures])
    with device.open(program, captures) as session:
        runs = [session.run(load, WINDOW)]
    runs += [one.run(load, WINDOW) for one in sets.sessions]
    for log in runs:
        for worker, wanted in enumerate(times):
            seen = [
                arrival
                for arrival, by in zip(log.requests.arrival_ns, log.requests.worker, strict=True)
                if by == worker
            ]
            first = int(np.searchsorted(wanted, seen[0]))
            assert seen == wanted[first : first + len(seen)].tolist()


def test_a_killed_client_ends_its_set_and_leaves_the_others(
    device: CudaDevice, shared: Plan
) -> None:
    needs_mps()
    plans = [with_shares(shared, (HALF, HALF)), in_turns(shared)]
    with device.start(plans, [jobs_of(plan) for plan in plans]) as made:
        made.wait()
        victim, sound = made.sessions
        pids = [child.pid for one in made.sessions for child in one.children]
        os.kill(victim.children[0].pid, signal.SIGKILL)
        with pytest.raises(DeviceError, match=r"worker vgg19 \(mps 50%\) was killed"):
            victim.run(CLOSED, WINDOW)
        assert sound.run(CLOSED, WINDOW).requests.worker
        assert victim._daemon is not None
        folder = victim._daemon.pipes
    assert not folder.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_stored_plan_of_processes_opens_like_any_other(
    device: CudaDevice, shared: Plan, tmp_path: Path
) -> None:
    needs_mps()
    for plan in (in_turns(shared), with_shares(shared, (HALF, HALF))):
        store.save(plan, tmp_path / "plan.json")
        kept = store.load(tmp_path / "plan.json", Plan)
        assert kept == plan
        with device.open(program_of(kept), jobs_of(kept)) as session:
            log = session.run(CLOSED, WINDOW)
        assert log.plan == plan
        assert set(log.requests.worker) == {0, 1}
        session.close()
        with pytest.raises(DeviceError, match="have ended"):
            session.run(CLOSED, WINDOW)


def test_a_closed_device_has_closed_its_processes(shared: Plan) -> None:
    plan = in_turns(shared)
    with CudaDevice() as own:
        started = own.start([plan], [jobs_of(plan)])
        lone = own.open(program_of(plan), jobs_of(plan))
        started.wait()
        pids = [child.pid for one in started.sessions for child in one.children]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(DeviceError, match="have ended"):
        lone.run(CLOSED, WINDOW)
    started.close()
    lone.close()
    for opening in (
        lambda: own.start([plan], [jobs_of(plan)]),
        lambda: own.open(program_of(plan), jobs_of(plan)),
    ):
        with pytest.raises(DeviceError, match="the device is closed"):
            opening()


def test_a_model_that_cannot_be_built_is_named(device: CudaDevice, shared: Plan) -> None:
    nosuch = ModelKey("nosuch", 8)
    first, *others = shared.mix.workers
    unknown = msgspec.structs.replace(first, model=nosuch, name="nosuch")
    plan = msgspec.structs.replace(
        in_turns(shared),
        mix=msgspec.structs.replace(shared.mix, workers=(unknown, *others)),
        workers=(
            msgspec.structs.replace(shared.workers[0], name="nosuch", model=nosuch),
            *shared.workers[1:],
        ),
    )
    with (
        pytest.raises(UsageError, match=r"worker nosuch \(timeslice\): unknown model 'nosuch'"),
        device.start([plan], [jobs_of(plan)]) as made,
    ):
        made.wait()
