"""What a contest can be asked for: its options, and the names of all policies."""

from __future__ import annotations

from dataclasses import dataclass

from eclip.cli.verification import Verification
from eclip.errors import UsageError
from eclip.planning.search.objective import THROUGHPUT, Objective

# Baselines first, each before what it is a baseline for.
PROCESSES = ("timeslice", "mps", "mps-model")  # on a GPU
_ORDER = ("shared", "priority", *PROCESSES, "model", "masks", "kernel", "eclip")


@dataclass(frozen=True)
class ContestOptions:
    repeats: int = 1
    trials: int = 24  # of static masks, for every objective
    trial_seconds: float = 0.3
    # What is swept or searched for: a setting or a plan for each.
    objectives: tuple[Objective, ...] = (THROUGHPUT,)
    verification: Verification | None = None  # of what a search finds
    processes: int = 30  # at most so many at once; the MPS sweep is thinned to fit
    load_part: float | None = None  # Poisson at this part of the closed-loop rates under shared
    requests: int = 2000  # of all workers in all repeats, where load_part is given
    reopen: bool = False  # open every session anew for every run

    def __post_init__(self) -> None:
        if min(self.repeats, self.trials, self.processes, self.requests) < 1:
            raise UsageError("repeats, trials, processes and requests start at 1")
        if not 0 < self.trial_seconds <= 60:
            raise UsageError("a trial takes above 0 and at most 60 s")
        if self.load_part is not None and not 0 < self.load_part <= 10:
            raise UsageError(f"the load is a part of a rate, such as 0.6, not {self.load_part:g}")


def known_policies() -> list[str]:
    """Every name that a comparison understands, in the order in which they run."""
    from eclip.planning.policies import POLICIES

    return [*_ORDER, *(name for name in POLICIES if name not in _ORDER)]
