"""Planning a running fleet: a placement, and the moves from the running placement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from eclip.errors import UsageError
from eclip.fleet.config import FleetFile, find_kinds
from eclip.fleet.place.moves import Moves, moves_between
from eclip.fleet.place.placement import Placement, place
from eclip.fleet.place.scores import Scorer
from eclip.fleet.place.spec import Fleet
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
    """``fleet``: the file's services and the GPUs present, at the current rates."""
    scorer = Scorer(find_kinds(file.fleet, [*folders, *map(Path, file.server.get("profiles", []))]))
    made = place(
        fleet,
        scorer,
        objective or file.objective,
        running=None if running is None else without_short(running, fleet),
        seconds=seconds,
        progress=progress,
    )
    moves = None
    if running is not None:
        moves = moves_between(running, made, fleet, scorer.kinds)
    return Planned(placement=made, moves=moves)


def without_short(running: Placement, fleet: Fleet) -> Placement:
    """The running placement without services that have too few instances, as after the loss of a
    machine: a search that starts from them would leave them short."""
    homes = Counter(one.service for placed in running.gpus for one in placed.instances)
    short = {one.name for one in fleet.services if homes[one.name] < one.instances}
    gpus = []
    for placed in running.gpus:
        kept = tuple(one for one in placed.instances if one.service not in short)
        if kept:
            gpus.append(msgspec.structs.replace(placed, instances=kept))
    return msgspec.structs.replace(running, gpus=tuple(gpus))


def plan_again(file: FleetFile, fleet: Fleet, running: Placement) -> Planned:
    """A plan for the GPUs left. If they cannot hold all services, they hold as much as possible."""
    try:
        return plan_fleet(file, fleet, running)
    except UsageError:
        return plan_fleet(file, fleet, running, objective="goodput")
