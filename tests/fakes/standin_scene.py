"""A worker on the stand-in driver beside a service that a test plays."""

from __future__ import annotations

import time

from eclip.core.rules import BACKGROUND, SERVICE, YIELD, Ints
from standin_gpu import BEGIN, Log, StandinGpu, make_board, make_worker, place_on, rules
from waiting import until

STILL_S = 0.2  # so long no launch: a worker that may launch gets to it sooner on any machine
YIELDS_TO_FIRST = rules((1, 2, YIELD))


class Scene:
    """A board with a service in row 0 that the test plays, and a worker that gives way to it."""

    def __init__(
        self,
        gpu: StandinGpu,
        *,
        tier: int = BACKGROUND,
        stretches: int = 6,
        micros: int = 500,
        **given: object,
    ) -> None:
        gpu.behave(0, lazy=False)
        self.board = make_board(SERVICE, tier)
        self.log: Log = gpu.watch()
        self.streams = [gpu.stream(), gpu.stream()]
        wanted: dict[str, object] = {"rules": YIELDS_TO_FIRST, **given}
        self.worker = make_worker(
            gpu,
            1,
            [[[(0, [micros])]] * stretches],
            [[[(1, [micros])]] * stretches],
            streams=self.streams,
            place=place_on(self.board, 1),
            **wanted,  # type: ignore[arg-type]
        )

    def launched(self) -> int:
        return len(self.worker.launches(self.log))

    def since(self, at: int) -> Ints:
        launches = self.worker.launches(self.log)
        return launches[launches[:, BEGIN] > at]

    def goes_on(self, more: int = 3) -> bool:
        before = self.launched()
        return until(lambda: self.launched() >= before + more, pause_s=0.001)

    def still(self) -> None:
        """Until it has launched nothing for a while."""
        quiet_from, seen = time.monotonic(), self.launched()
        while time.monotonic() < quiet_from + STILL_S:
            time.sleep(0.005)
            if self.launched() != seen:
                quiet_from, seen = time.monotonic(), self.launched()
