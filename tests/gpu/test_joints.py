"""Joints: wherever a model yields and moves, its results stay its own; idle they cost nothing."""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from eclip.core.copies import PART_BYTES
from eclip.core.device import Window
from eclip.core.load import closed_loop
from eclip.core.measures import steady_rates
from eclip.core.mix import parse_mix
from eclip.core.model_key import ModelKey
from eclip.core.plan import Joints, Plan, Promise, Rule, Slack, unpartitioned
from eclip.core.profile import Profile
from eclip.core.program import lower
from eclip.core.rules import BUSY_SINCE, DEADLINE, IDLE, LEFT, Ints
from eclip.core.topology import Mask
from eclip.cuda.device import CudaDevice
from eclip.gpu.session import Execution, GpuSession
from eclip.planner.joints import JointRules, give_way, promise_of

if TYPE_CHECKING:
    from eclip.capture.torch import CapturedModule

torch = pytest.importorskip("torch", reason="tests/gpu needs the Python package torch")

MODELS = (
    *("albert", "bert", "gpt2", "vit_b_16", "resnet50", "resnet152", "resnext101", "densenet121"),
    *("densenet201", "vgg19", "alexnet", "squeezenet", "shufflenet", "mobilenet_v3"),
    *("efficientnet", "convnext"),
)
SERVICE = ModelKey("alexnet", 1)
BACKGROUND = ("vgg19", "bert", "resnet50", "densenet201")
BATCH = 32  # of background
COMPARED = 10  # requests, one by one
JOINT = 0.3  # chance of a kernel to be one
LIMITS_NS = (1_000_000, 2_000_000)  # of slack: none, some
ROUNDS = 5
MOST_COST = 0.02
COPIED_BYTES = 32 << 20
QUICK = Window(seconds=0.3, warmup_seconds=0.0, trace_ms=0.0)

PlanOf = Callable[..., Plan]
Opened = Callable[..., AbstractContextManager[GpuSession]]
Capturing = Callable[[ModelKey], "CapturedModule"]


@pytest.fixture
def captured(device: CudaDevice) -> Iterator[Capturing]:
    """Captures a model, once a test."""
    from eclip.capture import named as models
    from eclip.capture.torch import capture

    made: dict[ModelKey, CapturedModule] = {}

    def get(model: ModelKey) -> CapturedModule:
        if model not in made:
            made[model] = capture(*models.build(model), model)
            made[model].graph.instantiate()
        return made[model]

    yield get
    torch.cuda.synchronize()
    made.clear()
    gc.collect()
    torch.cuda.empty_cache()


def clear(captured: CapturedModule) -> None:
    with torch.inference_mode():
        for tensor in captured.tensors():
            tensor.zero_()
    torch.cuda.synchronize()  # lanes do not wait for torch's stream


def copies(captured: CapturedModule) -> list[Any]:
    torch.cuda.synchronize()
    with torch.inference_mode():
        return [tensor.clone() for tensor in captured.tensors()]


