"""Lanes: kernels run on exactly the SMs of their mask, and pools leave nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

from eclip.core.topology import Mask, Topology
from eclip.cuda.device import CudaDevice
from eclip.cuda.driver import call, cu
from eclip.cuda.graphs import CudaGraph, place_segment, place_whole
from eclip.cuda.lanes import GpuLane, LanePool, Slices
from eclip.cuda.stressors import Stressors
from eclip.errors import DeviceError
from eclip.files import store

MASKS = 50
AT_ONCE = 25  # lanes in one pool
ROW = 256  # SM ids that a row of counts has room for
BLOCKS, THREADS, CYCLES = 4000, 128, 20_000  # more blocks than all SMs hold at once
LEAK_BYTES = 8 << 20  # over 1,000 cycles: less than one page of the driver's each
LEAK_FILES = 2

CapturedFrom = Callable[..., AbstractContextManager[CudaGraph]]
Held = Callable[[], tuple[int, int]]
Seen = list[frozenset[int]]


class Sightings:
    """Counts of blocks by SM on the GPU, a row for every launch."""

    def __init__(self, stressors: Stressors, rows: int) -> None:
        self._stressors = stressors
        self._rows = rows
        self._data = int(call(cu.cuMemAlloc, 4 * ROW * rows))
        self.fill(0)

    def fill(self, count: int) -> None:
        call(cu.cuMemsetD32, self._data, count, ROW * self._rows)
        call(cu.cuCtxSynchronize)  # lanes do not wait for the default stream

    def clear_on(self, stream: Any, row: int) -> None:
        call(cu.cuMemsetD32Async, self._data + 4 * ROW * row, 0, ROW, stream)

    def launch(self, stream: Any, row: int) -> None:
        data = self._data + 4 * ROW * row
        self._stressors.launch("where", stream, BLOCKS, THREADS, data, CYCLES, 0)

    def counts(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        read = np.zeros((self._rows, ROW), dtype=np.uint32)
        call(cu.cuMemcpyDtoH, read.ctypes.data, self._data, read.nbytes)
        return read

    def seen(self) -> Seen:
        counts = self.counts()
        assert counts.sum(axis=1).tolist() == [BLOCKS] * self._rows
        return [frozenset(np.flatnonzero(row).tolist()) for row in counts]

    def close(self) -> None:
        call(cu.cuMemFree, self._data)


def on_h200(device: CudaDevice) -> None:
    if "H200" not in device.gpu.name:
        pytest.skip(f"these numbers are those of an H200, not of a {device.gpu.name}")


def random_masks(slices: int) -> list[Mask]:
    """Every size in turn; drawn independently, so they overlap."""
    random = np.random.default_rng(3)
    sizes = [1 + index % slices for index in range(MASKS)]
    return [Mask(random.choice(slices, size, replace=False).tolist()) for size in sizes]


@contextlib.contextmanager
def lanes_of(device: CudaDevice, masks: Sequence[Mask]) -> Iterator[list[GpuLane]]:
    with contextlib.closing(LanePool(device.slices, masks)) as pool:
        yield pool.lanes


@pytest.fixture(scope="module")
def sm_ids(device: CudaDevice, stressors: Stressors) -> Seen:
    """The SMs of every slice, as its own lane shows them."""
    slices = len(device.topology.slice_units)
    singles = [Mask([index]) for index in range(slices)]
    with (
        contextlib.closing(Sightings(stressors, slices)) as sightings,
        lanes_of(device, singles) as lanes,
    ):
        for row, lane in enumerate(lanes):
            sightings.launch(lane.stream, row)
            call(cu.cuStreamSynchronize, lane.stream)
        return sightings.seen()


@pytest.fixture(scope="module")
def batches(device: CudaDevice) -> list[list[Mask]]:
    masks = random_masks(len(device.topology.slice_units))
    return [masks[first : first + AT_ONCE] for first in range(0, MASKS, AT_ONCE)]


@pytest.fixture
def sightings(stressors: Stressors) -> Iterator[Sightings]:
    with contextlib.closing(Sightings(stressors, AT_ONCE)) as made:
        yield made


@pytest.fixture
def plain_stream(device: CudaDevice) -> Iterator[Any]:
    stream = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
    yield stream
    call(cu.cuStreamSynchronize, stream)
    call(cu.cuStreamDestroy, stream)


def expected(sm_ids: Seen, masks: Sequence[Mask]) -> Seen:
    return [frozenset().union(*(sm_ids[index] for index in mask)) for mask in masks]


def test_topology_of_an_h200_is_15_slices_of_8_and_one_of_12(device: CudaDevice) -> None:
    on_h200(device)
    assert device.topology.units == 132
    assert device.topology.slice_units == (8,) * 15 + (12,)


def test_topology_read_from_the_driver_is_the_built_in_one(device: CudaDevice) -> None:
    on_h200(device)
    built_in = store.load_builtin("h200", Topology)
    device.topology.fingerprint.check(built_in.fingerprint, "the driver's", "the built-in")
    assert device.topology.name == built_in.name
    assert device.topology.lane_sizes == built_in.lane_sizes
    assert device.topology.hardware_queues == built_in.hardware_queues


def test_fine_slices_of_an_h200_are_66_pairs(device: CudaDevice) -> None:
    on_h200(device)
    fine = Slices(device.gpu, fine=True)
    assert fine.units == (2,) * 66
    assert fine.topology().lane_sizes[-1] == 132
    with contextlib.closing(LanePool(fine, [Mask([0]), Mask(range(5, 40))])) as pool:
        assert len(pool.lanes) == 2


def test_slices_are_disjoint_and_cover_the_gpu(device: CudaDevice, sm_ids: Seen) -> None:
    assert tuple(map(len, sm_ids)) == device.topology.slice_units
    assert len(frozenset().union(*sm_ids)) == device.topology.units


def test_a_kernel_launched_on_a_lane_runs_on_exactly_its_mask(
    device: CudaDevice, sm_ids: Seen, batches: list[list[Mask]], sightings: Sightings
) -> None:
    for masks in batches:
        sightings.fill(0)
        with lanes_of(device, masks) as lanes:
            for row, lane in enumerate(lanes):
                sightings.launch(lane.stream, row)
                call(cu.cuStreamSynchronize, lane.stream)
        assert sightings.seen() == expected(sm_ids, masks)


def test_a_graph_homed_in_a_lane_runs_on_exactly_its_mask(
    device: CudaDevice,
    sm_ids: Seen,
    batches: list[list[Mask]],
    sightings: Sightings,
    captured_from: CapturedFrom,
    plain_stream: Any,
) -> None:
    for masks in batches:
        sightings.fill(0)
        with lanes_of(device, masks) as lanes:
            for row, lane in enumerate(lanes):

                def enqueue(stream: Any, row: int = row) -> None:
                    sightings.launch(stream, row)

                with captured_from(enqueue) as captured:
                    assert captured.kernel_count == 1
                    with contextlib.closing(place_whole(captured, [lane.context])) as executable:
                        call(cu.cuGraphLaunch, executable.handle, plain_stream)
                        call(cu.cuStreamSynchronize, plain_stream)
        assert sightings.seen() == expected(sm_ids, masks)


def test_every_kernel_of_a_graph_over_many_lanes_runs_on_exactly_its_mask(
    device: CudaDevice,
    sm_ids: Seen,
    batches: list[list[Mask]],
    sightings: Sightings,
    captured_from: CapturedFrom,
    plain_stream: Any,
) -> None:
    def enqueue(stream: Any) -> None:
        for row in range(AT_ONCE):
            sightings.launch(stream, row)

    with captured_from(enqueue) as captured:
        for masks in batches:
            sightings.fill(0)
            with lanes_of(device, masks) as lanes:
                contexts = [lane.context for lane in lanes]
                with contextlib.closing(place_whole(captured, contexts)) as executable:
                    call(cu.cuGraphLaunch, executable.handle, plain_stream)
                    call(cu.cuStreamSynchronize, plain_stream)
            assert sightings.seen() == expected(sm_ids, masks)


def test_memory_nodes_go_with_the_kernel_that_follows_them(
    device: CudaDevice,
    sm_ids: Seen,
    batches: list[list[Mask]],
    sightings: Sightings,
    captured_from: CapturedFrom,
    plain_stream: Any,
) -> None:
    """Each row is cleared by the graph itself: whole, then only some rows' part of it."""

    def enqueue(stream: Any) -> None:
        for row in range(AT_ONCE):
            sightings.clear_on(stream, row)
            sightings.launch(stream, row)

    masks = batches[0]
    wanted = expected(sm_ids, masks)
    part = range(AT_ONCE // 4, AT_ONCE // 2)
    with captured_from(enqueue) as captured, lanes_of(device, masks) as lanes:
        assert captured.kernel_count == AT_ONCE
        pairs = [row for row in range(AT_ONCE) for _ in range(2)]  # a memset, then its kernel
        assert [node.kernel for node in captured.nodes] == pairs
        contexts = [lane.context for lane in lanes]
        with (
            contextlib.closing(place_whole(captured, contexts)) as whole,
            contextlib.closing(place_segment(captured, contexts, part)) as some,
        ):
            sightings.fill(7)
            call(cu.cuGraphLaunch, whole.handle, plain_stream)
            call(cu.cuStreamSynchronize, plain_stream)
            assert sightings.seen() == wanted
            sightings.fill(7)
            call(cu.cuGraphLaunch, some.handle, plain_stream)
            call(cu.cuStreamSynchronize, plain_stream)
        counts = sightings.counts()
    assert all((counts[row] == 7).all() for row in range(AT_ONCE) if row not in part)
    seen = [frozenset(np.flatnonzero(counts[row]).tolist()) for row in part]
    assert seen == wanted[part.start : part.stop]


@pytest.mark.alone
def test_a_thousand_pools_leak_nothing(
    device: CudaDevice, stressors: Stressors, held: Held
) -> None:
    slices = len(device.topology.slice_units)
    half, quarter = slices // 2, slices // 4
    masks = [
        Mask(range(half)),
        Mask(range(quarter, half + quarter)),
        Mask([0, slices - 1]),
    ]
    with contextlib.closing(Sightings(stressors, 1)) as sightings:

        def cycle() -> None:
            with lanes_of(device, masks) as lanes:
                for lane in lanes:
                    sightings.clear_on(lane.stream, 0)

        for _ in range(20):
            cycle()
        memory, files = held()
        for _ in range(1000):
            cycle()
        memory_after, files_after = held()
    assert memory_after - memory <= LEAK_BYTES
    assert files_after - files <= LEAK_FILES


@pytest.mark.alone
def test_a_mask_of_a_slice_that_does_not_exist_is_refused_and_leaves_nothing(
    device: CudaDevice, held: Held
) -> None:
    beyond = len(device.topology.slice_units)

    def attempt() -> None:
        with pytest.raises(DeviceError, match=f"mask 3,{beyond} names slices"):
            LanePool(device.slices, [Mask([0]), Mask([1, 2]), Mask([3, beyond])])

    for _ in range(5):
        attempt()
    memory, files = held()
    for _ in range(50):
        attempt()
    memory_after, files_after = held()
    assert memory_after - memory <= LEAK_BYTES
    assert files_after - files <= LEAK_FILES
