"""Random cases of services beside background work, and devices that differ from the calibration.

A seed gives a case: 1 to 3 services at a load of 0.1 to 0.7 in sum, with bounds of 1.1 to 3 times
their p99 alone, beside 1 or 2 background workers. Models are the built-in ones and synthetic ones.
Background may also be a training step, a model with kernels of up to 4 ms, or a model with copies.

A seed gives a device: constants and kernel times as far from the calibration as measurements on an
H200 were from the simulator, and stalls of the host. Kernels, and so traces, are the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from eclip.core.calibration import Calibration
from eclip.core.copies import Copy
from eclip.core.mix import Background, Bound, Mix, MixWorker
from eclip.core.model_key import ModelKey
from eclip.core.profile import Profile
from eclip.core.topology import Topology
from eclip.core.trace import Trace, with_traces
from eclip.models.library import find_profile
from eclip.models.modelled import model_names
from eclip.models.synthetic import synthetic_profile
from eclip.planner.case import Case, find_calibration, find_topology

Ints = npt.NDArray[np.int64]

LOADS, BOUNDS = (0.1, 0.7), (1.1, 3.0)
_SERVICES, _BACKGROUND = (0.6, 0.25, 0.15), (0.8, 0.2)  # shares of cases with 1, 2 (and 3)
_LINK_BYTES_PER_NS = 50.0
# Of a device: rates are off by 5%, host times by up to 3 times, and a neighbour costs so much more
# that tails become up to 1.9 times those simulated, 1.14 times in the middle.
_RATE_OFF, _KERNEL_OFF, _COST_OFF = 0.05, 0.05, 0.4
_MOST_TAIL, _TAIL_SKEW = 1.9, 2.7
_STALL_NS = (1e6, 12e6)
_STALLS_PER_S = (0.02, 0.5)


@dataclass(frozen=True)
class RandomCase:
    seed: int
    case: Case
    load: float  # of all services together
    kinds: tuple[str, ...]  # of every worker


@dataclass(frozen=True)
class DrawnDevice:
    """``seed`` 0: the calibration itself, without stalls."""

    seed: int
    calibration: Calibration
    stalls_per_s: float

    def profile(self, profile: Profile) -> Profile:
        """The same kernels at this device's times; equal models get equal times."""
        if not self.seed:
            return profile
        name = zlib.crc32(str(profile.model.usual).encode())
        random = np.random.default_rng([self.seed, name])
        whole = float(np.clip(random.normal(1.0, _RATE_OFF), 0.85, 1.15))
        each = np.exp(random.normal(0.0, _KERNEL_OFF, 20_000))[: len(profile.trace.kernels)]
        busy = np.maximum(np.rint(np.array(profile.busy_ns) * (whole * each)[:, None]), 1)
        return _with_times(profile, busy.astype(np.int64), np.array(profile.gap_ns))

    def stalls(self, seconds: float, warmup: float, worker: int, seed: int) -> Ints:
        """Rows of begin and end, in ns; the host launches nothing for the worker in between."""
        random = np.random.default_rng([self.seed, worker, seed])
        count = random.poisson(self.stalls_per_s * (seconds + warmup))
        begins = np.sort(random.uniform(-warmup, seconds, count)) * 1e9
        shortest, longest = np.log(_STALL_NS)
        took = np.exp(random.uniform(shortest, longest, count))
        return np.stack([begins, begins + took], axis=1).astype(np.int64)


def draw_case(seed: int) -> RandomCase:
    topology = find_topology("h200")
    calibration = find_calibration(None, topology)
    random = np.random.default_rng([seed, 32])
    services = 1 + int(random.choice(3, p=_SERVICES))
    background = 1 + int(random.choice(2, p=_BACKGROUND))
    load = float(random.uniform(*LOADS))
    parts = random.dirichlet([4.0] * services) * load
    workers, profiles, kinds = [], [], []
    for index, part in enumerate(parts):
        kind, profile = _service(topology, calibration, random, index)
        bound = Bound(times_alone=round(float(np.exp(random.uniform(*np.log(BOUNDS)))), 2))
        rate_rps = float(f"{part * 1e9 / profile.request_ns[-1]:.3g}")
        workers.append(
            MixWorker(name=f"s{index}", model=profile.model, rate_rps=rate_rps, bound=bound)
        )
        profiles.append(profile)
        kinds.append(kind)
    for index in range(background):
        kind, profile = _job(topology, calibration, random, index)
        workers.append(MixWorker(name=f"b{index}", model=profile.model, background=Background()))
        profiles.append(profile)
        kinds.append(kind)
    mix = Mix(name=f"random {seed}", workers=tuple(workers))
    case = Case(mix, topology, calibration, tuple(profiles))
    return RandomCase(seed, case, load, tuple(kinds))


