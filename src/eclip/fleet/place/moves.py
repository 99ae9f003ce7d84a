"""Moves: the steps from the running placement to another.

A new copy is ready before the old copy goes: a GPU whose set changes opens its next session beside
the running session, and needs memory for both. If both do not fit, the old set goes first, and its
services are served elsewhere or not at all while the new set loads; ``Change.beside`` is False.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from eclip.core.memory import WorkerMemory, memory_of
from eclip.core.model_key import ModelKey
from eclip.fleet.place.placement import PlacedGpu, Placement
from eclip.fleet.place.scores import GpuKind
from eclip.fleet.place.spec import Fleet, GpuId

LOAD_BYTES_PER_S = 2e9  # assumed: weights from a local disk over PCIe
START_S = 4.0  # assumed: capture, warm-up and opening a session


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of one GPU."""

    gpu: GpuId
    load: tuple[str, ...]  # services whose instance is new here
    unload: tuple[str, ...]
    load_s: float  # until the new set is ready
    both_bytes: int  # of the old and the new set together
    memory_bytes: int  # that the GPU has
    beside: bool  # there is memory for both; otherwise the old set goes first


class Moves(msgspec.Struct, frozen=True, kw_only=True):
    changes: tuple[Change, ...]  # GPUs that load first, then those that only unload
    instances: int  # that are loaded anew
    load_s: float  # of the slowest GPU; GPUs load at the same time
    assumed: str = (
        f"weights load at {LOAD_BYTES_PER_S / 1e9:g} GB/s, a session takes {START_S:g} s to open"
    )


def moves_between(
    old: Placement, new: Placement, fleet: Fleet, kinds: Mapping[str, GpuKind]
) -> Moves:
    """The steps of GPUs whose set changes, with the memory that they need meanwhile. An instance
    that stays with another share of its rate is not moved."""
    models = {service.name: service.model for service in fleet.services}
    before = {placed.gpu: placed for placed in old.gpus}
    after = {placed.gpu: placed for placed in new.gpus}
    changes = []
    for gpu in sorted(before.keys() | after.keys()):
        was, will = _services(before.get(gpu)), _services(after.get(gpu))
        if was.keys() == will.keys():
            continue
        changes.append(_change(gpu, was, will, models, kinds[gpu.kind]))
    changes.sort(key=lambda change: (not change.load, change.gpu))
    return Moves(
        changes=tuple(changes),
        instances=sum(len(change.load) for change in changes),
        load_s=max((change.load_s for change in changes), default=0.0),
    )


def _services(placed: PlacedGpu | None) -> dict[str, float]:
    return {} if placed is None else placed.shares


def _change(
    gpu: GpuId,
    was: Mapping[str, float],
    will: Mapping[str, float],
    models: Mapping[str, ModelKey],
    kind: GpuKind,
) -> Change:
    load = tuple(name for name in will if name not in was)
    weights_bytes = sum(
        footprint.weights_bytes
        for name in load
        if (footprint := kind.profiles[models[name]].footprint) is not None
    )
    known = [name for name in (*was, *will) if name in models]  # a service may have gone
    need = memory_of(
        kind.topology,
        [
            WorkerMemory(name=name, footprint=kind.profiles[models[name]].footprint)
            for name in known
        ],
        lanes=0,
    )
    return Change(
        gpu=gpu,
        load=load,
        unload=tuple(name for name in was if name not in will),
        load_s=START_S + weights_bytes / LOAD_BYTES_PER_S if will else 0.0,
        both_bytes=need.total_bytes,
        memory_bytes=need.capacity_bytes,
        beside=need.fits,
    )
