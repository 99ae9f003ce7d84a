"""The driving loop: requests of one worker, launched from compiled code that holds no GIL.

A worker's executable is a list of steps (launch a graph, record an event, let a stream wait for
one, hold the host until one has happened). Each worker has a thread of its own that repeats: wait
for the next request, pick the variant by who is active, take the steps, wait for completion.
Threads share one array of activity flags and nothing else, so they do not disturb each other.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numba
import numpy as np
import numpy.typing as npt

from eclip.errors import DeviceError

LAUNCH, RECORD, WAIT, HOLD = 0, 1, 2, 3
# A dozen graphs that wait for events keep other workers' launches from starting until they have
# moved on (docs/results.md, lock-step); up to six were seen to harm nobody.
AHEAD = 2
_CLOCK_MONOTONIC = 1
_CHUNK = 1 << 16  # requests between two returns to Python
FOREVER_NS = int(np.iinfo(np.int64).max)

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EntryPoints:
    """The functions of a GPU's driver that the loop calls, by their names in its library. All their
    arguments are 64-bit words; they return 0 or a bad status."""

    library: str
    graph_launch: str  # executable, stream
    event_record: str  # event, stream
    stream_wait: str  # stream, event, flags
    event_hold: str  # event: the host waits for it
    synchronise: str  # stream: the host waits for it


def _entry(library: str, name: str, arguments: int) -> Any:
    """A C function, as compiled code calls it."""
    try:
        function = getattr(ctypes.CDLL(library), name)
    except (OSError, AttributeError):
        raise DeviceError(
            f"{library} has no {name}: the GPU's driver is missing or too old"
        ) from None
    function.argtypes = [ctypes.c_uint64] * arguments
    function.restype = ctypes.c_int
    return function


@dataclass(frozen=True)
class Steps:
    """What one request of a worker takes, in order; ``stream`` completes last."""

    kind: Ints
    first: Words  # executable, event, stream, event
    second: Words  # stream, stream, event, nothing
    stream: int


class LoopGpu(Protocol):
    """What the loop asks of a GPU."""

    entry_points: EntryPoints

    def make_current(self) -> None:
        """For the calling thread."""
        ...

    def describe(self, status: int) -> str:
        """A bad status, for a person."""
        ...


@functools.cache
def make_driver(table: EntryPoints) -> Callable[..., tuple[int, int, int]]:
    """The loop, bound to a GPU's driver and compiled; called like ``drive`` below."""
    graph_launch = _entry(table.library, table.graph_launch, 2)
    event_record = _entry(table.library, table.event_record, 2)
    stream_wait = _entry(table.library, table.stream_wait, 3)
    event_hold = _entry(table.library, table.event_hold, 1)
    synchronise = _entry(table.library, table.synchronise, 1)
    clock = _entry("libc.so.6", "clock_gettime", 2)
    usleep = _entry("libc.so.6", "usleep", 1)

    @numba.njit(nogil=True)
    def now_ns(scratch: Ints) -> int:
        clock(_CLOCK_MONOTONIC, scratch.ctypes.data)
        return int(scratch[0] * 1_000_000_000 + scratch[1])

    @numba.njit(nogil=True)
    def drive(
        kind: Ints,
        first: Words,
        second: Words,
        begins: Ints,  # per variant: where its steps begin; one more entry at the end
        streams: Words,  # per variant: the stream that completes last
        variant_active: Ints,  # per variant a bit set of workers; the smallest sets first
        worker: int,
        active: Ints,  # per worker: 1 while it has a request; shared by all threads
        closed: bool,
        arrivals: Ints,  # absolute times
        taken: int,  # how many of them were served before
        stop_at: int,
        stop: Ints,  # set from outside to end the loop
        rows: Ints,  # out: arrival, start, end of every request
    ) -> tuple[int, int, int]:
        """Requests done, arrivals taken, and the first bad status, 0 if there was none."""
        scratch = np.zeros(2, dtype=np.int64)
        done = 0
        while done < rows.shape[0]:
            now = now_ns(scratch)
            if now >= stop_at or stop[0]:
                break
            arrival = now
            if not closed:
                if taken >= arrivals.shape[0]:
                    break
                arrival = arrivals[taken]
                if arrival > now:
                    active[worker] = 0
                    # Sleep while it is far, spin when it is near: usleep overshoots by about 60 µs.
                    if arrival - now > 200_000:
                        usleep(np.uint64(min(arrival - now - 150_000, 10_000_000) // 1000))
                    continue
                taken += 1
            active[worker] = 1
            others = 0
            for other in range(active.shape[0]):
                others |= active[other] << other
            variant = 0
            while others & ~variant_active[variant]:
                variant += 1
            start = now_ns(scratch)
            for step in range(begins[variant], begins[variant + 1]):
                if kind[step] == LAUNCH:
                    status = graph_launch(first[step], second[step])
                elif kind[step] == RECORD:
                    status = event_record(first[step], second[step])
                elif kind[step] == WAIT:
                    status = stream_wait(first[step], second[step], np.uint64(0))
                else:
                    status = event_hold(first[step])
                if status:
                    return done, taken, status
            status = synchronise(streams[variant])
            if status:
                return done, taken, status
            rows[done, 0] = arrival
            rows[done, 1] = start
            rows[done, 2] = now_ns(scratch)
            done += 1
        return done, taken, 0

    nothing = np.empty(0, dtype=np.int64)
    words = nothing.astype(np.uint64)
    one = np.ones(1, dtype=np.int64)
    rows = np.zeros((1, 3), dtype=np.int64)
    # Compile now: the first call would otherwise do it in the middle of a run.
    drive(nothing, words, words, nothing, words, one, 0, one, True, nothing, 0, 0, one, rows)
    return drive


class WorkerLoop:
    """One worker's steps, per variant, and its place among the others' activity flags."""

    def __init__(
        self,
        gpu: LoopGpu,
        variants: Sequence[tuple[int, Steps]],  # bit set of the active workers, and the steps
        worker: int,
        active: Ints,
    ) -> None:
        ordered = sorted(variants, key=lambda pair: pair[0].bit_count())
        steps = [one for _, one in ordered]
        self.steps = steps[-1]  # while everybody is active
        self._gpu = gpu
        self._worker = worker
        self._active = active
        self._drive = make_driver(gpu.entry_points)
        self._program = (
            np.concatenate([one.kind for one in steps]),
            np.concatenate([one.first for one in steps]),
            np.concatenate([one.second for one in steps]),
            np.cumsum([0, *(len(one.kind) for one in steps)]),
            np.array([one.stream for one in steps], dtype=np.uint64),
            np.array([active_set for active_set, _ in ordered], dtype=np.int64),
            worker,
            active,
        )

    def drive(
        self,
        arrivals: Ints | None = None,  # absolute times; None: closed loop
        stop_at_ns: int = FOREVER_NS,
        stop: Ints | None = None,
        most_requests: int = FOREVER_NS,
    ) -> Ints:
        """Serve requests in the calling thread; arrival, start and end of each, absolute times."""
        self._gpu.make_current()
        closed = arrivals is None
        times = np.empty(0, dtype=np.int64) if arrivals is None else arrivals
        stop = np.zeros(1, dtype=np.int64) if stop is None else stop
        chunks: list[Ints] = []
        taken = 0
        left = most_requests
        try:
            while left > 0:
                rows = np.zeros((min(left, _CHUNK), 3), dtype=np.int64)
                done, taken, status = self._drive(
                    *self._program, closed, times, taken, stop_at_ns, stop, rows
                )
                if status:
                    raise DeviceError(f"a launch failed: {self._gpu.describe(status)}")
                chunks.append(rows[:done])
                left -= done
                if done < len(rows):
                    break
        finally:
            self._active[self._worker] = 0
        return np.concatenate(chunks)


class Runner(threading.Thread):
    """A worker's loop in a thread of its own; ``rows`` raises what went wrong in it.

    A loop that fails stops the others too, through the flag they share.
    """

    def __init__(self, serve: Callable[[], Ints], stop: Ints) -> None:
        super().__init__(daemon=True)
        self._serve = serve
        self._stop_all = stop
        self._rows: Ints | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._rows = self._serve()
        except BaseException as error:
            self._error = error
            self._stop_all[0] = 1

    def rows(self) -> Ints:
        """Waits for the loop to end."""
        self.join()
        if self._rows is None:
            raise self._error or DeviceError("a worker's thread never ran")
        return self._rows


class Repeater:
    """One executable launched back to back from a thread of its own, while the block lasts."""

    def __init__(self, gpu: LoopGpu, executable: Any, stream: Any) -> None:
        steps = steps_of([(LAUNCH, executable, stream)])
        worker = WorkerLoop(gpu, [(1, steps)], 0, np.zeros(1, dtype=np.int64))
        self._stop = np.zeros(1, dtype=np.int64)
        self._runner = Runner(lambda: worker.drive(stop=self._stop), self._stop)

    def __enter__(self) -> Self:
        self._runner.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop[0] = 1
        self._runner.join()

    def ends_ns(self) -> Ints:
        return self._runner.rows()[:, 2]


def chained(parts: Sequence[tuple[Any, Any, tuple[Any, Any] | None]]) -> Steps:
    """Graphs one after another: executable, stream, and the event and stream it waits on, if any.

    No more than ``AHEAD`` graphs are queued behind one that runs: the host holds until then.
    """
    steps: list[tuple[int, Any, Any]] = []
    events: list[Any] = []
    for executable, stream, barrier in parts:
        if barrier is not None:
            event, before = barrier
            if len(events) >= AHEAD:
                steps.append((HOLD, events[-AHEAD], 0))
            events.append(event)
            steps.append((RECORD, event, before))
            steps.append((WAIT, stream, event))
        steps.append((LAUNCH, executable, stream))
    return steps_of(steps)


def steps_of(steps: Sequence[tuple[int, Any, Any]]) -> Steps:
    return Steps(
        kind=np.array([kind for kind, _, _ in steps], dtype=np.int64),
        first=np.array([int(first) for _, first, _ in steps], dtype=np.uint64),
        second=np.array([int(second) for _, _, second in steps], dtype=np.uint64),
        stream=int(steps[-1][2]),
    )
