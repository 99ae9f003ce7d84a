"""The frontier: which waits the next call on a user's stream needs, as far as only run time knows.

A user stream is in one order wherever its work runs: every call waits for the stream's previous
one, by the order of the queue they share or by a barrier. Queues are the streams themselves (home)
and lanes. A lane serves one stream at a time and passes to another only when it is known to be
empty, so that no call waits for work that its own program would not make it wait for.

The legacy default stream and blocking streams order against each other as CUDA says. Work at home
is ordered by the driver. Work on lanes is joined into the legacy stream's home where it matters: a
call on the legacy stream waits for the lanes that blocking streams used since its last call, and
the first call on a blocking stream after it waits for its lane. Idle streams cost nothing.

``native/frontier.h`` makes the same decisions in libeclip; a test drives both with the same
programs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eclip.jit import compiled, inlined

LEGACY, BLOCKING, NONBLOCKING = 0, 1, 2  # kinds of streams

DONE = -2  # a tail: nothing is pending
HOME = -1  # a queue: the user's own stream; lanes are 0 and up
FOLLOW = -3  # a wish: wherever the stream's last work went
_NEVER = -1
_NOBODY = -1

# What the shared words of a frontier mean.
_LEGACY_EPOCH, _BLOCKING_EPOCH, _STRAY, _STRAYED = range(4)

Ints = npt.NDArray[np.int64]


class Frontier:
    """Stream 0 is the legacy default stream; ``kinds`` are those of the others, from 1 on."""

    def __init__(self, kinds: Sequence[int], lanes: int) -> None:
        streams = 1 + len(kinds)
        self.lanes = lanes
        self._kind = np.array([LEGACY, *kinds], dtype=np.int64)
        self._tail = np.full(streams, DONE, dtype=np.int64)
        self._seen = np.zeros(streams, dtype=np.int64)
        self._used = np.zeros(streams, dtype=np.int64)
        self._user = np.full(self.lanes, _NOBODY, dtype=np.int64)
        self._busy = np.zeros(self.lanes, dtype=np.int64)
        self._shared = np.zeros(4, dtype=np.int64)
        # At most one barrier for every lane and one from home, three words each.
        self._barriers = np.zeros(3 * (self.lanes + 3), dtype=np.int64)
        self._counts = np.zeros(2, dtype=np.int64)

    def call(
        self, stream: int, wish: int, finished: int = 0
    ) -> tuple[int, list[tuple[int, int, int]], int]:
        """Where a call runs, the barriers before it (whose home, from, to), and how many more were
        not needed. ``finished``: a bit set of the lanes that would be found empty if asked.
        """
        queue: int = _decide(
            stream,
            wish,
            finished,
            self._kind,
            self._tail,
            self._seen,
            self._used,
            self._user,
            self._busy,
            self._shared,
            self._barriers,
            self._counts,
        )
        issued, skipped = self._counts.tolist()
        rows = self._barriers[: 3 * issued].reshape(issued, 3).tolist()
        return queue, [(row[0], row[1], row[2]) for row in rows], skipped

    def drained(self, stream: int) -> None:
        """Everything that was called on the stream is complete."""
        for lane in range(self.lanes):
            if self._used[stream] >> lane & 1 and self._user[lane] == stream:
                self._busy[lane] = 0
        self._used[stream] = 0
        self._tail[stream] = DONE
        self._seen[stream] = _NEVER
        if stream == 0:
            self._shared[_STRAYED] = 0

    def device_drained(self) -> None:
        """Everything on every lane is complete."""
        self._busy[:] = 0


@inlined
def _pending(stream: int, tail: Ints, user: Ints, busy: Ints) -> int:
    last = int(tail[stream])
    if last >= 0 and (user[last] != stream or busy[last] == 0):
        return DONE
    return last


@inlined
def _barrier(
    home: int, source: int, target: int, finished: int, busy: Ints, barriers: Ints, counts: Ints
) -> None:
    if source >= 0 and finished >> source & 1:
        busy[source] = 0
        counts[1] += 1
    else:
        at = 3 * counts[0]
        barriers[at] = home
        barriers[at + 1] = source
        barriers[at + 2] = target
        counts[0] += 1


@compiled
def _decide(
    stream: int,
    wish: int,
    finished: int,
    kind: Ints,
    tail: Ints,
    seen: Ints,
    used: Ints,
    user: Ints,
    busy: Ints,
    shared: Ints,
    barriers: Ints,
    counts: Ints,
) -> int:
    counts[:] = 0
    last = _pending(stream, tail, user, busy)
    queue = wish
    if wish == FOLLOW:
        queue = last if last >= 0 else HOME
    if queue >= 0:
        if user[queue] == stream or busy[queue] == 0 or finished >> queue & 1:
            if user[queue] != stream:
                shared[_STRAY] &= ~(1 << queue)
            user[queue] = stream
            busy[queue] = 1
        else:
            queue = HOME
    behind = False
    if kind[stream] == BLOCKING:
        if shared[_STRAYED]:
            legacy = _pending(0, tail, user, busy)
            tail[0] = DONE
            if legacy >= 0:
                _barrier(0, legacy, HOME, finished, busy, barriers, counts)
                tail[0] = HOME
            shared[_STRAYED] = 0
        behind = seen[stream] != shared[_LEGACY_EPOCH] and tail[0] != DONE
        seen[stream] = shared[_LEGACY_EPOCH]
        shared[_BLOCKING_EPOCH] += 1
    elif kind[stream] == LEGACY:
        for lane in range(busy.shape[0]):
            if shared[_STRAY] >> lane & 1 and busy[lane]:
                _barrier(0, lane, HOME, finished, busy, barriers, counts)
        shared[_STRAY] = 0
        behind = seen[stream] != shared[_BLOCKING_EPOCH]
        seen[stream] = shared[_BLOCKING_EPOCH]
        shared[_LEGACY_EPOCH] += 1
    if queue >= 0 and (last == HOME or behind):
        _barrier(stream, HOME, queue, finished, busy, barriers, counts)
    if last >= 0 and last != queue:
        _barrier(stream, last, queue, finished, busy, barriers, counts)
    tail[stream] = queue
    if queue >= 0:
        used[stream] |= 1 << queue
        if kind[stream] == BLOCKING:
            shared[_STRAY] |= 1 << queue
    if kind[stream] == LEGACY:
        shared[_STRAYED] = 1 if queue >= 0 else 0
    return queue
