"""One service in a front: its queue, its batches on the device, and their answers.

Nothing here waits. ``advance`` orders from the device what may go now; the front calls it whenever
something has changed.
"""

from __future__ import annotations

import asyncio
import bisect
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from eclip.core.requests import END, FOREVER_NS, HAS_EXPIRED, OUTCOME, START, WITH_RESULT
from eclip.server.control import ServiceSpec
from eclip.server.counters import Count, add, count, count_in, count_refused
from eclip.server.front.front_queue import FrontQueue, left_ns
from eclip.server.front.replica import BatchesOnDevice, OpenBatch, OpenRequest
from eclip.server.front.service_queue import ServiceQueue, order_of
from eclip.server.link import IN_FLIGHT, Slots
from eclip.server.log import report
from eclip.server.messages import (
    Array,
    InferRequest,
    InferResponse,
    Reason,
    RefusedError,
    Tensor,
)
from eclip.server.queue.admission import Backlog, expected_ns, refuse
from eclip.server.queue.batching import NEVER, form_batch, urgency, wait_until
from eclip.server.tensors import DATATYPES, from_raw, to_raw

RETRY_S = 1.0  # after which a client may ask again while something starts or ends


class OpenService(ServiceQueue):
    """A deployed service. ``row`` is this front's of the counters; ``total`` adds up a word of all
    fronts' rows. ``first_slot`` is what the device process calls the front's first one."""

    def __init__(
        self,
        spec: ServiceSpec,
        slots: Slots,
        row: memoryview,
        front_queue: FrontQueue,
        total: Callable[[int], int] | None = None,
        first_slot: int = 0,
    ) -> None:
        on_device = BatchesOnDevice(spec.slots.count, row, total or row.__getitem__)
        super().__init__(spec, front_queue, on_device)
        self.slots = slots
        self.row = row
        self.first_slot = first_slot
        self._timer: asyncio.TimerHandle | None = None
        row[Count.WAITING] = row[Count.DUE_NS] = 0

    @property
    def idle(self) -> bool:
        return not self.queue and not self.on_device

    # --- Requests --------------------------------------------------------------------------------

    def accept(self, asked: InferRequest, rows_elsewhere: int) -> OpenRequest:
        """Queue a request that its protocol has checked, or refuse it. ``rows_elsewhere`` wait in
        other fronts."""
        spec, info = self.spec, self.spec.info
        arrays = [tensor.data for tensor in asked.inputs]
        rows = arrays[0].shape[0] if info.max_batch else 1
        if rows > self.buckets.largest:  # the protocol has seen that it will hold so many
            count_refused(self.row, Reason.NOT_READY)
            line = f"{spec.name} is not ready for {rows} rows at once; ask again, or ask for fewer"
            raise RefusedError(Reason.NOT_READY, line, RETRY_S)
        _check_room(spec, asked.inputs, rows)
        add(self.row, Count.ARRIVED)
        due_ns = NEVER if spec.bound_ns is None else asked.arrival_ns + spec.bound_ns
        expires_ns = NEVER if asked.timeout_ns is None else asked.arrival_ns + asked.timeout_ns
        now_ns = self.front_queue.now_ns()
        if now_ns >= expires_ns:
            count_refused(self.row, Reason.EXPIRED)
            raise RefusedError(Reason.EXPIRED, "its timeout is over")
        order = urgency(asked.priority, min(due_ns, expires_ns), self.front_queue.number())
        place = bisect.bisect(self.queue, order, key=order_of)
        gives_place = bool(self.queue) and self.queue[-1].late
        backlog = Backlog(
            waiting=len(self.queue) - gives_place,
            rows_before=sum(one.rows for one in self.queue[:place]) + rows_elsewhere,
            running_ns=_left_ns(self.on_device, self.instances, now_ns),
        )
        refusal = refuse(
            rows,
            min(due_ns, expires_ns) - now_ns,
            backlog,
            spec.settings.queue,
            self.buckets,
            self.instances,
        )
        if refusal is not None:
            count_refused(self.row, Reason.OVERLOADED)
            line = f"{spec.name} is overloaded: {refusal.line}"
            raise RefusedError(Reason.OVERLOADED, line, refusal.retry_after_s)
        pending = OpenRequest(
            asked=asked,
            arrays=arrays,
            rows=rows,
            shapes=tuple(array.shape[1 if info.max_batch else 0 :] for array in arrays),
            order=order,
            due_ns=due_ns,
            expires_ns=expires_ns,
            future=self.front_queue.loop.create_future(),
        )
        if asked.timeout_ns is not None:
            pending.timer = self.front_queue.loop.call_at(expires_ns / 1e9, self._expire, pending)
        self.queue.insert(place, pending)
        add(self.row, Count.WAITING, rows)
        if len(self.queue) > spec.settings.queue:  # the last one is late anyway
            last = self.queue.pop()
            add(self.row, Count.WAITING, -last.rows)
            line = f"{spec.name} is overloaded: its answer would be late"
            retry_s = self.buckets.times_ns[-1] / 1e9
            self._refuse(last, RefusedError(Reason.OVERLOADED, line, retry_s))
        return pending

    def withdraw(self, pending: OpenRequest) -> None:
        """Nobody waits for it any more: it leaves the queue, or its batch stops if it was the last
        one there that somebody waited for."""
        if pending.timer is not None:
            pending.timer.cancel()
        batch = pending.batch
        if batch is None:
            if pending in self.queue:
                self.queue.remove(pending)
                add(self.row, Count.WAITING, -pending.rows)
                self.advance()
        elif not batch.cancelled and not any(one.waits for one in batch.requests):
            batch.cancelled = True
            batch.replica.cancel(batch)

    def _expire(self, pending: OpenRequest) -> None:
        if pending.waits:
            self._refuse(pending, RefusedError(Reason.EXPIRED, "its timeout is over"))
            self.withdraw(pending)

    def _refuse(self, pending: OpenRequest, error: RefusedError) -> None:
        if pending.timer is not None:
            pending.timer.cancel()
        pending.future.set_exception(error)
        count_refused(self.row, error.reason)
        count(self.row, Count.FAIL, self.front_queue.now_ns() - pending.asked.arrival_ns)

    def refuse_all(self, error: RefusedError) -> None:
        """Answer everybody with this; what is on the device may end there."""
        everybody = [*self.queue]
        for batch in self.on_device:
            everybody += batch.requests
        self.queue.clear()
        self.row[Count.WAITING] = 0
        for one in everybody:
            if one.waits:
                self._refuse(one, error)

    # --- Batches ---------------------------------------------------------------------------------

    def advance(self) -> None:
        """Something has changed: order from the device what may go now."""
        self.front_queue.advance(self)

    def send(self) -> bool:
        settings = self.spec.settings
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.on_device.free or not self.on_device.replicas:
            return False
        now_ns = self.front_queue.now_ns()
        buckets = self.buckets
        while True:
            first = self.queue[0]
            alike = [one for one in self.queue if one.shapes == first.shapes]
            rows, dues_ns = [one.rows for one in alike], [one.due_ns for one in alike]
            batch = form_batch(rows, dues_ns, buckets, now_ns)
            if not self.put_late_last(buckets.time_of(batch.bucket)):
                break
        if len(self.on_device) >= settings.replicas:  # only full ones go behind others
            full = batch.rows >= buckets.largest
            if not full or len(self.on_device) >= IN_FLIGHT * settings.replicas:
                return False
        elif settings.wait_ns:
            oldest_ns = min(one.asked.arrival_ns for one in alike[: batch.requests])
            due_ns = min(first.due_ns, first.expires_ns)
            until_ns = wait_until(batch, due_ns, oldest_ns, settings.wait_ns, buckets)
            if until_ns > now_ns:
                self._timer = self.front_queue.loop.call_at(until_ns / 1e9, self.advance)
                return False
        self._send(alike[: batch.requests], batch.rows, batch.bucket)
        return True

    def _send(self, requests: list[OpenRequest], rows: int, bucket: int) -> None:
        slot = self.on_device.free.pop()
        if len(requests) == len(self.queue):
            self.queue.clear()
        else:
            taken = set(map(id, requests))
            self.queue = [one for one in self.queue if id(one) not in taken]
        add(self.row, Count.WAITING, -rows)
        try:
            batch = _submitted(self, slot, requests, rows, bucket)
        except Exception as error:  # nothing of this batch has begun: it ends here, and no other
            self.on_device.free.append(slot)
            line = report(f"a batch of {self.spec.name} could not be ordered", error)
            line = f"the request could not be handed to the device: {line}"
            for one in requests:
                if one.waits:
                    self._refuse(one, RefusedError(Reason.FAILED, line))
            return
        for one in requests:
            one.batch = batch
        self.on_device.begin(batch)
        self.front_queue.begun(batch)

    def take(self, batch: OpenBatch, ended: memoryview) -> None:
        """A batch has ended, as its row says: answer everybody in it who still waits."""
        self.front_queue.ended(batch)
        self.on_device.leave(batch)
        started_ns, ended_ns, outcome = ended[START], ended[END], ended[OUTCOME]
        if outcome == WITH_RESULT:
            self.learn(batch.bucket, ended_ns - started_ns)
            add(self.row, Count.EXECUTIONS)
            self._answer(batch, started_ns, ended_ns)
        else:
            error = _why(outcome, self.slots, batch.slot)
            for one in batch.requests:
                if one.waits:
                    self._refuse(one, error)

    def _answer(self, batch: OpenBatch, started_ns: int, ended_ns: int) -> None:
        row, info = self.row, self.spec.info
        begin_ns = self.front_queue.now_ns()
        for one in batch.requests:
            if one.waits and begin_ns >= one.expires_ns:  # before its timer came to it
                self._refuse(one, RefusedError(Reason.EXPIRED, "its timeout is over"))
        outputs = _outputs(self.spec, self.slots, batch, ended_ns - started_ns)
        answered = []
        first = 0
        for one in batch.requests:
            last = first + one.rows
            if one.waits:
                tensors = [
                    Tensor(
                        tensor.name,
                        tensor.datatype,
                        (data[first:last] if info.max_batch else data).copy(),
                    )
                    for tensor, data in zip(info.outputs, outputs, strict=True)
                    if not one.asked.outputs or tensor.name in one.asked.outputs
                ]
                if one.timer is not None:
                    one.timer.cancel()
                one.future.set_result(
                    InferResponse(
                        info.name,
                        tensors,
                        one.asked.id,
                        queue_ns=max(started_ns - one.asked.arrival_ns, 0),
                        device_ns=ended_ns - started_ns,
                    )
                )
                answered.append(one)
            first = last
        now_ns = self.front_queue.now_ns()
        for one in answered:
            took_ns = now_ns - one.asked.arrival_ns
            queued_ns = max(started_ns - one.asked.arrival_ns, 0)
            count(row, Count.SUCCESS, took_ns)
            count_in(row, Count.LATENCIES, took_ns)
            count(row, Count.QUEUE, queued_ns)
            count_in(row, Count.QUEUED, queued_ns)
            count(row, Count.INPUT, batch.input_ns)
            count(row, Count.INFER, ended_ns - started_ns)
            count(row, Count.OUTPUT, now_ns - begin_ns)
            add(row, Count.INFERENCES, one.rows)
            if now_ns > one.due_ns:
                add(row, Count.LATE)
        row[Count.LAST_MS] = time.time_ns() // 1_000_000

    def slack_ns(self, rows_elsewhere: int, batches_elsewhere: int) -> float:
        """What a row that came now would have left of its bound; other fronts have so much."""
        instances = self.instances
        now_ns = self.front_queue.now_ns()
        running_ns = _left_ns(self.on_device, instances, now_ns)
        backlog = Backlog(
            waiting=len(self.queue),
            rows_before=self.row[Count.WAITING] + rows_elsewhere,
            running_ns=running_ns + batches_elsewhere * self.expected_ns[0] / instances,
        )
        return (self.spec.bound_ns or 0) - expected_ns(1, backlog, self.buckets, instances)

    def note_due(self) -> None:
        """Count when the most urgent request is due."""
        dues = [one.due_ns for one in self.queue[:1]]
        dues += [one.due_ns for batch in self.on_device for one in batch.requests]
        due_ns = min(dues, default=NEVER)
        self.row[Count.DUE_NS] = 0 if due_ns == NEVER else int(due_ns)

    def run_again(self, before: int | None = None) -> None:
        """What the device process does not answer any more goes back to the queue: all of it, as
        the process has died, unless that had happened to a request before; or what a generation
        before this one has left, which never began."""
        died = before is None
        twice = RefusedError(Reason.FAILED, "the device process died twice while it ran")
        if died:
            self.on_device.replicas = ()
        for batch in list(self.on_device):
            if before is not None and batch.replica.generation >= before:
                continue
            self.front_queue.ended(batch)
            self.on_device.leave(batch)
            for one in batch.requests:
                if not one.waits:
                    continue
                if one.tried:
                    self._refuse(one, twice)
                    continue
                one.tried, one.batch = died, None
                bisect.insort(self.queue, one, key=order_of)
                add(self.row, Count.WAITING, one.rows)
                add(self.row, Count.AGAIN)
        self.advance()  # now, or when there is another process


