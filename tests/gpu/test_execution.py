"""Execution of plans: outputs are the model's own; switches, lanes and neighbours cost little."""

from __future__ import annotations

import gc
import itertools
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from eclip.core.device import Window
from eclip.core.load import Load
from eclip.core.measures import measure
from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan
from eclip.core.profile import Profile
from eclip.core.runlog import RunLog
from eclip.core.topology import Mask
from eclip.core.trace import Trace
from eclip.cuda.device import CudaDevice
from eclip.cuda.graphs import CudaGraph
from eclip.cuda.stressors import Stressors
from eclip.gpu.executables import Capture
from eclip.gpu.session import Execution, GpuSession

if TYPE_CHECKING:
    from eclip.capture.torch import CapturedModule

torch = pytest.importorskip("torch", reason="tests/gpu needs the Python package torch")

MODELS = (
    *("albert", "bert", "gpt2", "vit_b_16", "resnet50", "resnet152", "resnext101", "densenet121"),
    *("densenet201", "vgg19", "alexnet", "squeezenet", "shufflenet", "mobilenet_v3"),
    *("efficientnet", "convnext"),
)
BATCH = 8
PLANS = 20
BY_SESSION = 2  # of those plans run as users run them; the others are launched once
MOST_SWITCHES = 40
SWITCH_NS = 1500
WHOLE, SEGMENTS, AUTO = Execution.WHOLE, Execution.SEGMENTS, Execution.AUTO
TIMED = ("albert", "resnet50", "vgg19", "shufflenet")

CapturedFrom = Callable[..., AbstractContextManager[CudaGraph]]
PlanOf = Callable[..., Plan]
Route = Callable[..., list[int]]  # the fixtures random_route and legal
Opened = Callable[..., AbstractContextManager[GpuSession]]
RunClosed = Callable[..., RunLog]
Zoo = Callable[[str], "CapturedModule"]


@pytest.fixture(scope="module")
def zoo(device: CudaDevice) -> Iterator[Zoo]:
    """The captured model of a name; each is built once and kept until the last test here."""
    from eclip.capture import named as models
    from eclip.capture.torch import capture

    made: dict[str, CapturedModule] = {}

    def get(name: str) -> CapturedModule:
        if name not in made:
            module, inputs = models.build(ModelKey(name, BATCH))
            made[name] = capture(module, inputs, ModelKey(name, BATCH))
            made[name].graph.instantiate()
        return made[name]

    yield get
    torch.cuda.synchronize()
    made.clear()
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def profile_of(device: CudaDevice, zoo: Zoo) -> Callable[[str], Profile]:
    from eclip.capture.profiler import measure_profile

    made: dict[str, Profile] = {}

    def get(name: str) -> Profile:
        if name not in made:
            made[name] = measure_profile(device, zoo(name), energy_seconds=0, stress=False)
        return made[name]

    return get


def rates_of(log: RunLog) -> list[float]:
    return [worker.rate_rps for worker in measure(log).workers]


def clear(captured: CapturedModule) -> None:
    with torch.inference_mode():
        for tensor in captured.tensors():
            tensor.zero_()
    torch.cuda.synchronize()  # lanes do not wait for torch's stream


def replay(captured: CapturedModule) -> list[Any]:
    """Outputs of the unpartitioned model."""
    clear(captured)
    captured.graph.replay()
    torch.cuda.synchronize()
    with torch.inference_mode():
        return [tensor.clone() for tensor in captured.tensors()]


@pytest.mark.parametrize("name", MODELS)
def test_random_plans_give_the_outputs_of_the_unpartitioned_model(
    name: str,
    device: CudaDevice,
    zoo: Zoo,
    plan_of: PlanOf,
    random_route: Route,
    legal: Route,
    opened: Opened,
    run_closed: RunClosed,
) -> None:
    captured = zoo(name)
    source = captured.capture
    wanted = replay(captured)
    for tensor in wanted:
        assert torch.isfinite(tensor).all()
        assert (tensor != tensor.flatten()[0]).any()
    random = np.random.default_rng([8, *name.encode()])
    slices = len(device.topology.slice_units)
    for trial in range(PLANS):
        sizes = random.integers(1, slices + 1, random.integers(3, 6))
        masks = [Mask(random.choice(slices, size, replace=False).tolist()) for size in sizes]
        switches = round(MOST_SWITCHES * trial / (PLANS - 1))
        route = random_route(random, len(source.trace.kernels), switches, len(masks))
        masks.append(device.topology.full)  # holds every kernel, used only by those that need it
        plan = plan_of(
            device.topology, [source.trace], [masks], [legal(device, source, masks, route)]
        )
        execution = (WHOLE, SEGMENTS)[trial % 2]
        clear(captured)
        with opened(device, plan, [source], execution) as session:
            if trial < PLANS - BY_SESSION:
                session.request(0)
            else:
                assert run_closed(session, 1, seconds=0.5, warmup=0.0).requests.worker
        same = [
            torch.equal(mine, theirs)
            for mine, theirs in zip(captured.tensors(), wanted, strict=True)
        ]
        assert all(same), f"plan {trial}, {switches} switches, {execution.value}: {same}"


