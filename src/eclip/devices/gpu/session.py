"""A session of a plan that runs as segments: lanes, executables, one loop for every worker.

It owns all of them and releases them in one order (closing.py), in whatever state it is closed. The
vendor's device gives it lanes, and a placer that makes executables.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from eclip.artefacts.plan import Lane, Plan
from eclip.artefacts.runlog import Prepared, RunLog
from eclip.devices.base import Closing, Slot, Window, check_load
from eclip.devices.gpu import loop
from eclip.devices.gpu.board import shared_board
from eclip.devices.gpu.closing import Belongings, Owner, Releases, WaitingGpu, noting
from eclip.devices.gpu.energy import EnergyCounter, mean_power_w, now_ns
from eclip.devices.gpu.recording import NO_KERNELS, make_log, since, window_warnings
from eclip.devices.gpu.segments import GraphPlacer, GraphSource, Segments
from eclip.devices.load import CLOSED_LOOP, Arrivals, Load
from eclip.devices.requests import Desk, Submitting
from eclip.errors import DeviceError, StoppedError
from eclip.progress import Progress
from eclip.runtime.program import Program, Route
from eclip.runtime.reactions import board_of


class LaneStreams(Protocol):
    """The lanes of a session, made once; owns their streams."""

    @property
    def streams(self) -> Sequence[int]: ...

    def close(self) -> None: ...


class SegmentGpu(loop.LoopGpu, WaitingGpu, GraphPlacer, Protocol):
    """What a session asks of a GPU."""

    @property
    def uuid(self) -> str: ...

    def free_memory(self) -> int: ...


@dataclass(frozen=True)
class Post:
    """Where sessions of a device run: what they share with it."""

    gpu: SegmentGpu
    make_lanes: Callable[[Sequence[Lane]], LaneStreams]
    counter: EnergyCounter | None
    progress: Progress
    title: str


class SegmentSession(Owner, Submitting):
    def __init__(
        self,
        post: Post,
        program: Program,
        sources: Sequence[GraphSource],
        warnings: Sequence[str],
    ) -> None:
        self._post = post
        self._program = program
        self._warnings = warnings
        self._belongings = Belongings(post.gpu, sources)
        # Also when it is collected, or the interpreter ends, while it is open.
        self._finalizer = weakref.finalize(self, self._belongings.close_quietly)
        try:
            self.board, self._rows = self._take_rows(program.plan)  # who is busy
            pool = post.make_lanes(program.plan.lanes)
            self._belongings.releases.callback(pool.close)
            self._belongings.streams += pool.streams
            self._segments = Segments(post.gpu, sources, pool.streams)
            began, free = time.monotonic(), post.gpu.free_memory()
            self._loops = [
                self._make_loop(worker, self._belongings.releases)
                for worker in program.plan.everyone
            ]
            self.prepared = Prepared(
                executables=len(self._segments.placed),
                seconds=time.monotonic() - began,
                device_bytes=max(0, free - post.gpu.free_memory()),
            )
        except BaseException as error:
            with noting(error):
                self.close()
            raise

    def close(self) -> None:
        """Wait for what is in flight and release everything; the second time does nothing."""
        self._belongings.close()
        self._finalizer.detach()

    def _begin_serving(
        self, slots: int | Sequence[Sequence[Slot]], background: Collection[int]
    ) -> Desk:
        raise DeviceError("requests cannot be submitted on this kind of GPU yet; use run")

    def _take_rows(self, plan: Plan) -> tuple[loop.Ints, tuple[int, ...]]:
        """A row of the shared board for every worker if others are to see them, else of our own."""
        shared = shared_board(self._post.gpu.uuid) if plan.has_tiers else None
        if shared is None:
            return board_of(plan), plan.everyone
        self._belongings.releases.callback(shared.close)
        return shared.words, shared.claim_all(plan.workers)

    def _make_loop(self, worker: int, owner: Releases) -> loop.WorkerLoop:
        planned, conduct = self._program.plan.workers[worker], self._program.conducts[worker]
        return loop.WorkerLoop(
            self._post.gpu,
            self._ways(worker, owner),
            loop.Place(self.board, self._rows[worker], np.array(self._rows, dtype=np.int64)),
            self._segments.behaviour(worker, planned, conduct, owner),
        )

    def _ways(self, worker: int, owner: Releases) -> loop.Ways:
        """A worker's requests in every variant, and wherever its reactions may take it."""
        plan = self._program.plan
        planned = plan.workers[worker]
        stretches = self._program.conducts[worker].stretches(planned.kernels)

        def prepare(route: Route) -> list[loop.Steps]:
            if planned.joints is not None:
                return self._segments.stretches(route, stretches, owner)
            return [self._segments.segments(route, owner)]

        return loop.Ways(
            variants=[
                (sum(1 << other for other in variant.active), prepare(route))
                for variant, routes in zip(plan.variants, self._program.routes, strict=True)
                for route in routes
                if route.worker == worker
            ],
            moves=[prepare(route) for route in self._program.moves_of(worker)],
        )

    def request(self, worker: int) -> None:
        """Run one request of a worker and wait for it: one thread at a time for each worker."""
        with self._belongings.in_use():
            served = self._loops[worker].drive(most_requests=1, stop=self._belongings.ending)
        if len(served) == 0:
            raise DeviceError("the session was closed before the request began")

    def run(self, load: Load, window: Window) -> RunLog:
        with self._belongings.in_use():
            return self._run(load, window)

    def _run(self, load: Load, window: Window) -> RunLog:
        plan = self._program.plan
        check_load(plan, load)
        warnings = [*self._warnings, *self._measuring_warnings(window)]
        duration_ns = round(window.seconds * 1e9)
        zero = now_ns() + round(window.warmup_seconds * 1e9)
        stop = np.zeros(1, dtype=np.int64)
        runners = self._runners(load, zero, zero + duration_ns, stop)
        power, ended = self._run_threads(runners, zero, zero + duration_ns, stop)
        served = [
            since(runner.rows(), zero) for runner in runners
        ]  # raises what a worker failed of
        if ended <= zero:
            raise StoppedError("stopped before the run began to be measured")
        return make_log(
            plan,
            self._post.title,
            load,
            served,
            [worker.kernels for worker in plan.workers],
            NO_KERNELS,
            ended - zero,
            power,
            warnings,
            self.prepared,
        )

    def _measuring_warnings(self, window: Window) -> list[str]:
        if self._post.counter is None:
            return ["energy is not measured: see `eclip doctor`"]
        others = self._post.counter.other_processes()
        named = ", ".join(map(str, others))
        found = [f"other processes used the GPU: {named}"] if others else []
        return [*window_warnings(window), *found]

    def _runners(self, load: Load, zero: int, end_ns: int, stop: Arrivals) -> list[loop.Runner]:
        return [
            loop.Runner(
                functools.partial(
                    self._loops[worker].drive,
                    None if arrivals is CLOSED_LOOP else arrivals + zero,
                    end_ns,
                    stop,
                ),
                stop,
            )
            for worker, arrivals in enumerate(load.arrivals)
        ]

    def _run_threads(
        self, runners: Sequence[loop.Runner], zero: int, end_ns: int, stop: Arrivals
    ) -> tuple[float | None, int]:
        """Run all workers until the end, or a stop request: the mean power between the first and
        the last energy tick inside, and when that was."""
        counter, progress = self._post.counter, self._post.progress

        def stopped() -> bool:
            return bool(stop[0]) or progress.stopped

        with self._belongings.running(runners, stop):
            power = None if counter is None else mean_power_w(counter, zero, end_ns, stopped)
            while now_ns() < end_ns and not stopped():
                time.sleep(0.001)
            return power, min(end_ns, now_ns())


class SessionOwner(Owner):
    """A device that closes its sessions before itself: what they own lives in it."""

    def __init__(self) -> None:
        self._sessions: weakref.WeakSet[Closing] = weakref.WeakSet()
        self._releases = Releases()
        self._closed = False

    def close(self) -> None:
        self._closed = True
        for session in list(self._sessions):
            self._releases.callback(session.close)
        self._releases.close()

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError("the device is closed; make another one")
