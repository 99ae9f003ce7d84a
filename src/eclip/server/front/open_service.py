"""One service in a front: its queue, its batches on the device, and their answers.

Nothing here waits. ``advance`` orders from the device what may go now; the front calls it whenever
something has changed.
"""

from __future__ import annotations

import asyncio
import bisect
import time
from collections.abc import Iterable, Sequence

import numpy as np

from eclip.server import link
from eclip.server.control import ServiceSpec
from eclip.server.counters import Count, add, count, count_in, count_refused
from eclip.server.front.front_queue import FrontQueue, left_ns
from eclip.server.front.service_queue import OpenBatch, OpenRequest, ServiceQueue, order_of
from eclip.server.link import IN_FLIGHT, Answer, DeviceOrder, Slots
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
    """A deployed service. ``row`` is this front's of the counters."""

    def __init__(
        self, spec: ServiceSpec, slots: Slots, row: memoryview, front_queue: FrontQueue
    ) -> None:
        super().__init__(spec, front_queue)
        self.slots = slots
        self.row = row
        self._free = list(range(spec.slots.count))
        self._timer: asyncio.TimerHandle | None = None
        row[Count.WAITING] = row[Count.RUNNING] = row[Count.DUE_NS] = 0

    @property
    def idle(self) -> bool:
        return not self.queue and not self._batches

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
            running_ns=_left_ns(self._batches.values(), self.instances, now_ns),
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
            self.front_queue.order(_order_of(self, link.CANCEL, batch))

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
        for batch in self._batches.values():
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
        if not self._free:
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
        if len(self._batches) >= settings.replicas:  # only full ones go behind others
            full = batch.rows >= buckets.largest
            if not full or len(self._batches) >= IN_FLIGHT * settings.replicas:
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
        slot = self._free.pop()
        if len(requests) == len(self.queue):
            self.queue.clear()
        else:
            taken = set(map(id, requests))
            self.queue = [one for one in self.queue if id(one) not in taken]
        add(self.row, Count.WAITING, -rows)
        try:
            batch = _ordered(self, slot, requests, rows, bucket)
        except Exception as error:  # nothing of this batch has begun: it ends here, and no other
            self._free.append(slot)
            line = report(f"a batch of {self.spec.name} could not be ordered", error)
            line = f"the request could not be handed to the device: {line}"
            for one in requests:
                if one.waits:
                    self._refuse(one, RefusedError(Reason.FAILED, line))
            return
        for one in requests:
            one.batch = batch
        self._batches[batch.ticket] = batch
        self.front_queue.begun(batch)
        self.row[Count.RUNNING] = len(self._batches)

    def take(self, answer: Answer) -> None:
        """A batch has ended: answer everybody in it who still waits."""
        batch = self._batches.pop(answer.ticket, None)
        if batch is None:  # of a device process that has died since
            return
        self.front_queue.ended(batch)
        if answer.status == link.OK:
            self.learn(batch.bucket, answer.ended_ns - answer.started_ns)
            add(self.row, Count.EXECUTIONS)
            self._answer(batch, answer)
        else:
            error = _why(answer, self.spec.name, self.slots)
            for one in batch.requests:
                if one.waits:
                    self._refuse(one, error)
        self._free.append(batch.slot)
        self.row[Count.RUNNING] = len(self._batches)

    def _answer(self, batch: OpenBatch, answer: Answer) -> None:
        row, info = self.row, self.spec.info
        begin_ns = self.front_queue.now_ns()
        for one in batch.requests:
            if one.waits and begin_ns >= one.expires_ns:  # before its timer came to it
                self._refuse(one, RefusedError(Reason.EXPIRED, "its timeout is over"))
        outputs = _outputs(self.spec, self.slots, batch.slot)
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
                        queue_ns=max(answer.started_ns - one.asked.arrival_ns, 0),
                        device_ns=answer.ended_ns - answer.started_ns,
                    )
                )
                answered.append(one)
            first = last
        now_ns = self.front_queue.now_ns()
        for one in answered:
            took_ns = now_ns - one.asked.arrival_ns
            queued_ns = max(answer.started_ns - one.asked.arrival_ns, 0)
            count(row, Count.SUCCESS, took_ns)
            count_in(row, Count.LATENCIES, took_ns)
            count(row, Count.QUEUE, queued_ns)
            count_in(row, Count.QUEUED, queued_ns)
            count(row, Count.INPUT, batch.input_ns)
            count(row, Count.INFER, answer.ended_ns - answer.started_ns)
            count(row, Count.OUTPUT, now_ns - begin_ns)
            add(row, Count.INFERENCES, one.rows)
            if now_ns > one.due_ns:
                add(row, Count.LATE)
        row[Count.LAST_MS] = time.time_ns() // 1_000_000

    def slack_ns(self, rows_elsewhere: int, batches_elsewhere: int) -> float:
        """What a row that came now would have left of its bound; other fronts have so much."""
        instances = self.instances
        now_ns = self.front_queue.now_ns()
        running_ns = _left_ns(self._batches.values(), instances, now_ns)
        backlog = Backlog(
            waiting=len(self.queue),
            rows_before=self.row[Count.WAITING] + rows_elsewhere,
            running_ns=running_ns + batches_elsewhere * self.expected_ns[0] / instances,
        )
        return (self.spec.bound_ns or 0) - expected_ns(1, backlog, self.buckets, instances)

    def note_due(self) -> None:
        """Count when the most urgent request is due."""
        dues = [one.due_ns for one in self.queue[:1]]
        dues += [one.due_ns for batch in self._batches.values() for one in batch.requests]
        due_ns = min(dues, default=NEVER)
        self.row[Count.DUE_NS] = 0 if due_ns == NEVER else int(due_ns)

    def run_again(self) -> None:
        """The device process has died: what it ran goes back to the queue, unless it was there
        before."""
        twice = RefusedError(Reason.FAILED, "the device process died twice while it ran")
        batches, self._batches = list(self._batches.values()), {}
        self.row[Count.RUNNING] = 0
        self.front_queue.advance(self)  # when there is another
        for batch in batches:
            self.front_queue.ended(batch)
            self._free.append(batch.slot)
            for one in batch.requests:
                if not one.waits:
                    continue
                if one.tried:
                    self._refuse(one, twice)
                    continue
                one.tried, one.batch = True, None
                bisect.insort(self.queue, one, key=order_of)
                add(self.row, Count.WAITING, one.rows)
                add(self.row, Count.AGAIN)


