"""The stand-in driver as a GPU for the driving loop, and the log of what it was seen doing.

Its kernels take real time on real threads. A line of the log is written for every launch of a graph
and for every kernel, in the order in which they began.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from eclip.core.rules import (
    ALWAYS,
    BACKGROUND,
    BUSY_SINCE,
    DEADLINE,
    HEARTBEAT,
    IDLE,
    LEFT,
    NEVER,
    NO_RULES,
    TIER,
    WORDS,
    Ints,
    Rules,
)
from eclip.gpu.entry_points import EntryPoints
from eclip.gpu.loop import drive
from eclip.gpu.steps import ANYBODY, Steps, Stretches, chained
from eclip.gpu.worker_loop import Place, Runner, WorkerLoop
from waiting import until

LAUNCHED, RAN = 1, 2
KIND, WHO, WHERE, BEGIN, END = range(5)
_LINE = 5
_ROOM = 1 << 17
_NAMES = 1_000  # of kernels, for every worker
_logs: list[Ints] = []  # never freed: what was launched last may still write

Part = tuple[int, Sequence[int]]  # lane, and what each kernel takes in microseconds


class _KernelParams(ctypes.Structure):
    _fields_ = (
        ("func", ctypes.c_uint64),
        ("shape", ctypes.c_uint * 7),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_uint64),
        ("kern", ctypes.c_uint64),
        ("ctx", ctypes.c_uint64),
    )


class StandinGpu:
    """Streams, events and executables of the stand-in; they live as long as the process."""

    def __init__(self, library: Path) -> None:
        self.entry_points = EntryPoints(
            library=str(library),
            graph_launch="cuGraphLaunch",
            event_record="cuEventRecord",
            stream_wait="cuStreamWaitEvent",
            event_hold="cuEventSynchronize",
            synchronise="cuStreamSynchronize",
        )
        self._driver = ctypes.CDLL(str(library))
        self._driver.standin_timed.restype = ctypes.c_uint64
        self._driver.standin_function.restype = ctypes.c_uint64
        self._call("cuInit", 0)
        self._context = self._made("cuDevicePrimaryCtxRetain", 0)
        self._kernel = self._driver.standin_function(
            b"timed", ctypes.c_uint64(self._driver.standin_timed()), 2, 1
        )

    def _call(self, name: str, *arguments: object) -> None:
        words = [ctypes.c_uint64(one) if isinstance(one, int) else one for one in arguments]
        status = getattr(self._driver, name)(*words)
        assert status == 0, f"{name} returned {status}"

    def _made(self, name: str, *arguments: object) -> int:
        handle = ctypes.c_uint64()
        self._call(name, ctypes.byref(handle), *arguments)
        return handle.value

    def make_current(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def describe(self, status: int) -> str:
        return f"status {status}"

    def behave(self, seed: int, lazy: bool) -> None:
        """While it is lazy, nothing runs until somebody waits."""
        self._driver.standin_behave(seed, int(lazy))

    def stream(self) -> int:
        return self._made("cuStreamCreate", 1)

    def event(self) -> int:
        return self._made("cuEventCreate", 2)

    def executable(self, kernels: Sequence[tuple[int, int]]) -> int:
        """A chain of kernels: what each is called in the log, and its microseconds."""
        graph = self._made("cuGraphCreate", 0)
        before = (ctypes.c_uint64 * 1)()
        for index, kernel in enumerate(kernels):
            values = (ctypes.c_uint64 * 2)(*kernel)
            first = ctypes.addressof(values)
            arguments = (ctypes.c_void_p * 2)(first, first + 8)
            params = _KernelParams(func=self._kernel, arguments=arguments)
            before[0] = self._made(
                "cuGraphAddKernelNode_v2", graph, before, min(index, 1), ctypes.byref(params)
            )
        return self._made("cuGraphInstantiateWithFlags", graph, 0)

    @contextmanager
    def capturing(self, mode: int) -> Iterator[int]:
        """A stream that captures: mode 0 makes everybody's waits fail, 2 nothing but what is
        launched on the stream itself."""
        stream = self.stream()
        with self.captured(stream, mode):
            yield stream

    @contextmanager
    def captured(self, stream: int, mode: int) -> Iterator[None]:
        self._call("cuStreamBeginCapture_v2", stream, mode)
        try:
            yield
        finally:
            graph = ctypes.c_uint64()
            self._driver.cuStreamEndCapture(ctypes.c_uint64(stream), ctypes.byref(graph))

    def times_compiled(self) -> int:
        """The loop: more than once if it was called with other types."""
        return len(cast(Any, drive).signatures)

    def watch(self) -> Log:
        words = np.zeros(2 + _LINE * _ROOM, dtype=np.int64)
        words[1] = _ROOM
        _logs.append(words)
        self._driver.standin_watch(ctypes.c_void_p(words.ctypes.data))
        return Log(words)


@dataclass(frozen=True)
class Log:
    words: Ints

    def lines(self) -> Ints:
        count = int(self.words[0])
        assert count <= _ROOM, "the log is full"
        return self.words[2 : 2 + _LINE * count].reshape(-1, _LINE).copy()

    def of(self, kind: int) -> Ints:
        lines = self.lines()
        found: Ints = lines[lines[:, KIND] == kind]
        return found


@dataclass(frozen=True)
class Launched:
    """What an executable is of a worker's request."""

    way: int
    stretch: int
    begins: bool  # the stretch
    kernels: int