def draw_device(calibration: Calibration, seed: int) -> DrawnDevice:
    if not seed:
        return DrawnDevice(0, calibration, 0.0)
    random = np.random.default_rng([seed, 33])
    costs, sharing = calibration.costs, calibration.interference
    times = {
        name: round(
            getattr(costs, name) * float(np.clip(np.exp(random.normal(0, _COST_OFF)), 0.4, 3.0))
        )
        for name in ("launch_ns", "joint_ns", "notice_ns", "hold_ns", "barrier_ns", "switch_ns")
    }
    tail = 1 + (_MOST_TAIL - 1) * float(random.uniform()) ** _TAIL_SKEW
    rates = {
        name: getattr(calibration.memory, name) * float(random.normal(1.0, _RATE_OFF))
        for name in ("dram_bytes_per_s", "l2_bytes_per_s")
    }
    stalls = np.exp(random.uniform(*np.log(_STALLS_PER_S))) if random.uniform() < 0.5 else 0.0
    return DrawnDevice(
        seed,
        msgspec.structs.replace(
            calibration,
            costs=msgspec.structs.replace(costs, **times),
            interference=msgspec.structs.replace(
                sharing,
                crowding=sharing.crowding * float(np.exp(random.normal(0, _COST_OFF))),
                presence=sharing.presence + tail - 1,
                pressure=sharing.pressure * tail,
            ),
            memory=msgspec.structs.replace(calibration.memory, **rates),
        ),
        float(stalls),
    )


def begun_after(arrivals: Ints, stalls: Ints) -> Ints:
    """When the host can begin each request: at its arrival, or at the end of the stall it fell in.
    The result rises."""
    begun = arrivals.copy()
    for begin, end in stalls.tolist():
        begun[(begun >= begin) & (begun < end)] = end
    return np.maximum.accumulate(begun - np.arange(len(begun))) + np.arange(len(begun))


def _service(
    topology: Topology, calibration: Calibration, random: np.random.Generator, index: int
) -> tuple[str, Profile]:
    if random.uniform() < 0.7:
        key = ModelKey(str(random.choice(model_names())), int(random.choice([1, 1, 8])))
        kind, profile = "built in", find_profile(key, topology, calibration, ())
    else:
        kind = "synthetic"
        kernels = int(np.exp(random.uniform(np.log(20), np.log(300))))
        seed = int(random.integers(1 << 30))
        profile = synthetic_profile(seed, kernels, topology, f"service{index}")
    if random.uniform() < 0.2:
        kind += ", copies"
        profile = _with_copies(profile, random, f"{profile.model.name}.in", (0.1e6, 4e6))
    return kind, profile


def _job(
    topology: Topology, calibration: Calibration, random: np.random.Generator, index: int
) -> tuple[str, Profile]:
    kind = str(random.choice(["built in", "synthetic", "training", "long kernels", "copies"]))
    key = ModelKey(str(random.choice(model_names())), int(random.choice([8, 32])))
    kernels = int(np.exp(random.uniform(np.log(30), np.log(600))))
    seed = int(random.integers(1 << 30))
    if kind in ("built in", "training", "copies"):
        profile = find_profile(key, topology, calibration, ())
    else:
        profile = synthetic_profile(seed, kernels, topology, f"job{index}")
    if kind == "training":
        profile = _training_step(profile, random)
    elif kind == "long kernels":
        profile = _with_long_kernels(profile, random)
    elif kind == "copies":
        profile = _with_copies(profile, random, f"{key.name}.loaded", (4e6, 200e6))
    return kind, profile