@pytest.mark.parametrize("name", TIMED)
@pytest.mark.alone
def test_one_lane_of_all_units_costs_at_most_1_percent_over_replay(
    name: str,
    device: CudaDevice,
    zoo: Zoo,
    plan_of: PlanOf,
    opened: Opened,
    stopwatch: Any,
) -> None:
    captured = zoo(name)
    trace = captured.capture.trace
    plan = plan_of(device.topology, [trace], [[device.topology.full]], [[0] * len(trace.kernels)])
    stream = torch.cuda.Stream()
    handle = stream.cuda_stream
    ours: list[float] = []
    plain: list[float] = []
    with opened(device, plan, [captured.capture], WHOLE) as session, torch.cuda.stream(stream):
        steps = session.steps(0)
        ways: list[tuple[list[float], Callable[[], float]]] = [
            (plain, lambda: stopwatch.time_ns(captured.graph.replay, handle, handle)),
            (ours, lambda: stopwatch.steps_ns(steps)),
        ]
        for _ in range(220):
            ways.reverse()
            for times, once in ways:
                times.append(once())
    cost = float(np.median(ours[20:]) / np.median(plain[20:]))
    assert cost <= 1.01, f"{cost:.4f} × {np.median(plain[20:]) / 1e3:.1f} µs"


# Real models pay more than a chain of synthetic kernels (0.9 µs): overlap of neighbouring kernels
# (programmatic dependent launch) ends at a switch. docs/results/tests.md has the numbers.
# Those that failed in one of two runs on an H200 (docs/results/tests.md); the others must hold.
missed = pytest.mark.xfail(reason="2.3 to 4.3 µs a switch on an H200, 2026-11-15", strict=False)
SWITCHING = [
    pytest.param(
        name, number, marks=[missed] if number > 5 or (name, number) == ("shufflenet", 5) else []
    )
    for name in TIMED
    for number in (1, 5, 14, 40)
]


@pytest.mark.parametrize(("name", "switches"), SWITCHING)
@pytest.mark.alone
def test_a_plan_alone_takes_its_predicted_time_and_little_per_switch(
    name: str,
    switches: int,
    device: CudaDevice,
    zoo: Zoo,
    profile_of: Callable[[str], Profile],
    plan_of: PlanOf,
    random_route: Route,
    opened: Opened,
    stopwatch: Any,
) -> None:
    source, profile = zoo(name).capture, profile_of(name)
    order = range(len(device.topology.slice_units))
    masks = [device.topology.take(size, order) for size in profile.sizes]
    kernels = len(source.trace.kernels)
    route = random_route(np.random.default_rng(switches), kernels, switches, len(masks))
    refused = set(profile.illegal)
    for kernel in range(kernels):
        while (kernel, route[kernel]) in refused:
            route[kernel] += 1  # as it was profiled: on the next larger size that holds it
    plan = plan_of(device.topology, [source.trace], [masks], [route])
    predicted_ns = sum(
        profile.busy_ns[kernel][size] + profile.gap_ns[kernel][size]
        for kernel, size in enumerate(route)
    )
    taken_ns = {}
    for execution in (WHOLE, SEGMENTS):
        with opened(device, plan, [source], execution) as session:
            steps = session.steps(0)
            times = [stopwatch.steps_ns(steps) for _ in range(45)][10:]
        taken_ns[execution.value] = float(np.median(times))
    limit_ns = predicted_ns * 1.01 + SWITCH_NS * plan.main.assignments[0].switches
    assert min(taken_ns.values()) <= limit_ns, f"{taken_ns}, predicted {predicted_ns}"


