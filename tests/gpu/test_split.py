"""``eclip.split`` and ``eclip.lane`` under PyTorch: kernels and graphs keep to their lane's SMs."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import eclip
from eclip.cuda.device import CudaDevice
from eclip.cuda.driver import call, cu
from eclip.cuda.stressors import Stressors
from eclip.errors import UsageError
from eclip.pytorch.lanes import Lane

ROW = 256
BLOCKS, THREADS, CYCLES = 4000, 128, 20_000


@pytest.fixture
def halves(device: CudaDevice) -> Iterator[tuple[Lane, Lane]]:
    whole = device.topology.units
    first = device.topology.grant(whole // 3)
    with eclip.split(first, whole - first) as (one, other):
        yield one, other


class Sightings:
    """A count of blocks by SM in GPU memory that PyTorch owns."""

    def __init__(self, stressors: Stressors) -> None:
        import torch

        self._stressors = stressors
        self.counts = torch.zeros(ROW, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()

    def launch(self) -> None:
        """On PyTorch's current stream."""
        import torch

        stream = cu.CUstream(torch.cuda.current_stream().cuda_stream)
        data = self.counts.data_ptr()
        self._stressors.launch("where", stream, BLOCKS, THREADS, data, CYCLES, 0)

    def seen(self) -> frozenset[int]:
        import torch

        torch.cuda.synchronize()
        read = self.counts.cpu().numpy()
        assert read.sum() == BLOCKS
        return frozenset(np.flatnonzero(read).tolist())


def test_lanes_are_disjoint_and_cover_the_gpu(
    device: CudaDevice, halves: tuple[Lane, Lane]
) -> None:
    one, other = halves
    assert len(one.sm_ids()) == one.sms
    assert len(other.sm_ids()) == other.sms
    assert not one.sm_ids() & other.sm_ids()
    assert len(one.sm_ids() | other.sm_ids()) == device.topology.units


def test_kernels_in_a_block_run_on_its_lane_and_on_no_other(
    stressors: Stressors, halves: tuple[Lane, Lane]
) -> None:
    for lane in (*halves, *halves):
        sightings = Sightings(stressors)
        with lane:
            sightings.launch()
            lane.stream.synchronize()
        assert sightings.seen() == lane.sm_ids()


def test_a_captured_graph_replays_on_its_lane_from_any_stream(
    stressors: Stressors, halves: tuple[Lane, Lane]
) -> None:
    import torch

    for lane, elsewhere in itertools.permutations(halves):
        sightings = Sightings(stressors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=lane.stream):
            sightings.launch()
        for replay_on in (contextlib.nullcontext(), lane, elsewhere):
            sightings.counts.zero_()
            torch.cuda.synchronize()
            with replay_on:
                graph.replay()
                # The device's own wait is for the primary context, and lanes have others.
                torch.cuda.current_stream().synchronize()
            assert sightings.seen() == lane.sm_ids()


def model_of(torch: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 7, stride=2),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(8),
        torch.nn.Flatten(),
        torch.nn.Linear(4096, 4096),
        torch.nn.LayerNorm(4096),
        torch.nn.Linear(4096, 1000),
    )
    return model.cuda().half().eval(), torch.randn(16, 3, 224, 224).cuda().half()


def test_results_on_lanes_are_those_of_the_default_stream_bit_by_bit(
    halves: tuple[Lane, Lane],
) -> None:
    import torch

    model, given = model_of(torch)
    with torch.no_grad():
        expected = model(given).clone()
        torch.cuda.synchronize()
        for lane in halves:
            for _ in range(3):  # the first may still choose kernels
                with lane:
                    found = model(given)
                lane.stream.synchronize()
                assert torch.equal(found, expected)


def test_training_on_a_lane_has_the_losses_of_the_default_stream_bit_by_bit(
    halves: tuple[Lane, Lane],
) -> None:
    """Backward runs on a thread of autograd's, on the streams of forward."""
    import torch

    def losses(lane: Any) -> list[float]:
        torch.manual_seed(2)
        model = torch.nn.Sequential(
            torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512)
        ).cuda()
        steps = torch.optim.SGD(model.parameters(), lr=0.01)
        given = torch.randn(64, 512).cuda()
        torch.cuda.synchronize()
        found = []
        with lane:
            for _ in range(5):
                steps.zero_grad()
                loss = (model(given) - given).square().mean()
                loss.backward()
                steps.step()
                found.append(loss.item())
        torch.cuda.synchronize()
        return found

    expected = losses(contextlib.nullcontext())
    assert losses(halves[0]) == expected
    assert losses(halves[1]) == expected


def test_two_lanes_run_at_the_same_time(stressors: Stressors, halves: tuple[Lane, Lane]) -> None:
    """A kernel on one lane ends while a longer one on the other still runs."""
    import torch

    long, short = Sightings(stressors), Sightings(stressors)
    with halves[0]:
        for _ in range(200):
            long.launch()
    ended = torch.cuda.Event()
    ended.record(halves[0].stream)
    with halves[1]:
        short.launch()
    halves[1].stream.synchronize()
    assert not ended.query()
    torch.cuda.synchronize()


def test_a_thousand_splits_leave_memory_and_streams_as_they_were(device: CudaDevice) -> None:
    first = device.topology.grant(device.topology.units // 3)

    def cycle() -> tuple[int, ...]:
        with eclip.split(first, device.topology.units - first) as lanes:
            return tuple(lane.stream.cuda_stream for lane in lanes)

    streams = cycle()
    free_before, _ = call(cu.cuMemGetInfo)
    assert {cycle() for _ in range(1000)} == {streams}
    free_after, _ = call(cu.cuMemGetInfo)
    assert free_before - free_after <= 8 << 20


def test_sizes_are_rounded_and_what_does_not_fit_is_refused(device: CudaDevice) -> None:
    whole, part = device.topology.units, min(device.topology.slice_units)
    with pytest.warns(UserWarning, match=f"1 became {part}"):
        lane = eclip.lane(sms=1)
    with pytest.raises(UsageError, match="close lanes, or pass overlap=True"):
        eclip.lane(sms=whole)
    assert len(lane.sm_ids()) == part
    lane.close()
    with pytest.raises(UsageError, match=f"more than .* has \\({whole}\\)"):
        eclip.split(whole, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eclip.lane(sms=whole).close()
