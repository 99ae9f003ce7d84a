"""``eclip.split`` and ``eclip.lane`` on the stand-in drivers of both vendors: which slices kernels
run on, what is handed out, and what is said where it cannot be."""

from __future__ import annotations

import gc
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import eclip
from eclip.core.topology import Mask
from eclip.cuda import driver, lanes
from eclip.cuda.driver import CONNECTIONS_VARIABLE
from eclip.devices import open_lanes
from eclip.errors import DeviceError, UsageError
from eclip.hip import api
from eclip.hip import driver as hip_driver
from eclip.pytorch import lanes as torch_lanes
from hip_bench import ENGINES, StandIn, captured_from, launch
from native_build import Native
from small_torch import Cuda, small_torch
from standin_cu import StandinDriver

KEEPS = 1_000_000  # a kernel's name in the stand-in's log


@dataclass
class Side:
    """A vendor's stand-in under a small torch."""

    torch: Any
    sizes: tuple[int, int]  # of a split that fits exactly
    slice_units: int
    units: int
    run: Callable[[int, bool], Mask]  # the slices of a kernel on a stream, or in a graph from there
    said: Callable[[], list[str]]

    @property
    def cuda(self) -> Cuda:
        cuda: Cuda = self.torch.cuda
        return cuda


def mask_of(bits: int) -> Mask:
    return Mask(index for index in range(bits.bit_length()) if bits >> index & 1)


@pytest.fixture
def nvidia(native: Native, monkeypatch: pytest.MonkeyPatch) -> Side:
    standin = StandinDriver(native.standin)
    for module in (driver, lanes):
        monkeypatch.setattr(module, "cu", standin)
    monkeypatch.setenv(CONNECTIONS_VARIABLE, "32")

    def run(stream: int, graph: bool) -> Mask:
        return mask_of(standin.slices_under(stream, graph) & 0xFFFF)

    torch = small_torch(cuda="13.0", initialised=True)
    return Side(torch, (48, 84), 8, 132, run, lambda: standin.said)


@pytest.fixture
def amd(hip: StandIn, monkeypatch: pytest.MonkeyPatch) -> Side:
    monkeypatch.setattr(api, "LIBRARIES", (str(hip.path),))
    monkeypatch.setattr(hip_driver, "_NODES", hip.nodes)
    gpu = hip.gpu()
    table = np.full(gpu.build.units + 1, 1000, dtype=np.int64)

    def run(stream: int, graph: bool) -> Mask:
        with hip.watched() as lines:
            if graph:  # it keeps to the stream that it is launched on
                raw, kept = captured_from(gpu, lambda inner: launch(gpu, inner, "k", KEEPS, table))
                executable = gpu.hip.made("hipGraphInstantiateWithFlags", raw, 0)
                gpu.hip.call("hipGraphLaunch", executable, stream)
            else:
                kept = launch(gpu, stream, "k", KEEPS, table)
            gpu.wait_for(stream)
            (line,) = lines()
            del kept
        return mask_of(int(line[ENGINES]))

    torch = small_torch(hip="6.3", initialised=True)
    return Side(torch, (26, 78), 13, 104, run, list)


@pytest.fixture(params=["nvidia", "amd"])
def side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    found: Side = request.getfixturevalue(request.param)
    monkeypatch.setitem(sys.modules, "torch", found.torch)
    torch_lanes._opened.cache_clear()
    yield found
    torch_lanes._opened.cache_clear()


def slices(lane: eclip.Lane) -> Mask:
    return Mask.parse(lane.slices)


# --- Where kernels run ----------------------------------------------------------------------------


def test_kernels_of_a_lane_run_on_its_slices_only(side: Side) -> None:
    with eclip.split(*side.sizes) as (first, second):
        assert (first.sms, second.sms) == side.sizes
        assert not slices(first) & slices(second)
        for lane in (first, second):
            assert side.run(lane.stream.cuda_stream, False) == slices(lane)


def test_a_graph_runs_on_the_slices_of_its_lane(side: Side) -> None:
    with eclip.split(*side.sizes) as (first, second):
        for lane in (second, first):
            assert side.run(lane.stream.cuda_stream, True) == slices(lane)


def test_a_lane_is_the_current_stream_of_its_block_and_thread(side: Side) -> None:
    elsewhere: list[int] = []
    with eclip.split(*side.sizes) as (first, second):
        with first:
            assert side.cuda.current() == first.stream.cuda_stream
            with second, first:
                assert side.cuda.current() == first.stream.cuda_stream
            other = threading.Thread(target=lambda: elsewhere.append(side.cuda.current()))
            other.start()
            other.join()
        assert side.cuda.current() == 0
    assert elsewhere == [0]


def test_a_lane_of_all_units_is_a_plain_stream(side: Side) -> None:
    lane = eclip.lane(sms=side.units)
    assert slices(lane) <= side.run(lane.stream.cuda_stream, False)
    lane.close()


