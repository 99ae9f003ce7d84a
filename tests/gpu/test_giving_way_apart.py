"""A service and background in two processes on a GPU: the board between them is enough."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from eclip.core.device import Window
from eclip.core.load import closed_loop, load_of_mix
from eclip.core.measures import steady_rates
from eclip.core.mix import parse_mix
from eclip.core.plan import Plan, Turns, unpartitioned
from eclip.core.profile import Profile
from eclip.core.runlog import RunLog
from eclip.cuda.device import CudaDevice
from eclip.cuda.processes.child import Job
from eclip.cuda.processes.session import ProcessSets
from eclip.planner.joints import JointRules, give_way, promise_of
from eclip.planner.policies import with_shares

torch = pytest.importorskip("torch", reason="tests/gpu needs the Python package torch")

pytestmark = pytest.mark.alone

MIX = parse_mix("bert:1@300rps/50ms,vgg19:32@background")
ENTRY = "eclip.capture.served:open_model"
WINDOW = Window(seconds=3.0, warmup_seconds=0.3, trace_ms=0.0)
SERVICE, BACKGROUND = 0, 1
MOST_RATIO = 1.5  # of the p99 to that alone; docs/results/services.md has more requests
TURNS, MPS, PLAIN = "time-sliced, gives way", "MPS, gives way", "time-sliced"


def profile_of(device: CudaDevice, worker: int) -> Profile:
    from eclip.capture.named import build
    from eclip.capture.profiler import measure_profile
    from eclip.capture.torch import capture

    model = MIX.models[worker]
    captured = capture(*build(model), model)
    sizes = (device.topology.units,)
    return measure_profile(device, captured, sizes=sizes, energy_seconds=0.0, stress=False)


def plans_on(device: CudaDevice) -> dict[str, Plan]:
    profiles = [profile_of(device, worker) for worker in (SERVICE, BACKGROUND)]
    plain = unpartitioned(device.topology, profiles, MIX)
    promises = {SERVICE: promise_of(MIX.workers[SERVICE], profiles[SERVICE], 0.0)}
    giving = give_way(plain, profiles, promises, {BACKGROUND: JointRules(depth=1)})
    return {
        TURNS: msgspec.structs.replace(giving, sharing=Turns()),
        MPS: with_shares(giving, (100, 100)),
        PLAIN: msgspec.structs.replace(plain, sharing=Turns()),
    }


@pytest.fixture(scope="module")
def sets(device: CudaDevice) -> Iterator[dict[str, tuple[ProcessSets, int]]]:
    plans = plans_on(device)
    jobs = [Job(ENTRY, model) for model in MIX.models]
    with device.start(list(plans.values()), [jobs] * len(plans)) as made:
        made.wait()
        yield {name: (made, index) for index, name in enumerate(plans)}


def p99_ms(log: RunLog) -> float:
    mine = np.array(log.requests.worker) == SERVICE
    latency_ns = np.subtract(log.requests.end_ns, log.requests.arrival_ns)
    return float(np.percentile(latency_ns[mine], 99)) / 1e6


def measured(sets: dict[str, tuple[ProcessSets, int]], name: str) -> tuple[float, float, RunLog]:
    """p99 over that alone, background over its rate alone, and the log of both together."""
    made, index = sets[name]
    session = made.sessions[index]
    load = load_of_mix(MIX, WINDOW.seconds, WINDOW.warmup_seconds, 0)
    alone = session.run(load.only(SERVICE), WINDOW)
    quiet = session.run(closed_loop(2, only=BACKGROUND), WINDOW)
    both = session.run(load, WINDOW)
    ratio = p99_ms(both) / p99_ms(alone)
    background = steady_rates(both)[BACKGROUND] / steady_rates(quiet)[BACKGROUND]
    counters = both.counters[BACKGROUND]
    print(
        f"{name}: p99 {p99_ms(both):.2f} ms, {ratio:.2f} times alone; background {background:.3f}; "
        f"{counters.yields} yields, longest pause {counters.longest_pause_ns / 1e6:.1f} ms"
    )
    return ratio, background, both


@pytest.mark.parametrize("name", [TURNS, MPS])
def test_background_in_another_process_gives_way(
    sets: dict[str, tuple[ProcessSets, int]], name: str
) -> None:
    ratio, background, log = measured(sets, name)
    assert log.counters[BACKGROUND].yields > 100
    assert ratio <= MOST_RATIO
    assert background > 0.5


def test_without_joints_it_does_not(sets: dict[str, tuple[ProcessSets, int]]) -> None:
    ratio, _, log = measured(sets, PLAIN)
    assert log.counters[BACKGROUND].yields == 0
    assert ratio > MOST_RATIO
