"""A desk and the doors beside it, served by driving loops, each in a thread of its own."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import numpy as np

from eclip.core.device import CLOSED
from eclip.core.requests import BELL, FOREVER_NS
from eclip.desk import Desk
from eclip.gpu.steps import Ints, Words
from eclip.gpu.worker_loop import GroupLoop, Runner, WorkerLoop

_NO_ROWS: Ints = np.empty((0, 0), dtype=np.int64)


class Loops:
    """A loop that fails ends them all: what is open at the desk is answered with its error."""

    def __init__(self, loops: Sequence[WorkerLoop], desk: Desk, copies: Sequence[Words]) -> None:
        self._desk = desk
        self.ending: Ints = np.zeros(1, dtype=np.int64)  # set to end the loops
        self.bells = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in desk.groups]
        desk.doors.loops[:, BELL] = self.bells
        most = max(len(group.workers) for group in desk.groups)
        places: Ints = np.zeros((len(desk.groups), most, 3), dtype=np.int64)
        for number, group in enumerate(desk.groups):
            for program, worker in enumerate(group.workers):
                places[number, program] = loops[worker].service
        counts = [np.zeros((len(group.workers), 2), dtype=np.int64) for group in desk.groups]
        desk.counts = [counts[number][program] for number, program in desk.places]
        self._loops = [
            GroupLoop(
                [loops[worker] for worker in group.workers],
                [copies[worker] for worker in group.workers],
                desk.doors,
                number,
                counts[number],
                places,
            )
            for number, group in enumerate(desk.groups)
        ]
        self.runners = [
            Runner(functools.partial(self._serve, number), self.ending)
            for number in range(len(desk.groups))
        ]
        desk.open(self)

    def ring(self, group: int) -> None:
        os.eventfd_write(self.bells[group], 1)

    def stop(self) -> None:
        """Requests in flight end, and then the loops."""
        self._desk.refuse(CLOSED)
        self.ending[0] = 1
        for group in range(len(self.bells)):
            self.ring(group)

    def close(self) -> None:
        """When the loops have ended."""
        self.runners = []  # which know us: what we hold would stay until a collection
        while self.bells:
            os.close(self.bells.pop())

    def _serve(self, group: int) -> Ints:
        try:
            for _ in self._loops[group].run(self.ending, FOREVER_NS, FOREVER_NS):
                pass
        except BaseException as error:
            self._desk.refuse(f"the session has failed; open another one: {error}", str(error))
            self.stop()
            raise
        finally:
            self._desk.refuse(CLOSED)
            self._desk.end(group)
        return _NO_ROWS