@dataclass(frozen=True)
class Worker:
    """A worker's loop on the stand-in, and what its launches are called in the log."""

    number: int
    loop: WorkerLoop
    kernels: int  # of a request
    stretches: int
    depth: int
    variants: int
    parts: dict[int, Launched]  # by executable

    def launches(self, log: Log) -> Ints:
        lines = log.of(LAUNCHED)
        ours: Ints = lines[np.isin(lines[:, WHO], list(self.parts))]
        return ours

    def ran(self, log: Log) -> Ints:
        lines = log.of(RAN)
        ours: Ints = lines[lines[:, WHO] // _NAMES == self.number]
        return ours

    def runner(self, stop: Ints | None = None, **given: object) -> Runner:
        flag = np.zeros(1, dtype=np.int64) if stop is None else stop
        return Runner(lambda: self.loop.drive(stop=flag, **given), flag)  # type: ignore[arg-type]


def make_worker(
    gpu: StandinGpu,
    number: int,
    variants: Sequence[Sequence[Sequence[Part]]],  # variant, stretch, part
    moves: Sequence[Sequence[Sequence[Part]]] = (),
    *,
    streams: Sequence[int],
    place: Place | None = None,
    depth: int = 1,
    active: Sequence[int] = (),  # of the variants; by default everybody in the one there is
    rules: Rules = NO_RULES,
    bound_ns: int = 0,
    floor: float = 0.0,
) -> Worker:
    parts: dict[int, Launched] = {}

    def steps(way: int, stretch: int, first: int, taken: Sequence[Part]) -> Steps:
        chain: list[tuple[int, int, tuple[int, int] | None]] = []
        for lane, micros in taken:
            names = [(number * _NAMES + first + at, us) for at, us in enumerate(micros)]
            first += len(micros)
            executable = gpu.executable(names)
            parts[executable] = Launched(way, stretch, not chain, len(micros))
            barrier = (gpu.event(), chain[-1][1]) if chain else None
            chain.append((executable, streams[lane], barrier))
        return chained(chain)

    def whole(way: int, stretches: Sequence[Sequence[Part]]) -> list[Steps]:
        sizes = [sum(len(micros) for _, micros in taken) for taken in stretches]
        begins = [0, *itertools.accumulate(sizes)]
        return [steps(way, at, begins[at], taken) for at, taken in enumerate(stretches)]

    masks = active or [ANYBODY]
    count = len(variants[0])
    worker = WorkerLoop(
        gpu,
        Stretches(
            variants=[
                (mask, whole(index, stretches))
                for index, (mask, stretches) in enumerate(zip(masks, variants, strict=True))
            ],
            moves=[
                whole(len(variants) + index, stretches) for index, stretches in enumerate(moves)
            ],
            events=[gpu.event() for _ in range(depth if count > 1 else 0)],
            done_ns=[
                1000 * total
                for total in itertools.accumulate(
                    sum(sum(micros) for _, micros in taken) for taken in variants[0]
                )
            ],
        ),
        place,
        rules._replace(bound_ns=bound_ns or rules.bound_ns, floor=floor or rules.floor),
    )
    kernels = sum(len(micros) for taken in variants[0] for _, micros in taken)
    return Worker(number, worker, kernels, count, depth, len(variants), parts)


def rules(*each: tuple[int, int, int]) -> Rules:
    """Who (a bit set), the most slack, and the choice."""
    columns = np.array(each, dtype=np.int64).reshape(-1, 3)
    who, level, choice = columns.T.copy()
    return Rules(who, level, choice)


def make_board(*tiers: int) -> Ints:
    board = np.zeros((len(tiers), WORDS), dtype=np.int64)
    board[:, TIER] = tiers
    board[:, BUSY_SINCE] = IDLE
    board[:, HEARTBEAT] = ALWAYS
    board[board[:, TIER] == BACKGROUND, DEADLINE] = NEVER
    return board


def place_on(board: Ints, row: int) -> Place:
    return Place(board, row, np.arange(len(board)))


def raise_busy(board: Ints, row: int, slack_ns: int = 0) -> int:
    """As a service does whose request is accepted; a time from which on everybody can see it."""
    now = time.monotonic_ns()
    board[row, DEADLINE] = now + slack_ns
    board[row, LEFT] = 0
    board[row, BUSY_SINCE] = now
    return time.monotonic_ns()


def set_idle(board: Ints, row: int) -> int:
    board[row, BUSY_SINCE] = IDLE
    return time.monotonic_ns()


@contextmanager
def serving(*runners: Runner) -> Iterator[None]:
    """While the block lasts, the loops run; then they are told to stop, and must."""
    for runner in runners:
        runner.start()
    try:
        yield
    finally:
        for runner in runners:
            runner._stop_all[0] = 1
        ended(*runners)


def ended(*runners: Runner) -> None:
    """All loops end by themselves; those that hang are stopped, and are a failure."""
    alive = not until(lambda: not any(runner.is_alive() for runner in runners), patience_s=120)
    for runner in runners:
        runner._stop_all[0] = 1
    assert not alive, "a loop did not end"


@contextmanager
def meanwhile(disturb: Callable[[], None]) -> Iterator[None]:
    """Do this again and again in another thread."""
    over = threading.Event()

    def repeat() -> None:
        while not over.is_set():
            disturb()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
