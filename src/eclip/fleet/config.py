"""The fleet's file: TOML in, a checked fleet and its kinds of GPUs out.

    objective = "fewest"              # or goodput, energy

    [[service]]
    name = "search"
    model = "bert:1"
    rate = 300                        # requests/s
    bound = "5ms"                     # on the p99
    instances = 2                     # at least; 1 unless given
    weight = 1.0                      # for the objective goodput

    [[gpus]]
    machine = "node-1"
    kind = "h200"                     # a topology by name, or its file
    count = 8

Unknown keys are refused: a typo must not pass for a wish.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from eclip.artefacts.mix import read_bound
from eclip.artefacts.model_key import parse_model
from eclip.errors import ArtefactError, UsageError
from eclip.fleet.scores import GpuKind
from eclip.fleet.spec import Fleet, GpuGroup, Service, check_fleet
from eclip.frontends.library import find_profile
from eclip.lab.case import find_calibration, find_topology


class _ServiceEntry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    model: str
    rate: float
    bound: str
    weight: float = 1.0
    instances: int = 1


class _GpusEntry(msgspec.Struct, forbid_unknown_fields=True):
    machine: str
    kind: str
    count: int = 1


class _File(msgspec.Struct, forbid_unknown_fields=True):
    service: list[_ServiceEntry] = []
    gpus: list[_GpusEntry] = []
    objective: str = "fewest"


def load_fleet(path: Path) -> tuple[Fleet, str]:
    """The fleet of a file, and the objective it names."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        entries = msgspec.convert(raw, _File)
    except OSError as error:
        raise ArtefactError(f"cannot read {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ArtefactError(f"{path}: {error}") from None
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
    return check_fleet(Fleet(services=services, gpus=groups)), entries.objective


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
