"""Simulated runs made by hand and at random: profiles, plans, loads, and ``run`` for their log."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from eclip.core.calibration import Calibration, Interference
from eclip.core.device import Window
from eclip.core.load import CLOSED_LOOP, Load
from eclip.core.mix import Mix, mix_of
from eclip.core.model_key import parse_model
from eclip.core.plan import ALL_WORKERS, Lane, Plan
from eclip.core.profile import Profile
from eclip.core.program import lower
from eclip.core.runlog import RunLog
from eclip.core.topology import Mask, Topology
from eclip.core.trace import Kernel, Trace, with_traces
from eclip.files import store
from eclip.models.synthetic import synthetic_profile
from eclip.planner.case import Case
from eclip.planner.evaluate import SimEvaluator
from eclip.planner.policies import PolicyOptions
from eclip.planner.problem import Problem
from eclip.sim import device as sim

H200 = store.load_builtin("h200", Topology)
MI50 = store.load_builtin("mi50", Topology)
CALIBRATIONS = {
    topology.name: store.load_builtin(topology.name, Calibration) for topology in (H200, MI50)
}
# Kernels wait for each other's units and share bandwidth, and that is all.
NO_SHARING = Interference(cohabit=0.0, crowding=0.0, presence=0.0, pressure=0.0)
FULL = {"seconds": 0.02, "warmup_seconds": 0.0, "trace_ms": 20.0}


def free(
    topology: Topology = MI50, sharing: Interference = NO_SHARING, **costs: int
) -> Calibration:
    """The calibration with every cost but these at 0, and 1000 bytes/ns of memory."""
    calibration = CALIBRATIONS[topology.name]
    none = dict.fromkeys(calibration.costs.__struct_fields__, 0) | {"turn_ns": 1_000_000}
    return msgspec.structs.replace(
        calibration,
        costs=msgspec.convert(none | costs, type(calibration.costs)),
        interference=sharing,
        memory=msgspec.structs.replace(
            calibration.memory, dram_bytes_per_s=1e12, l2_bytes_per_s=1e12
        ),
    )


def flat_profile(
    name: str,
    busy_ns: Sequence[int],
    topology: Topology = MI50,
    gap_ns: int = 0,
    dram_bytes: int = 0,
    blocks: int = 60_000,
    per_unit: int = 1,
) -> Profile:
    """Kernels that take the same time on any lane, and by default fill every unit to the end."""
    sizes = topology.lane_sizes
    kernel = Kernel(name="k", grid=(blocks, 1, 1), block=(256, 1, 1))
    trace = Trace(model=parse_model(f"{name}:1"), kernels=(kernel,) * len(busy_ns))
    return Profile(
        trace=trace,
        fingerprint=with_traces(topology.fingerprint, [trace]),
        modelled=True,
        source="by hand",
        sizes=sizes,
        request_ns=(sum(busy_ns) + gap_ns * len(busy_ns),) * len(sizes),
        busy_ns=tuple((busy,) * len(sizes) for busy in busy_ns),
        gap_ns=((gap_ns,) * len(sizes),) * len(busy_ns),
        spread_ns=((0,) * len(sizes),) * len(busy_ns),
        dram_bytes=(dram_bytes,) * len(busy_ns),
        l2_bytes=(dram_bytes,) * len(busy_ns),
        blocks_per_unit=(per_unit,) * len(busy_ns),
        footprint=None,
    )


def scaling_profile(
    name: str, busy_ns: Sequence[int], topology: Topology = H200, blocks: int = 60_000
) -> Profile:
    """Kernels that take these times on all units, and the longer the fewer they have."""
    flat = flat_profile(name, busy_ns, topology, blocks=blocks)
    parts = [topology.units / size for size in flat.sizes]
    busy = tuple(tuple(round(time * part) for part in parts) for time in busy_ns)
    request_ns = tuple(sum(column) for column in zip(*busy, strict=True))
    return msgspec.structs.replace(flat, busy_ns=busy, request_ns=request_ns)


@dataclass(frozen=True)
class MadeCase(Case):
    """A case whose kernels for fewer units are given, not looked for."""

    given: tuple[Profile, ...] = ()

    @functools.cached_property
    def others(self) -> tuple[Profile, ...]:
        return self.given


def case_of(
    profiles: Sequence[Profile],
    topology: Topology = H200,
    *,
    mix: Mix | None = None,
    others: Sequence[Profile] = (),
) -> Case:
    """Of profiles made by hand; the mix has their models in this order, and may have rates."""
    return MadeCase(
        mix or mix_of(profile.model for profile in profiles),
        topology,
        CALIBRATIONS[topology.name],
        tuple(profiles),
        given=tuple(others),
    )


def problem_of(profiles: Sequence[Profile], topology: Topology) -> Problem:
    mix = mix_of(profile.model for profile in profiles)
    return Problem(mix, topology, tuple(profiles))


def pinned(profiles: Sequence[Profile], masks: Sequence[str], topology: Topology = MI50) -> Plan:
    """Every worker on one lane of its own."""
    return problem_of(profiles, topology).plan(
        policy="by hand",
        lanes=[Lane(worker, Mask.parse(mask)) for worker, mask in enumerate(masks)],
        choices=[
            np.full(len(profile.trace.kernels), worker, dtype=np.int64)
            for worker, profile in enumerate(profiles)
        ],
        whys=[""] * len(profiles),
        why="",
    )


def arrivals(*times: Sequence[int] | None, seed: int = 0) -> Load:
    return Load(
        label="by hand",
        seed=seed,
        arrivals=tuple(
            CLOSED_LOOP if part is None else np.array(part, dtype=np.int64) for part in times
        ),
    )


def run(
    plan: Plan,
    profiles: Sequence[Profile],
    load: Load,
    calibration: Calibration | None = None,
    **window: float,
) -> RunLog:
    device = sim.SimDevice(plan.topology, calibration or CALIBRATIONS[plan.topology.name])
    with device.open(lower(plan, [profile.trace for profile in profiles]), profiles) as session:
        log = session.run(load, Window(**{**FULL, **window}))
        return msgspec.structs.replace(log, alone_rps=(1.0,) * len(profiles))


def closed(plan: Plan, seed: int = 0) -> Load:
    return arrivals(*[None] * len(plan.workers), seed=seed)


def random_mix(seed: int, topology: Topology) -> list[Profile]:
    rng = np.random.default_rng(seed)
    workers = int(rng.integers(2, 5))
    return [
        synthetic_profile(seed * 10 + index, int(rng.integers(2, 12)), topology, name=f"m{index}")
        for index in range(workers)
    ]


def random_bursts(seed: int, workers: int, begin_ns: int, end_ns: int) -> Load:
    rng = np.random.default_rng(seed)
    return arrivals(
        *(
            np.sort(rng.integers(begin_ns, end_ns, rng.integers(1, 12))).tolist()
            for _ in range(workers)
        ),
        seed=seed,
    )


def random_plan(seed: int, profiles: Sequence[Profile], topology: Topology) -> Plan:
    """Random lanes, some of them of the same slices and some owned by all, and random routes."""
    rng = np.random.default_rng(seed)
    slices = len(topology.slice_units)
    lanes = []
    for owner in [*range(len(profiles)), *rng.integers(-1, len(profiles), 6).tolist()]:
        size = int(rng.integers(1, slices + 1))
        lanes.append(Lane(owner, Mask(rng.choice(slices, size, replace=False).tolist())))
    choices = []
    for worker, profile in enumerate(profiles):
        mine = [n for n, lane in enumerate(lanes) if lane.owner in (worker, ALL_WORKERS)]
        choices.append(rng.choice(mine, len(profile.trace.kernels)).astype(np.int64))
    return problem_of(profiles, topology).plan(
        policy="random", lanes=lanes, choices=choices, whys=[""] * len(profiles), why=""
    )


def options_for(
    problem: Problem, calibration: Calibration | None = None, **given: Any
) -> PolicyOptions:
    """Options with which every policy can plan, search too, and quickly."""
    calibration = calibration or store.load_builtin(problem.topology.name, Calibration)
    evaluator = SimEvaluator(problem.topology, problem.profiles, calibration)
    return PolicyOptions(evaluator=evaluator, batches=1, **given)