def _submitted(
    service: OpenService, slot: int, requests: list[OpenRequest], rows: int, bucket: int
) -> OpenBatch:
    """Fill a slot and submit its batch, the last step that can fail."""
    spec = service.spec
    begin_ns = service.front_queue.now_ns()
    _fill(spec, service.slots, slot, requests, rows)
    now_ns = service.front_queue.now_ns()
    place = spec.buckets.index(bucket)
    expires_ns = max(one.expires_ns for one in requests)
    due_ns = min(one.due_ns for one in requests)
    batch = OpenBatch(
        ticket=service.front_queue.number(),
        slot=slot,
        bucket=bucket,
        replica=service.on_device.choose(),
        expires_ns=FOREVER_NS if expires_ns == NEVER else int(expires_ns),
        requests=requests,
        sent_ns=now_ns,
        expected_ns=service.expected_ns[place],
        input_ns=now_ns - begin_ns,
        part=spec.parts[place],
    )
    due = 0 if due_ns == NEVER else int(due_ns)
    batch.replica.submit(batch, service.first_slot + slot, place, rows, due)
    return batch


def _left_ns(batches: Iterable[OpenBatch], instances: float, now_ns: int) -> float:
    """What is left of batches on the device, per instance; those behind have not begun."""
    left = 0.0
    for place, batch in enumerate(batches):
        left += left_ns(batch, now_ns) if place < instances else batch.expected_ns
    return left / instances