def _training_step(profile: Profile, random: np.random.Generator) -> Profile:
    """Forward, backward at twice the times, and kernels of an optimizer that move weights."""
    kernels = len(profile.trace.kernels)
    forward = np.arange(kernels)
    updates = random.choice(kernels, size=min(kernels, 30))
    order = np.concatenate([forward, forward[::-1], updates])
    factor = np.concatenate([np.ones(kernels), np.full(kernels, 2.0), np.ones(len(updates))])
    return _rebuilt(profile, f"{profile.model.name}.step", order, factor)


def _with_long_kernels(profile: Profile, random: np.random.Generator) -> Profile:
    """A twentieth of the kernels, one at least, takes 0.3 to 4 ms."""
    kernels = len(profile.trace.kernels)
    factor = np.ones(kernels)
    whole = np.array(profile.busy_ns)[:, -1]
    for kernel in random.choice(kernels, size=max(1, kernels // 20), replace=False):
        wanted_ns = np.exp(random.uniform(np.log(0.3e6), np.log(4e6)))
        factor[kernel] = max(1.0, wanted_ns / whole[kernel])
    return _rebuilt(profile, f"{profile.model.name}.long", np.arange(kernels), factor)


def _rebuilt(profile: Profile, name: str, order: Ints, factor: npt.NDArray[np.float64]) -> Profile:
    """A model of these kernels in this order, each so many times as long."""
    trace = Trace(
        model=ModelKey(name, profile.model.batch),
        kernels=tuple(profile.trace.kernels[kernel] for kernel in order.tolist()),
    )
    busy = np.maximum(np.rint(np.array(profile.busy_ns)[order] * factor[:, None]), 1)
    busy = busy.astype(np.int64)

    def column(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(np.array(values)[order].tolist())

    def moved(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(np.rint(np.array(values)[order] * factor).astype(np.int64).tolist())

    gap = np.array(profile.gap_ns)[order]
    return Profile(
        trace=trace,
        fingerprint=with_traces(profile.fingerprint, [trace]),
        modelled=True,
        source=f"{profile.model}, rearranged",
        sizes=profile.sizes,
        request_ns=_sums(busy, gap),
        busy_ns=_table(busy),
        gap_ns=_table(gap),
        spread_ns=_table(np.zeros_like(gap)),
        dram_bytes=moved(profile.dram_bytes),
        l2_bytes=moved(profile.l2_bytes),
        blocks_per_unit=column(profile.blocks_per_unit),
        footprint=profile.footprint,
        illegal=tuple(
            (place, size)
            for place, kernel in enumerate(order.tolist())
            for refused, size in profile.illegal
            if refused == kernel
        ),
    )


def _with_copies(
    profile: Profile, random: np.random.Generator, name: str, sizes: tuple[float, float]
) -> Profile:
    """Inputs come from the host before the first kernel, and a tenth goes back behind the last."""
    size = int(np.exp(random.uniform(*np.log(sizes))))
    kernels = len(profile.trace.kernels)
    copies = tuple(
        Copy(before=at, to_device=at == 0, bytes=part, ns=round(part / _LINK_BYTES_PER_NS))
        for at, part in ((0, size), (kernels, max(1, size // 10)))
    )
    trace = Trace(model=ModelKey(name, profile.model.batch), kernels=profile.trace.kernels)
    gap = np.array(profile.gap_ns)
    gap[-1] += sum(copy.ns for copy in copies)
    return msgspec.structs.replace(
        profile,
        trace=trace,
        fingerprint=with_traces(profile.fingerprint, [trace]),
        modelled=True,
        request_ns=_sums(np.array(profile.busy_ns), gap),
        gap_ns=_table(gap),
        energy_uj=(),
        copies=copies,
    )


def _with_times(profile: Profile, busy: Ints, gap: Ints) -> Profile:
    return msgspec.structs.replace(
        profile,
        request_ns=_sums(busy, gap),
        busy_ns=_table(busy),
        gap_ns=_table(gap),
        energy_uj=(),
        tail_ns=(),
    )


def _sums(busy: Ints, gap: Ints) -> tuple[int, ...]:
    return tuple((busy.sum(axis=0) + gap.sum(axis=0)).tolist())


def _table(values: Ints) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, values.tolist()))
