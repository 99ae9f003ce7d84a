"""Operations of variable output length on PyTorch tensors: PyTorch's results, captured or not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from eclip.cuda.device import CudaDevice
from eclip.cuda.driver import call, cu
from eclip.errors import ArenaError, UsageError
from varout_data import data

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int64", "bool", "uint8"])
@pytest.mark.parametrize("shape", [(1,), (7, 300), (3, 40, 50), (100_000,)])
def test_nonzero_is_torchs(device: CudaDevice, kind: str, shape: tuple[int, ...]) -> None:
    from eclip import varout

    dtype = getattr(torch, kind)
    for share in (0.0, 0.02, 0.5, 1.0):
        x = (torch.rand(shape, device="cuda") < share).to(dtype)
        assert torch.equal(varout.nonzero(x).result(), torch.nonzero(x))
        small = varout.nonzero(x, capacity=100, arena_words=x.numel())
        assert torch.equal(small.result(), torch.nonzero(x))
        got: list[Any] = []

        def keep(window: Any, got: list[Any] = got) -> None:
            got.append(window.values[window.valid].clone())

        varout.nonzero(x, capacity=1000).each(keep)
        assert torch.equal(torch.cat(got), torch.nonzero(x.flatten()).flatten())


@pytest.mark.parametrize("kind", ["float32", "float16", "int64", "bool"])
def test_masked_select_is_torchs(device: CudaDevice, kind: str) -> None:
    from eclip import varout

    x = torch.randn(300, 70, device="cuda").to(getattr(torch, kind))
    for share in (0.0, 0.3, 1.0):
        mask = torch.rand(300, 1, device="cuda") < share
        found = varout.masked_select(x, mask, capacity=64, arena_words=x.numel())
        assert torch.equal(found.result(), torch.masked_select(x, mask))


def test_expand_is_repeat_interleave(device: CudaDevice) -> None:
    from eclip import varout

    for lengths in ([0], [5], [0, 100_000, 0], [3, 0, 1] * 500, [0] * 99 + [4097]):
        given = torch.tensor(lengths, device="cuda")
        wanted = torch.repeat_interleave(given)
        found = varout.expand(given, capacity=100, arena_words=len(wanted))
        assert torch.equal(found.result(), wanted)
        got: list[Any] = []

        def keep(window: Any, got: list[Any] = got) -> None:
            got.append(window.values[window.valid].clone())

        varout.expand(given, capacity=1024).each(keep)
        assert torch.equal(torch.cat(got), wanted)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000])
def test_nms_is_torchvisions(device: CudaDevice, count: int) -> None:
    from eclip import varout

    torchvision = pytest.importorskip("torchvision")
    corner = torch.rand(count, 2, device="cuda") * 20
    boxes = torch.cat([corner, corner + 1 + 4 * torch.rand(count, 2, device="cuda")], dim=1)
    scores = torch.rand(count, device="cuda")
    for threshold in (0.1, 0.5, 0.9):
        wanted = torchvision.ops.nms(boxes, scores, threshold)
        assert torch.equal(varout.nms(boxes, scores, threshold).result(), wanted)
        small = varout.nms(boxes, scores, threshold, capacity=7, arena_words=count)
        assert torch.equal(small.result(), wanted)


@contextlib.contextmanager
def captured(work: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """The work as one graph; the call replays it and waits."""
    from eclip.cuda.conditional import keeping
    from eclip.cuda.graphs import Executable

    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    with torch.inference_mode(), torch.cuda.stream(stream):
        work()  # compiles what is compiled once
        stream.synchronize()
        with keeping() as kept, torch.cuda.graph(graph, stream=stream):
            work()
    executable = Executable(cu.CUgraph(graph.raw_cuda_graph()))

    def replay() -> None:
        torch.cuda.synchronize()
        call(cu.cuGraphLaunch, executable.handle, stream.cuda_stream)
        stream.synchronize()

    try:
        yield replay
    finally:
        executable.close()
        del kept


WIDE = 300_000


@pytest.fixture
def four_windows(monkeypatch: pytest.MonkeyPatch) -> int:
    """What a turn is worth, such that without a capacity so few inputs have several windows; they
    would begin at 1.5 million."""
    from eclip.varout.cuda import ops

    monkeypatch.setattr(ops, "_TURN_SLOTS", WIDE // 8)
    return WIDE // 4


@pytest.mark.parametrize("capacity", [None, 4096, WIDE // 4, WIDE])
@pytest.mark.parametrize("row", [(), (3,), (32,)], ids=str)
def test_a_captured_consumer_takes_and_puts_every_window(
    device: CudaDevice, four_windows: int, capacity: int | None, row: tuple[int, ...]
) -> None:
    from eclip import varout

    x = torch.zeros(WIDE, device="cuda")
    rows = torch.randint(1, 100, (WIDE, *row), device="cuda").float()
    y, plain = torch.empty_like(rows), torch.empty_like(rows)
    values, count = torch.empty(WIDE, dtype=torch.int64, device="cuda"), torch.empty_like(x[:1])

    def work() -> None:
        found = varout.nonzero(x, capacity=capacity)
        assert found.window == (capacity or four_windows)
        found.each(lambda window: window.put(y, 2 * window.take(rows) + 1))
        found.each(lambda window: window.put(plain, window.take(rows)))  # a second consumer
        count.copy_(found.count)
        if capacity is None:
            values.copy_(found.values)

    window = capacity or four_windows
    some = {0, 1, window - 1, window, window + 1, 2 * window, 2 * window + 1, WIDE}
    with captured(work) as replay:
        for seed, length in enumerate(sorted(length for length in some if length <= WIDE)):
            x.copy_(data(length, seed, WIDE, at_end=seed % 2 == 1))
            y.fill_(-7)
            plain.fill_(-7)
            replay()
            chosen = (x != 0).view(-1, *(1 for _ in row))
            assert int(count.item()) == length
            assert torch.equal(y, torch.where(chosen, 2 * rows + 1, -7.0)), length
            assert torch.equal(plain, torch.where(chosen, rows, -7.0)), length
            if capacity is None:
                assert torch.equal(values[:length], torch.nonzero(x).flatten())
                assert not values[length:].any()


@pytest.mark.parametrize("capacity", [None, 50_000])
def test_a_captured_consumer_may_look_at_values_and_valid(
    device: CudaDevice, four_windows: int, capacity: int | None
) -> None:
    """Written inside the graph and its loop, only where a body asks; in any order, and again."""
    from eclip import varout

    x = torch.zeros(WIDE, device="cuda")
    seen = torch.zeros(WIDE + 1, device="cuda")
    turns, held = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")

    def work() -> None:
        found = varout.nonzero(x, capacity=capacity)

        def body(window: Any) -> None:
            held.add_(window.valid.sum())
            turns.add_(1)
            assert window.values is window.values
            # Empty slots are 0, so that they add to the place before the first.
            seen.index_add_(0, window.values + window.valid, torch.ones_like(seen[: window.slots]))

        found.each(body)

    with captured(work) as replay:
        for length in (0, 1, 70_000, 80_000, WIDE):
            x.copy_(data(length, length, WIDE))
            for total in (seen, turns, held):
                total.zero_()
            replay()
            size = capacity or four_windows
            wanted_turns = max(1, -(-length // size))
            assert int(turns.item()) == wanted_turns
            assert int(held.item()) == length
            assert torch.equal(seen[1:], (x != 0).float())
            assert int(seen[0].item()) == wanted_turns * size - length


def test_without_a_capacity_a_body_may_change_what_was_selected_from(
    device: CudaDevice, four_windows: int
) -> None:
    from eclip import varout

    x = torch.zeros(WIDE, device="cuda")

    def work() -> None:
        found = varout.nonzero(x)
        assert found.window == four_windows
        found.each(lambda window: window.put(x, window.take(x) + 0.5))

    with captured(work) as replay:
        x.copy_(torch.where(torch.rand(WIDE, device="cuda") < 0.9, -0.5, 0.0))
        replay()
        assert not x.any()
    x.copy_(data(WIDE // 2, 0, WIDE))
    found = varout.nonzero(x)
    wanted = torch.nonzero(x)
    found.each(lambda window: window.put(x, window.take(x) * 0))
    assert torch.equal(found.result(), wanted)  # after the windows were consumed, too


def test_slots_that_hold_nothing_are_zero_and_legal(device: CudaDevice, four_windows: int) -> None:
    from eclip import varout

    for capacity in (None, 50_000):
        hostile = torch.full((4 * WIDE,), -1, dtype=torch.int64, device="cuda")
        del hostile  # so that what is allocated next begins as no position
        found = varout.nonzero(data(80_000, 1, WIDE), capacity=capacity)
        held: list[int] = []

        def body(window: Any, held: list[int] = held) -> None:
            assert not window.values[~window.valid].any()
            held.append(int(window.valid.sum()))

        found.each(body)
        assert held == ([75_000, 5_000] if capacity is None else [50_000, 30_000])


@pytest.mark.parametrize("kind", ["float32", "bool", "int64"])
@pytest.mark.parametrize("off", [-1, 0, 1, 8191, 8192])
def test_inputs_around_the_size_from_which_tiles_are_larger(
    device: CudaDevice, kind: str, off: int
) -> None:
    from eclip import varout
    from eclip.varout.cuda import build

    inputs = build._LARGE + off
    width = torch.empty(0, dtype=getattr(torch, kind)).element_size()
    larger = off >= 0 and width <= 4
    assert build.items_for(inputs, width) == (2 if larger else 1) * build.ITEMS
    for share in (0.0, 0.02, 0.5, 1.0):
        x = (torch.rand(inputs, device="cuda") < share).to(getattr(torch, kind))
        x[-1] = 1
        assert torch.equal(varout.nonzero(x).result(), torch.nonzero(x))
        y = torch.zeros_like(x)

        def copy(window: Any, x: Any = x, y: Any = y) -> None:
            window.put(y, window.take(x))

        varout.nonzero(x, capacity=inputs // 3).each(copy)
        assert torch.equal(x, y)
        picked = varout.masked_select(x, x != 0).result()
        assert torch.equal(picked, torch.masked_select(x, x != 0))


def test_what_cannot_be_says_so(device: CudaDevice) -> None:
    from eclip import varout

    x = torch.ones(100, device="cuda")
    with pytest.raises(ArenaError, match="needed 90 words"):
        varout.nonzero(x, capacity=10).result()
    with pytest.raises(UsageError, match="at least 1"):
        varout.nonzero(x, capacity=0)
    with pytest.raises(UsageError, match="CUDA tensors"):
        varout.nonzero(x.cpu())
    with pytest.raises(UsageError, match="booleans"):
        varout.masked_select(x, x)
    windows: list[Any] = []

    def body(window: Any) -> None:
        windows.append(window)
        with pytest.raises(UsageError, match="at least 100 rows"):
            window.take(x[:50])
        with pytest.raises(UsageError, match=r"\[100\] of torch.float32 here, not \[9\]"):
            window.put(x, x[:9])
        with pytest.raises(UsageError, match="gaps"):
            window.put(torch.zeros(2, 100, device="cuda").T, torch.zeros(100, 2, device="cuda"))

    varout.nonzero(x).each(body)
    with pytest.raises(UsageError, match="only in the body"):
        print(windows[0].values)
    with pytest.raises(UsageError, match="only in the body"):
        windows[0].take(x)
    with pytest.raises(UsageError, match="no positions"):
        varout.masked_select(x, x != 0).each(lambda window: window.take(x))