def _why(outcome: int, slots: Slots, slot: int) -> RefusedError:
    """There is no result."""
    if outcome == HAS_EXPIRED:
        return RefusedError(Reason.EXPIRED, "its timeout is over")
    return RefusedError(Reason.FAILED, slots.get_line(slot))


def _check_room(spec: ServiceSpec, inputs: Sequence[Tensor], rows: int) -> None:
    """Refuse a tensor of open size that does not fit into its part of a slot."""
    largest = spec.buckets[-1]
    for tensor, room in zip(inputs, spec.slots.inputs, strict=True):
        size = len(to_raw(tensor)) if tensor.data.dtype.hasobject else tensor.data.nbytes
        if size > room // largest * rows:
            raise RefusedError(
                Reason.BAD_REQUEST,
                f"input {tensor.name!r} has {size} bytes, and a row of it at most "
                f"{room // largest}; the server's configuration may give it more room",
            )


def _fill(
    spec: ServiceSpec, slots: Slots, slot: int, requests: list[OpenRequest], rows: int
) -> None:
    """Put the requests' rows one after another."""
    info = spec.info
    for index, tensor in enumerate(info.inputs):
        parts = [one.arrays[index] for one in requests]
        shape = parts[0].shape
        if info.max_batch:
            shape = (rows, *shape[1:])
        if tensor.datatype == "BYTES":
            joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
            raw = bytes(to_raw(Tensor(tensor.name, tensor.datatype, joined)))
            slots.put_bytes(slot, index, raw, shape)
            continue
        room = slots.array(slot, index, shape, DATATYPES[tensor.datatype].dtype)
        if len(parts) == 1:
            room[...] = parts[0]
        else:
            np.concatenate(parts, out=room)


def _outputs(spec: ServiceSpec, slots: Slots, batch: OpenBatch, took_ns: int) -> list[Array]:
    """As a CPU function has written them; or with the shapes that the device writes, in the parts
    of the slot; or, where nothing is computed, how long it took."""
    info = spec.info
    rows = sum(one.rows for one in batch.requests)
    found: list[Array] = []
    for index, tensor in enumerate(info.outputs, len(info.inputs)):
        datatype = DATATYPES[tensor.datatype]
        shape = (rows, *tensor.shape) if info.max_batch else tensor.shape
        if spec.timing_only:
            found.append(np.full(shape, took_ns / 1e6, datatype.dtype))
        elif spec.function is None:
            found.append(slots.array(batch.slot, index, shape, datatype.dtype))
        elif tensor.datatype == "BYTES":
            raw, shape = slots.get_bytes(batch.slot, index)
            found.append(from_raw(tensor.name, datatype, shape, memoryview(raw)).data)
        else:
            found.append(slots.read(batch.slot, index, datatype.dtype))
    return found


def collect(service: OpenService) -> None:
    """Take what has ended."""
    for batch, ended in service.on_device.ended():
        service.take(batch, ended)
