"""Orders: the configuration of each GPU's server, from a placement and the fleet's file.

All functions are pure. A GPU's order is for its actor; the routing table is for routers.
"""

from __future__ import annotations

from typing import Any

import msgspec

from eclip.errors import UsageError
from eclip.fleet.config import FleetFile
from eclip.fleet.place.placement import PlacedGpu, Placement
from eclip.fleet.place.spec import GpuId, Service
from eclip.server.config import ServingConfig, make_config
from eclip.server.messages import ModelInfo

# Keys of [server] that routers rely on; the file must not set them.
_OURS = ("host", "http_port", "grpc_port", "topology", "token_file", "tls_cert", "tls_key")


class GpuOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one GPU's server."""

    placed: PlacedGpu
    config: ServingConfig
    guests: int  # routers that may come through its door

    @property
    def gpu(self) -> GpuId:
        return self.placed.gpu


class GpuPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses of a GPU's server, and its loaded models."""

    gpu: GpuId
    host: str  # by which Ray knows its machine
    http: str  # host:port
    grpc: str
    door: str | None  # a path on its machine
    models: dict[str, ModelInfo]
    pid: int
    failed: dict[str, str] = {}  # services that could not be loaded, and why


class RoutingTable(msgspec.Struct, frozen=True, kw_only=True):
    """The places of all servers, and each service's share by GPU, for routers."""

    places: tuple[GpuPlace, ...]
    shares: dict[str, dict[GpuId, float]]  # by service


def orders_of(file: FleetFile, placement: Placement) -> dict[GpuId, GpuOrder]:
    return {placed.gpu: order_of(file, placed) for placed in placement.gpus}


def order_of(file: FleetFile, placed: PlacedGpu) -> GpuOrder:
    services = {service.name: service for service in file.fleet.services}
    entries = [
        _entry(services[instance.service], instance.rate_rps, file.serve.get(instance.service, {}))
        for instance in placed.instances
        if instance.service in services  # a service may have left the file
    ]
    server: dict[str, Any] = {
        "http_port": 0,
        "grpc_port": 0,
        "topology": placed.gpu.kind,
        "policy": placed.policy,  # with which the set was found to keep its bounds
    }
    if file.router.token_file is not None:
        server["token_file"] = file.router.token_file
    for taken in _OURS:
        if taken in file.server:
            raise UsageError(f"[server]: {taken} is set by the fleet; leave it out")
    return GpuOrder(
        placed=placed,
        config=make_config({"server": server | file.server, "service": entries}, str(placed.gpu)),
        guests=file.router.count if file.router.shared_memory else 0,
    )


def join(old: GpuOrder, new: GpuOrder) -> GpuOrder:
    """The new order with all services of the old order, for the time of a move."""
    names = {service.name for service in new.config.services}
    more = tuple(service for service in old.config.services if service.name not in names)
    services = (*new.config.services, *more)
    return msgspec.structs.replace(
        new, config=msgspec.structs.replace(new.config, services=services)
    )


def table_of(placement: Placement, places: dict[GpuId, GpuPlace]) -> RoutingTable:
    shares: dict[str, dict[GpuId, float]] = {}
    for placed in placement.gpus:
        for instance in placed.instances:
            shares.setdefault(instance.service, {})[placed.gpu] = instance.share
    here = tuple(places[placed.gpu] for placed in placement.gpus if placed.gpu in places)
    return RoutingTable(places=here, shares=shares)


def _entry(service: Service, rate_rps: float, serve: dict[str, Any]) -> dict[str, Any]:
    """A server's [[service]]. A user's own model is planned with the times of the fleet's model."""
    entry: dict[str, Any] = {
        "name": service.name,
        "model": service.model.title,
        "batches": [service.model.batch],
        "bound": f"{service.bound_ms:g}ms",
        "rate": rate_rps,
        "instances": 1,
    }
    if "model" in serve or "file" in serve:
        del entry["model"]
        entry["profile"] = service.model.name
    return entry | serve
