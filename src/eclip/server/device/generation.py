"""A generation: one deployment as it runs in the device process.

Every instance of a service is a group of the session: its buckets are the group's workers, and one
of them runs at a time. Fronts put batches into the rings of the groups themselves, and loops answer
there. So nothing here is on a request's way, but for CPU functions: on a device that only takes the
time, a function computes meanwhile in a thread, and the answer leaves when both have ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from eclip.capture.sources import make_source
from eclip.core.device import Closing, Device, Session, Slot
from eclip.core.plan import Plan
from eclip.core.program import lower
from eclip.core.requests import ROWS, SLOT, Compute, LoopGroup, Ring
from eclip.errors import DeviceError, EclipError
from eclip.files import store
from eclip.server.control import Deployment, ServiceSpec
from eclip.server.device.deploying import profiles_of
from eclip.server.device.host import host_of
from eclip.server.device.models import (
    CpuFunction,
    announce_files,
    compute,
    example_inputs,
    find_function,
)
from eclip.server.device.parts import Parts
from eclip.server.link import Slots
from eclip.server.log import report
from eclip.server.messages import Tensor
from eclip.server.tensors import DATATYPES, from_raw, to_raw

_WARM_S = 60.0


@dataclass(eq=False)
class Stage:
    """A service of a generation."""

    spec: ServiceSpec
    account: int  # of the session: when it is busy
    workers: list[int]  # of the plan
    function: CpuFunction | None
    counted: tuple[int, int] = (0, 0)  # busy time and yields, so far
    began_ns: dict[int, int] = field(default_factory=dict)  # functions that run, by thread
    # The function's own: one that hangs keeps no other service waiting. None start unless used.
    threads: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.threads = ThreadPoolExecutor(self.spec.settings.replicas, self.spec.name)

    def run(self, slots: Slots, slot: int, rows: int) -> None:
        """In a thread of its own: from the inputs in the slot to outputs there; a line there says
        why it failed."""
        thread = threading.get_ident()
        self.began_ns[thread] = time.monotonic_ns()
        try:
            self._compute(slots, slot, rows)
        except Exception as error:  # a user's function may raise anything
            line = report(f"model {self.spec.name} failed", error)
            slots.put_line(slot, f"model {self.spec.name} failed: {line}")
            raise
        finally:
            del self.began_ns[thread]

    def _compute(self, slots: Slots, slot: int, rows: int) -> None:
        assert self.function is not None
        info, inputs = self.spec.info, {}
        for index, tensor in enumerate(info.inputs):
            datatype = DATATYPES[tensor.datatype]
            if tensor.datatype == "BYTES":
                raw, shape = slots.get_bytes(slot, index)
                data = from_raw(tensor.name, datatype, shape, memoryview(raw)).data
            else:
                data = slots.read(slot, index, datatype.dtype)
            inputs[tensor.name] = data
        outputs = compute(self.function, inputs, info, rows)
        first = len(info.inputs)
        for index, (tensor, array) in enumerate(zip(info.outputs, outputs, strict=True), first):
            if tensor.datatype == "BYTES":
                raw = bytes(to_raw(Tensor(tensor.name, tensor.datatype, array)))
                slots.put_bytes(slot, index, raw, array.shape)
            else:
                slots.array(slot, index, array.shape, array.dtype)[...] = array


class HangWatch:
    """Since when each group should have answered."""

    def __init__(self, groups: int) -> None:
        self._answered = [0] * groups
        self._since_ns = [0] * groups
        self._progress_ns = 0

    def look(self, rings: Sequence[Sequence[Ring]], now_ns: int) -> list[int]:
        """``rings``: of each group."""
        for group, of_group in enumerate(rings):
            answered = sum(ring.answered for ring in of_group)
            if answered != self._answered[group]:
                self._answered[group] = answered
                self._since_ns[group] = self._progress_ns = now_ns
            elif not any(ring.open for ring in of_group):
                self._since_ns[group] = now_ns
        return self._since_ns

    def since_ns(self, group: int, gives_way: bool) -> int:
        """Background may be kept waiting as long as others get on."""
        return max(self._since_ns[group], self._progress_ns if gives_way else 0)


class Generation(Closing):
    """``slots`` are those of every attachment, by service."""

    def __init__(
        self,
        deployment: Deployment,
        device: Device,
        slots: Mapping[int, Mapping[int, Slots]],
        parts: Parts | None = None,
    ) -> None:
        self.number = deployment.generation
        self.failed: dict[int, str] = {}
        self.stages: dict[int, Stage] = {}
        self._deployment = deployment
        self._doors: dict[int, int] = {}  # the session's, by front
        self._watch = HangWatch(len(deployment.groups))
        self._busy_ns = 0  # as counted last
        self._stack = contextlib.ExitStack()
        try:
            self.session = self._open(device, slots, parts or Parts())
        except BaseException:
            self._stack.close()
            raise
        self.count()  # what was warmed is nobody's

    def _open(
        self, device: Device, slots: Mapping[int, Mapping[int, Slots]], parts: Parts
    ) -> Session:
        deployment, specs = self._deployment, self._deployment.specs
        announce_files(spec.settings for spec in specs)
        with parts.part("profiles"):
            profiles = profiles_of(specs, host_of(device, deployment.server))
            plan = store.load(deployment.plan, Plan)
        kind = device.source_kind(plan.sharing)
        with parts.part("captures"):
            sources = [make_source(kind, profile, device) for profile in profiles]
        program = lower(plan, [profile.trace for profile in profiles])
        # One more slot for every service, to warm it in: in the others, fronts and the generation
        # that runs may be at work.
        spare = {
            spec.id: self._stack.enter_context(_spare_slot(spec))
            for spec in specs
            if not device.modelled
        }
        with parts.part("instantiating"):
            session = self._stack.enter_context(device.open(program, sources))
        groups: list[LoopGroup] = []
        of_workers: list[ServiceSpec] = []
        for account, spec in enumerate(specs, 1):
            first = len(of_workers)
            for _ in range(spec.settings.replicas):
                workers = range(len(of_workers), len(of_workers) + len(spec.buckets))
                groups.append(LoopGroup(tuple(workers), account))
                of_workers += [spec] * len(spec.buckets)
            try:
                function = None if spec.function is None else _warm_function(spec.function, spec)
            except EclipError as error:
                self.failed[spec.id] = str(error)
                continue
            workers = range(first, len(of_workers))
            stage = self.stages[spec.id] = Stage(spec, account, [*workers], function)
            self._stack.callback(stage.threads.shutdown, wait=False, cancel_futures=True)
        of_attachments = [*(slots[attachment] for attachment in range(len(slots))), spare]
        with parts.part("slots"):
            given: int | Sequence[Sequence[Slot]] = 1  # nothing lies there
            if not device.modelled:
                given = [
                    _device_slots(spec, worker.model.batch, of_attachments)
                    for spec, worker in zip(of_workers, plan.workers, strict=True)
                ]
            session.serve(given, groups=groups)
        with parts.part("warming"):
            _warm(session)
        return session

    # --- Fronts ----------------------------------------------------------------------------------

    def attach(
        self, front: int, rings: Sequence[Ring], wakeup: int, slots: Mapping[int, Slots]
    ) -> None:
        """From now on loops look at a front's rings, too."""
        work = self._computing(front, slots)
        self._doors[front] = self.session.doors.open(rings, wakeup, work)

    def leave(self, front: int) -> None:
        """A front has gone: what it asked for need not be finished."""
        if front in self._doors:
            self.session.doors.shut(self._doors[front])

    def uses(self, front: int) -> bool:
        """Whether something uses its rings and slots still, when it leaves."""
        if front in self._doors and self.session.doors.is_left(self._doors[front]):
            del self._doors[front]
        return front in self._doors

    def _computing(self, front: int, slots: Mapping[int, Slots]) -> Compute:
        groups, doors = self._deployment.groups, self.session.doors

        def begin(group: int, row: Sequence[int]) -> Future[None] | None:
            stage = self.stages.get(groups[group].id)
            if stage is None or stage.function is None:
                return None
            slot = row[SLOT] - front * stage.spec.slots.count
            work = stage.threads.submit(stage.run, slots[stage.spec.id], slot, row[ROWS])
            work.add_done_callback(lambda done: doors.ring(group))
            return work

        return begin

    # --- What is said of it ----------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether something of a front has no answer."""
        rings = self.session.doors.rings
        return any(
            rings[door][group].open
            for door in self._doors.values()
            for group in range(len(rings[door]))
        )

    @property
    def failure(self) -> str:
        """Why the session serves no more."""
        return self.session.failure

    def hanging(self, now_ns: int, most_ns: float) -> str | None:
        """The name of a service that should have answered so long ago."""
        doors = [rings for rings in self.session.doors.rings if rings]
        self._watch.look([*zip(*doors, strict=True)], now_ns)
        for group, spec in enumerate(self._deployment.groups):
            gives_way = spec.settings.tier == "background"
            if now_ns - self._watch.since_ns(group, gives_way) > most_ns:
                return spec.name
        for stage in self.stages.values():
            if now_ns - min([*stage.began_ns.values()], default=now_ns) > most_ns:
                return stage.spec.name
        return None

    def count(self) -> dict[int, tuple[int, int]]:
        """By the counters' rows: for how many ns something was busy, and how often services gave
        way, since this was asked last. Row 0 is the whole device's."""
        accounts, yielded = self.session.doors.accounts, self.session.yielded
        busy_ns = accounts.busy_ns(0)
        found = {0: (busy_ns - self._busy_ns, 0)}
        self._busy_ns = busy_ns
        for stage in self.stages.values():
            now = accounts.busy_ns(stage.account), sum(yielded[one] for one in stage.workers)
            before, stage.counted = stage.counted, now
            found[stage.spec.row] = now[0] - before[0], now[1] - before[1]
        return found

    def close(self) -> None:
        self._stack.close()


