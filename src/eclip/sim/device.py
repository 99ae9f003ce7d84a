"""The simulator as a device: profiles in, run logs out, time and energy modelled.

It lowers a program and its profiles to what ``events.advance`` reads (``tables.py``); all constants
come from the calibration. Progress and interrupts are handled between chunks of simulated time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eclip.core import credit
from eclip.core.calibration import Calibration
from eclip.core.copies import LINKS, NO_LINK
from eclip.core.device import (
    Capability,
    Closing,
    Slot,
    SourceKind,
    StartedSessions,
    Window,
    check_load,
    check_sources,
)
from eclip.core.load import CLOSED_LOOP, Load
from eclip.core.memory import check_memory, memory_of_plan
from eclip.core.plan import Plan, Processes, Sharing, Turns, account_warnings
from eclip.core.profile import Profile
from eclip.core.program import Program, program_of
from eclip.core.requests import OWN, LoopGroup
from eclip.core.rules import board_of
from eclip.core.runlog import KernelRecords, Requests, RunLog, WorkerCounters
from eclip.core.topology import Topology
from eclip.desk import Desk, Submitting, slots_for
from eclip.errors import DeviceError, StoppedError
from eclip.progress import Progress
from eclip.sim import events, stretches
from eclip.sim.contention import LIMITS, Ints, Records
from eclip.sim.pacing import Meter, Pacer
from eclip.sim.tables import JointTables, KernelTables, kernels_of

_AHEAD = 8  # requests of a worker, at least, that the core may know
_CHUNK_NS = 50e6
_BUFFER_ROWS = 1 << 16
_GLIMPSE_WARMUP = 0.25  # of the window
_GLIMPSE_PIECES = 16  # after each one is asked whether it is decided


class SimDevice(Closing):
    capabilities = frozenset(
        {
            *(Capability.TURNS, Capability.TRACE, Capability.ENERGY),
            *(Capability.JOINTS, Capability.SUBMIT),
        }
    )
    modelled = True
    driver = None
    index = 0
    uuid = None

    def __init__(
        self, topology: Topology, calibration: Calibration, progress: Progress | None = None
    ) -> None:
        self._warnings = calibration.fingerprint.check(
            topology.fingerprint, "the calibration", topology.title
        )
        self.topology = topology
        self.calibration = calibration
        self._progress = progress or Progress()
        self._meter = Meter(calibration.power.idle_w)

    @property
    def title(self) -> str:
        return f"simulator of {self.topology.title}"

    def energy_mj(self) -> int:
        return self._meter.energy_mj()

    def source_kind(self, sharing: Sharing) -> SourceKind:
        return SourceKind.PROFILE

    def open(
        self, program: Program, sources: Sequence[Profile], *, brief: bool = False
    ) -> SimSession:
        plan = program.plan
        if isinstance(plan.sharing, Processes):
            raise DeviceError("the simulator has no processes to run under MPS")
        check_sources(plan, [profile.trace for profile in sources])
        check_memory(memory_of_plan(plan, self.topology), "the plan")
        warnings = [
            *self._warnings,
            *plan.fingerprint.check(self.topology.fingerprint, "the plan", self.topology.title),
        ]
        for profile in sources:
            warnings += profile.fingerprint.check(
                plan.fingerprint, f"the profile of {profile.model}", "the plan"
            )
        if any(lane.priority for lane in plan.lanes):
            warnings.append("the simulator does not know stream priorities: the plan's do nothing")
        warnings += account_warnings(plan)
        if plan.aliased:
            warnings.append(
                f"{len(plan.lanes)} lanes share {plan.topology.hardware_queues} hardware queues: "
                f"some wait on each other for no reason"
            )
        tables = KernelTables(sources, self.calibration)
        return SimSession(program, tables, self.title, tuple(warnings), self._progress, self._meter)

    def start(self, plans: Sequence[Plan], jobs: Sequence[Sequence[Any]]) -> StartedSessions:
        raise DeviceError("the simulator has no processes to start")


class SimSession(Submitting):
    def __init__(
        self,
        program: Program,
        tables: KernelTables,
        title: str,
        warnings: tuple[str, ...],
        progress: Progress,
        meter: Meter,
    ) -> None:
        self._program = program
        self._tables = tables
        self._title = title
        self._warnings = warnings
        self._progress = progress
        self._meter = meter
        self._pacer: Pacer | None = None

    def _begin_serving(
        self,
        slots: int | Sequence[Sequence[Slot]],
        background: Collection[int],
        groups: Sequence[LoopGroup] | None,
    ) -> Desk:
        workers = len(self._program.plan.workers)
        desk = Desk(slots_for(slots, workers, lambda worker: Slot()), background, groups)
        places = max(_AHEAD, *map(len, desk.slots))
        machine, state = self._served_machine(desk, places)
        self._pacer = pacer = Pacer(machine, state, desk, self._meter, places)
        desk.open(pacer)
        pacer.start()
        # Also when it is collected while it serves.
        self._end_serving = weakref.finalize(self, _end_serving, pacer, desk)
        return desk

    def _served_machine(self, desk: Desk, places: int) -> tuple[events.Setup, events.State]:
        """With so many places for arrivals of each worker, and no arrival so far."""
        plan = self._program.plan
        arrivals = tuple(np.zeros(places, dtype=np.int64) for _ in plan.workers)
        load = Load(label="submitted", seed=0, arrivals=arrivals)
        machine = build_machine(self._program, self._tables, load, trace_ns=0)
        state = initial_state(machine, plan, load, 0.0, self._tables.profiles)
        own = np.zeros(len(plan.workers), dtype=bool)
        for worker, (group, program) in enumerate(desk.places):
            own[worker] = desk.doors.loops[group, OWN] == program
        state.workers["arrival_end"] = state.workers["next_arrival"]
        state.workers["closed"] = own
        state.workers["due"] = np.where(own, 0.0, np.inf)
        # With a row for every worker the core stops whenever a request has ended.
        rows = np.zeros((len(plan.workers), state.request_rows.shape[1]), dtype=np.int64)
        return machine, state._replace(request_rows=rows)

    @property
    def lateness_ns(self) -> Ints:
        """By how much the last completions came after their simulated ends."""
        return np.empty(0, dtype=np.int64) if self._pacer is None else self._pacer.lateness_ns

    def close(self) -> None:
        if self._pacer is not None:
            self._end_serving()

    def run(self, load: Load, window: Window) -> RunLog:
        self._check_idle()
        plan = self._program.plan
        check_load(plan, load)
        duration_ns = round(window.seconds * 1e9)
        trace_ns = round(window.trace_ms * 1e6)
        begin_ns = -window.warmup_seconds * 1e9
        machine = build_machine(self._program, self._tables, load, trace_ns)
        state = initial_state(machine, plan, load, begin_ns, self._tables.profiles)
        requests: list[Ints] = []
        kernels: list[Ints] = []
        until = begin_ns
        while until < duration_ns:
            if self._progress.stopped:
                if until <= 0:
                    raise StoppedError("stopped before the run began to be measured")
                duration_ns = round(until)
                break
            until = min(until + _CHUNK_NS, float(duration_ns))
            while events.advance(machine, state, until, until == duration_ns) == events.BUFFER_FULL:
                _empty_buffers(state, requests, kernels)
            self._progress.part((until - begin_ns) / (duration_ns - begin_ns))
        _empty_buffers(state, requests, kernels)
        request_columns = np.concatenate(requests).T.tolist()
        kernel_columns = np.concatenate(kernels).T.tolist()
        return RunLog(
            plan=plan,
            device=self._title,
            modelled=True,
            load=load.label,
            seed=load.seed,
            duration_ns=duration_ns,
            energy_uj=round(float(state.clock[0]["energy_nj"]) / 1e3),
            requests=Requests(
                worker=tuple(request_columns[0]),
                arrival_ns=tuple(request_columns[1]),
                start_ns=tuple(request_columns[2]),
                end_ns=tuple(request_columns[3]),
                verdict=tuple(request_columns[4]) if plan.has_accounts else (),
            ),
            kernels=KernelRecords(
                window_ns=trace_ns,
                worker=tuple(kernel_columns[0]),
                position=tuple(kernel_columns[1]),
                lane=tuple(kernel_columns[2]),
                start_ns=tuple(kernel_columns[3]),
                end_ns=tuple(kernel_columns[4]),
            ),
            counters=_counters(state, duration_ns),
            unfinished=tuple(_unfinished(machine, worker, duration_ns) for worker in state.workers),
            offered=load.offered(duration_ns),
            lag_ns=(0,) * len(plan.workers),
            warnings=self._warnings,
        )


def _end_serving(pacer: Pacer, desk: Desk) -> None:
    pacer.stop()
    desk.close()
    pacer.close()


@dataclass(frozen=True)
class Glimpse:
    """A short simulation, in numbers. Rates come from kernels done rather than from requests, so
    that a window of a few requests is enough."""

    rates_rps: tuple[float, ...]  # per worker
    power_w: float
    requests: Ints  # rows of worker, arrival, start, end, verdict


def glimpse(
    plan: Plan,
    tables: KernelTables,
    load: Load,
    window_ns: float,
    is_decided: Callable[[Ints], bool] | None = None,
    *,
    warm: bool = False,
) -> Glimpse:
    """Simulate a plan made from these tables' profiles for so long, after a quarter of that. With
    ``is_decided`` it is asked in between about the requests so far, and True ends the simulation:
    only the requests mean something then. ``warm``: accounts of services begin with all credit, as
    they have after a while where bounds are kept."""
    machine = build_machine(program_of(plan), tables, load, 0)
    state = initial_state(machine, plan, load, -_GLIMPSE_WARMUP * window_ns, tables.profiles)
    if warm:
        credit.warm(state.joined.board)
    rows: list[Ints] = []
    pieces = _GLIMPSE_PIECES if is_decided is not None else 1
    for piece in range(1, pieces + 1):
        last = piece == pieces
        until_ns = float(window_ns) if last else window_ns * piece / pieces
        while events.advance(machine, state, until_ns, last) == events.BUFFER_FULL:
            _empty_buffers(state, rows, [])
        _empty_buffers(state, rows, [])
        if is_decided is not None and is_decided(np.concatenate(rows)):
            break
    return Glimpse(
        rates_rps=tuple(
            float(worker["kernels"]) / (planned.kernels * window_ns / 1e9)
            for worker, planned in zip(state.workers, plan.workers, strict=True)
        ),
        power_w=float(state.clock[0]["energy_nj"]) / window_ns,
        requests=np.concatenate(rows),
    )


def build_machine(
    program: Program, tables: KernelTables, load: Load, trace_ns: int
) -> events.Setup:
    """What the core reads: kernels of every variant's routes, one after another, and constants."""
    plan = program.plan
    calibration = tables.calibration
    costs, sharing = calibration.costs, calibration.interference
    memory, power = calibration.memory, calibration.power
    order = sorted(range(len(plan.variants)), key=lambda index: len(plan.variants[index].active))
    routes = np.zeros((len(order), len(plan.workers)), dtype=events.ROUTE)
    kernels: list[Records] = []
    filled = 0
    joints = JointTables(program, tables)
    for row, index in enumerate(order):
        for route in program.routes[index]:
            rows = kernels_of(plan, route, tables)
            launch_ns = costs.launch_ns + route.barriers * costs.launch_switch_ns
            first = joints.add(route.worker, rows, filled)
            routes[row, route.worker] = (filled, filled + len(rows), launch_ns, first)
            kernels.append(rows)
            filled += len(rows)
    for worker in plan.everyone:
        for route in program.moves_of(worker):
            rows = kernels_of(plan, route, tables)
            joints.add_move(worker, rows, filled)
            kernels.append(rows)
            filled += len(rows)
    slice_units = np.array(plan.topology.slice_units, dtype=np.float64)
    lane_units = np.zeros((len(plan.lanes), len(slice_units)))
    for number, lane in enumerate(plan.lanes):
        for index in lane.mask:
            lane_units[number, index] = slice_units[index]
    # Time-sliced workers are processes of their own, each with all hardware queues to itself.
    queues = len(plan.lanes) if isinstance(plan.sharing, Turns) else plan.topology.hardware_queues
    lane_queue = np.arange(len(plan.lanes)) % queues
    arrivals = np.concatenate([_times(times) for times in load.arrivals])
    begins = np.concatenate([_times(times) for times in load.begins]) if load.begins else arrivals
    every = np.concatenate(kernels)
    copies = every["link"] != NO_LINK
    every["queue"] = lane_queue[every["lane"]]
    every["queue"][copies] = lane_queue.max() + every["link"][copies]
    return events.Setup(
        kernels=every,
        routes=routes,
        variant_active=np.array(
            [sum(1 << worker for worker in plan.variants[index].active) for index in order]
        ),
        queues=int(lane_queue.max()) + 1 + LINKS,
        lane_units=lane_units,
        lane_total=lane_units.sum(axis=1),
        arrivals=arrivals,
        begins=begins,
        limits=np.array(
            [
                (
                    sharing.cohabit,
                    sharing.crowding,
                    sharing.presence,
                    sharing.pressure / 1e3**0.5,  # root of TB/s to that of bytes per ns
                    memory.dram_bytes_per_s / 1e9,
                    memory.l2_bytes_per_s / 1e9,
                    power.idle_w,
                )
            ],
            dtype=LIMITS,
        ),
        turns=int(isinstance(plan.sharing, Turns)),
        turn_ns=float(costs.turn_ns),
        turn_switch_ns=float(costs.turn_switch_ns),
        trace_until=float(trace_ns),
        gives_way=int(plan.gives_way or plan.has_accounts),
        stretches=joints.columns(),
    )


