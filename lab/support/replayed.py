"""What was measured once more on the simulator, with the same arrivals: how far off it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from lab.support import sharing
from lab.support.bounded import kept_plan
from lab.support.contenders import BOUNDED, WAYS, Scene
from lab.support.effort import Task, background_window
from lab.support.entrants import plan_file
from lab.support.measuring import at_rates, mix_of_pair
from lab.support.pairs import PAIRS
from lab.support.workshop import Shelf

from eclip.core.device import Window
from eclip.core.load import closed_loop, load_of_mix
from eclip.core.mix import Mix
from eclip.core.plan import Plan, unpartitioned
from eclip.core.profile import Profile
from eclip.core.program import lower
from eclip.core.shapes import shape_of
from eclip.errors import EclipError
from eclip.sim.device import SimDevice

LEFT_OUT = ("priorities", "segments", "yield d2 first")  # it does not know priorities


def can_replay(row: dict[str, Any]) -> bool:
    known = row.get("way") in WAYS or row.get("way") in BOUNDED
    return "background" in row and known and row["way"] not in LEFT_OUT


def replay(row: dict[str, Any], shelf: Shelf) -> dict[str, Any] | None:
    """The row's figures by simulation; None: its profiles or plan are not here."""
    found = [shelf.find(model) for model in PAIRS[row["pair"]].models]
    profiles = tuple(one for one in found if one is not None)
    if len(profiles) < len(found):
        return None
    mix = at_rates(
        mix_of_pair([one.model for one in profiles], profiles, row["floor"]), row["rates"]
    )
    try:
        plan = _plan(row, shelf, mix, profiles)
        return None if plan is None else _figures(row, shelf, mix, plan, profiles)
    except EclipError:
        return None


def _plan(
    row: dict[str, Any], shelf: Shelf, mix: Mix, profiles: tuple[Profile, ...]
) -> Plan | None:
    scene = Scene(mix, shelf.topology, profiles, round(1e3 * row["grain_us"]))
    if row["way"] in WAYS:
        return WAYS[row["way"]](scene)
    task = Task(row["pair"], (row["load"],), (row["way"],), floor=row["floor"])
    plan = kept_plan(plan_file(shelf.folder, task, row["load"], row["way"]), profiles)
    return None if plan is None else _bound(plan, row["bounds_ns"])


def _bound(plan: Plan, bounds_ns: Sequence[int]) -> Plan:
    """With the bounds that were in force."""
    bounds = iter(bounds_ns)
    workers = [
        worker
        if worker.promise is None
        else msgspec.structs.replace(
            worker, promise=msgspec.structs.replace(worker.promise, bound_ns=next(bounds))
        )
        for worker in plan.workers
    ]
    return msgspec.structs.replace(plan, workers=tuple(workers))


def _figures(
    row: dict[str, Any], shelf: Shelf, mix: Mix, plan: Plan, profiles: Sequence[Profile]
) -> dict[str, Any]:
    last = len(profiles) - 1
    loads = [
        load_of_mix(mix, row["seconds"], row["warmup"], number, shape_of(row["shape"]))
        for number in range(row["runs"])
    ]
    window = Window(row["run_seconds"], row["warmup"], trace_ms=0.0)
    device = SimDevice(shelf.topology, shelf.calibration)
    traces = [profile.trace for profile in profiles]
    with device.open(lower(plan, traces), profiles) as session:
        shared = [session.run(load, window) for load in loads]
    # As on the device, alone is on all units: what a mask takes is part of what sharing costs.
    confined = any(plan.confines(service) for service in range(last))
    plain = unpartitioned(shelf.topology, profiles, mix)
    with device.open(lower(plain if confined else plan, traces), profiles) as session:
        services = []
        for service in range(last):
            alone = [session.run(load.only(service), window) for load in loads]
            shared_of, alone_of = (
                sharing.Latencies.of(logs, loads, service) for logs in (shared, alone)
            )
            services.append(sharing.service_figures(shared_of, alone_of))
    same = plan if plan.gives_way else plain  # background's own loop, if it has one
    with device.open(lower(same, traces), profiles) as session:
        idle = background_window(profiles[-1].request_ns[-1] / 1e9)
        undisturbed = session.run(closed_loop(len(profiles), only=last), idle)
    background = sharing.rate_of(shared, last) / sharing.rate_of([undisturbed], last)
    return {"background": background, "services": services}


def with_replays(rows: Sequence[dict[str, Any]], shelf: Shelf) -> list[dict[str, Any]]:
    """Rows with what the simulator says, where it can."""
    return [
        row | {"simulated": replay(row, shelf)}
        if can_replay(row) and not row.get("simulated")
        else row
        for row in rows
    ]