def _ordered(
    service: OpenService, slot: int, requests: list[OpenRequest], rows: int, bucket: int
) -> OpenBatch:
    """Fill a slot and order its batch from the device, the last step that can fail."""
    begin_ns = service.front_queue.now_ns()
    _fill(service.spec, service.slots, slot, requests, rows)
    now_ns = service.front_queue.now_ns()
    place = service.spec.buckets.index(bucket)
    batch = OpenBatch(
        ticket=service.front_queue.number(),
        slot=slot,
        bucket=bucket,
        requests=requests,
        sent_ns=now_ns,
        expected_ns=service.expected_ns[place],
        input_ns=now_ns - begin_ns,
        part=service.spec.parts[place],
    )
    service.front_queue.order(_order_of(service, link.RUN, batch, rows))
    return batch


def _order_of(service: OpenService, kind: int, batch: OpenBatch, rows: int = 0) -> DeviceOrder:
    last_ns = max(one.expires_ns for one in batch.requests)
    return DeviceOrder(
        kind,
        batch.ticket,
        service.spec.id,
        batch.slot,
        rows,
        batch.bucket,
        0 if last_ns == NEVER else int(last_ns),
        service.front_queue.epoch,
    )


def _left_ns(batches: Iterable[OpenBatch], instances: float, now_ns: int) -> float:
    """What is left of batches on the device, per instance; those behind have not begun."""
    left = 0.0
    for place, batch in enumerate(batches):
        left += left_ns(batch, now_ns) if place < instances else batch.expected_ns
    return left / instances


def _why(answer: Answer, name: str, slots: Slots) -> RefusedError:
    """There is no result."""
    if answer.status == link.EXPIRED:
        return RefusedError(Reason.EXPIRED, "its timeout is over")
    if answer.status == link.GONE:
        return RefusedError(Reason.NOT_READY, f"{name} is not loaded any more", RETRY_S)
    return RefusedError(Reason.FAILED, slots.get_line(answer.slot))


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


def _outputs(spec: ServiceSpec, slots: Slots, slot: int) -> list[Array]:
    info = spec.info
    found: list[Array] = []
    for index, tensor in enumerate(info.outputs, len(info.inputs)):
        datatype = DATATYPES[tensor.datatype]
        if tensor.datatype == "BYTES":
            raw, shape = slots.get_bytes(slot, index)
            found.append(from_raw(tensor.name, datatype, shape, memoryview(raw)).data)
        else:
            found.append(slots.read(slot, index, datatype.dtype))
    return found
