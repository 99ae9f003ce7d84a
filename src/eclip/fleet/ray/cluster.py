"""Ray itself: the cluster of a fleet's file, on this machine or by address.

Ray is imported in functions: it takes a second, may be missing, and reads when it is imported
whether it may use other addresses than this machine's own. The controller imports it at its top, so
it is imported here as late. A Ray of this machine listens on 127.0.0.1, has no dashboard, sends no
usage statistics, and ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eclip.core.device import Closing
from eclip.errors import DeviceError, StoppedError, UsageError
from eclip.fleet.config import FleetFile, RaySettings
from eclip.fleet.place.placement import Placement
from eclip.fleet.planning import Planned
from eclip.progress import Progress
from eclip.server.folder import own_folder

CONTROLLER = "controller"  # the actor's name
MACHINE = "machine"  # the label of a Ray node that says which of the file's machines it is
LEAST, BELOW = (2, 55), (3, 0)  # as the extra `fleet` has it
HOST = "127.0.0.1"
_STORE_BYTES = 80_000_000  # actors pass small things only
_REACH_S = 5.0
_GREET_S = 30.0  # for a head that is busy
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # of gRPC
_READY_S = 600.0
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".*",  # its accounts of deaths are pages long
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
THIS_MACHINE = {
    # Without this, Ray takes the address of a network card even when it is told 127.0.0.1.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # A node with a dead process refuses connections: noticed after 3 s instead of 16 s. The time
    # that a slow node has is unchanged.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


class GoneError(DeviceError):
    """The controller was ended for good. Only commands do that: Ray starts anew what dies."""


def check_version() -> None:
    """Refuse a Ray that is not there, or of a version that we do not know."""
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            "the package ray is missing; install eclip with what a fleet needs: "
            "pip install 'eclip[fleet]'"
        ) from None
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not LEAST <= numbers < BELOW:
        wanted = f"{LEAST[0]}.{LEAST[1]} or newer, below {BELOW[0]}"
        raise UsageError(f"ray is {version} and must be {wanted}: pip install 'eclip[fleet]'")


def import_ray(settings: RaySettings) -> Any:
    check_version()
    os.environ.update(_QUIET)
    if settings.address is None:
        os.environ.update(THIS_MACHINE)
    return importlib.import_module("ray")


def address_of(settings: RaySettings) -> str:
    return settings.address or f"{HOST}:{settings.port}"


def answers(settings: RaySettings, seconds: float = _REACH_S) -> bool:
    """True if a process listens at the head's address."""
    host, _, port = address_of(settings).rpartition(":")
    try:
        socket.create_connection((host, int(port)), seconds).close()
    except OSError:
        return False
    return True


def _speaks_grpc(settings: RaySettings) -> bool:
    """Whether it is Ray's head, as far as that can be told at once: Ray's client tries for minutes,
    and fills the screen."""
    host, _, port = address_of(settings).rpartition(":")
    try:
        with socket.create_connection((host, int(port)), _GREET_S) as connection:
            connection.sendall(_GREETING)
            frame = connection.recv(9)
    except OSError:
        return False
    return frame[3:4] == b"\x04"  # SETTINGS, with which every server of HTTP/2 begins


def claim_port(settings: RaySettings) -> socket.socket:
    """A claim to start Ray on this machine, held while the socket is open. Any other claim is
    refused. The kernel frees the claim when the process ends."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0eclip-fleet-{settings.port}")
    except OSError:
        claim.close()
        raise UsageError(
            f"another eclip fleet up is starting a fleet at {address_of(settings)}; wait until it "
            f"is up, or give another port in [ray]"
        ) from None
    return claim


def connect(settings: RaySettings) -> None:
    """Connect to the cluster of the file; a failure raises an error of one line."""
    check_version()
    address = address_of(settings)
    if not answers(settings):
        hint = "is the fleet up?" if settings.address is None else "is it running there?"
        raise UsageError(f"cannot reach Ray at {address}; {hint}")
    if not _speaks_grpc(settings):
        another = "another port" if settings.address is None else "the address of Ray's head"
        raise UsageError(f"what listens at {address} is not Ray; give {another} in [ray]")
    ray = import_ray(settings)
    try:
        with _signals_as_they_were():
            ray.init(
                address=address,
                namespace=settings.namespace,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        line = " ".join(str(error).split())
        raise UsageError(f"cannot join the Ray cluster at {address}: {line}") from None


def disconnect() -> None:
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


class LocalRay(Closing):
    """Ray on this machine, one node for each machine of the file, with simulated GPUs."""

    def __init__(self, file: FleetFile, progress: Progress) -> None:
        import_ray(file.ray)
        logging.getLogger("ray").setLevel(logging.ERROR)
        cluster_utils = importlib.import_module("ray.cluster_utils")
        self._stack = contextlib.ExitStack()
        self._folder = str(self._stack.enter_context(own_folder("eclip-ray-")))
        self._cluster = cluster_utils.Cluster()
        self.nodes: dict[str, Any] = {}  # by machine
        machines: dict[str, dict[str, float]] = {}
        for group in file.fleet.gpus:
            machines.setdefault(group.machine, {})[group.kind] = group.count
        try:
            with _signals_as_they_were(), _notes_in(self._folder):
                for machine, kinds in machines.items():
                    if progress.stopped:
                        raise StoppedError("stopped before Ray was started")
                    self.nodes[machine] = self._add(machine, kinds, file.ray.port)
        except BaseException:
            self.close()
            raise

    def _add(self, machine: str, kinds: dict[str, float], port: int) -> Any:
        head = {"gcs_server_port": port, "temp_dir": self._folder} if not self.nodes else {}
        try:
            return self._cluster.add_node(
                resources=kinds,
                labels={MACHINE: machine},
                num_cpus=0,
                object_store_memory=_STORE_BYTES,
                node_ip_address=HOST,
                include_log_monitor=False,
                include_dashboard=False,
                no_monitor=True,
                **head,
            )
        except Exception as error:  # Ray raises many kinds, bare Exceptions among them
            line = " ".join(str(error).split())
            raise DeviceError(f"Ray did not start on this machine: {line}") from None

    def close(self) -> None:
        with contextlib.suppress(Exception), _notes_in(self._folder):  # the dead cannot be ended
            self._cluster.shutdown()
        self._stack.close()


@contextlib.contextmanager
def _notes_in(folder: str) -> Iterator[None]:
    """Make Ray keep its address file in ``folder``. Its usual place is shared by the machine: there
    starting fails if Ray never ran before, and another user's Ray would lose its address."""
    before = os.environ.get("RAY_TMPDIR")
    os.environ["RAY_TMPDIR"] = folder
    (Path(folder) / "ray").mkdir(exist_ok=True)
    try:
        yield
    finally:
        if before is None:
            del os.environ["RAY_TMPDIR"]
        else:
            os.environ["RAY_TMPDIR"] = before


