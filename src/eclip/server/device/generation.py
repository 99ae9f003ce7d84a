"""A generation: one deployment as it runs in the device process, from orders to answers.

Of an instance one bucket runs at a time; a second batch is handed to the session only behind one of
the same bucket, where the session keeps their order. On a device that only takes the time, a CPU
function computes meanwhile in a thread, and the answer leaves when both have ended.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
import numpy as np

from eclip.capture.sources import make_source
from eclip.core.device import CANCELLED, EXPIRED, Closing, Completion, Device, Session, Slot
from eclip.core.plan import Plan
from eclip.core.program import lower
from eclip.errors import DeviceError, EclipError
from eclip.files import store
from eclip.server import link
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
from eclip.server.link import IN_FLIGHT, Answer, DeviceOrder, Link, Slots
from eclip.server.log import report
from eclip.server.messages import Tensor
from eclip.server.tensors import DATATYPES, from_raw, to_raw

_WARM_S = 60.0
_STATUS = {None: link.OK, CANCELLED: link.CANCELLED, EXPIRED: link.EXPIRED}


@dataclass(eq=False)
class AttachedFront:
    """A front as the device process sees it."""

    number: int
    link: Link
    slots: Mapping[int, Slots]  # by service id
    open: int = 0  # its orders that have no answer
    leaving: bool = False

    def answer(self, answer: Answer) -> None:
        self.open -= 1
        if not self.leaving:
            self.link.answers.push(answer)
            self.link.answered.raise_()


@dataclass(eq=False, slots=True)
class OpenOrder:
    front: AttachedFront
    order: DeviceOrder
    taken_ns: int
    instance: int = -1
    ticket: int = -1  # the session's
    computing: bool = False
    completion: Completion | None = None
    failure: str | None = None  # of its CPU function


@dataclass(eq=False)
class Stage:
    """A service of a generation."""

    spec: ServiceSpec
    workers: list[dict[int, int]]  # of every instance: the plan's worker by bucket
    function: CpuFunction | None
    yielded: int = 0  # as counted last
    waiting: collections.deque[OpenOrder] = field(default_factory=collections.deque)
    running: list[list[OpenOrder]] = field(init=False)  # per instance
    # The function's own: one that hangs keeps no other service waiting. None start unless used.
    threads: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.running = [[] for _ in self.workers]
        self.threads = ThreadPoolExecutor(len(self.workers), self.spec.name)

    def instance_for(self, bucket: int) -> int | None:
        """One that is free, or runs the same bucket and has nothing behind it."""
        least = min(range(len(self.running)), key=lambda instance: len(self.running[instance]))
        here = self.running[least]
        if not here:
            return least
        for instance, orders in enumerate(self.running):
            if len(orders) < IN_FLIGHT and orders[-1].order.bucket == bucket:
                return instance
        return None


class Generation(Closing):
    """``slots`` are those of every attachment, by service. ``wake`` is called, from any thread,
    when ``collect`` has something to do."""

    def __init__(
        self,
        deployment: Deployment,
        device: Device,
        slots: Mapping[int, Mapping[int, Slots]],
        wake: Callable[[], None],
        parts: Parts | None = None,
    ) -> None:
        self.number = deployment.generation
        self.failed: dict[int, str] = {}
        self.stages: dict[int, Stage] = {}
        self._deployment = deployment
        self._wake = wake
        self._completed_ns = 0  # the session's last completion
        self._orders: dict[int, OpenOrder] = {}  # by the session's ticket
        self._done: collections.deque[OpenOrder] = collections.deque()  # their function has ended
        self._stack = contextlib.ExitStack()
        try:
            self.session = self._open(device, slots, parts or Parts())
        except BaseException:
            self._stack.close()
            raise

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
        first = 0
        of_workers: list[ServiceSpec] = []
        for spec in specs:
            workers = []
            for _ in range(spec.settings.replicas):
                workers.append({size: first + place for place, size in enumerate(spec.buckets)})
                first += len(spec.buckets)
                of_workers += [spec] * len(spec.buckets)
            try:
                function = None if spec.function is None else _warm_function(spec.function, spec)
            except EclipError as error:
                self.failed[spec.id] = str(error)
                continue
            stage = self.stages[spec.id] = Stage(spec, workers, function)
            self._stack.callback(stage.threads.shutdown, wait=False, cancel_futures=True)
        with parts.part("slots"):
            if device.modelled:
                most = max(spec.slots.count for spec in specs)
                session.serve(len(slots) * most + 1)
            else:
                of_attachments = [*(slots[attachment] for attachment in range(len(slots))), spare]
                session.serve(
                    [
                        _device_slots(spec, worker.model.batch, of_attachments)
                        for spec, worker in zip(of_workers, plan.workers, strict=True)
                    ]
                )
        with parts.part("warming"):
            _warm(session, [len(slots) * spec.slots.count for spec in of_workers])
        return session

    @property
    def open(self) -> int:
        """Orders that have no answer."""
        waiting = sum(len(stage.waiting) for stage in self.stages.values())
        running = sum(len(run) for stage in self.stages.values() for run in stage.running)
        return waiting + running

    def busy_rows(self) -> list[int]:
        """The counters' rows of services of which something runs."""
        return [stage.spec.row for stage in self.stages.values() if any(stage.running)]

    def oldest_ns(self) -> tuple[int, str] | None:
        """Since when the oldest order should have ended, and whose it is. Background work may be
        kept waiting as long as others get on."""
        ages = []
        for stage in self.stages.values():
            gives_way = stage.spec.settings.tier == "background"
            for orders in stage.running:
                if orders:
                    held = gives_way and orders[0].completion is None
                    since_ns = max(orders[0].taken_ns, self._completed_ns if held else 0)
                    ages.append((since_ns, stage.spec.name))
        return min(ages, default=None)

    def new_yields(self) -> dict[int, int]:
        """By the counters' rows: how often services gave way since this was asked last."""
        yielded, found = self.session.yielded, {}
        for stage in self.stages.values():
            total = sum(yielded[worker] for of in stage.workers for worker in of.values())
            found[stage.spec.row] = total - stage.yielded
            stage.yielded = total
        return found

    def take(self, front: AttachedFront, order: DeviceOrder) -> None:
        stage = self.stages[order.service]
        stage.waiting.append(OpenOrder(front, order, time.monotonic_ns()))
        self._pump(stage)

    def cancel(self, front: AttachedFront, order: DeviceOrder) -> None:
        self._cancel(front, lambda one: one.order.ticket == order.ticket)

    def leave(self, front: AttachedFront) -> None:
        """A front has gone: what it ordered need not be finished."""
        self._cancel(front, lambda one: True)

    def _cancel(self, front: AttachedFront, asked: Callable[[OpenOrder], bool]) -> None:
        for stage in self.stages.values():
            for one in [one for one in stage.waiting if one.front is front and asked(one)]:
                stage.waiting.remove(one)
                _answer(one, link.CANCELLED, one.taken_ns, time.monotonic_ns())
            for orders in stage.running:
                for one in orders:
                    if one.front is front and asked(one) and one.completion is None:
                        self.session.cancel(one.ticket)

    def _pump(self, stage: Stage) -> None:
        """Hand to the session what an instance is free for."""
        while stage.waiting:
            instance = stage.instance_for(stage.waiting[0].order.bucket)
            if instance is None:
                return
            one = stage.waiting.popleft()
            order, count = one.order, stage.spec.slots.count
            worker = stage.workers[instance][order.bucket]
            slot = one.front.number * count + order.slot
            one.instance = instance
            one.ticket = self.session.submit(worker, slot, order.expires_ns or None)
            stage.running[instance].append(one)
            self._orders[one.ticket] = one
            if stage.function is not None:
                one.computing = True
                stage.threads.submit(self._compute, stage, stage.function, one)

    def _compute(self, stage: Stage, function: CpuFunction, one: OpenOrder) -> None:
        """In a thread of its own: from the inputs in the slot to outputs there."""
        slot, info = one.order.slot, stage.spec.info
        try:
            slots = one.front.slots[one.order.service]
            inputs = {}
            for index, tensor in enumerate(info.inputs):
                datatype = DATATYPES[tensor.datatype]
                if tensor.datatype == "BYTES":
                    raw, shape = slots.get_bytes(slot, index)
                    data = from_raw(tensor.name, datatype, shape, memoryview(raw)).data
                else:
                    data = slots.read(slot, index, datatype.dtype)
                inputs[tensor.name] = data
            outputs = compute(function, inputs, info, one.order.rows)
            first = len(info.inputs)
            for index, (tensor, array) in enumerate(zip(info.outputs, outputs, strict=True), first):
                if tensor.datatype == "BYTES":
                    raw = bytes(to_raw(Tensor(tensor.name, tensor.datatype, array)))
                    slots.put_bytes(slot, index, raw, array.shape)
                else:
                    slots.array(slot, index, array.shape, array.dtype)[...] = array
        except Exception as error:  # a user's function may raise anything
            line = report(f"model {stage.spec.name} failed", error)
            one.failure = f"model {stage.spec.name} failed: {line}"
        self._done.append(one)
        self._wake()

    def collect(self) -> None:
        """Answer what has ended."""
        touched: dict[int, Stage] = {}
        for completion in self.session.poll():
            self._completed_ns = time.monotonic_ns()
            one = self._orders.pop(completion.ticket)
            one.completion = completion
            if not one.computing:
                self._finish(one, completion, touched)
        while self._done:
            one = self._done.popleft()
            one.computing = False
            if one.completion is not None:
                self._finish(one, one.completion, touched)
        for stage in touched.values():
            self._pump(stage)

    def _finish(self, one: OpenOrder, completion: Completion, touched: dict[int, Stage]) -> None:
        order = one.order
        stage = self.stages[order.service]
        stage.running[one.instance].remove(one)
        touched[order.service] = stage
        slots = one.front.slots[order.service]
        status = _STATUS.get(completion.error, link.FAILED)
        ended_ns = completion.end_ns
        if status == link.FAILED:
            slots.put_line(order.slot, completion.error or "")
        elif status == link.OK and one.failure is not None:
            status = link.FAILED
            slots.put_line(order.slot, one.failure)
        elif status == link.OK and stage.function is not None:
            ended_ns = max(ended_ns, time.monotonic_ns())
        elif status == link.OK:
            _describe_outputs(stage.spec, slots, order, completion)
        _answer(one, status, completion.start_ns, ended_ns)

    def close(self) -> None:
        self._stack.close()