# --- What is handed out ---------------------------------------------------------------------------


def test_open_lanes_share_no_slices_unless_asked_to(side: Side) -> None:
    first, second = eclip.split(*side.sizes)
    with pytest.raises(UsageError, match=f"leave 0 of {side.units} .*close lanes, or pass overlap"):
        eclip.lane(sms=side.slice_units)
    over = eclip.lane(sms=side.slice_units, overlap=True)
    assert slices(over) <= slices(first) | slices(second)
    assert over.stream.cuda_stream not in (first.stream.cuda_stream, second.stream.cuda_stream)
    for lane in (first, second, over):
        lane.close()


def test_closed_lanes_give_their_slices_and_streams_to_later_ones(side: Side) -> None:
    seen = set()
    for _ in range(20):
        with eclip.split(*side.sizes) as lanes_:
            seen.add(tuple(lane.stream.cuda_stream for lane in lanes_))
    assert len(seen) == 1
    assert "cuStreamDestroy" not in side.said()


def test_a_lane_nobody_has_is_given_back_and_one_whose_stream_is_used_is_not(side: Side) -> None:
    stream = eclip.lane(sms=side.units).stream
    gc.collect()
    with pytest.raises(UsageError, match="open lanes"):
        eclip.lane(sms=side.slice_units)
    del stream
    gc.collect()
    eclip.lane(sms=side.units).close()


def test_a_closed_lane_cannot_be_entered_and_closing_twice_is_closing_once(side: Side) -> None:
    lane = eclip.lane(sms=side.slice_units)
    lane.close()
    lane.close()
    assert "closed" in repr(lane)
    with pytest.raises(DeviceError, match="the lane is closed; ask for another one"), lane:
        pass


def test_lanes_asked_for_by_many_threads_at_once_are_disjoint(side: Side) -> None:
    made: list[eclip.Lane] = []
    begin = threading.Barrier(4)

    def ask() -> None:
        begin.wait()
        made.append(eclip.lane(sms=side.slice_units))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert sum(len(slices(lane)) for lane in made) == len(
        {index for lane in made for index in slices(lane)}
    )
    for lane in made:
        lane.close()


def test_sizes_are_rounded_up_to_slices_and_this_is_said(side: Side) -> None:
    with pytest.warns(UserWarning, match=f"2 became {side.slice_units}") as told:
        lane = eclip.lane(sms=2)
    assert (lane.asked, lane.sms) == (2, side.slice_units)
    assert told[0].filename == __file__
    lane.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eclip.lane(sms=side.slice_units).close()


# --- What cannot be -------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_in_one_line_and_takes_nothing(side: Side) -> None:
    whole, part = side.units, side.slice_units
    for asked, words in (
        ((whole, 1), rf"{whole} \+ 1 = {whole + 1} .*more than .* has \({whole}\)"),
        ((part + 1, whole - part - 1), "do not fit beside each other: .* hands out slices of"),
        ((), "say how many units each lane gets"),
        ((0,), "at least 1, not 0"),
        ((-8,), "at least 1, not -8"),
        ((True,), "not True"),
        ((48.0,), "not 48.0"),
        (("48",), "not '48'"),
    ):
        with pytest.raises(UsageError, match=words) as refused:
            eclip.split(*asked)
        assert "\n" not in str(refused.value)
    for device, kind in ((3, DeviceError), (-1, UsageError), ("0", UsageError)):
        with pytest.raises(kind):
            eclip.lane(8, device=device)  # type: ignore[arg-type]
    eclip.lane(sms=whole).close()


@pytest.mark.parametrize(
    ("torch", "words"),
    [
        (None, "PyTorch is missing; install it: pip install torch"),
        (small_torch(), "PyTorch 2.13.0 is built for CPUs only, so there is no GPU to split"),
    ],
)
def test_without_pytorch_for_a_gpu_this_is_said(
    torch: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    for ask in (lambda: eclip.split(48, 84), lambda: eclip.lane(sms=48)):
        with pytest.raises(DeviceError, match=words):
            ask()


def test_without_a_gpu_this_is_said(nvidia: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", nvidia.torch)
    monkeypatch.setattr(driver.cu, "devices", 0)
    torch_lanes._opened.cache_clear()
    with pytest.raises(DeviceError, match="there is no GPU 0; this host has 0"):
        eclip.split(48, 84)
    with pytest.raises(UsageError, match="a simulator has no streams"):
        open_lanes("sim")


def test_a_program_that_has_initialised_cuda_keeps_its_number_of_queues(
    nvidia: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", nvidia.torch)
    monkeypatch.delenv(CONNECTIONS_VARIABLE)
    driver.cu.cuInit(0)
    torch_lanes._opened.cache_clear()
    eclip.lane(sms=8).close()
    assert CONNECTIONS_VARIABLE not in os.environ
    torch_lanes._opened.cache_clear()
