"""A desk served by driving loops, each in a thread of its own."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import numpy as np

from eclip.core.device import CLOSED
from eclip.core.requests import BELL, Desk
from eclip.gpu.steps import Ints, Words
from eclip.gpu.worker_loop import Runner, WorkerLoop

_NO_ROWS: Ints = np.empty((0, 0), dtype=np.int64)


class LoopServer:
    """A loop that fails ends them all: what is open anywhere is answered with its error."""

    def __init__(self, loops: Sequence[WorkerLoop], desk: Desk, copies: Sequence[Words]) -> None:
        self._loops = loops
        self._desk = desk
        self._copies = copies
        self.ending: Ints = np.zeros(1, dtype=np.int64)  # set to end the loops
        self._bells = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in loops]
        for ring, bell in zip(desk.rings, self._bells, strict=True):
            ring.marks[BELL] = bell
        self.runners = [
            Runner(functools.partial(self._serve, worker), self.ending)
            for worker in range(len(loops))
        ]
        desk.open(self)

    def accepted(self, worker: int, now_ns: int) -> None:
        ring = self._desk.rings[worker]
        self._loops[worker].accepted(now_ns, ring.submitted - ring.answered - 1)
        os.eventfd_write(self._bells[worker], 1)

    def given_up(self, worker: int) -> None:
        """Its loop looks at every joint, and when a request's turn comes."""

    def stop(self) -> None:
        """Requests in flight end, and then the loops."""
        self._desk.refuse(CLOSED)
        self.ending[0] = 1
        for bell in self._bells:
            os.eventfd_write(bell, 1)

    def close(self) -> None:
        """When the loops have ended."""
        self.runners = []  # which know us: what we hold would stay until a collection
        while self._bells:
            os.close(self._bells.pop())

    def _serve(self, worker: int) -> Ints:
        ring = self._desk.rings[worker]
        try:
            self._loops[worker].serve(ring, self._copies[worker], self.ending)
        except BaseException as error:
            self._desk.refuse(f"the session has failed; open another one: {error}", str(error))
            self.stop()
            raise
        finally:
            self._desk.refuse(CLOSED)
            self._desk.answer_all(ring)
        return _NO_ROWS
