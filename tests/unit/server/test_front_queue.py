"""Whose batch goes to the device next, and what a service does with those that come too late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from eclip.core.requests import WITH_RESULT, Ring
from eclip.server.config import ServiceSettings
from eclip.server.control import ServiceSpec
from eclip.server.counters import WORDS, Count
from eclip.server.device.models import info_of, slots_of, tensors_of
from eclip.server.front.front_queue import FrontQueue
from eclip.server.front.open_service import OpenService, collect
from eclip.server.front.replica import OpenBatch, Replica
from eclip.server.link import Signal, Slots
from eclip.server.messages import InferRequest, Reason, RefusedError, Tensor
from eclip.server.tensors import DATATYPES

MS = 1_000_000


class Loop:
    """A clock that the test moves, and what an event loop has for a service."""

    now_ns = 0

    def __init__(self) -> None:
        self.timers: set[object] = set()

    def create_future(self) -> Any:
        future = SimpleNamespace(error=None, result=None)
        future.done = lambda: future.error is not None or future.result is not None

        def set_exception(error: Exception) -> None:
            assert not future.done(), "answered twice"
            future.error = error

        future.set_exception = set_exception
        future.set_result = lambda result: setattr(future, "result", result)
        return future

    def call_at(self, when_s: float, call: object, *given: object) -> Any:
        timer = SimpleNamespace()
        timer.cancel = lambda: self.timers.discard(id(timer))
        self.timers.add(id(timer))
        return timer


@dataclass
class Order:
    """A batch that was submitted."""

    service: int
    bucket: int
    rows: int


class NotedReplica(Replica):
    """Submits, and notes what."""

    def __init__(self, front: Front, spec: ServiceSpec, place: int) -> None:
        super().__init__(1, place, Ring(spec.slots.count), front.bell)
        self._front, self._spec = front, spec

    def submit(self, batch: OpenBatch, slot: int, program: int, rows: int, due_ns: int) -> None:
        super().submit(batch, slot, program, rows, due_ns)
        self._front.orders.append(Order(self._spec.id, self._spec.buckets[program], rows))

    def end(self, start_ns: int, end_ns: int) -> None:
        self._ring.answer(start_ns, end_ns, WITH_RESULT)


class Front:
    """Services of 1 ms in a batch of 1, and 2 ms in one of 8."""

    def __init__(self, stack: ExitStack) -> None:
        self.loop = Loop()
        self.orders: list[Order] = []
        self.elsewhere = 0
        self.bell = stack.enter_context(Signal()).descriptor
        row = memoryview(bytearray(8 * WORDS)).cast("q")
        self.front_queue = FrontQueue(
            cast(Any, self.loop),
            row,
            lambda: row[Count.TAKEN] + self.elsewhere,
            lambda: self.loop.now_ns,
        )
        self.front_queue.epoch = 1
        self._stack = stack

    def open(
        self,
        name: str,
        bound_ms: float | None,
        parts: tuple[float, ...] = (0.4, 0.8),
        **settings: Any,
    ) -> OpenService:
        made = ServiceSettings(name=name, model="bert", instances=4, **settings)
        inputs, outputs = tensors_of(made, computed=False)
        spec = ServiceSpec(
            id=len(name) + ord(name[0]),
            row=0,
            settings=made,
            info=info_of(made, inputs, outputs, 8),
            buckets=(1, 8),
            times_ns=(1 * MS, 2 * MS),
            costs_ns=(1 * MS, 2 * MS),
            least_costs_ns=(1 * MS, 2 * MS),
            parts=parts,
            bound_ns=None if bound_ms is None else round(bound_ms * MS),
            slots=slots_of(made, inputs, outputs, 8),
            timing_only=True,
        )
        slots = self._stack.enter_context(Slots.create(spec.slots))
        counted = memoryview(bytearray(8 * WORDS)).cast("q")
        service = OpenService(spec, slots, counted, self.front_queue)
        service.on_device.replicas = [
            NotedReplica(self, spec, place) for place in range(made.replicas)
        ]
        return service

    def ask(self, service: OpenService, priority: int = 0, timeout_ns: int | None = None) -> Any:
        """Its future."""
        info = service.spec.info
        tensors = [
            Tensor(one.name, one.datatype, np.zeros((1, *one.shape), DATATYPES[one.datatype].dtype))
            for one in info.inputs
        ]
        asked = InferRequest(
            model=service.spec.name,
            inputs=tensors,
            arrival_ns=self.loop.now_ns,
            priority=priority,
            timeout_ns=timeout_ns,
        )
        pending = service.accept(asked, 0)
        service.advance()
        return pending.future

    def stop(self) -> None:
        """There is no device process: all wait."""
        self.front_queue.epoch = 0

    def go_on(self) -> None:
        self.front_queue.epoch = 2
        self.front_queue.advance()

    def end(self, service: OpenService, took_ns: int = 1 * MS) -> None:
        """The batch of it that was ordered first."""
        replica, now_ns = next(iter(service.on_device)).replica, self.loop.now_ns
        assert isinstance(replica, NotedReplica)
        replica.end(now_ns - took_ns, now_ns)
        collect(service)
        self.front_queue.advance()

    @property
    def ran(self) -> list[int]:
        """The services whose batches were ordered."""
        return [order.service for order in self.orders]


@pytest.fixture
def front() -> Iterator[Front]:
    with ExitStack() as stack:
        yield Front(stack)


def test_as_many_batches_run_as_fill_the_device(front: Front) -> None:
    service = front.open("a", 100.0)
    for _ in range(6):
        front.ask(service)
    assert len(front.ran) == 4  # the fourth found three, which keep 1.2 busy
    front.end(service)
    assert [(order.bucket, order.rows) for order in front.orders[4:]] == [(8, 2)]  # it has grown


def test_the_one_that_must_start_first_goes_first(front: Front) -> None:
    patient, urgent = front.open("patient", 50.0), front.open("urgent", 10.0)
    front.stop()
    for service in (patient, urgent):
        front.ask(service)
    assert front.ran == []
    front.go_on()
    assert front.ran == [urgent.spec.id, patient.spec.id]


def test_a_priority_goes_before_what_must_start_earlier(front: Front) -> None:
    patient, urgent = front.open("patient", 50.0), front.open("urgent", 10.0)
    front.stop()
    front.ask(urgent)
    front.ask(patient, priority=1)
    front.go_on()
    assert front.ran == [patient.spec.id, urgent.spec.id]


def test_what_has_no_bound_is_not_put_off_for_ever(front: Front) -> None:
    unbound, bound = front.open("u", None), front.open("bound", 10.0)
    front.stop()
    front.ask(unbound)
    front.loop.now_ns = 2_000 * MS  # a long time
    front.ask(bound)
    front.go_on()
    assert front.ran == [unbound.spec.id, bound.spec.id]


def test_every_service_may_have_one_batch_on_a_full_device(front: Front) -> None:
    service, others = front.open("a", 100.0), front.open("o", 100.0, (2.0, 2.0))
    front.ask(others)
    assert front.front_queue.full
    front.ask(service)
    front.ask(service)
    assert front.ran == [others.spec.id, service.spec.id]
    front.end(others)
    assert front.ran == [others.spec.id, service.spec.id, service.spec.id]


def test_batches_that_slow_each_other_leave_one_of_each_service(front: Front) -> None:
    """As with plain streams; and it is known soon that they do not any more."""
    service, others = front.open("a", 100.0), front.open("o", 100.0)

    def run(took_ns: int, batches: int) -> None:
        for one in (service, others) * (batches // 2):
            front.ask(one)
            front.end(one, took_ns=took_ns)

    run(3 * MS, 20)
    assert front.front_queue.concurrency.several == 0.0
    assert service.instances == 1.0
    front.orders.clear()
    for _ in range(4):
        front.ask(service)
    assert len(front.ran) == 1
    front.end(service)
    assert [order.rows for order in front.orders] == [1, 3]
    front.end(service)
    run(1 * MS, 300)
    assert front.front_queue.concurrency.several == 1.0
    assert service.instances == 4.0
    front.orders.clear()
    for _ in range(4):
        front.ask(service)
    assert len(front.ran) == 4


def test_a_full_batch_is_ordered_a_little_before_the_one_that_runs_ends(front: Front) -> None:
    service, others = front.open("a", 100.0), front.open("o", 100.0, (2.0, 2.0))
    front.ask(others)
    service.expected_ns = [1.0 * MS, 2.0 * MS]
    for _ in range(9):
        front.ask(service)
    assert front.ran == [others.spec.id, service.spec.id]
    front.loop.now_ns = 800_000
    service.advance()
    assert [(one.bucket, one.rows) for one in front.orders[2:]] == [(8, 8)]


def test_a_service_slower_than_its_profile_takes_nothing_from_others(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    right, wrong = front.open("a", 100.0), front.open("wrong", 100.0)
    for _ in range(20):
        for service, took_ns in ((right, 1_100_000), (wrong, 3_300_000)):
            front.ask(service)
            front.end(service, took_ns=took_ns)
    assert "wrong takes 3.0 times as long as its profile says" in caplog.text
    assert len(caplog.records) == 1  # once
    assert front.front_queue.concurrency.several == 1.0
    assert wrong.expected_ns[0] > 3.0 * MS  # by which it is admitted


def test_a_batch_that_waits_for_more_has_one_timer_whoever_else_is_busy(front: Front) -> None:
    waiting, others = front.open("w", 100.0, wait="10ms"), front.open("o", 100.0)
    front.ask(waiting)
    for _ in range(3):
        front.ask(others)
        front.end(others)
    assert len(front.loop.timers) == 1
    assert waiting.spec.id not in front.ran


def test_background_waits_for_no_room(front: Front) -> None:
    service, background = front.open("a", 100.0, (2.0, 2.0)), front.open("b", None, (0.0, 0.0))
    front.ask(service)
    front.ask(background)
    assert front.ran == [service.spec.id, background.spec.id]


def test_what_other_fronts_run_counts_unless_nothing_of_ours_runs(front: Front) -> None:
    service = front.open("a", 100.0)
    front.elsewhere = 2_000
    front.ask(service)
    assert len(front.ran) == 1
    front.ask(service)
    assert len(front.ran) == 1
    front.elsewhere = 0
    front.end(service)
    assert len(front.ran) == 2


def test_a_short_batch_that_would_be_late_slips_in(front: Front) -> None:
    """It ends before there is room, so nobody waits longer for it."""
    long = front.open("long", 100.0, (2.0, 2.0))
    long.expected_ns = [5.0 * MS, 5.0 * MS]
    patient, urgent = front.open("patient", 50.0), front.open("urgent", 3.0)
    for service in (long, patient, urgent):
        front.ask(service)  # each may have one
    for service in (patient, urgent):
        for one in service.on_device:
            one.expected_ns = 5.0 * MS
    front.orders.clear()
    front.ask(patient)
    assert front.ran == []
    front.ask(urgent)
    assert front.ran == [urgent.spec.id]


def test_what_cannot_be_in_time_makes_nobody_else_late(front: Front) -> None:
    service = front.open("a", 6.0)
    front.stop()
    first = front.ask(service)
    front.loop.now_ns = 5_900_000  # 0.1 ms are left, and it takes 1
    second = front.ask(service)
    service.urgency()
    assert [one.future for one in service.queue] == [second, first]
    front.go_on()
    (order,) = front.orders
    assert order.rows == 2  # there was room for both


def test_what_is_late_is_not_put_off_for_ever(front: Front) -> None:
    late, others = front.open("a", 6.0), front.open("o", 5_000.0)
    front.stop()
    front.ask(late)
    front.loop.now_ns = 5_900_000
    late.urgency()
    for now_ms, first in ((100, others), (4_500, late)):
        front.loop.now_ns = now_ms * MS
        newer = front.open("newer", 50.0)
        front.ask(newer)
        assert (late.urgency() < newer.urgency()) == (first is late)


def test_a_full_queue_gives_up_what_is_late_for_what_can_be_in_time(front: Front) -> None:
    service = front.open("a", 6.0, queue=2)
    front.stop()
    late, later = front.ask(service), front.ask(service)
    with pytest.raises(RefusedError, match="2 requests wait already"):
        front.ask(service)
    front.loop.now_ns = 5_900_000
    service.urgency()
    front.ask(service)
    assert not late.done()
    assert isinstance(later.error, RefusedError) and later.error.reason is Reason.OVERLOADED
    assert len(service.queue) == 2
    assert service.row[Count.WAITING] == 2


def test_a_request_that_would_wait_too_long_is_refused(front: Front) -> None:
    service = front.open("a", 6.0, queue=1_000)
    with pytest.raises(RefusedError, match="its answer would take about"):
        for _ in range(200):
            front.ask(service)
    assert 20 < len(service.queue) < 100  # in 6 ms, by four instances


def test_buckets_get_slower_together_and_none_is_faster_than_alone(front: Front) -> None:
    """Those that do not run have no measurement of their own."""
    service = front.open("a", 100.0)
    for took_ns, expected_ms in ((2 * MS, (1.2, 2.4)), (0, (1.0, 2.0))):
        front.ask(service)
        front.end(service, took_ns=took_ns)
        assert service.expected_ns == pytest.approx([one * MS for one in expected_ms])


def test_a_device_process_that_died_leaves_no_room_taken(front: Front) -> None:
    service = front.open("a", 100.0)
    for _ in range(4):
        front.ask(service)
    assert front.front_queue.full
    front.front_queue.epoch = 0
    replicas = service.on_device.replicas
    service.run_again()
    assert not front.front_queue.full
    assert not any(service.row[Count.OPEN : Count.OPEN + len(replicas)])
    front.orders.clear()
    front.front_queue.epoch = 2
    front.front_queue.advance()
    assert front.ran == []  # its loops are not known yet
    service.on_device.replicas = [NotedReplica(front, service.spec, place) for place in range(4)]
    front.front_queue.advance()
    assert len(front.ran) == 1  # all four in one batch


def test_a_batch_that_cannot_be_ordered_ends_and_the_next_one_runs(front: Front) -> None:
    """So many nanoseconds fit into no ring: before, the service never ran again."""
    service = front.open("a", None)
    futures = [front.ask(service, timeout_ns=1 << 63) for _ in range(service.spec.slots.count + 1)]
    reasons = [future.error.reason for future in futures]
    assert reasons == [Reason.FAILED] * len(futures)
    assert service.idle and service.row[Count.WAITING] == service.row[Count.RUNNING] == 0
    assert front.ran == [] and not any(replica.batches for replica in service.on_device.replicas)
    future = front.ask(service)
    front.end(service)
    assert future.result is not None


def test_a_client_that_left_keeps_no_other_of_its_batch_from_an_answer(front: Front) -> None:
    service = front.open("a", None)
    front.front_queue.epoch = 0  # both wait, and are one batch
    gone, other = (front.ask(service, timeout_ns=1 << 63) for _ in range(2))
    gone.set_exception(RefusedError(Reason.CANCELLED, "its client has gone"))
    front.front_queue.epoch = 1
    service.advance()
    assert (gone.error.reason, other.error.reason) == (Reason.CANCELLED, Reason.FAILED)


def test_a_batch_goes_where_all_fronts_have_the_fewest(front: Front) -> None:
    """Other fronts have batches open at the first two of four replicas."""
    service = front.open("a", 100.0, (0.1, 0.1))
    service.on_device.total = lambda word: service.row[word] + (word - Count.OPEN < 2)
    for _ in range(4):
        front.ask(service)
    assert [batch.replica.place for batch in service.on_device] == [2, 3, 0, 1]


def test_a_batch_that_an_ended_generation_has_left_runs_in_the_next_one(front: Front) -> None:
    """As of a front that was stopped while its server deployed: nobody has died, so it may be run
    again once more."""
    service = front.open("a", 100.0)
    future = front.ask(service)
    old = next(iter(service.on_device))
    service.on_device.replicas = [NotedReplica(front, service.spec, place) for place in range(4)]
    for replica in service.on_device.replicas:
        replica.generation = 2
    assert not service.on_device.have_moved
    service.run_again(2)
    front.front_queue.advance()
    new = next(iter(service.on_device))
    assert service.on_device.have_moved and new is not old and len(front.ran) == 2
    front.end(service)
    assert future.result is not None and service.idle
