"""Variable-output stages on the GPU: every length right under every mechanism, on any lane."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest

from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan
from eclip.core.topology import Mask
from eclip.cuda.device import CudaDevice
from eclip.cuda.driver import call, cu
from eclip.cuda.lanes import GpuLane, LanePool
from eclip.errors import ArenaError, DeviceError
from eclip.gpu.executables import Capture
from eclip.gpu.session import Execution, GpuSession
from eclip.gpu.steps import LAUNCH
from eclip.varout.mechanisms import Mechanism
from varout_data import data

torch = pytest.importorskip("torch")

INPUTS = 50_000
CAPACITY = 4096
LENGTHS = (0, 1, CAPACITY // 2, CAPACITY - 1, CAPACITY, CAPACITY + 1, 2 * CAPACITY,
           2 * CAPACITY + 1, 5 * CAPACITY + 17, INPUTS)  # fmt: skip
ALL = [one for one in Mechanism if one is not Mechanism.EXACT]


def expected(x: Any) -> Any:
    return torch.where(x != 0, 2 * x + 1, torch.full_like(x, -7))


@contextlib.contextmanager
def lane_of(device: CudaDevice, mask: Mask) -> Iterator[GpuLane]:
    with contextlib.closing(LanePool(device.slices, [mask])) as pool:
        yield pool.lanes[0]


def masks(device: CudaDevice) -> dict[str, Mask]:
    slices = len(device.topology.slice_units)
    return {
        "all": Mask(range(slices)),
        "half": Mask(range(slices // 2)),
        "one": Mask([slices - 1]),
    }


@pytest.mark.parametrize("where", ["all", "half", "one"])
@pytest.mark.parametrize("mechanism", ALL, ids=lambda one: one.value)
def test_every_length_on_every_lane(device: CudaDevice, mechanism: Mechanism, where: str) -> None:
    from eclip.varout.cuda.stage import Compaction, built

    x = torch.zeros(INPUTS, device="cuda")
    y = torch.zeros_like(x)
    stage = Compaction(x, y, mechanism, CAPACITY)
    with (
        lane_of(device, masks(device)[where]) as lane,
        built(stage, lane.stream) as executable,
    ):
        for seed, (length, at_end) in enumerate(
            (length, at_end) for at_end in (False, True) for length in LENGTHS
        ):
            x.copy_(data(length, seed, at_end=at_end))
            y.fill_(-7)
            torch.cuda.synchronize()
            call(cu.cuGraphLaunch, executable.handle, lane.stream)
            call(cu.cuStreamSynchronize, lane.stream)
            assert stage.count() == length
            assert torch.equal(y, expected(x)), (length, at_end)


@pytest.mark.parametrize("mechanism", [Mechanism.SWAP, Mechanism.RESIDENT, Mechanism.SPILL])
@pytest.mark.parametrize("inputs", [1, 31, 4095, 4096, 4097, 3_000_001])
def test_inputs_of_any_size(device: CudaDevice, mechanism: Mechanism, inputs: int) -> None:
    from eclip.varout.cuda.stage import Compaction, built

    for length in {0, 1, inputs // 3, inputs}:
        x = data(length, length, inputs)
        y = torch.full_like(x, -7)
        stage = Compaction(x, y, mechanism, max(1, inputs // 5))
        with (
            lane_of(device, masks(device)["all"]) as lane,
            built(stage, lane.stream) as executable,
        ):
            call(cu.cuGraphLaunch, executable.handle, lane.stream)
            call(cu.cuStreamSynchronize, lane.stream)
            assert stage.count() == length
        assert torch.equal(y, expected(x)), length


@pytest.mark.parametrize("inputs", [1 << 20, (1 << 23) + 4097])
def test_many_requests_in_a_row_find_the_state_as_they_need_it(
    device: CudaDevice, inputs: int
) -> None:
    """Nobody waits between them: the next request begins when the last one's blocks are gone, one
    of which closed it while others still wrote."""
    from eclip.varout.cuda.build import COUNT
    from eclip.varout.cuda.stage import Compaction, built

    some = [data(length, length, inputs) for length in (0, 1, inputs // 50, inputs // 2, inputs)]
    x, y = torch.zeros(inputs, device="cuda"), torch.zeros(inputs, device="cuda")
    stage = Compaction(x, y, Mechanism.MAXIMUM, inputs)
    with lane_of(device, masks(device)["all"]) as lane, built(stage, lane.stream) as executable:
        stream = torch.cuda.ExternalStream(int(lane.stream))
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for number in range(400):
                x.copy_(some[number * 7 % len(some)])
                y.fill_(-7)
                stage.buffer.fill_(-1)
                call(cu.cuGraphLaunch, executable.handle, lane.stream)
                wrong += (y != expected(x)).sum()
                wrong += stage.state[COUNT] != (x != 0).sum()
        stream.synchronize()
    assert int(wrong.item()) == 0


def test_an_exhausted_arena_is_an_error_with_the_numbers(device: CudaDevice) -> None:
    from eclip.varout.cuda.stage import Compaction, built

    x = data(1000, 0)
    stage = Compaction(x, torch.zeros_like(x), Mechanism.SPILL, 600, arena_words=399)
    with lane_of(device, masks(device)["all"]) as lane, built(stage, lane.stream) as executable:
        call(cu.cuGraphLaunch, executable.handle, lane.stream)
        call(cu.cuStreamSynchronize, lane.stream)
        with pytest.raises(ArenaError, match=r"needed 400 words .* has 399"):
            stage.count()
        x.copy_(data(999, 1))
        torch.cuda.synchronize()
        call(cu.cuGraphLaunch, executable.handle, lane.stream)
        call(cu.cuStreamSynchronize, lane.stream)
        assert stage.count() == 999  # the next request is not affected


@pytest.mark.alone
def test_a_stage_built_and_closed_many_times_leaks_nothing(
    device: CudaDevice, held: Callable[[], tuple[int, int]]
) -> None:
    from eclip.varout.cuda.stage import Compaction, built

    x = data(5000, 0)
    stage = Compaction(x, torch.zeros_like(x), Mechanism.SWAP, 512)
    with lane_of(device, masks(device)["half"]) as lane:

        def cycle() -> None:
            with built(stage, lane.stream) as executable:
                call(cu.cuGraphLaunch, executable.handle, lane.stream)

        for _ in range(20):
            cycle()
        before, _ = held()
        for _ in range(300):
            cycle()
        after, _ = held()
    assert after - before <= 8 << 20


def test_a_drift_builds_another_stage_while_requests_go_on(device: CudaDevice) -> None:
    from eclip.core.lengths import lengths_of
    from eclip.files import store
    from eclip.files.machine import Machine
    from eclip.varout.cuda.adaptive import AdaptiveCompaction

    machine = store.load_builtin("h200", Machine)
    x = data(1000, 0, 1 << 20)
    y = torch.zeros_like(x)
    with (
        lane_of(device, masks(device)["half"]) as lane,
        AdaptiveCompaction(
            x, y, machine, lengths_of([1000] * 100), lane.stream, [Mechanism.SWAP], 1e-3, 0.05
        ) as stage,
    ):
        before = stage.choice.capacity
        variants = [data(length, length, 1 << 20) for length in (1000, 30_000, 40_000)]
        for number in range(3000):
            given = variants[0] if number < 100 else variants[1 + number % 2]
            x.copy_(given)
            y.fill_(-7)
            torch.cuda.synchronize()
            assert stage.request() == int(torch.count_nonzero(given))
            if number % 50 == 0:
                assert torch.equal(y, expected(x))
            if stage.choice.capacity > before and number > 200:
                break
        assert stage.choice.capacity > before
        assert "overflowed" in stage.replanned[0]
        stage.request()
        assert torch.equal(y, expected(x))


# Models


def models() -> dict[str, tuple[Any, Callable[[int], tuple[Any, ...]]]]:
    from eclip.varout.cuda.models import Detector, MoeBlock

    torch.manual_seed(0)
    detector = Detector(capacity=256).cuda().eval()
    block = MoeBlock(capacity=32).cuda().eval()
    with torch.no_grad():
        block.gate.bias[0] = 3.0  # most tokens choose the first expert: it overflows

    def image(seed: int) -> tuple[Any, ...]:
        torch.manual_seed(seed)
        return (torch.randn(1, 3, 128, 128, device="cuda") * (0.2 + seed),)

    def tokens(seed: int) -> tuple[Any, ...]:
        torch.manual_seed(seed)
        return (torch.randn(256, 128, device="cuda"),)

    with torch.no_grad():  # 307 of an image's 1024 places are likely: more than the capacity
        likely = detector.candidate(detector.trunk(image(3)[0]))
    detector.threshold = float(likely.flatten().quantile(0.7))
    return {"detector": (detector, image), "moe": (block, tokens)}


@pytest.mark.parametrize("name", ["detector", "moe"])
def test_a_model_equals_its_plain_form(device: CudaDevice, name: str) -> None:
    module, inputs = models()[name]
    with torch.inference_mode():
        for seed in range(4):
            given = inputs(seed)
            if name == "moe":
                wanted = module.plain(*given)
                assert torch.allclose(module(*given), wanted, rtol=1e-3, atol=1e-3)
            else:
                places, decoded = module.plain(*given)
                values, count, found = module(*given)
                kept = values[: int(count.item())]
                assert torch.equal(kept, places)
                assert torch.allclose(found[kept], decoded, rtol=1e-4, atol=1e-5)


@pytest.mark.own_process
@pytest.mark.parametrize("execution", [Execution.WHOLE, Execution.SEGMENTS])
def test_two_workers_under_a_plan_give_what_eager_gives(
    device: CudaDevice,
    plan_of: Callable[..., Plan],
    opened: Callable[..., AbstractContextManager[GpuSession]],
    execution: Execution,
) -> None:
    """Both at once, each against PyTorch's own operators. The host waits for nothing inside a
    request: what waits cannot be captured, and all of a request is the launch of one graph, though
    both models produce more than fits their first window."""
    from eclip.capture.torch import capture

    chosen = models()
    captured = {
        name: capture(module, inputs(0), ModelKey(name, 1))
        for name, (module, inputs) in chosen.items()
    }
    sources: list[Capture] = [one.capture for one in captured.values()]
    assert all(source.graph.atomic for source in sources)
    slices = len(device.topology.slice_units)
    lanes: Sequence[Sequence[Mask]] = [
        [Mask(range(slices // 2))],
        [Mask(range(slices // 2, slices))],
    ]
    routes = [[0] * source.graph.kernel_count for source in sources]
    plan = plan_of(device.topology, [source.trace for source in sources], lanes, routes)
    longest = dict.fromkeys(chosen, 0)
    detector, block = chosen["detector"][0], chosen["moe"][0]
    with opened(device, plan, sources, execution) as session, ThreadPoolExecutor(2) as threads:
        for worker in range(2):
            assert session.steps(worker).kind.tolist() == [LAUNCH]
        for seed in range(4):
            given = {name: inputs(seed) for name, (_, inputs) in chosen.items()}
            for name, one in captured.items():
                one.load(given[name])
            torch.cuda.synchronize()
            list(threads.map(session.request, range(2)))
            with torch.inference_mode():
                wanted = block.plain(*given["moe"])
                assert torch.allclose(captured["moe"].outputs, wanted, rtol=1e-3, atol=1e-3)
                places, decoded = detector.plain(*given["detector"])
                values, count, found = captured["detector"].outputs
                kept = values[: int(count.item())]
                assert torch.equal(kept, places)
                assert torch.allclose(found[kept], decoded, rtol=1e-4, atol=1e-5)
                experts = block.gate(*given["moe"]).topk(block.choices, dim=1).indices
            for name, length in (
                ("moe", int(experts.flatten().bincount().max())),
                ("detector", int(torch.isfinite(found[:, 0]).sum())),
            ):
                longest[name] = max(longest[name], length)
    for name, (module, _) in chosen.items():
        assert longest[name] > module.capacity, "no request overflowed its window"


@pytest.mark.own_process
def test_a_model_with_a_loop_is_refused_where_a_plan_would_cut_it(
    device: CudaDevice,
    plan_of: Callable[..., Plan],
    opened: Callable[..., AbstractContextManager[GpuSession]],
) -> None:
    from eclip.capture.torch import capture

    module, inputs = models()["moe"]
    source = capture(module, inputs(0), ModelKey("moe", 1)).capture
    slices = len(device.topology.slice_units)
    both = [[Mask(range(slices // 2)), Mask(range(slices))]]
    route = [index % 2 for index in range(source.graph.kernel_count)]
    plan = plan_of(device.topology, [source.trace], both, [route])
    with (
        pytest.raises(DeviceError, match="runs whole on one lane"),
        opened(device, plan, [source], Execution.WHOLE),
    ):
        pass