def _spare_slot(spec: ServiceSpec) -> Slots:
    return Slots.create(msgspec.structs.replace(spec.slots, count=1))


def _device_slots(
    spec: ServiceSpec, batch: int, of_attachments: Sequence[Mapping[int, Slots]]
) -> Sequence[Slot]:
    """A worker's view of all slots, attachment by attachment: the first ``batch`` rows of each
    tensor."""
    largest, inputs = spec.buckets[-1], len(spec.slots.inputs)
    found = []
    for attachment in of_attachments:
        slots = attachment[spec.id]
        for slot in range(slots.layout.count):
            rooms = [
                slots.room(slot, index)[: room // largest * batch]
                for index, room in enumerate((*spec.slots.inputs, *spec.slots.outputs))
            ]
            found.append(Slot(tuple(rooms[:inputs]), tuple(rooms[inputs:])))
    return found


def _warm_function(name: str, spec: ServiceSpec) -> CpuFunction:
    """The function, when it has given what it should for every bucket."""
    function = find_function(name)
    for batch in spec.buckets:
        try:
            compute(function, example_inputs(spec.info, batch), spec.info, batch)
        except EclipError:
            raise
        except Exception as error:  # a user's function may raise anything
            raise DeviceError(f"{name} failed: {report(f'{name} failed', error)}") from None
    return function


def _warm(session: Session) -> None:
    """Run every worker once, each in its last slot."""
    open_ = set()
    for worker in range(len(session.served)):
        open_.add(session.submit(worker, len(session.slots(worker)) - 1))
    deadline = time.monotonic() + _WARM_S
    while open_:
        for completion in session.poll(0.1):
            open_.discard(completion.ticket)
            if completion.error is not None:
                raise DeviceError(f"a model failed while it was warmed: {completion.error}")
        if time.monotonic() > deadline:
            raise DeviceError(f"models were not warm after {_WARM_S:.0f} s")
