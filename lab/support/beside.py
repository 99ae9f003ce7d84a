"""Background work beside services: its rate, the services' busy share, and what is wanted of both.

Services leave the device free for 1 - busy share of the time. Background work that gives way at
once and loses nothing would get that part of its rate alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from lab.support.knee import WANTED
from lab.support.offered import zeros

from eclip.server.counters import Count
from served_core import Driver, LoopThread, open_front, request, take_attachment

T = TypeVar("T")

MODEL, BATCH = "vgg19", 32
NAME = "background"
SETTINGS = {"name": NAME, "model": MODEL, "tier": "background", "batches": [BATCH]}
ATTACHMENTS = 2  # of the server: this module's front has the second
LEAST_PART = 0.9  # of what services leave
_IN_FLIGHT = 3  # two on the device, and one that is being copied
_WARM_UP_S = 0.5


class BackgroundFront(LoopThread):
    """Keeps the background busy, from a front and a thread of its own: copying a batch of images
    takes about a millisecond, for which requests of services would have to wait."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self._answered = 0
        self._asking = False
        try:
            self._core = self(open_front(driver(self._sit(driver))))
        except BaseException:
            super().close()
            raise
        self._inputs = zeros(self._core.models[NAME], BATCH)

    @staticmethod
    async def _sit(driver: Driver) -> Any:
        return take_attachment(driver.served.supervisor, ATTACHMENTS - 1)

    def rate_during(self, meanwhile: Callable[[], T]) -> tuple[float, T]:
        """Batches a second while something else happens, and what that gave."""
        with self._busy():
            time.sleep(_WARM_UP_S)
            before, begin_s = self._answered, time.monotonic()
            result = meanwhile()
            return (self._answered - before) / (time.monotonic() - begin_s), result

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self._asking = True
        asking = [self.begin(self._ask()) for _ in range(_IN_FLIGHT)]
        try:
            yield
        finally:
            self._asking = False
            for future in asking:
                future.result()

    async def _ask(self) -> None:
        while self._asking:
            await self._core.infer(request(NAME, self._inputs))
            self._answered += 1

    def close(self) -> None:
        try:
            self(self._close_core())
        finally:
            super().close()

    async def _close_core(self) -> None:
        self._core.close()


def busy_share_during(driver: Driver, meanwhile: Callable[[], T]) -> tuple[float, T]:
    """The part of the time in which the server had something on the device, and what was given.
    From the words that its metric ``eclip_device_busy_share`` is made of."""

    def busy_s() -> float:
        return float(driver.served.supervisor.counters.of_device(0)[Count.BUSY_NS]) / 1e9

    before_s, begin_s = busy_s(), time.monotonic()
    result = meanwhile()
    return min((busy_s() - before_s) / (time.monotonic() - begin_s), 1.0), result


def part_of_free(row: Mapping[str, Any]) -> float:
    """What the background got of its rate alone, for each part that services left."""
    part = row["beside_rps"] / row["alone_rps"]
    return float(part / max(1 - row["busy_share"], 1e-9))


def misses(row: Mapping[str, Any]) -> list[str]:
    """Of what is wanted."""
    kept = {
        "bounds": row["attained"] >= WANTED,
        "background": part_of_free(row) >= LEAST_PART,
    }
    return [name for name, is_kept in kept.items() if not is_kept]
