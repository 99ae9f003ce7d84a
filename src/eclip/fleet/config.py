"""The fleet's file: TOML in, a checked fleet and its kinds of GPUs out.

    objective = "fewest"              # or goodput, energy
    reserve = 0.1                     # services are placed for a tenth more than their rates

    [[service]]
    name = "search"
    model = "bert:1"
    rate = 300                        # requests/s
    bound = "5ms"                     # on the p99
    instances = 2                     # at least; default 1
    weight = 1.0                      # for the objective goodput

    [[gpus]]
    machine = "node-1"
    kind = "h200"                     # a topology by name, or its file
    count = 8

Keys for a running fleet, which `eclip fleet plan` ignores:

    [ray]
    address = "10.0.0.5:6379"         # an existing cluster; default: start Ray on this machine
    [router]
    http_port = 8000
    count = 2
    [server]                          # for the server of every GPU: keys of its [server]
    device = "cuda"
    [service.serve]                   # of a service: keys of a server's [[service]]
    model = "my.package:factory"

Unknown keys are refused: a typo must not pass for a wish.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from eclip.core.mix import read_bound
from eclip.core.model_key import parse_model
from eclip.errors import ArtefactError, UsageError
from eclip.fleet.place.scores import GpuKind
from eclip.fleet.place.spec import RESERVE, Fleet, GpuGroup, Service, check_fleet
from eclip.models.library import find_profile
from eclip.planner.case import find_calibration, find_topology
from eclip.server.config import in_words


class _ServiceEntry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    model: str
    rate: float
    bound: str
    weight: float = 1.0
    instances: int = 1
    serve: dict[str, Any] = {}


class _GpusEntry(msgspec.Struct, forbid_unknown_fields=True):
    machine: str
    kind: str
    count: int = 1


class RaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[ray]``"""

    address: str | None = None  # host:port of a cluster; None: Ray is started on this machine
    port: int = 6399  # of the Ray that is started here
    namespace: str = "eclip"  # of the actors; another one for a second fleet on a cluster

    def __post_init__(self) -> None:
        if self.address is not None and not re.fullmatch(r"[^\s:/]+:\d{1,5}", self.address):
            raise ValueError("an address is HOST:PORT, like 10.0.0.5:6379")
        if not 1024 <= self.port <= 65_535:
            raise ValueError("a port is 1024 to 65535")
        if not self.namespace:
            raise ValueError("ray: a namespace needs a name")


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[router]``: where clients ask."""

    host: str | None = None  # to listen on; None: the address by which Ray knows the machine
    http_port: int = 8000
    grpc_port: int = 8001  # 0, as for HTTP: a free one, another one for each router
    count: int = 1  # processes; those on one machine share the ports
    token_file: str | None = None  # on every machine; routers and the GPUs' servers ask for it
    shared_memory: bool = True  # to GPUs of its own machine; otherwise TCP to all

    def __post_init__(self) -> None:
        if not 1 <= self.count <= 64:
            raise ValueError("count: 1 to 64")
        if not all(0 <= port <= 65_535 for port in (self.http_port, self.grpc_port)):
            raise ValueError("a port is 0 to 65535")
        if self.grpc_port and self.grpc_port == self.http_port:
            raise ValueError("grpc_port must be another than http_port")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    service: list[_ServiceEntry] = []
    gpus: list[_GpusEntry] = []
    objective: str = "fewest"
    reserve: float = RESERVE
    replan: bool = True
    ray: RaySettings = RaySettings()
    router: RouterSettings = RouterSettings()
    server: dict[str, Any] = {}


_STRUCTS: dict[str, type[msgspec.Struct]] = {
    "": _File, "service": _ServiceEntry, "gpus": _GpusEntry,
    "ray": RaySettings, "router": RouterSettings,
}  # fmt: skip


class FleetFile(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a fleet's file."""

    fleet: Fleet
    objective: str
    replan: bool  # place anew when rates drift
    ray: RaySettings
    router: RouterSettings
    server: dict[str, Any]  # of every GPU's server
    serve: dict[str, dict[str, Any]]  # by service: more keys for its [[service]] in a server


def load_fleet_file(path: Path) -> FleetFile:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtefactError(f"cannot read {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ArtefactError(f"{path}: {error}") from None
    try:
        entries = msgspec.convert(raw, _File)
    except msgspec.ValidationError as error:
        raise ArtefactError(f"{path}: {in_words(str(error), raw, _STRUCTS)}") from None
    services = tuple(
        Service(
            name=entry.name,
            model=parse_model(entry.model),
            rate_rps=entry.rate,
            bound_ms=_bound_ms(entry),
            weight=entry.weight,
            instances=entry.instances,
        )
        for entry in entries.service
    )
    groups = tuple(
        GpuGroup(machine=entry.machine, kind=entry.kind, count=entry.count)
        for entry in entries.gpus
    )
    return FleetFile(
        fleet=check_fleet(Fleet(services=services, gpus=groups, reserve=entries.reserve)),
        objective=entries.objective,
        replan=entries.replan,
        ray=entries.ray,
        router=entries.router,
        server=entries.server,
        serve={entry.name: entry.serve for entry in entries.service if entry.serve},
    )


def find_kinds(fleet: Fleet, folders: Sequence[Path] = ()) -> dict[str, GpuKind]:
    """Topology, calibration and profiles of every kind of GPU in the fleet."""
    models = dict.fromkeys(service.model for service in fleet.services)
    kinds = {}
    for name in fleet.kinds:
        try:
            topology = find_topology(name)
            calibration = find_calibration(None, topology)
            profiles = {
                model: find_profile(model, topology, calibration, folders) for model in models
            }
        except UsageError as error:
            raise UsageError(f"GPUs of kind {name!r}: {error}") from None
        kinds[name] = GpuKind(topology, calibration, profiles)
    return kinds


def _bound_ms(entry: _ServiceEntry) -> float:
    try:
        bound = read_bound(entry.bound)
    except ValueError as error:
        raise UsageError(f"service {entry.name!r}: {error}") from None
    if bound.ms is None:
        raise UsageError(
            f"service {entry.name!r}: a fleet's bounds are in ms, not {bound}, because times alone "
            f"differ from one kind of GPU to another"
        )
    return bound.ms