def _answer(one: OpenOrder, status: int, started_ns: int, ended_ns: int) -> None:
    order = one.order
    one.front.answer(Answer(order.ticket, order.service, order.slot, status, started_ns, ended_ns))


def _describe_outputs(
    spec: ServiceSpec, slots: Slots, order: DeviceOrder, completion: Completion
) -> None:
    """Say which shapes the device has written; or, where nobody computes, how long it took."""
    first = len(spec.info.inputs)
    for index, tensor in enumerate(spec.info.outputs, first):
        shape = (order.rows, *tensor.shape) if spec.info.max_batch else tensor.shape
        room = slots.array(order.slot, index, shape, DATATYPES[tensor.datatype].dtype)
        if spec.timing_only:
            room[...] = np.float64((completion.end_ns - completion.start_ns) / 1e6)


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


def _warm(session: Session, slots: Sequence[int]) -> None:
    """Run every worker once, each in this slot."""
    open_ = {session.submit(worker, slot) for worker, slot in enumerate(slots)}
    deadline = time.monotonic() + _WARM_S
    while open_:
        for completion in session.poll(0.1):
            open_.discard(completion.ticket)
            if completion.error is not None:
                raise DeviceError(f"a model failed while it was warmed: {completion.error}")
        if time.monotonic() > deadline:
            raise DeviceError(f"models were not warm after {_WARM_S:.0f} s")
