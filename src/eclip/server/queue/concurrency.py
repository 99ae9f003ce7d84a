"""Concurrency: whether several batches of a service run at once, by what batches really take.

Every service may have one batch on the device at any time, as with plain streams, so none starves.
Several at once shorten the wait while batches hardly slow each other. Where they do, each takes
longer, stays smaller than it would have grown while it waited, and all services lose. So batches
are held against their times alone: the room for several shrinks with the ratio and is gone beyond
a limit. What is left then is plain streams.

A service whose model is slower than its profile says would look like a crowded device to all
others. Its times alone are corrected by how much more it is slowed than the services beside it.

Pure: numbers in, numbers out.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

# Batches over their times alone: up to the first there is all room for several of a service, beyond
# the second none. Chosen on four simulated machines (lab/serving/modelled_pairs.py, seeds 100 to
# 107).
_LIGHT, _HEAVY = 1.4, 1.9
_LEARNING = 1 / 64  # how much of what is known of all a new batch is
_LEARNING_OWN = 1 / 8  # ... and of what is known of a service
_ENOUGH = 8  # batches of a service, before it is compared
_WRONG = 2.0  # times as much slower as the others: then its profile is wrong


@dataclass(slots=True)
class _Service:
    slower: float  # than its times alone
    batches: int = 1


class Concurrency:
    """What batches of a device took, lately."""

    def __init__(self) -> None:
        self._services: dict[int, _Service] = {}
        self._took_ns = self._alone_ns = 0.0

    def learn(self, service: int, took_ns: float, alone_ns: float) -> None:
        """From a batch. ``alone_ns`` is what its profile says."""
        slower = took_ns / alone_ns
        known = self._services.setdefault(service, _Service(slower))
        known.slower += _LEARNING_OWN * (slower - known.slower)
        known.batches += 1
        alone_ns *= self.beyond_profile(service)
        self._took_ns += _LEARNING * (took_ns - self._took_ns)
        self._alone_ns += _LEARNING * (alone_ns - self._alone_ns)

    @property
    def several(self) -> float:
        """The part of the room for several batches of a service that there is, from 0 to 1."""
        slower = self._took_ns / self._alone_ns if self._alone_ns else 1.0
        return min(max((_HEAVY - slower) / (_HEAVY - _LIGHT), 0.0), 1.0)

    def beyond_profile(self, service: int) -> float:
        """How many times longer than its profile says a service's batches take, besides what slows
        the others, too; 1: its profile may be right."""
        known = self._services[service]
        others = [
            one.slower
            for key, one in self._services.items()
            if key != service and one.batches >= _ENOUGH
        ]
        if known.batches < _ENOUGH or not others:
            return 1.0
        times = known.slower / max(statistics.median(others), 1.0)
        return times if times > _WRONG else 1.0
