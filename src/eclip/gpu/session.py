"""A session on a GPU: lanes, executables, one loop for every worker.

It owns all of them and releases them in one order (closing.py), in whatever state it is closed;
a device closes its sessions first. What differs from one vendor to another it asks of its device
(device.py) and of the placer that comes with its lanes.

A plan runs as one graph per group chained by events or, where graphs may span lanes, as one graph
of everything; ``Execution.AUTO`` tries both with all workers running and keeps the faster.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import time
import weakref
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from eclip.core.device import Slot, Window, check_load
from eclip.core.load import CLOSED_LOOP, Arrivals, Load
from eclip.core.plan import Plan
from eclip.core.program import Program, Route
from eclip.core.requests import END, LoopGroup
from eclip.core.rules import board_of, open_account
from eclip.core.runlog import KernelRecords, Prepared, RunLog
from eclip.desk import Desk, Submitting
from eclip.errors import DeviceError, StoppedError, TracingError
from eclip.gpu import worker_loop
from eclip.gpu.board import shared_board
from eclip.gpu.closing import Belongings, Owner, Releases, noting
from eclip.gpu.device import SessionDevice
from eclip.gpu.energy import EnergyCounter, mean_power_w, now_ns
from eclip.gpu.executables import Capture, Executables
from eclip.gpu.recording import (
    NO_KERNELS,
    make_log,
    record_kernels,
    since,
    window_warnings,
)
from eclip.gpu.serving import Loops
from eclip.gpu.steps import Ints, Steps, Stretches

_TRIAL_SECONDS = 0.15  # to decide between one graph and segments
_TRIAL_REQUESTS = 8
_TRACE_WARMUP_S = 0.02  # of the run that records kernels; the graphs are warm already


class Execution(enum.Enum):
    AUTO = "auto"
    WHOLE = "whole"
    SEGMENTS = "segments"


class GpuSession(Owner, Submitting):
    def __init__(
        self,
        device: SessionDevice,
        program: Program,
        captures: Sequence[Capture],
        warnings: Sequence[str],
        execution: Execution,
    ) -> None:
        self._execution = execution
        self._device = device
        self._program = program
        self._captures = captures
        self._warnings = warnings
        self._server: Loops | None = None
        self._belongings = Belongings(device.gpu, captures)
        # Also when it is collected, or the interpreter ends, while it is open.
        self._finalizer = weakref.finalize(self, self._belongings.close_quietly)
        try:
            self.board, self._rows = self._take_rows(program.plan)  # who is busy
            self._placer = device.place_lanes(program.plan.lanes, self._belongings.releases)
            self._belongings.streams += self._placer.streams
            self._placer.check(program, captures)
            self._executables = Executables(captures, self._placer)
            began, free = time.monotonic(), device.gpu.free_memory()
            self._loops = self._open_loops()
            self.prepared = Prepared(
                executables=len(self._executables.placed),
                seconds=time.monotonic() - began,
                device_bytes=max(0, free - device.gpu.free_memory()),
            )
        except BaseException as error:
            with noting(error):
                self.close()
            raise
        device.gpu.quicken()  # for whoever serves requests without a run

    def close(self) -> None:
        """Wait for what is in flight and release everything; the second time does nothing."""
        if self._server is not None:
            self._server.stop()
        try:
            self._belongings.close()
            self._finalizer.detach()
        finally:
            if self._desk is not None:
                self._desk.close()

    def _begin_serving(
        self,
        slots: int | Sequence[Sequence[Slot]],
        background: Collection[int],
        groups: Sequence[LoopGroup] | None,
    ) -> Desk:
        owner = Releases()
        with self._belongings.in_use():
            try:
                self._device.gpu.make_current()
                given, copies = self._device.prepare_slots(self._captures, slots, owner)
                desk = Desk(given, background, groups)
                owner.callback(desk.close)
                self._server = Loops(self._loops, desk, copies)
                owner.callback(self._server.close)
                self._belongings.begin(self._server.runners, self._server.ending)
            except BaseException as error:
                self._server = None
                with noting(error):
                    owner.close()
                raise
        self._belongings.releases.take_over(owner)
        return desk

    def _take_rows(self, plan: Plan) -> tuple[Ints, tuple[int, ...]]:
        """A row of the shared board for every worker if others are to see them, else of our own."""
        shared = shared_board(self._device.gpu.uuid) if plan.has_tiers else None
        if shared is None:
            return board_of(plan), plan.everyone
        self._belongings.releases.callback(shared.close)
        return shared.words, shared.claim_all(plan.workers)

    def _open_loops(self) -> list[worker_loop.WorkerLoop]:
        """Every worker's loop, in the way the device asks for or, if that is AUTO, the faster one.

        Both are tried with all workers at once: alone a graph over several contexts may win and
        then, beside others, fall into lock-step with them.
        """
        wanted = self._execution
        barriers = sum(route.barriers for routes in self._program.routes for route in routes)
        if wanted is not Execution.AUTO or barriers == 0 or self._program.plan.gives_way:
            return self._make_loops(wanted, self._belongings.releases)
        whole_owner, segments_owner = Releases(), Releases()
        try:
            whole = self._make_loops(Execution.WHOLE, whole_owner)
            segments = self._make_loops(Execution.SEGMENTS, segments_owner)
            ratio = np.mean(self._try_rates(whole) / self._try_rates(segments))
        except BaseException:  # the session closes, and these first
            self._belongings.releases.take_over(whole_owner)
            self._belongings.releases.take_over(segments_owner)
            raise
        if ratio > 1:
            loops, winner, loser = whole, whole_owner, segments_owner
        else:
            loops, winner, loser = segments, segments_owner, whole_owner
        self._belongings.releases.take_over(winner)
        loser.close()
        return loops

    def _make_loops(self, way: Execution, owner: Releases) -> list[worker_loop.WorkerLoop]:
        rows = np.array(self._rows, dtype=np.int64)
        return [
            worker_loop.WorkerLoop(
                self._device.gpu,
                self._stretches(worker, way, owner),
                worker_loop.Place(self.board, self._rows[worker], rows),
                self._program.rules[worker],
            )
            for worker in self._program.plan.everyone
        ]

    def _stretches(self, worker: int, way: Execution, owner: Releases) -> Stretches:
        """A worker's requests in every variant, and wherever its rules may take it."""
        plan = self._program.plan
        planned = plan.workers[worker]
        rules = self._program.rules[worker]
        stretches = rules.stretches(planned.kernels)

        def prepare(route: Route) -> list[Steps]:
            if planned.joints is not None:
                return self._executables.stretches(route, stretches, owner)
            if way is Execution.SEGMENTS or plan.gives_way:
                return [self._executables.segments(route, owner)]
            return [self._executables.whole(route, owner)]

        variants = [
            (sum(1 << other for other in variant.active), prepare(route))
            for variant, routes in zip(plan.variants, self._program.routes, strict=True)
            for route in routes
            if route.worker == worker
        ]
        moves = [prepare(route) for route in self._program.moves_of(worker)]
        return Stretches(
            variants, moves, *self._executables.progress(worker, planned, rules, owner)
        )

    def _try_rates(self, loops: Sequence[worker_loop.WorkerLoop]) -> npt.NDArray[np.float64]:
        """Requests per second of every worker, all of them back to back for a moment."""
        longest_ns = max(
            sum(group.predicted_ns for group in part.groups)
            for part in self._program.plan.main.assignments
        )
        seconds = max(_TRIAL_SECONDS, _TRIAL_REQUESTS * longest_ns / 1e9)
        stop = np.zeros(1, dtype=np.int64)
        runners = [
            worker_loop.Runner(functools.partial(worker.drive, stop=stop), stop) for worker in loops
        ]
        with self._belongings.running(runners, stop):
            time.sleep(seconds)
        rates = []
        for runner in runners:
            ends = runner.rows()[:, END]
            rates.append((len(ends) - 1) * 1e9 / (ends[-1] - ends[0]) if len(ends) > 1 else 1e-9)
        return np.array(rates)

    def steps(self, worker: int) -> Steps:
        """What the first stretch of a worker's request takes while everybody is active."""
        return self._loops[worker].stretches[0]

    def request(self, worker: int) -> None:
        """Run one request of a worker and wait for it: one thread at a time for each worker."""
        self._check_idle()
        with self._belongings.in_use():
            served = self._loops[worker].drive(most_requests=1, stop=self._belongings.ending)
        if len(served) == 0:
            raise DeviceError("the session was closed before the request began")

    def run(self, load: Load, window: Window) -> RunLog:
        self._check_idle()
        with self._belongings.in_use():
            return self._run(load, window)

    def _run(self, load: Load, window: Window) -> RunLog:
        plan = self._program.plan
        check_load(plan, load)
        warnings = [*self._warnings, *_measuring_warnings(self._device.counter, window)]
        duration_ns = round(window.seconds * 1e9)
        self._device.gpu.quicken()
        for row, worker in zip(self._rows, plan.workers, strict=True):
            if worker.promise is not None:
                open_account(self.board, row, worker.promise)
        zero = now_ns() + round(window.warmup_seconds * 1e9)
        stop = np.zeros(1, dtype=np.int64)
        runners = self._runners(load, zero, zero + duration_ns, stop)
        power, ended = self._run_threads(runners, zero, zero + duration_ns, stop)
        served = [
            since(runner.rows(), zero) for runner in runners
        ]  # raises what a worker failed of
        if ended <= zero:
            raise StoppedError("stopped before the run began to be measured")
        duration_ns = ended - zero
        kernels = NO_KERNELS
        if window.trace_ms > 0 and not self._device.progress.stopped:
            try:
                kernels = self._trace(load, window)
            except TracingError as error:
                warnings.append(f"kernels are not recorded: {error}")
        return make_log(
            plan,
            self._device.title,
            load,
            served,
            [worker.kernels for worker in plan.workers],
            kernels,
            duration_ns,
            power,
            warnings,
            self.prepared,
        )

    def _runners(
        self, load: Load, zero: int, end_ns: int, stop: Arrivals
    ) -> list[worker_loop.Runner]:
        return [
            worker_loop.Runner(
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

    def _trace(self, load: Load, window: Window) -> KernelRecords:
        """The load once more from its start, only as long as the trace window, and recorded."""
        window_ns = round(window.trace_ms * 1e6)
        warmup_ns = round(min(window.warmup_seconds, _TRACE_WARMUP_S) * 1e9)
        # What arrived longer ago would all be served at once at the beginning.
        recent = tuple(
            None if arrivals is CLOSED_LOOP else arrivals[arrivals >= -warmup_ns]
            for arrivals in load.arrivals
        )
        stop = np.zeros(1, dtype=np.int64)
        self._device.gpu.make_current()  # in the caller's thread, for the tracer
        names = {kernel.name for capture in self._captures for kernel in capture.trace.kernels}
        with self._device.tracer(names) as tracer:
            ids = {
                tracer.executable_id(handle): part
                for handle, part in self._executables.placed.items()
            }
            zero = now_ns() + warmup_ns
            again = dataclasses.replace(load, arrivals=recent)
            runners = self._runners(again, zero, zero + window_ns, stop)
            with self._belongings.running(runners, stop):
                while now_ns() < zero + window_ns and not stop[0]:
                    time.sleep(0.001)
            served = sum(len(runner.rows()) for runner in runners)
        if served and not any(span.executable in ids for span in tracer.spans):
            raise TracingError(f"no kernel of {served} requests was seen")
        return record_kernels(tracer.spans, ids, zero, window_ns)

    def _run_threads(
        self, runners: Sequence[worker_loop.Runner], zero: int, end_ns: int, stop: Arrivals
    ) -> tuple[float | None, int]:
        """Run all workers until the end, or a stop request: the mean power between the first and
        the last energy tick inside, and when that was."""
        counter, progress = self._device.counter, self._device.progress

        def stopped() -> bool:
            return bool(stop[0]) or progress.stopped

        with self._belongings.running(runners, stop):
            power = None if counter is None else mean_power_w(counter, zero, end_ns, stopped)
            while now_ns() < end_ns and not stopped():
                time.sleep(0.001)
            return power, min(end_ns, now_ns())


def _measuring_warnings(counter: EnergyCounter | None, window: Window) -> list[str]:
    if counter is None:
        return ["energy is not measured: see `eclip doctor`"]
    others = counter.other_processes()
    named = ", ".join(map(str, others))
    found = [f"other processes used the GPU: {named}"] if others else []
    return [*window_warnings(window), *found]
