"""The controller: brings a fleet to its placement, and makes a new one when the world changes.

The controller is an actor, which Ray restarts. All its state is known to the GPUs' actors, which
the controller asks after a restart. Once a second the controller looks at Ray's list of nodes and
at the routers' counters. GPUs that are gone, or back, and rates that have drifted lead to a new
placement, searched from the running placement. Instances are loaded before others are unloaded.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from eclip.errors import EclipError, PlanningError
from eclip.fleet.config import FleetFile
from eclip.fleet.orders import GpuOrder, GpuPlace, RoutingTable, join, orders_of, table_of
from eclip.fleet.place.placement import Placement
from eclip.fleet.place.spec import Fleet, GpuId, gpu_ids
from eclip.fleet.planning import Planned, plan_again
from eclip.fleet.rates import RateWatch, RouterReport, with_rates
from eclip.fleet.ray.cluster import CONTROLLER, one_line
from eclip.fleet.ray.handles import KEPT, GpuHandles, RouterHandles, fleet_there
from eclip.fleet.replanning import Replanning
from eclip.server.log import ServerLog

_LOOK_S = 1.0
_END_S = 60.0


class GpuStatus(msgspec.Struct, frozen=True, kw_only=True):
    gpu: str
    state: str  # ready, starting, idle or gone
    services: dict[str, float]  # rates that were planned for
    http: str = ""
    pid: int = 0


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    ready: bool  # it serves; also while it is placed again
    doing: str  # the change under way; empty: none
    trouble: str  # the reason why the placement was not reached, or a service not loaded
    gpus: tuple[GpuStatus, ...]
    routers: tuple[RouterReport, ...]
    rates_rps: dict[str, float]  # measured in the last seconds
    refused: dict[str, float]  # the part of a service's rate that finds no room
    placements: int  # reached since this controller started
    pid: int


class Controller:
    def __init__(self, file: FleetFile, planned: Planned) -> None:
        self._file = file
        self._log = ServerLog()
        self._gpus = GpuHandles()
        self._routers = RouterHandles(file.router, file.fleet)
        self._rates = RateWatch(file.fleet)
        self._replanning = Replanning(file.fleet)
        self._placement = planned.placement
        self._placements = 0
        self._doing, self._trouble = "starting", ""
        self._unreached: Planned | None = None  # to be tried again
        self._ending = threading.Event()
        self._gpus.adopt(file.fleet)
        if ray.get_runtime_context().was_current_actor_reconstructed and self._gpus.orders:
            planned = Planned(placement=self._placement_now(), moves=None)
        threading.Thread(target=self._run, args=(planned,), daemon=True).start()

    # --- What actors and people ask --------------------------------------------------------------

    def order_for(self, gpu: GpuId) -> GpuOrder | None:
        return self._gpus.orders.get(gpu)

    def arrived(self, place: GpuPlace) -> None:
        """A GPU's actor has started, and serves."""
        self._gpus.arrived(place)
        self._routers.tell(self.table())

    def table(self) -> RoutingTable:
        return table_of(self._placement, dict(self._gpus.places))

    def placement(self) -> Placement:
        return self._placement

    def status(self) -> FleetStatus:
        there = set(gpu_ids(fleet_there(self._file.fleet)))
        reports = self._routers.reports
        return FleetStatus(
            ready=self._placements > 0 and any(report.ready for report in reports),
            doing=self._doing,
            trouble=self._trouble or _not_loaded(list(self._gpus.places.values())),
            gpus=tuple(self._gpu_status(gpu, gpu in there) for gpu in gpu_ids(self._file.fleet)),
            routers=reports,
            rates_rps=self._rates.rates_rps,
            refused=self._placement.refused,
            placements=self._placements,
            pid=os.getpid(),
        )

    def end(self) -> None:
        """Answer open requests, and end all actors but this one."""
        self._ending.set()
        self._routers.end()
        self._gpus.end(self._gpus.gpus, _END_S)

    def _gpu_status(self, gpu: GpuId, there: bool) -> GpuStatus:
        place = self._gpus.places.get(gpu)
        placed = next((one for one in self._placement.gpus if one.gpu == gpu), None)
        state = "idle" if placed is None else "starting" if place is None else "ready"
        return GpuStatus(
            gpu=str(gpu),
            state=state if there else "gone",
            services={one.service: one.rate_rps for one in placed.instances} if placed else {},
            http=place.http if place else "",
            pid=place.pid if place else 0,
        )

    # --- Its thread ------------------------------------------------------------------------------

    def _run(self, planned: Planned) -> None:
        self._try(planned)
        while not self._ending.wait(_LOOK_S):
            try:
                self._look()
            except RayError as error:
                self._log.write("looking again", reason=one_line(error))

    def _try(self, planned: Planned) -> None:
        """Bring the fleet to this placement. A failure is reported as trouble, and running
        instances stay."""
        self._unreached = planned
        try:
            self._apply(planned)
            self._trouble, self._unreached = "", None
            self._placements += 1
        except (EclipError, RayError) as error:
            self._trouble = one_line(error)
            self._log.write("the placement was not reached", reason=self._trouble)
        self._doing = ""

    def _apply(self, planned: Planned) -> None:
        """Load, tell the routers, then unload."""
        new = orders_of(self._file, planned.placement)
        changes = () if planned.moves is None else planned.moves.changes
        no_room = {change.gpu for change in changes if not change.beside}
        before = dict(self._gpus.orders)
        self._gpus.start(new[gpu] for gpu in new if gpu not in before)
        joined = []
        for gpu, order in new.items():
            if gpu in before and before[gpu] != order:
                both = order if gpu in no_room else join(before[gpu], order)
                if both != order:
                    joined.append(order)
                self._gpus.deploy(both)
        self._placement = planned.placement
        self._routers.start()
        self._routers.tell(self.table())
        for order in joined:
            self._gpus.deploy(order)
        self._gpus.end(gpu for gpu in self._gpus.gpus if gpu not in new)
        self._routers.tell(self.table())
        self._log.write("placed", gpus=[str(gpu) for gpu in new])

    def _look(self) -> None:
        self._routers.look()
        self._rates.take(self._routers.reports, time.monotonic())
        there = fleet_there(self._file.fleet)
        drifted = self._file.replan and self._rates.drifted() is not None
        reason = self._replanning.reason(there, drifted=drifted, now_s=time.monotonic())
        if reason:
            self._doing = f"placing again: {reason}"
            self._log.write(self._doing)
            self._place_again(there)
        elif self._unreached is not None:
            self._try(self._unreached)
        elif self._gpus.look():
            self._routers.tell(self.table())

    def _place_again(self, there: Fleet) -> None:
        gone = self._replanning.gone(there)
        self._gpus.lose(gone)
        self._routers.tell(self.table())
        self._gpus.end(gone, 0.0)
        fleet = with_rates(there, self._rates.planned_rps)
        try:
            planned = self._replanning.plan(fleet, self._plan, time.monotonic())
        except EclipError as error:
            self._doing, self._trouble = "", str(error)
            self._log.write("the old placement stays", reason=self._trouble)
            return
        self._try(planned)

    def _plan(self, fleet: Fleet) -> Planned:
        try:
            planned: Planned = ray.get(_plan_again.remote(self._file, fleet, self._placement))
        except RayError as error:
            raise PlanningError(one_line(error)) from None
        return planned

    def _placement_now(self) -> Placement:
        placed = tuple(order.placed for order in self._gpus.orders.values())
        return msgspec.structs.replace(self._placement, gpus=placed)


_plan_again = ray.remote(num_cpus=0, max_retries=3)(plan_again)


def start_controller(file: FleetFile, planned: Planned) -> Any:
    """On the head: if that is lost, so is everything else."""
    options = ray.remote(Controller).options(
        name=CONTROLLER, max_concurrency=16, resources={"node:__internal_head__": 0.001}, **KEPT
    )
    return options.remote(file, planned)


def _not_loaded(places: Sequence[GpuPlace]) -> str:
    """A service that a GPU could not load, and why; empty: there is none."""
    for place in places:
        for name, reason in place.failed.items():
            return f"service {name!r} was not loaded on {place.gpu}: {reason}"
    return ""
