"""How long things are measured, and how long that takes, reckoned before a GPU is asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from lab.support.contenders import APART, BOUNDED, CLAIMED, OURS_APART, SWEPT_APART, WAYS
from lab.support.pairs import PAIRS

from eclip.core.device import Window

ALONE_REQUESTS = 12  # of background, at least
# A GPU may go above its power limit for a quarter of a second, which is not measured.
SETTLE_S = 0.25
CAPACITY_S = 0.3
# What was seen on an H200, in seconds.
BEGIN_S = 30.0  # of a process: importing torch, compiling the loop
CAPTURE_S = 3.0
PROFILE_S = 8.0
OPEN_S = 0.1
PROCESSES_S = 20.0
SEARCH_S = 4.0
RUN_S = 0.05  # between two runs

RequestMs = Callable[[str], float]


@dataclass(frozen=True)
class Effort:
    """Of one pair at one load. What is claimed runs in every round, for so many requests of the
    rarest service over all rounds; what is only to be told from it, briefly in the first."""

    requests: int = 1000
    brief: int = 300
    rounds: int = 2
    least_s: float = 0.6  # of a run
    most_s: float = 2.5
    warmup_s: float = 0.12

    def window(self, rate_rps: float) -> Window:
        return self._window(1.05 * self.requests / self.rounds, rate_rps)

    def brief_window(self, rate_rps: float) -> Window:
        return self._window(self.brief, rate_rps)

    def _window(self, requests: float, rate_rps: float) -> Window:
        seconds = min(max(requests / rate_rps, self.least_s), self.most_s)
        return Window(round(seconds, 3), self.warmup_s, trace_ms=0.0)


def background_window(request_s: float) -> Window:
    """Of background alone."""
    return Window(max(0.4, ALONE_REQUESTS * request_s), SETTLE_S, trace_ms=0.0)


@dataclass(frozen=True)
class Task:
    """A pair, measured in these ways at these loads."""

    pair: str
    loads: tuple[float, ...]
    ways: tuple[str, ...]
    effort: Effort = Effort()
    shape: str = "poisson"
    floor: float = 0.0
    busy_cores: bool = False
    again: bool = False  # services alone twice, to see the noise
    stage: str = ""
    later_ways: tuple[str, ...] | None = None  # at loads after the first; None: the same

    def ways_at(self, load: float) -> tuple[str, ...]:
        if load == self.loads[0] or self.later_ways is None:
            return self.ways
        return self.later_ways

    @property
    def inside(self) -> list[str]:
        return [way for way in self.ways if way in WAYS]

    def bounded_at(self, load: float) -> list[str]:
        return [way for way in self.ways_at(load) if way in BOUNDED]

    @property
    def apart(self) -> list[str]:
        return [way for way in self.ways if way in APART]

    @property
    def name(self) -> str:
        words = [self.pair, "/".join(f"{load:g}" for load in self.loads)]
        words += [self.shape] * (self.shape != "poisson")
        words += [f"floor {self.floor:g}"] * bool(self.floor)
        words += ["busy cores"] * self.busy_cores
        return " ".join(words)


def idle_runs(ways: Sequence[str], rounds: int, *, again: bool) -> int:
    """Runs of background alone, roughly: ways that share a grain and a depth share a loop, and
    those of baselines are run once for all loads (``again``: they have been)."""
    apart = sum(way in OURS_APART for way in ways)
    own = sum(way.startswith(("launches", "yield d1", "yield fine")) for way in ways)
    return rounds * (2 + apart) + (0 if again else own)


def measured_s(task: Task, load: float, request_ms: RequestMs) -> float:
    """Seconds of all runs at one load, by what a request of each model takes."""
    models = PAIRS[task.pair].models
    services = len(models) - 1
    rates = [load * 1e3 / request_ms(model) / services for model in models[:-1]]
    effort, ways = task.effort, task.ways_at(load)
    window, brief = effort.window(min(rates)), effort.brief_window(min(rates))
    whole = window.seconds + window.warmup_seconds + RUN_S
    short = min(brief.seconds, window.seconds) + window.warmup_seconds + RUN_S
    claimed = sum(way in CLAIMED for way in ways)
    apart = sum(way in OURS_APART for way in ways)
    told = sum(way in SWEPT_APART for way in ways)
    alone = services * (1 + task.again + apart)
    seconds = effort.rounds * whole * (claimed + alone)
    seconds += short * (len(ways) - claimed) + short * services * min(told, 2)
    idle = background_window(request_ms(models[-1]) / 1e3)
    runs = idle_runs(ways, effort.rounds, again=load != task.loads[0])
    return seconds + runs * (idle.seconds + idle.warmup_seconds + RUN_S)


def prepared_s(task: Task, captured: set[str], profiled: Callable[[str], bool]) -> float:
    """Until a task's sessions are open; what is captured on the way is noted."""
    models = PAIRS[task.pair].models
    new = [model for model in models if model not in captured]
    captured |= set(models)
    seconds = sum(CAPTURE_S if profiled(model) else PROFILE_S for model in new)
    processes = PROCESSES_S if task.apart else 0.0
    return max(seconds, processes) + OPEN_S * len(task.ways) + CAPACITY_S * (len(models) - 1) * 2


def expected_s(
    tasks: Sequence[Task],
    request_ms: RequestMs,
    profiled: Callable[[str], bool],
    searched: Callable[[Task, float, str], bool],
    captured: Collection[str] = (),
) -> Mapping[Task, float]:
    """Seconds of every task, in this order, in one process that has captured these models."""
    captured = set(captured)
    found = {}
    for task in tasks:
        seconds = prepared_s(task, captured, profiled)
        for load in task.loads:
            seconds += measured_s(task, load, request_ms)
            factors = {
                BOUNDED[way][0] for way in task.bounded_at(load) if not searched(task, load, way)
            }
            seconds += SEARCH_S * len(factors)
        found[task] = seconds
    return found
