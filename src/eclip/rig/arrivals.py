"""Arrivals of a contest: the load of every repeat, the same for all policies, and its window.

They are the mix's own (closed loop, or drawn at its rates in some shape), replayed from a file, or
Poisson at a part of every worker's closed-loop rate under plain streams, which is measured first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec

from eclip.core.device import Window
from eclip.core.load import Load, check_shape, load_of_csv, load_of_mix
from eclip.core.measures import measure
from eclip.core.mix import Mix
from eclip.core.plan import unpartitioned
from eclip.core.shapes import Shape, shape_of
from eclip.errors import UsageError
from eclip.rig.rig import Rig

DEFAULT_REQUESTS = 2000
_FEWEST_PER_WORKER = 0.1  # of all requests: a p99 of a few requests says nothing
_ROOM = 1.1  # more requests than wanted, since some may be unfinished at the end


class Arrivals:
    """``part``: of the closed-loop rates; ``requests``: how many of all workers in all repeats."""

    def __init__(
        self,
        mix: Mix,
        window: Window,
        *,
        repeats: int = 1,
        seed: int = 0,
        part: float | None = None,
        requests: int = DEFAULT_REQUESTS,
        shape: Shape | None = None,
        file: Path | None = None,
    ) -> None:
        if part is not None and not 0 < part <= 10:
            raise UsageError(f"the load is a part of a rate, such as 0.6, not {part:g}")
        if part is not None and mix.has_rates:
            raise UsageError(
                f"the load {part:g} draws the arrivals; leave rates (@rps) out of the mix"
            )
        check_shape(mix, shape)
        if requests < 1:
            raise UsageError("requests start at 1")
        self.part = part
        self._mix = mix
        self._window = window
        self._repeats = repeats
        self._seed = seed
        self._requests = requests
        self._shape = shape
        self._replayed = None if file is None else load_of_csv(file, mix, window.seconds, seed)
        self._rates: list[float] | None = None

    def window(self, rig: Rig) -> Window:
        if self.part is None:
            return self._window
        rates = self.rates_under_shared(rig)
        seconds = long_enough(rates, self._requests) / self._repeats
        trace_ms = min(self._window.trace_ms, 1000 * seconds)
        return dataclasses.replace(self._window, seconds=seconds, trace_ms=trace_ms)

    def load(self, rig: Rig, repeat: int) -> Load:
        if self._replayed is not None:
            return self._replayed
        window, mix = self.window(rig), self._mix
        if self.part is not None:
            mix = at_rates(mix, self.rates_under_shared(rig))
        seed = self._seed + repeat
        load = load_of_mix(mix, window.seconds, window.warmup_seconds, seed, self._shape)
        if self.part is None:
            return load
        label = f"Poisson at {self.part:.0%} of the closed-loop rates under shared"
        return dataclasses.replace(load, label=label)

    def rates_under_shared(self, rig: Rig) -> list[float]:
        """The asked-for part of every worker's closed-loop rate under plain streams."""
        if self._rates is None:
            case = rig.case
            window = dataclasses.replace(self._window, trace_ms=0.0)
            load = load_of_mix(self._mix, window.seconds, window.warmup_seconds, self._seed)
            plan = unpartitioned(case.topology, case.profiles, case.mix)
            workers = measure(rig.run_once(plan, load, window)).workers
            idle = [worker.name for worker in workers if worker.requests == 0]
            if idle:
                raise UsageError(
                    f"{', '.join(idle)} completed no request under shared in "
                    f"{window.seconds:g} s; give more seconds"
                )
            self._rates = [(self.part or 1.0) * worker.rate_rps for worker in workers]
        return self._rates


def parts_of_load(
    load: float | str | Path | None,
) -> tuple[float | None, Shape | None, Path | None]:
    """A part of the closed-loop rates, a shape of the arrivals, or the file that has them."""
    if load is None or isinstance(load, float | int):
        return load, None, None
    shape = shape_of(load)
    return None, shape, Path(load) if shape is None else None


def at_rates(mix: Mix, rates: Sequence[float | None]) -> Mix:
    """The mix with Poisson arrivals at these rates, one per worker; None: closed loop."""
    workers = tuple(
        msgspec.structs.replace(worker, rate_rps=rate)
        for worker, rate in zip(mix.workers, rates, strict=True)
    )
    return msgspec.structs.replace(mix, workers=workers)


def long_enough(rates: Sequence[float], requests: int) -> float:
    """Seconds for ``requests`` of all workers together, and a tenth of that of the slowest."""
    return _ROOM * max(requests / sum(rates), _FEWEST_PER_WORKER * requests / min(rates))
