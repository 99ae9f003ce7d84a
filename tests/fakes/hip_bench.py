"""The stand-in for HIP as a device: captures of kernels whose times are known, and the log of what
ran where."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from eclip.core.mix import mix_of
from eclip.core.profile import Profile
from eclip.core.topology import Topology
from eclip.gpu import calls, closing, energy, session, worker_loop
from eclip.gpu.entry_points import EntryPoints
from eclip.gpu.executables import Capture
from eclip.gpu.steps import Words
from eclip.gpu.worker_loop import Runner
from eclip.hip.api import CAPTURE_THREAD_LOCAL, STREAM_NON_BLOCKING
from eclip.hip.device import HipDevice
from eclip.hip.driver import QUEUES_VARIABLE, HipGpu
from eclip.hip.graphs import HipGraph
from eclip.models.synthetic import synthetic_profile
from eclip.planner.problem import Problem

LIBRARY = Path(__file__).parents[2] / "native" / "build" / "hip" / "libamdhip64.so.5"
WHO, STREAM, BEGIN, END, UNITS, ENGINES = range(6)
# Faults, and the way in which ROCm 6 counts kinds of nodes.
NONE, MASK_ORDER, LOST_WAIT, MASK_REFUSED, MASK_IGNORED, FAILING_LAUNCH, NEWER_COUNT = range(7)
_ROOM = 1 << 16
_NAMES = 1000  # of kernels, for every model
_SLOWER = 60  # than synthetic kernels: the host's delays must not show
_logs: list[Any] = []  # never freed: what was launched last may still write

_PROPERTIES = """\
cpu_cores_count 0
simd_count 416
max_waves_per_simd 8
wave_front_size 64
array_count 8
simd_arrays_per_engine 1
cu_per_simd_array 14
simd_per_cu 4
location_id 17152
domain 0
gfx_target_version 90010
num_xcc 1
"""


def missing() -> str | None:
    if shutil.which("g++") is None:
        return "g++ is missing; install it, then: make native-tests"
    return None if LIBRARY.exists() else "the stand-in for HIP is not built: make native-tests"


def write_nodes(folder: Path, properties: str = _PROPERTIES) -> Path:
    """What the kernel driver tells: a CPU and the GPU."""
    for index, text in enumerate(("cpu_cores_count 8\nsimd_count 0\n", properties)):
        (folder / str(index)).mkdir(parents=True)
        (folder / str(index) / "properties").write_text(text)
    return folder


def slower(profile: Profile) -> Profile:
    """Without gaps: the stand-in's kernels follow each other at once."""

    def scaled(table: Any) -> Any:
        return tuple(tuple(value * _SLOWER for value in row) for row in table)

    busy_ns = scaled(profile.busy_ns)
    return msgspec.structs.replace(
        profile,
        request_ns=tuple(map(sum, zip(*busy_ns, strict=True))),
        busy_ns=busy_ns,
        gap_ns=tuple((0,) * len(row) for row in busy_ns),
        spread_ns=scaled(profile.spread_ns),
    )


@dataclass(frozen=True)
class StandIn:
    """A device on the stand-in, and what it was seen doing."""

    nodes: Path
    path: Path = LIBRARY

    def device(self) -> HipDevice:
        return HipDevice(library=self.path, nodes=self.nodes)

    def gpu(self) -> HipGpu:
        return HipGpu(library=self.path, nodes=self.nodes)

    @property
    def library(self) -> ctypes.CDLL:
        return ctypes.CDLL(str(self.path))

    def use_its_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Runs go by the stand-in's clock, which a busy host does not slow down."""
        clock = StandInClock(self.library)
        for module in (session, energy):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(worker_loop, "Runner", functools.partial(TurnRunner, self.library))
        running = closing.Belongings.running

        @contextmanager
        def watched(*given: Any) -> Iterator[None]:
            """Whoever waits for the end of a run takes turns, too: no worker gets ahead of it.
            Before workers are waited for it leaves, since they need the rest of the turns."""
            with ExitStack() as turns:
                turns.enter_context(taking_turns(self.library, expect(self.library)))
                with running(*given), turns.pop_all():
                    yield

        monkeypatch.setattr(closing.Belongings, "running", watched)
        known = calls.addresses_of

        def addresses_of(table: EntryPoints) -> Words:
            found = known(table).copy()
            for name in ("clock_gettime", "usleep", "poll"):
                place = np.flatnonzero(found == calls._address("libc.so.6", name))
                found[place] = calls._address(str(self.path), f"standin_{name}")
            return found

        monkeypatch.setattr(worker_loop, "addresses_of", addresses_of)

    @contextmanager
    def planted(self, fault: int) -> Iterator[None]:
        self.library.standin_hip_plant(fault)
        try:
            yield
        finally:
            self.library.standin_hip_plant(NONE)

    def alive(self) -> list[int]:
        """Streams, events, graphs and executables that nobody has destroyed."""
        ask = self.library.standin_hip_alive
        ask.restype = ctypes.c_int64
        return [int(ask(kind)) for kind in range(4)]

    @contextmanager
    def watched(self) -> Iterator[Callable[[], npt.NDArray[np.int64]]]:
        """Lines of the kernels that ran in the block, by their start."""
        words = np.zeros(2 + 6 * _ROOM, dtype=np.int64)
        words[1] = _ROOM
        _logs.append(words)
        self.library.standin_hip_watch(ctypes.c_void_p(words.ctypes.data))

        def lines() -> npt.NDArray[np.int64]:
            count = int(words[0])
            assert count <= _ROOM, "the log is full"
            rows = words[2 : 2 + 6 * count].reshape(-1, 6).copy()
            return rows[np.argsort(rows[:, BEGIN], kind="stable")]

        try:
            yield lines
        finally:
            self.library.standin_hip_watch(None)

    def capture(self, gpu: HipGpu, number: int, profile: Profile) -> Capture:
        """A model whose kernels take what its profile says, captured by HIP's own capture."""
        tables = [
            by_units(profile, kernel, gpu.build.units)
            for kernel in range(len(profile.trace.kernels))
        ]

        def enqueue(stream: int) -> list[Any]:
            return [
                launch(gpu, stream, kernel.name, _NAMES * number + index, table, kernel.grid)
                for index, (kernel, table) in enumerate(
                    zip(profile.trace.kernels, tables, strict=True)
                )
            ]

        raw, kept = captured_from(gpu, enqueue)
        graph = HipGraph(gpu.hip, raw)
        trace = msgspec.structs.replace(profile.trace, kernels=graph.kernels(gpu.hip))
        assert trace == profile.trace
        return Capture(graph, trace, (tables, kept))