def _times(times: Ints | None) -> Ints:
    return np.empty(0, dtype=np.int64) if times is CLOSED_LOOP else times


def initial_state(
    machine: events.Setup, plan: Plan, load: Load, begin_ns: float, profiles: Sequence[Profile]
) -> events.State:
    workers = np.zeros(len(plan.workers), dtype=events.WORKER)
    workers["phase"] = stretches.IDLE
    workers["closed"] = [times is CLOSED_LOOP for times in load.arrivals]
    workers["arrival_end"] = np.cumsum([len(_times(times)) for times in load.arrivals])
    workers["next_arrival"][1:] = workers["arrival_end"][:-1]
    # Closed-loop workers start at random points of each other's requests, not in lock-step.
    phases = iter(np.random.default_rng(load.seed).uniform(0, 1, int(workers["closed"].sum())))
    for index, worker in enumerate(workers):
        times = _times((load.begins or load.arrivals)[index])
        if worker["closed"]:
            worker["due"] = begin_ns + next(phases) * profiles[index].request_ns[-1]
        else:
            worker["due"] = max(times[0], begin_ns) if len(times) else np.inf
    progress = np.zeros(len(plan.workers), dtype=stretches.PROGRESS)
    progress["free_at"] = -np.inf
    clock = np.zeros(1, dtype=events.CLOCK)
    clock["now"] = begin_ns
    clock["holder"] = events.NOBODY
    return events.State(
        workers=workers,
        clock=clock,
        queue_holder=np.full(machine.queues, events.NOBODY, dtype=np.int64),
        active=np.zeros(len(workers), dtype=np.int64),
        scratch=np.zeros((2, machine.lane_units.shape[1])),
        request_rows=np.zeros((_BUFFER_ROWS, 5), dtype=np.int64),
        kernel_rows=np.zeros((_BUFFER_ROWS, 5), dtype=np.int64),
        joined=stretches.Joined(
            board=board_of(plan),
            progress=progress,
            wake=np.full(1, np.inf),
            unsettled=np.zeros(1, dtype=np.int64),
        ),
    )


