"""Planning a fleet that runs: a placement, and the moves from the one that is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from eclip.errors import UsageError
from eclip.fleet.config import FleetFile, find_kinds
from eclip.fleet.moves import Moves, moves_between
from eclip.fleet.placement import Placement, place
from eclip.fleet.scores import Scorer
from eclip.fleet.spec import Fleet
from eclip.progress import Progress

AGAIN_S = 5.0  # for a placement while the fleet runs


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    placement: Placement
    moves: Moves | None  # None: nothing ran before


def plan_fleet(
    file: FleetFile,
    fleet: Fleet,
    running: Placement | None = None,
    *,
    folders: Sequence[Path] = (),
    seconds: float = AGAIN_S,
    objective: str | None = None,
    progress: Progress | None = None,
) -> Planned:
    """``fleet`` is the file's, or what is left of it, at the rates of the moment."""
    scorer = Scorer(find_kinds(file.fleet, [*folders, *map(Path, file.server.get("profiles", []))]))
    made = place(
        fleet,
        scorer,
        objective or file.objective,
        running=running,
        seconds=seconds,
        progress=progress,
    )
    moves = None
    if running is not None:
        moves = moves_between(running, made, fleet, scorer.kinds)
    return Planned(placement=made, moves=moves)


def plan_again(file: FleetFile, fleet: Fleet, running: Placement) -> Planned:
    """For what is left; where that does not hold all services, as much of them as it can."""
    try:
        return plan_fleet(file, fleet, running)
    except UsageError:
        return plan_fleet(file, fleet, running, objective="goodput")
