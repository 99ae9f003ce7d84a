"""What a comparison relies on: priorities count, and idle sessions of other plans do not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec
import pytest

from eclip.core.device import Window
from eclip.core.load import CLOSED_LOOP, Load
from eclip.core.measures import Measures, measure
from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan
from eclip.core.program import lower
from eclip.core.topology import Mask
from eclip.cuda.device import CudaDevice
from eclip.gpu.executables import Capture

torch = pytest.importorskip("torch", reason="tests/gpu needs the Python package torch")

pytestmark = pytest.mark.alone

MODELS = ("vgg19", "shufflenet")  # the second has the shorter requests
KEYS = [ModelKey(name, 8) for name in MODELS]
CLOSED = Load(label="closed loop", seed=0, arrivals=(CLOSED_LOOP,) * len(MODELS))
WINDOW = Window(seconds=0.8, warmup_seconds=0.2, trace_ms=0.0)
OTHERS = 12  # sessions with eight lanes each
PlanOf = Callable[..., Plan]


@pytest.fixture(scope="module")
def captures(device: CudaDevice) -> list[Capture]:
    from eclip.capture.named import build
    from eclip.capture.torch import capture

    return [capture(*build(key), key).capture for key in KEYS]


def measured(device: CudaDevice, plan: Plan, captures: list[Capture]) -> Measures:
    with device.open(lower(plan, [one.trace for one in captures]), captures) as session:
        return measure(msgspec.structs.replace(session.run(CLOSED, WINDOW), alone_rps=(1.0, 1.0)))


def test_worker_with_the_higher_priority_gains(
    device: CudaDevice, captures: list[Capture], plan_of: PlanOf
) -> None:
    traces = [one.trace for one in captures]
    routes = [[0] * len(trace.kernels) for trace in traces]
    plain: Plan = plan_of(device.topology, traces, [[device.topology.full]] * 2, routes)
    lanes = (plain.lanes[0], msgspec.structs.replace(plain.lanes[1], priority=1))
    preferred = msgspec.structs.replace(plain, lanes=lanes)
    rates: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(3):  # in turns
        for prefer, plan in ((False, plain), (True, preferred)):
            rates[prefer].append(measured(device, plan, captures).workers[1].rate_rps)
    print("shufflenet beside vgg19, requests/s: plain", rates[False], "preferred", rates[True])
    assert min(rates[True]) > 1.1 * max(rates[False])


def test_idle_sessions_of_other_plans_cost_nothing(
    device: CudaDevice, captures: list[Capture], plan_of: PlanOf
) -> None:
    traces = [one.trace for one in captures]
    slices = len(device.topology.slice_units)

    def plan_from(first: int) -> Plan:
        """Four lanes a worker; they switch every twentieth of a request."""
        masks = [
            [
                Mask((first + 8 * worker + index) % slices for index in range(size))
                for size in (4, 6, 8, 12)
            ]
            for worker in range(2)
        ]
        routes = [
            [20 * position // len(trace.kernels) % 4 for position in range(len(trace.kernels))]
            for trace in traces
        ]
        made: Plan = plan_of(device.topology, traces, masks, routes)
        return made

    plan = plan_from(0)
    alone = [measured(device, plan, captures).workers for _ in range(2)]
    with contextlib.ExitStack() as stack:
        for first in range(1, OTHERS + 1):
            program = lower(plan_from(first), traces)
            stack.enter_context(device.open(program, captures))
        crowded = measured(device, plan, captures).workers
    alone.append(measured(device, plan, captures).workers)
    for worker in range(2):
        rates = [one[worker].rate_rps for one in alone]
        print(MODELS[worker], "alone", rates, "beside idle sessions", crowded[worker].rate_rps)
        assert crowded[worker].rate_rps >= 0.97 * min(rates)
