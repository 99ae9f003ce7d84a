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

from eclip.artefacts.measures import measure
from eclip.artefacts.plan import Plan
from eclip.artefacts.runlog import RunLog
from eclip.devices.base import Window
from eclip.devices.cuda.device import CudaDevice
from eclip.devices.cuda.executables import Capture
from eclip.devices.load import CLOSED_LOOP, Load
from eclip.devices.remote import ProcessSets, Sharing, host_of, mps_sharing
from eclip.errors import DeviceError
from eclip.runtime.program import lower

torch = pytest.importorskip("torch", reason="tests/gpu needs the Python package torch")

MODELS = ("vgg19", "shufflenet")
BATCH = 8
HALF = 50
WINDOW = Window(seconds=1.5, warmup_seconds=0.2, trace_ms=0.0)
CLOSED = Load(label="closed loop", seed=0, arrivals=(CLOSED_LOOP,) * len(MODELS))
PlanOf = Callable[..., Plan]


@pytest.fixture(scope="module")
def captures(device: CudaDevice) -> list[Capture]:
    from eclip.frontends.models import build
    from eclip.frontends.torch import capture

    return [capture(*build(name, BATCH), name, BATCH).capture for name in MODELS]


@pytest.fixture(scope="module")
def shared(device: CudaDevice, captures: list[Capture], plan_of: PlanOf) -> Plan:
    traces = [source.trace for source in captures]
    full = [[device.topology.full]] * len(traces)
    plan: Plan = plan_of(device.topology, traces, full, [[0] * len(one.kernels) for one in traces])
    return msgspec.structs.replace(plan, policy="shared")


@pytest.fixture(scope="module")
def sets(device: CudaDevice, shared: Plan) -> Iterator[ProcessSets]:
    """Time-slicing, MPS with everything for everybody, and MPS with halves."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        pytest.skip("this host has no nvidia-cuda-mps-control")
    from eclip.frontends.served import ENTRY

    sharings = [
        Sharing(msgspec.structs.replace(shared, policy="timeslice", turns=True)),
        mps_sharing(shared, (100, 100)),
        mps_sharing(shared, (HALF, HALF)),
    ]
    begun = time.monotonic()
    with ProcessSets(host_of(device), ENTRY, sharings) as made:
        print(f"{len(sharings) * len(MODELS)} processes in {time.monotonic() - begun:.1f} s")
        yield made
        folders = [session._daemon.pipes for session in made.sessions if session._daemon]
    assert not any(folder.exists() for folder in folders)


@pytest.fixture(scope="module")
def logs(
    device: CudaDevice, captures: list[Capture], shared: Plan, sets: ProcessSets
) -> dict[str, RunLog]:
    program = lower(shared, [source.trace for source in captures])
    alone = []
    for worker in range(len(MODELS)):
        # In its own process with the others idle: no arrivals for them.
        arrivals = tuple(
            CLOSED_LOOP if index == worker else np.empty(0, dtype=np.int64)
            for index in range(len(MODELS))
        )
        load = Load(label="alone", seed=0, arrivals=arrivals)
        ends = sets.sessions[0].run(load, WINDOW, [1.0, 1.0]).requests.end_ns
        alone.append((len(ends) - 1) * 1e9 / (ends[-1] - ends[0]))
    with device.open(program, captures) as session:
        found = {"shared": session.run(CLOSED, WINDOW, alone)}
    for one in sets.sessions:
        found[one.sharing.label] = one.run(CLOSED, WINDOW, alone)
    for label, log in found.items():
        got = measure(log)
        print(f"{label}: STP {got.stp:.3f} fairness {got.fairness:.2f} {got.power_w:.0f} W")
        print(f"  warnings: {log.warnings}")
    for one in sets.sessions:
        print(one.sharing.label, one.facts)
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
        arrivals = tuple(
            CLOSED_LOOP if index == worker else np.empty(0, dtype=np.int64)
            for index in range(len(MODELS))
        )
        load = Load(label="alone", seed=0, arrivals=arrivals)
        with device.open(program, captures) as session:
            ends = session.run(load, WINDOW, [1.0, 1.0]).requests.end_ns
        inside = (len(ends) - 1) * 1e9 / (ends[-1] - ends[0])
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
        runs = [session.run(load, WINDOW, [1.0, 1.0])]
    runs += [one.run(load, WINDOW, [1.0, 1.0]) for one in sets.sessions]
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
    from eclip.frontends.served import ENTRY

    if shutil.which("nvidia-cuda-mps-control") is None:
        pytest.skip("this host has no nvidia-cuda-mps-control")
    sharings = [mps_sharing(shared, (HALF, HALF)), Sharing(shared)]
    with ProcessSets(host_of(device), ENTRY, sharings) as made:
        victim, sound = made.sessions
        pids = [child.pid for one in made.sessions for child in one.children]
        os.kill(victim.children[0].pid, signal.SIGKILL)
        with pytest.raises(DeviceError, match=r"worker vgg19 \(mps 50%\) was killed"):
            victim.run(CLOSED, WINDOW, [1.0, 1.0])
        assert sound.run(CLOSED, WINDOW, [1.0, 1.0]).requests.worker
        assert victim._daemon is not None
        folder = victim._daemon.pipes
    assert not folder.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_model_that_cannot_be_built_is_named(device: CudaDevice, shared: Plan) -> None:
    unknown = msgspec.structs.replace(shared.mix.workers[0], model="nosuch", name="nosuch")
    workers = (unknown, *shared.mix.workers[1:])
    plan = msgspec.structs.replace(
        shared,
        mix=msgspec.structs.replace(shared.mix, workers=workers),
        workers=(
            msgspec.structs.replace(shared.workers[0], name="nosuch", model=unknown.key),
            *shared.workers[1:],
        ),
    )
    from eclip.errors import UsageError
    from eclip.frontends.served import ENTRY

    with pytest.raises(UsageError, match=r"worker nosuch \(timeslice\): unknown model 'nosuch'"):
        ProcessSets(host_of(device), ENTRY, [Sharing(plan)])
