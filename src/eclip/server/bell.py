"""Bell: tasks of one event loop that wait for a condition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Bell:
    """Wakes all waiters on any change; each re-checks its condition."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def ring(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future