@pytest.mark.parametrize(
    "names", [("albert", "vgg19"), ("resnet50", "bert", "densenet121", "shufflenet")]
)
@pytest.mark.alone
def test_workers_with_14_switches_do_not_fall_into_lock_step(
    names: tuple[str, ...],
    device: CudaDevice,
    zoo: Zoo,
    plan_of: PlanOf,
    random_route: Route,
    legal: Route,
    opened: Opened,
    run_closed: RunClosed,
) -> None:
    sources = [zoo(name).capture for name in names]
    share = len(device.topology.slice_units) // len(names)
    random = np.random.default_rng(14)
    masks, routes = [], []
    for worker, source in enumerate(sources):
        first = worker * share
        own = [Mask(range(first, first + count)) for count in (share, 3 * share // 4, share // 2)]
        route = random_route(random, len(source.trace.kernels), 14, len(own))
        own.append(device.topology.full)
        masks.append(own)
        routes.append(legal(device, source, own, route))
    plan = plan_of(device.topology, [source.trace for source in sources], masks, routes)
    assert not plan.aliased
    rates: dict[Execution, list[list[float]]] = {AUTO: [], SEGMENTS: []}
    for _ in range(3):
        for execution, found in rates.items():
            with opened(device, plan, sources, execution) as session:
                found.append(rates_of(run_closed(session, len(names), seconds=1.0)))
    # Each worker counts the same, whatever the length of its requests, as in STP.
    kept = np.median(rates[AUTO], axis=0) / np.median(rates[SEGMENTS], axis=0)
    assert kept.mean() >= 0.97, f"{dict(zip(names, kept.round(3).tolist(), strict=True))}"


@pytest.mark.alone
def test_short_groups_behind_a_long_one_hold_up_nobody(
    device: CudaDevice,
    zoo: Zoo,
    plan_of: PlanOf,
    opened: Opened,
    run_closed: RunClosed,
) -> None:
    """All queued at once, they kept the neighbour to one request for each of theirs."""
    sources = [zoo(name).capture for name in ("resnext101", "shufflenet")]
    slices = len(device.topology.slice_units)
    masks = [[Mask(range(slices - 4))] * 2, [Mask(range(slices - 4, slices))]]
    kernels = len(sources[0].trace.kernels)
    long = 2 * kernels // 3
    switching = [0] * long + [1 - n // 20 % 2 for n in range(kernels - long)]
    assert sum(a != b for a, b in itertools.pairwise(switching)) > 10
    beside = [0] * len(sources[1].trace.kernels)
    rates = []
    for route in ([0] * kernels, switching):
        traces = [source.trace for source in sources]
        plan = plan_of(device.topology, traces, masks, [route, beside])
        with opened(device, plan, sources, AUTO) as session:
            rates.append(rates_of(run_closed(session, 2, seconds=0.5)))
    still, switched = rates
    print("requests/s beside one lane", still, "and beside switches", switched)
    assert switched[1] >= 0.95 * still[1]


@pytest.mark.alone
def test_a_neighbour_with_longer_requests_on_other_units_takes_nothing(
    device: CudaDevice,
    stressors: Stressors,
    plan_of: PlanOf,
    captured_from: CapturedFrom,
    opened: Opened,
    run_closed: RunClosed,
) -> None:
    slices = len(device.topology.slice_units)
    halves = [Mask(range(slices // 2)), Mask(range(slices // 2, slices))]
    scratch = torch.zeros(64, device="cuda")

    def work(rounds: int) -> Callable[[Any], None]:
        def enqueue(stream: Any) -> None:
            for _ in range(10):
                stressors.launch("fma", stream, 128, 1024, scratch.data_ptr(), 0, rounds)

        return enqueue

    torch.cuda.synchronize()
    with captured_from(work(10)) as short, captured_from(work(30)) as long:
        sources = [
            Capture(graph, Trace(model=ModelKey(name, 1), kernels=graph.kernels()), scratch)
            for name, graph in (("short", short), ("long", long))
        ]
        rates: list[list[float]] = []
        for workers in (1, 2) * 3:
            mine = sources[:workers]
            routes = [[0] * len(source.trace.kernels) for source in mine]
            lanes = [[half] for half in halves[:workers]]
            plan = plan_of(device.topology, [source.trace for source in mine], lanes, routes)
            with opened(device, plan, mine, WHOLE) as session:
                rates.append(rates_of(run_closed(session, workers, seconds=1.0)))
    (alone,) = np.median(rates[::2], axis=0)
    beside, neighbour = np.median(rates[1::2], axis=0)
    assert 2.0 <= beside / neighbour <= 4.5, "the neighbour's requests are not 3× as long"
    assert beside >= 0.95 * alone


def count_for(seconds: float) -> float:
    """How often a second pure Python code gets round a loop."""
    end = time.perf_counter() + seconds
    rounds = 0
    while time.perf_counter() < end:
        rounds += 1
    return rounds / seconds


@pytest.mark.alone
def test_the_driving_loop_holds_no_gil(
    device: CudaDevice, zoo: Zoo, plan_of: PlanOf, opened: Opened, run_closed: RunClosed
) -> None:
    sources = [zoo(name).capture for name in ("resnet50", "bert", "densenet121", "shufflenet")]
    routes = [[0] * len(source.trace.kernels) for source in sources]
    lanes = [[device.topology.full]] * len(sources)
    plan = plan_of(device.topology, [source.trace for source in sources], lanes, routes)
    free = statistics.median(count_for(0.2) for _ in range(3))
    logs: list[RunLog] = []
    with opened(device, plan, sources, WHOLE) as session:
        thread = threading.Thread(
            target=lambda: logs.append(run_closed(session, len(sources), seconds=2.0))
        )
        thread.start()
        time.sleep(0.5)
        # The best of several: a loop with the GIL would hold up all of them, others' work on this
        # host only some.
        beside = max(count_for(0.2) for _ in range(5))
        thread.join()
    assert min(rates_of(logs[0])) > 0
    assert beside >= 0.8 * free


@pytest.mark.parametrize("execution", [WHOLE, SEGMENTS])
@pytest.mark.alone
def test_what_others_do_on_the_gpu_makes_no_run_faster(
    execution: Execution,
    device: CudaDevice,
    zoo: Zoo,
    plan_of: PlanOf,
    opened: Opened,
    run_closed: RunClosed,
) -> None:
    """Graphs are 6% slower where nothing else has worked beside (docs/results/lanes.md)."""
    source = zoo("shufflenet").capture
    half = len(source.trace.kernels) // 2
    route = [0] * half + [1] * (len(source.trace.kernels) - half)
    masks = [device.topology.full, Mask(range(12))]
    plan = plan_of(device.topology, [source.trace], [masks], [route])
    work = "import torch; torch.zeros(8, device='cuda').add_(1); torch.cuda.synchronize()"
    with opened(device, plan, [source], execution) as session:
        (alone,) = rates_of(run_closed(session, 1, seconds=0.5))
        subprocess.run([sys.executable, "-c", work], check=True)
        (after,) = rates_of(run_closed(session, 1, seconds=0.5))
    assert after <= 1.02 * alone


@pytest.mark.parametrize("rate_rps", [None, 200.0])
@pytest.mark.alone
def test_the_run_log_has_requests_in_order_and_plausible_power(
    rate_rps: float | None,
    device: CudaDevice,
    zoo: Zoo,
    plan_of: PlanOf,
    legal: Route,
    opened: Opened,
) -> None:
    source = zoo("resnet50").capture
    kernels = len(source.trace.kernels)
    masks = [Mask(range(8)), device.topology.full]
    route = legal(device, source, masks, [0] * (kernels // 2) + [1] * (kernels - kernels // 2))
    plan = plan_of(device.topology, [source.trace], [masks], [route])
    arrivals = None if rate_rps is None else np.arange(0, int(1.5e9), int(1e9 / rate_rps))
    load = Load(label="test", seed=0, arrivals=(arrivals,))
    with opened(device, plan, [source], Execution.AUTO) as session:
        log = session.run(load, Window(seconds=1.5, warmup_seconds=0.1, trace_ms=0.0))
    requests = log.requests
    times = list(zip(requests.arrival_ns, requests.start_ns, requests.end_ns, strict=True))
    assert len(times) > 100
    assert all(arrival <= start <= end for arrival, start, end in times)
    assert list(requests.end_ns) == sorted(requests.end_ns)
    assert requests.end_ns[0] >= 0
    assert requests.end_ns[-1] < log.duration_ns
    if arrivals is not None:
        assert len(times) + log.unfinished[0] == len(arrivals)
        assert requests.arrival_ns == tuple(arrivals[: len(times)].tolist())
    assert log.energy_uj > 0
    assert 60 <= log.energy_uj * 1e3 / log.duration_ns <= 800  # watts
    assert log.counters[0].kernels == len(times) * kernels
    assert log.counters[0].barriers == len(times) * plan.main.assignments[0].switches
