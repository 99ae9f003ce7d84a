"""A desk whose requests are served by loops on the stand-in driver."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from eclip.core.device import Completion, Slot
from eclip.core.requests import LoopGroup
from eclip.desk import Desk
from eclip.gpu.serving import Loops
from eclip.gpu.steps import Words
from standin_gpu import Worker
from waiting import until


class StandinDesk:
    """``copies``: for every worker, the executables of its slots."""

    def __init__(
        self,
        workers: Sequence[Worker],
        slots: int = 4,
        background: Collection[int] = (),
        copies: Sequence[Words] | None = None,
        groups: Sequence[LoopGroup] | None = None,
    ) -> None:
        self.desk = Desk([[Slot()] * slots] * len(workers), background, groups)
        self.completions: list[Completion] = []
        nothing = [np.zeros((slots, 2), dtype=np.uint64)] * len(workers)
        loops = [worker.loop for worker in workers]
        self.server = Loops(loops, self.desk, nothing if copies is None else copies)

    def start(self) -> None:
        for runner in self.server.runners:
            runner.start()

    def submit(self, worker: int = 0, slot: int = 0, deadline_ns: int | None = None) -> int:
        return self.desk.submit(worker, slot, deadline_ns)

    def poll(self) -> None:
        self.completions += self.desk.poll(0.0)

    def wait_for(self, tickets: int) -> list[Completion]:
        """All that have ended, when they are so many."""

        def ended() -> bool:
            self.completions += self.desk.poll(0.01)
            return len(self.completions) >= tickets

        assert until(ended, pause_s=0.0)
        return self.completions

    def close(self) -> None:
        self.server.stop()
        for runner in self.server.runners:
            if runner.ident is not None:
                runner.join()
        self.server.close()
        self.desk.close()


@contextmanager
def served(
    workers: Sequence[Worker],
    slots: int = 4,
    background: Collection[int] = (),
    copies: Sequence[Words] | None = None,
) -> Iterator[StandinDesk]:
    made = StandinDesk(workers, slots, background, copies)
    try:
        made.start()
        yield made
    finally:
        made.close()
