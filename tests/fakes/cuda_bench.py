"""A device and sessions on a driver that writes down what is asked of it.

Handles are numbers with names.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from eclip.core.device import Closing
from eclip.core.program import Route, program_of
from eclip.core.requests import WITH_RESULT, Doors
from eclip.cuda import driver, graphs, lanes, placing, slots
from eclip.cuda.device import CudaDevice
from eclip.cuda.driver import Gpu
from eclip.cuda.lanes import Slices
from eclip.errors import DeviceError
from eclip.gpu import closing, serving, worker_loop
from eclip.gpu.closing import Releases
from eclip.gpu.executables import Buffer, Capture, Staging
from eclip.gpu.pieces import CapturedGraph
from eclip.gpu.session import Execution, GpuSession
from eclip.progress import Progress
from logs import KERNELS, make_mix, make_plan, make_profile
from waiting import PATIENCE_S


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class Handle(int):
    """A number that says what it is."""

    name: str

    def __new__(cls, value: int, name: str) -> Handle:
        made = super().__new__(cls, value)
        made.name = name
        return made

    def __repr__(self) -> str:
        return self.name


MAKERS = {
    "cuGreenCtxStreamCreate": "stream",
    "cuStreamCreateWithPriority": "stream",
    "cuGraphInstantiate": "executable",
    "cuGreenCtxCreate": "context",
    "cuEventCreate": "event",
}
RELEASERS = (
    "cuStreamSynchronize", "cuStreamDestroy", "cuGraphExecDestroy", "cuGreenCtxDestroy",
    "cuEventDestroy", "cuDevicePrimaryCtxRelease",
)  # fmt: skip


class RecordingDriver:
    """``failing`` maps a call to the status it answers with, from now on. ``fails_at`` maps it to
    the one time, counted from 1, that it answers with an error. A method ``_cuName`` of a subclass
    gives what ``cuName`` answers besides its status; such calls are not written down."""

    CUresult = Result

    def __init__(self) -> None:
        self.said: list[str] = []
        self.failing: dict[str, Result] = {}
        self.fails_at: dict[str, int] = {}
        self._calls: Counter[str] = Counter()
        self._made = 0

    def released(self) -> list[str]:
        return [line for line in self.said if line.split()[0] in RELEASERS]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return types.SimpleNamespace(  # enums: any member will do
                CU_STREAM_NON_BLOCKING=1, CU_GREEN_CTX_DEFAULT_STREAM=1, CU_EVENT_DISABLE_TIMING=2,
                CU_STREAM_CAPTURE_MODE_RELAXED=2, __call__=None,
            )  # fmt: skip

        ours = getattr(type(self), f"_{name}", None)

        def function(*arguments: Any) -> tuple[Any, ...]:
            self._calls[name] += 1
            if self._calls[name] == self.fails_at.get(name):
                return (Result.CUDA_ERROR_INVALID_VALUE, None)
            if ours is not None:
                return (Result.CUDA_SUCCESS, *ours(self, *arguments))
            self.said.append(" ".join([name, *map(repr, arguments)]))
            if name == "cuGetErrorString":
                return (Result.CUDA_SUCCESS, b"as the test wants")
            if name in self.failing:
                return (self.failing[name], None)
            if name in MAKERS:
                self._made += 1
                return (Result.CUDA_SUCCESS, Handle(self._made, f"{MAKERS[name]}{self._made}"))
            if name in ("cuThreadExchangeStreamCaptureMode", "cuCtxFromGreenCtx"):
                return (Result.CUDA_SUCCESS, arguments[0])
            if name == "cuMemGetInfo":
                return (Result.CUDA_SUCCESS, 0, 0)
            return (Result.CUDA_SUCCESS,)

        function.__name__ = name
        return function

    @staticmethod
    def CUgraph(raw: int) -> int:  # noqa: N802
        return raw


class FakeGpu(Gpu):
    """Closes as the real one does, and is always current."""

    uuid = "GPU-0"

    def __init__(self, release: Callable[[], None]) -> None:
        self.context = "primary"
        self._release = release

    def make_current(self) -> None:
        pass

    def quicken(self) -> None:
        pass

    def close(self) -> None:
        self._release()


class FakeSlices(Slices):
    """The slices of an H200, whose contexts cost nothing."""

    def __init__(self, gpu: Any) -> None:
        self.gpu = gpu
        self.fine = False
        self.resources = list(range(17))
        self._unused = {}


class FakeWorkerLoop:
    """A request lasts until the gate opens, if there is one."""

    gate: threading.Event | None = None

    def __init__(self, *arguments: Any) -> None:
        self.steps = None

    def drive(
        self, arrivals: Any = None, stop_at_ns: int = 0, stop: Any = None, most_requests: int = 0
    ) -> Any:
        if most_requests:
            if self.gate is not None:
                self.gate.wait(PATIENCE_S)
            return np.zeros((1, 3), dtype=np.int64)
        while not stop[0]:
            time.sleep(0.001)
        return np.zeros((0, 3), dtype=np.int64)

    service = 0, 0, 0  # no row, bound or time


class FakeGroupLoop:
    """Requests end as soon as they are seen, if the gate is open."""

    def __init__(
        self, loops: Any, copies: Any, doors: Doors, me: int, counts: Any, places: Any
    ) -> None:
        self._doors, self._me = doors, me

    def run(self, stop: Any, stop_at_ns: int, most_own: int) -> Iterator[Any]:
        gate = FakeWorkerLoop.gate
        while not stop[0]:
            for rings in self._doors.rings:
                if (gate is None or gate.is_set()) and rings[self._me].open:
                    now = time.monotonic_ns()
                    rings[self._me].answer(now, now, WITH_RESULT)
            time.sleep(0.0001)
        yield from ()


class FakeGraph(Closing):
    """What a recapture gives: says when it goes, and may refuse."""

    def __init__(self, fake: RecordingDriver, number: int, refuses: bool) -> None:
        self._fake, self._number, self._refuses = fake, number, refuses

    def close(self) -> None:
        self._fake.said.append(f"cuStreamDestroy? graph{self._number}")
        if self._refuses:
            raise DeviceError("a captured graph cannot be destroyed: refused")


class Bench:
    """A device and sessions on it, all on the recording driver."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, fake: RecordingDriver | None = None
    ) -> None:
        self.fake = fake or RecordingDriver()
        for module in (driver, placing, lanes, graphs, slots):
            monkeypatch.setattr(module, "cu", self.fake)
        monkeypatch.setattr(worker_loop, "WorkerLoop", FakeWorkerLoop)
        monkeypatch.setattr(serving, "GroupLoop", FakeGroupLoop)
        monkeypatch.setattr(FakeWorkerLoop, "gate", None)
        monkeypatch.setattr(placing, "check_clusters", lambda *given: None)
        monkeypatch.setattr(lanes, "cuda_priority", lambda wanted: 0)
        self.kept: list[Any] = []
        monkeypatch.setattr(closing, "never_free", self.kept.append)
        self.gpu = FakeGpu(self._closer)
        self.device = object.__new__(CudaDevice)
        vars(self.device).update(
            execution=Execution.WHOLE,
            progress=Progress(),
            gpu=self.gpu,
            slices=FakeSlices(self.gpu),
            nvml=types.SimpleNamespace(close=lambda: self.fake.said.append("nvmlShutdown")),
            _sessions=weakref.WeakSet(),
            _releases=Releases(),
            _closed=False,
            _pinned=slots.PinnedPages(),
        )
        monkeypatch.setattr(FakeSlices, "take_context", self._take)
        for release in (self.gpu.close, self.device.nvml.close, self.device.slices.close):
            self.device._releases.callback(release)
        self.refuses = False
        self._graphs = 0

    def _closer(self) -> None:
        driver.call(self.fake.cuDevicePrimaryCtxRelease, "gpu")

    def _take(self, mask: Any) -> Any:
        slices = self.device.slices
        if unused := slices._unused.get(mask):
            return unused.pop()
        return driver.call(self.fake.cuGreenCtxCreate)

    def open(
        self,
        inputs: Sequence[Buffer] = (),
        outputs: Sequence[Buffer] | None = (),
        stage: Callable[[], Staging] | None = None,
    ) -> GpuSession:
        """Two workers with a loop in their graphs, each captured again on a lane of its own."""
        plan = make_plan("test", make_mix(2), (48,))
        trace = make_profile().trace
        routes = tuple(
            Route(worker, np.full(KERNELS, worker), np.full(KERNELS, -1)) for worker in range(2)
        )
        graph = CapturedGraph(None, [], "a loop")
        source = Capture(graph, trace, None, self._recapture, inputs, outputs, stage)
        program = dataclasses.replace(program_of(plan), routes=(routes,))
        session = GpuSession(self.device, program, [source, source], (), self.device.execution)
        self.device._sessions.add(session)
        self.fake.said.clear()
        return session

    def _recapture(self, stream: Any) -> tuple[int, Closing]:
        self._graphs += 1
        return self._graphs, FakeGraph(self.fake, self._graphs, self.refuses)
