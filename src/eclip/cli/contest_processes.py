"""The processes of a contest: one per worker under MPS, or taking turns of the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eclip.artefacts.plan import Plan
from eclip.cli import wiring

if TYPE_CHECKING:
    from eclip.devices.base import Device
    from eclip.devices.remote import ProcessSession, ProcessSets, Sharing

PlanOf = Callable[[str], Plan]  # by policy


@dataclass(frozen=True)
class Started:
    """Processes that were started together, and whose they are."""

    sets: ProcessSets
    sessions: dict[str, list[ProcessSession]]


def start_processes(
    device: Device[Any],
    names: Sequence[str],  # policies that run in processes
    plan_of: PlanOf,
    most: int,  # processes at once
    or_leave_out: Callable[..., contextlib.AbstractContextManager[None]],
    stack: contextlib.ExitStack,
) -> list[Started]:
    """The processes of these policies, not waited for yet.

    All that run under MPS have one daemon, so that one of them failing takes the others along.
    """
    started = []
    others = sum(name != "mps" for name in names)
    for under_mps in (False, True):
        sharings = {
            name: _sharings(name, plan_of, most, others)
            for name in names
            if (name != "timeslice") == under_mps
        }
        if not sharings:
            continue
        with or_leave_out(*sharings):
            every = [one for mine in sharings.values() for one in mine]
            sets = wiring.open_sets(device, every)
            stack.callback(sets.close)
            sessions = iter(sets.sessions)
            mine = {name: [next(sessions) for _ in part] for name, part in sharings.items()}
            started.append(Started(sets, mine))
    return started


def _sharings(name: str, plan_of: PlanOf, most: int, others: int) -> list[Sharing]:
    from eclip.devices.cuda.mps import MOST_CLIENTS, equal_shares
    from eclip.devices.remote import Sharing, mps_sharing, shares_of

    if name == "timeslice":
        return [Sharing(plan_of("timeslice"))]
    shared = plan_of("shared")
    if name == "mps-model":
        return [mps_sharing(shared, shares_of(plan_of("model")), policy="mps-model")]
    workers = len(shared.workers)
    # The others have a set each, and one of them is under MPS, too.
    sets = min(most // workers - others, MOST_CLIENTS // workers - 1)
    shares = equal_shares(workers, max(1, sets))
    return [mps_sharing(shared, (share,) * workers) for share in shares]