def _empty_buffers(state: events.State, requests: list[Ints], kernels: list[Ints]) -> None:
    clock = state.clock[0]
    requests.append(state.request_rows[: clock["requests"]].copy())
    kernels.append(state.kernel_rows[: clock["kernels"]].copy())
    clock["requests"] = 0
    clock["kernels"] = 0


def _counters(state: events.State, duration_ns: int) -> tuple[WorkerCounters, ...]:
    return tuple(
        WorkerCounters(
            kernels=int(worker["kernels"]),
            barriers=int(worker["barriers"] + mine["barriers"]),
            lane_waits=int(worker["lane_waits"]),
            false_waits=int(worker["false_waits"]),
            false_wait_ns=round(float(worker["false_wait_ns"])),
            yields=int(mine["yields"]),
            moves=int(mine["moves"]),
            longest_pause_ns=_longest_pause_ns(mine, duration_ns),
        )
        for worker, mine in zip(state.workers, state.joined.progress, strict=True)
    )


def _longest_pause_ns(mine: np.void, duration_ns: int) -> int:
    """The one that it is in counts, too: a worker may starve to the end."""
    longest = float(mine["longest_pause_ns"])
    if mine["held"]:
        longest = max(longest, duration_ns - max(float(mine["held_since"]), 0.0))
    return round(longest)


def _unfinished(machine: events.Setup, worker: np.void, duration_ns: int) -> int:
    """Requests begun, or arrived and still waiting, at the end of the run."""
    waiting = machine.arrivals[worker["next_arrival"] : worker["arrival_end"]]
    return int(worker["phase"] != stretches.IDLE) + int(np.count_nonzero(waiting < duration_ns))
