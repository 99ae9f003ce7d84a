"""Brings a fleet up from its file, and brings it back after a loss of Ray.

Ray's head is a single point of failure: without a head, running actors serve for a while, and then
end. ``stay`` notices this, restarts Ray if Ray was started here, and brings the fleet back from the
file.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eclip.core.device import Closing
from eclip.errors import EclipError, StoppedError, UsageError
from eclip.fleet.config import FleetFile, load_fleet_file
from eclip.fleet.orders import orders_of
from eclip.fleet.place.placement import Placement
from eclip.fleet.planning import AGAIN_S, Planned, plan_fleet
from eclip.fleet.ray import cluster
from eclip.progress import Progress
from eclip.server.ports import free_port

_LOOK_S = 0.5
_PAUSE_S = 5.0  # between two tries to come back
_LOST = 2  # successive looks without an answer of the head
_DOWN = 6  # successive looks without a controller: a change of the fleet has none for a moment


class FleetRunner(Closing):
    def __init__(self, path: Path, folders: Sequence[Path] = (), seconds: float = AGAIN_S) -> None:
        self.path = path
        self.file = load_fleet_file(path)
        self.adopted = False  # the fleet was up before
        self._folders = folders
        self._seconds = seconds
        self._local: cluster.LocalRay | None = None
        self._claim: socket.socket | None = None  # of the port, where Ray is started here
        self._planned: Planned | None = None
        cluster.check_version()

    def up(self, progress: Progress | None = None) -> Any:
        """The fleet's status, as soon as it serves. A running fleet is changed to the file."""
        settings, running = self.file.ray, None
        if settings.address is not None or cluster.answers(settings, 1.0):
            cluster.connect(settings)
            running = cluster.running_placement()
            self.adopted = running is not None
            if running is None and settings.address is None:
                if self._claim is None:
                    cluster.claim_port(settings).close()  # refused while another starts one
                raise UsageError(
                    f"port {settings.port} has a Ray without a fleet; give another port in [ray]"
                )
            cluster.check_nodes(self.file)
        elif self._claim is None:
            self._claim = cluster.claim_port(settings)
            self._check_ports()
        progress = progress or Progress()
        if self._planned is None or running is not None:
            progress.phase("searching for a placement")
            self._planned = self._plan(running, progress)
        if settings.address is None and running is None:
            progress.phase("starting Ray")
            self._local = cluster.LocalRay(self.file, progress)
            cluster.connect(settings)
        if progress.stopped:
            raise StoppedError("stopped before servers were started")
        progress.phase("starting servers")
        try:
            return cluster.bring_up(self.file, self._planned, progress)
        except cluster.GoneError:
            raise  # another command changes the fleet
        except BaseException:
            if running is None:  # leave nothing half up
                with contextlib.suppress(EclipError):
                    cluster.take_down()
            raise

    def stay(self, stop: threading.Event, say: Callable[[str], None]) -> None:
        """Stay until ``stop`` is set, then take the fleet down; or until another command has taken
        the fleet down."""
        missed = without = 0
        while not stop.wait(_LOOK_S):
            missed = 0 if cluster.answers(self.file.ray, 1.0) else missed + 1
            if missed >= _LOST:
                self._come_back(stop, say)
                missed = without = 0
            elif not missed:
                without = without + 1 if cluster.find_controller() is None else 0
                if without >= _DOWN:
                    say("the fleet was taken down")
                    return
        cluster.take_down()

    def close(self) -> None:
        self._end_ray()
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def _end_ray(self) -> None:
        cluster.disconnect()
        if self._local is not None:
            self._local.close()
            self._local = None

    def _check_ports(self) -> None:
        """Refuse ports of routers that are in use on this machine, before anything starts."""
        router = self.file.router
        for name in ("http_port", "grpc_port"):
            free_port(router.host or cluster.HOST, getattr(router, name), name)

    def _plan(self, running: Placement | None, progress: Progress) -> Planned:
        planned = plan_fleet(
            self.file,
            self.file.fleet,
            running,
            folders=self._folders,
            seconds=self._seconds,
            progress=progress,
        )
        orders_of(self.file, planned.placement)  # refuses what a server would
        if planned.placement.refused:
            name, part = next(iter(planned.placement.refused.items()))
            raise UsageError(
                f"service {name!r}: no room for {part:.0%} of its requests within its bound; add "
                f"GPUs or lower its rate"
            )
        return planned

    def _come_back(self, stop: threading.Event, say: Callable[[str], None]) -> None:
        began_s = time.monotonic()
        say(f"Ray's head does not answer; the fleet comes back from {self.path}")
        self._end_ray()
        settings = self.file.ray
        while settings.address is not None and not cluster.answers(settings):
            if stop.wait(_LOOK_S):
                return
        self._read_again(say)
        said = ""
        while (refusal := self._try_up()) is not None:
            if refusal != said:
                said = refusal
                say(f"not yet: {said}")
            if stop.wait(_PAUSE_S):
                return
        say(f"the fleet is back after {time.monotonic() - began_s:.1f} s")

    def _try_up(self) -> str | None:
        """None if the fleet is up, else the reason. The nodes of a cluster come back one after
        another, after its head."""
        try:
            self.up()
        except EclipError as error:
            self._end_ray()
            if self.file.ray.address is None:
                raise
            return str(error)
        return None

    def _read_again(self, say: Callable[[str], None]) -> None:
        """Read the file again, which may have changed. An invalid file is ignored."""
        try:
            file: FleetFile = load_fleet_file(self.path)
        except EclipError as error:
            say(f"the fleet's file is invalid and its former content is used: {error}")
            return
        if file != self.file:
            self.file, self._planned = file, None
