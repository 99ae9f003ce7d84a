"""A worker in a separate process: the child's side, and the messages between both sides.

A child builds its workload, reports that it is ready, and then runs windows on the parent's orders.
When the parent closes the connection or dies, the child ends after the request in flight. The
parent handles interrupts. The child sends any error to the parent as one line.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan, PlannedWorker
from eclip.core.rules import Rules, rules_of
from eclip.errors import DeviceError, EclipError
from eclip.gpu.board import LentRow
from eclip.gpu.steps import Ints
from eclip.gpu.worker_loop import Place, Runner

_LOOK_S = 0.05  # how often a child that serves looks whether its parent is still there


@dataclass(frozen=True)
class Attachment:
    """A child's place in a set whose workers give way to each other, sent by the parent."""

    plan: Plan
    worker: int  # its index
    rows: tuple[int, ...]  # of the board, one per worker
    board: int  # a descriptor that the child inherits

    @property
    def planned(self) -> PlannedWorker:
        return self.plan.workers[self.worker]


@dataclass(frozen=True)
class Attached:
    """An attachment in use: what a worker's loop needs to give way, or to be given way to."""

    worker: PlannedWorker
    rules: Rules
    place: Place


@dataclass(frozen=True)
class Job:
    """What a child builds: ``entry`` is module:function, called with the model; and with what it
    was attached with, if its set gives way."""

    entry: str
    model: ModelKey
    attachment: Attachment | None = None


@dataclass(frozen=True)
class Facts:
    """What a child found when it had built its workload."""

    trace: str  # digest
    kernels: int
    units: int  # that the driver grants this process
    mps: bool  # the process is a client of an MPS server


@dataclass(frozen=True)
class Order:
    """Serve one window. Times are of CLOCK_MONOTONIC, which all processes of a host share."""

    begin_ns: int
    end_ns: int
    arrivals: Ints | None  # absolute; None: closed loop


@dataclass(frozen=True)
class Served:
    began_ns: int
    rows: Ints  # arrival, start, end of every request


@dataclass(frozen=True)
class Failure:
    kind: type[EclipError]
    reason: str


class Workload(Protocol):
    facts: Facts

    def serve(self, arrivals: Ints | None, stop_at_ns: int, stop: Ints) -> Ints:
        """Arrival, start and end of every request, until the time or the flag says stop."""
        ...


def main(descriptor: int) -> None:
    """The whole life of a child, which talks to its parent through this descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(descriptor)
    try:
        job: Job = connection.recv()
        try:
            with _open(job) as workload:
                connection.send(workload.facts)
                _serve(connection, workload)
        except EclipError as error:
            connection.send(Failure(type(error), str(error)))
        except ModuleNotFoundError as error:
            reason = f"the package {error.name} is missing; see `eclip doctor`"
            connection.send(Failure(DeviceError, reason))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            line = next(iter(str(error).strip().splitlines()), "no reason given")
            connection.send(Failure(DeviceError, f"{type(error).__name__}: {line}"))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.stderr.flush()
        os._exit(1)  # the parent is gone


@contextlib.contextmanager
def _open(job: Job) -> Iterator[Workload]:
    open_workload = _load(job.entry)
    with contextlib.ExitStack() as stack:
        given: list[Any] = [job.model]
        if job.attachment is not None:
            given.append(stack.enter_context(_take(job.attachment)))
        yield stack.enter_context(open_workload(*given))


@contextlib.contextmanager
def _take(attachment: Attachment) -> Iterator[Attached]:
    with LentRow(attachment.board, attachment.rows[attachment.worker]) as row:
        place = Place(row.words, row.row, np.array(attachment.rows, dtype=np.int64))
        yield Attached(attachment.planned, rules_of(attachment.plan, attachment.worker), place)


def _load(entry: str) -> Any:
    module, _, function = entry.partition(":")
    made: Any = getattr(importlib.import_module(module), function)
    return made


def _serve(connection: Connection[Any, Any], workload: Workload) -> None:
    while True:
        try:
            order: Order = connection.recv()
        except EOFError:
            return
        served = _serve_window(connection, workload, order)
        if served is None:
            return
        connection.send(served)


def _serve_window(
    connection: Connection[Any, Any], workload: Workload, order: Order
) -> Served | None:
    """None if the parent left meanwhile."""
    stop = np.zeros(1, dtype=np.int64)
    began_ns = 0

    def serve() -> Ints:
        nonlocal began_ns
        time.sleep(max(0, order.begin_ns - now_ns()) / 1e9)
        began_ns = now_ns()
        return workload.serve(order.arrivals, order.end_ns, stop)

    runner = Runner(serve, stop)
    runner.start()
    while runner.is_alive():
        runner.join(_LOOK_S)
        if connection.poll():  # nothing is sent during a window: this is its end
            stop[0] = 1
            runner.join()
            return None
    return Served(began_ns, runner.rows())


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