def same(found: list[Any], wanted: list[Any]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def restless(plan: Plan, kernels: int, depth: int, random: np.random.Generator) -> Plan:
    """The second worker moves to its second or third lane, or yields, by the first one's slack."""
    at = tuple((np.flatnonzero(random.random(kernels - 1) < JOINT) + 1).tolist())
    joints = Joints(
        at=at,
        depth=depth,
        rules=(
            Rule(to=(0,), slack=Slack.NONE, lane=2),
            Rule(to=(0,), slack=Slack.SOME, lane=3),
            Rule(to=(0,), slack=Slack.PLENTY, lane=None),
        ),
        stretch_ns=(1,) * (len(at) + 1),
    )
    none_ns, some_ns = LIMITS_NS
    promise = Promise(bound_ns=10**12, request_ns=1, some_ns=some_ns, none_ns=none_ns)
    first, second = plan.workers
    return msgspec.structs.replace(
        plan,
        workers=(
            msgspec.structs.replace(first, promise=promise),
            msgspec.structs.replace(second, joints=joints),
        ),
    )


@contextlib.contextmanager
def flipping(board: Ints, random: np.random.Generator) -> Iterator[None]:
    """While the block lasts, the first worker seems to be busy and idle, and more or less urgent,
    at random."""
    over = threading.Event()
    none_ns, some_ns = LIMITS_NS

    def flip() -> None:
        row = board[0]
        row[LEFT] = 0
        while not over.is_set():
            now = time.monotonic_ns()
            row[DEADLINE] = now + random.choice([0, (none_ns + some_ns) // 2, 10**10])
            row[BUSY_SINCE] = now if random.random() < 0.7 else IDLE
            time.sleep(random.uniform(0.0, 2e-4))
        row[BUSY_SINCE] = IDLE

    thread = threading.Thread(target=flip, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("name", MODELS)
def test_random_yields_and_moves_give_the_outputs_of_the_model(
    name: str, device: CudaDevice, captured: Capturing, plan_of: PlanOf, opened: Opened
) -> None:
    service, model = captured(SERVICE), captured(ModelKey(name, 1))
    sources = [service.capture, model.capture]
    clear(model)
    model.graph.replay()
    wanted = copies(model)
    for tensor in wanted:
        assert torch.isfinite(tensor).all()
        assert (tensor != tensor.flatten()[0]).any()
    slices = len(device.topology.slice_units)
    full = device.topology.full
    masks = [[full], [full, Mask(range(slices // 2)), Mask(range(slices // 2, slices))]]
    traces = [source.trace for source in sources]
    kernels = len(traces[1].kernels)
    plain: Plan = plan_of(
        device.topology, traces, masks, [[0] * len(traces[0].kernels), [0] * kernels]
    )
    random = np.random.default_rng([16, *name.encode()])
    for depth in (1, 2):
        plan = restless(plain, kernels, depth, random)
        with opened(device, plan, sources, Execution.AUTO) as session:
            with flipping(session.board, random):
                for _ in range(COMPARED):
                    clear(model)
                    session.request(1)
                    assert same(copies(model), wanted), f"depth {depth}"
                clear(model)
                log = session.run(closed_loop(2, only=1), QUICK)
            assert same(copies(model), wanted), f"depth {depth}, back to back"
            counters = log.counters[1]
            print(
                f"{name}, depth {depth}: {len(log.requests.worker)} requests, {counters.yields} "
                f"yields, {counters.moves} moves, {counters.barriers} barriers"
            )
            assert counters.yields > 0 and counters.moves > 0


def profile_of(device: CudaDevice, captured: CapturedModule) -> Profile:
    from eclip.capture.profiler import measure_profile

    sizes = (device.topology.units,)
    return measure_profile(device, captured, sizes=sizes, energy_seconds=0.0, stress=False)


@pytest.mark.alone
@pytest.mark.parametrize("name", BACKGROUND)
def test_joints_cost_nothing_while_no_service_is_busy(
    name: str, device: CudaDevice, captured: Capturing
) -> None:
    both = [captured(SERVICE), captured(ModelKey(name, BATCH))]
    profiles = [profile_of(device, one) for one in both]
    mix = parse_mix(f"{SERVICE}@100rps/100ms,{name}:{BATCH}@background")
    plain = unpartitioned(device.topology, profiles, mix)
    promises = {0: promise_of(mix.workers[0], profiles[0], 0.0)}
    plans = [plain, give_way(plain, profiles, promises, {1: JointRules(depth=2)})]
    window = Window(seconds=0.4, warmup_seconds=0.1, trace_ms=0.0)
    rates: list[list[float]] = [[], []]
    with contextlib.ExitStack() as stack:
        sessions: list[Any] = [
            stack.enter_context(
                device.open(
                    lower(plan, [one.trace for one in profiles]), [one.capture for one in both]
                )
            )
            for plan in plans
        ]
        for _, index in itertools.product(range(ROUNDS), (0, 1)):
            log = sessions[index].run(closed_loop(2, only=1), window)
            rates[index].append(steady_rates(log)[1])
    without, with_joints = (statistics.median(each) for each in rates)
    joints = plans[1].workers[1].joints
    assert joints is not None and len(joints.at) > 0
    print(
        f"{name}:{BATCH}, requests/s: whole {without:.1f}, in {len(joints.at) + 1} stretches "
        f"{with_joints:.1f} ({with_joints / without - 1:+.1%})"
    )
    assert with_joints >= (1 - MOST_COST) * without


class Copying(torch.nn.Module):  # type: ignore[misc, name-defined]
    """From pinned memory to the GPU, some work, and back, in one graph."""

    def __init__(self) -> None:
        super().__init__()
        count = COPIED_BYTES // 4
        self.inbound = torch.arange(count, dtype=torch.float32).pin_memory()
        self.outbound = torch.zeros(count).pin_memory()
        self.register_buffer("here", torch.zeros(count, device="cuda"))

    def forward(self, scale: Any) -> Any:
        doubled = scale * 2
        self.here.copy_(self.inbound, non_blocking=True)
        result = self.here * doubled
        self.outbound.copy_(result, non_blocking=True)
        return result[:4]


def test_profile_has_the_copies_of_a_graph(device: CudaDevice) -> None:
    from eclip.capture.torch import capture

    model = capture(Copying(), (torch.ones(1, device="cuda"),), ModelKey("copying", 1))
    inward, outward = profile_of(device, model).copies
    assert (inward.bytes, outward.bytes) == (COPIED_BYTES, COPIED_BYTES)
    assert (inward.to_device, outward.to_device) == (True, False)
    assert inward.before < outward.before
    for one in (inward, outward):  # 10 to 100 GB/s
        assert 10 < one.bytes / one.ns < 100


@pytest.mark.parametrize("depth", [1, 2])
def test_long_copies_are_cut_and_lose_nothing(
    depth: int, device: CudaDevice, captured: Capturing, plan_of: PlanOf, opened: Opened
) -> None:
    from eclip.capture.torch import capture

    module = Copying()
    model = capture(module, (torch.ones(1, device="cuda"),), ModelKey("copying", 1))
    assert sorted({node.copy_bytes for node in model.capture.graph.nodes})[-1] == COPIED_BYTES
    sources = [captured(SERVICE).capture, model.capture]
    traces = [source.trace for source in sources]
    full, half = device.topology.full, Mask(range(len(device.topology.slice_units) // 2))
    routes = [[0] * len(trace.kernels) for trace in traces]
    plain: Plan = plan_of(device.topology, traces, [[full], [full, half, half]], routes)
    random = np.random.default_rng(depth)
    plan = restless(plain, len(traces[1].kernels), depth, random)
    with opened(device, plan, sources, Execution.AUTO) as session:
        # Two copies, each in parts, in each of three places.
        assert session.prepared.executables > 3 * 2 * (COPIED_BYTES // PART_BYTES)
        with flipping(session.board, random):
            for turn in range(COMPARED):
                module.inbound += turn
                module.outbound.zero_()
                session.request(1)
                assert torch.equal(module.outbound, 2 * module.inbound)