@contextlib.contextmanager
def _signals_as_they_were() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces; the caller keeps its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_nodes(file: FleetFile) -> None:
    """Refuse a cluster that lacks GPUs of the file, and say how they are offered."""
    handles = importlib.import_module("eclip.fleet.ray.handles")
    there = {
        (group.machine, group.kind): group.count for group in handles.fleet_there(file.fleet).gpus
    }
    for group in file.fleet.gpus:
        count = there.get((group.machine, group.kind), 0)
        if count < group.count:
            offer = f"--labels {MACHINE}={group.machine} "
            offer += f"--resources '{{\"{group.kind}\": {group.count}}}'"
            raise UsageError(
                f"the cluster offers {count} of the {group.count} {group.kind} of machine "
                f"{group.machine!r}; start Ray there with: {offer}"
            )


def find_controller() -> Any | None:
    """The controller of the running fleet; None without a fleet."""
    ray = importlib.import_module("ray")
    try:
        return ray.get_actor(CONTROLLER)
    except ValueError:
        return None


def running_placement() -> Placement | None:
    controller = find_controller()
    if controller is None:
        return None
    placement: Placement = ask(controller.placement)
    return placement


def bring_up(file: FleetFile, planned: Planned, progress: Progress) -> Any:
    """Start a controller with this file, which takes over running actors. Returns its status when
    ready, or raises its trouble."""
    ray = importlib.import_module("ray")
    start = importlib.import_module("eclip.fleet.ray.controller").start_controller
    before = find_controller()
    if before is not None:
        ray.kill(before)  # a controller with the new file takes its place
        while find_controller() is not None:
            time.sleep(0.02)
    controller = start(file, planned)
    deadline = time.monotonic() + _READY_S
    said = ""
    while time.monotonic() < deadline:
        if progress.stopped:
            raise StoppedError("stopped before the fleet was up")
        status = ask(controller.status)
        if (doing := _in_words(status)) != said:
            said = doing
            progress.phase(f"starting servers, {said}")
        if status.ready:
            return status
        if status.trouble:
            raise DeviceError(status.trouble)
        time.sleep(0.1)
    raise DeviceError(f"the fleet was not ready after {_READY_S:.0f} s")


def _in_words(status: Any) -> str:
    """``2 of 4 GPUs and 0 of 1 routers are ready``"""
    used = [gpu for gpu in status.gpus if gpu.services]
    serving = sum(gpu.state == "ready" for gpu in used)
    routers = sum(bool(router.ready) for router in status.routers)
    return f"{serving} of {len(used)} GPUs and {routers} of {len(status.routers)} routers are ready"


def take_down() -> bool:
    """End all of the fleet's actors; False: there are none."""
    ray = importlib.import_module("ray")
    controller = find_controller()
    if controller is None:
        return False
    ask(controller.end, 180.0)
    ray.kill(controller)
    return True


def ask(method: Any, seconds: float = 60.0) -> Any:
    """The result of an actor's method; Ray's errors become DeviceError, in one line."""
    ray = importlib.import_module("ray")
    try:
        return ray.get(method.remote(), timeout=seconds)
    except ray.exceptions.ActorDiedError:
        raise GoneError(
            "another eclip fleet up or down was given at the same time; see eclip fleet status"
        ) from None
    except ray.exceptions.RayError as error:
        raise DeviceError(f"the fleet does not answer: {one_line(error)}") from None


def one_line(error: Exception) -> str:
    """The last line of an actor's error, without Ray's traceback."""
    line = str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
    return re.sub(r"^[\w.]+Error: ", "", line)