class StandInClock:
    """Stands for the module ``time``."""

    CLOCK_MONOTONIC = time.CLOCK_MONOTONIC
    monotonic = staticmethod(time.monotonic)

    def __init__(self, library: ctypes.CDLL) -> None:
        library.standin_hip_now.restype = ctypes.c_int64
        self._library = library

    def clock_gettime_ns(self, _: int) -> int:
        return int(self._library.standin_hip_now())

    def sleep(self, seconds: float) -> None:
        self._library.standin_usleep(round(seconds * 1e6))


def expect(library: ctypes.CDLL) -> ctypes.c_int64:
    """The number of a thread that will take turns: nobody's time passes before it has begun."""
    return ctypes.c_int64(library.standin_hip_expect())


@contextmanager
def taking_turns(library: ctypes.CDLL, number: ctypes.c_int64) -> Iterator[None]:
    library.standin_hip_begin(number)
    try:
        yield
    finally:
        library.standin_hip_leave(number)


class TurnRunner(Runner):
    """A worker's thread that takes turns with the others by the stand-in's clock."""

    def __init__(self, library: ctypes.CDLL, *given: Any) -> None:
        super().__init__(*given)
        self._library = library
        self._number = expect(library)

    def run(self) -> None:
        with taking_turns(self._library, self._number):
            super().run()


def by_units(profile: Profile, kernel: int, units: int) -> npt.NDArray[np.int64]:
    """Nanoseconds by the number of units: between two profiled sizes, those of the smaller."""
    times = np.array(profile.busy_ns[kernel], dtype=np.int64)
    places = np.searchsorted(profile.sizes, np.arange(units + 1), side="right") - 1
    return np.ascontiguousarray(times[np.maximum(places, 0)])


def launch(
    gpu: HipGpu, stream: int, name: str, who: int, table: Any, grid: Sequence[int] = (1, 1, 1)
) -> Any:
    """A kernel on a stream. What it gives must live as long as the kernel may run: ROCm 5.2 keeps
    pointers to arguments, not arguments."""
    library = ctypes.CDLL(gpu.hip.path)
    library.standin_hip_function.restype = ctypes.c_void_p
    text = ctypes.create_string_buffer(name.encode())
    function = ctypes.c_void_p(library.standin_hip_function(text))
    values = (ctypes.c_int64 * 2)(who, table.ctypes.data)
    first = ctypes.addressof(values)
    arguments = (ctypes.c_void_p * 2)(first, first + 8)
    status = library.hipModuleLaunchKernel(
        function, *grid, 256, 1, 1, 0, ctypes.c_void_p(stream), arguments, None
    )
    assert status == 0, status
    return text, values, arguments, table


def captured_from(gpu: HipGpu, enqueue: Callable[[int], Any]) -> tuple[int, Any]:
    """The graph of what a function puts onto a stream, and what must live with it."""
    library = ctypes.CDLL(gpu.hip.path)
    stream = gpu.hip.made("hipStreamCreateWithFlags", STREAM_NON_BLOCKING)
    handle, graph = ctypes.c_void_p(stream), ctypes.c_void_p()
    assert library.hipStreamBeginCapture(handle, CAPTURE_THREAD_LOCAL) == 0
    kept = enqueue(stream)
    assert library.hipStreamEndCapture(handle, ctypes.byref(graph)) == 0
    gpu.hip.call("hipStreamDestroy", stream)
    return int(graph.value or 0), kept


def make_problem(topology: Topology, workers: int) -> Problem:
    profiles = tuple(
        slower(synthetic_profile(worker, 12 + worker, topology, name=f"m{worker}"))
        for worker in range(workers)
    )
    return Problem(mix_of(profile.model for profile in profiles), topology, profiles)


@contextmanager
def standing_in(folder: Path, own: bool = False) -> Iterator[StandIn]:
    """``own``: with a library, and so a clock, that nobody else in this process has. The number of
    queues that HIP is asked for is put back."""
    before = os.environ.get(QUEUES_VARIABLE)
    nodes = write_nodes(folder / "nodes")
    try:
        yield StandIn(nodes, Path(shutil.copy(LIBRARY, folder))) if own else StandIn(nodes)
    finally:
        if before is None:
            os.environ.pop(QUEUES_VARIABLE, None)
        else:
            os.environ[QUEUES_VARIABLE] = before
