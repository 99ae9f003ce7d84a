"""Refinement: the search goes on on the device, where every look costs a moment.

The simulation knows how plans differ, trials know what they give. So the search thinks with a
simulation that has its error on everything tried so far taken off (correction.py): starting from
the best that were tried it looks for better ones there, tries the few that promise most on the
device, learns from them, and so on until its time is over.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from eclip.core.plan import Plan, unpartitioned
from eclip.planner.search.candidates import Candidate, Evaluate, Found, Homes, Hunt, apart
from eclip.planner.search.correction import EARLIER_NOISE, Corrected
from eclip.planner.search.objective import Objective, Score
from eclip.planner.search.placement import Placer
from eclip.progress import Progress

_TRIED_AT_ONCE = 5  # between two thoughts
_THOUGHTS = 5  # batches of simulated candidates before the next trials
_THOUGHT = 32  # candidates of one


def refine(
    placer: Placer,
    simulate: Evaluate,
    trials: Evaluate,
    objective: Objective,
    *,
    starts: Sequence[Homes],
    seconds: float,
    earlier: Sequence[tuple[Plan, Score]] = (),
    seed: int = 0,
    priorities: int = 1,
    progress: Progress | None = None,
) -> Found:
    """Everything that was tried on the device, the best first, with what is expected of it.

    ``starts`` are all tried, however long that takes, before the first thought. ``earlier`` is what
    another search has tried; it is learnt from, and tried again only if it is a start.
    ``priorities``: so many levels of stream priorities the device has; with 1 there are none.
    """
    progress, problem = progress or Progress(), placer.problem
    objective.check(len(problem.profiles))
    deadline = time.monotonic() + seconds
    nobody_masked = unpartitioned(problem.topology, problem.profiles, problem.mix)
    (plain,) = trials([nobody_masked])
    random = np.random.default_rng(seed)
    tried = Hunt(placer, trials, objective, plain, random, priorities)
    corrected = Corrected(simulate)
    corrected.learn([nobody_masked], [plain])
    corrected.learn([plan for plan, _ in earlier], [gave for _, gave in earlier], EARLIER_NOISE)
    new = tried.try_all(starts)
    rounds = 0
    while new:
        corrected.learn([one.plan for one in new], [one.score for one in new])
        left = deadline - time.monotonic()
        if left <= 0 or progress.stopped:
            break
        progress.part(1 - left / seconds)
        thought = Hunt(placer, corrected, objective, plain, random, priorities)
        thought.try_all([one.homes for one in tried.best])
        for _ in range(_THOUGHTS):
            thought.try_all(thought.children(_THOUGHT))
        new = tried.try_all(_most_promising(thought.ranked(), tried))
        rounds += 1
    (plain,) = corrected.expected([nobody_masked])
    return tried.rescored(corrected.expected, plain).found(rounds)


def _most_promising(ranked: Sequence[Candidate], tried: Hunt) -> list[Homes]:
    """The best ones that were not tried and are not all alike."""
    chosen: list[Candidate] = []
    for one in ranked:
        if len(chosen) == _TRIED_AT_ONCE:
            break
        if not tried.knows(one) and all(apart(one.score, other.score) for other in chosen):
            chosen.append(one)
    return [one.homes for one in chosen]
