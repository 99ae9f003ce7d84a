"""Scores: the performance of a set of services on a GPU.

There are three functions, each more expensive than the one before:

- ``may_fit``: a limit from profiles alone. Only impossible sets are refused: too much memory, a
  request that takes longer than its bound, more work than the units have time for.
- ``estimate``: a coarse simulation, request by request (``coarse.py``), for guiding a search.
- ``score``: the simulator, kernel by kernel, with the plan that would be deployed. Only the score
  counts. Each set is simulated once and remembered.

A score assumes Poisson arrivals at the rates, which are rounded up to steps of 4.4%; warm
instances; the calibration's GPU; a p99 over the requests of one run. The plan's policy is ``yield``
(least slack first) or ``shared`` (plain streams), the first that keeps the bounds.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from eclip.core.calibration import Calibration
from eclip.core.load import Load, closed_loop, load_of_mix
from eclip.core.memory import WorkerMemory, memory_of
from eclip.core.mix import MAX_WORKERS, Bound, Mix, MixWorker
from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan, unpartitioned
from eclip.core.profile import Profile
from eclip.core.shapes import Poisson
from eclip.core.topology import Topology
from eclip.errors import ArtefactError
from eclip.files import store
from eclip.files.encoding import encode_json
from eclip.fleet.place.coarse import Floats, most_late, p99, tail_coarsely
from eclip.planner import policies
from eclip.planner.joints import GRAIN_NS
from eclip.planner.problem import Problem
from eclip.progress import Progress
from eclip.sim.contention import Ints
from eclip.sim.device import Glimpse, glimpse
from eclip.sim.tables import KernelTables

MARK = b"eclip fleet scores"  # in files of them
_EDITION = 3  # of how a set is simulated: scores of another one are not taken over
POLICIES = ("yield", "shared")
CLEARLY = 1.2  # times a bound, by the coarse simulation: further off than it errs
_STEPS = 16  # of a rate, to the doubling
_PROMISED = 500  # requests of the service with the fewest: a bound is on a p99
_WARMUP = 0.25  # of the window
_BACK_TO_BACK = 12  # requests of the slowest, to measure what a pair costs
_NEVER_NS = 1e18  # a latency, finite so that it can be written to a file
_STARVED = 100.0  # times longer: beside some, a model gets nothing done
# What the coarse simulation leaves out, on the mean of random sets (lab/fleet.py coarse).
_BIAS = {"yield": 1.0, "shared": 1.02}


class Member(msgspec.Struct, frozen=True, order=True):
    """An instance as a score sees it: nothing of its service's name."""

    model: ModelKey
    rate_rps: float
    bound_ms: float


Members = tuple[Member, ...]  # sorted


class SetScore(msgspec.Struct, frozen=True, kw_only=True):
    """The score of a set on one GPU; tuples have an entry for every member, in their order."""

    policy: str
    p99_ms: tuple[float, ...]
    within: tuple[float, ...]  # the part of the requests that is answered within the bound
    power_w: float
    worst: float  # the largest p99 over bound

    @property
    def kept(self) -> bool:
        return self.worst <= 1


@dataclass(frozen=True)
class GpuKind:
    """A kind of GPU, with the profiles of all models that may run there."""

    topology: Topology
    calibration: Calibration
    profiles: Mapping[ModelKey, Profile]

    def request_ns(self, model: ModelKey) -> float:
        return float(self.profiles[model].request_ns[-1])

    @functools.cached_property
    def unit_time_ns(self) -> dict[ModelKey, float]:
        """The device time of a request of each model, if its work were spread over all units."""
        return {model: unit_time_ns(profile) for model, profile in self.profiles.items()}

    @functools.cached_property
    def number(self) -> dict[ModelKey, int]:
        """Every model's index in arrays over models."""
        return {model: number for number, model in enumerate(self.profiles)}

    @functools.cached_property
    def tables(self) -> KernelTables:
        """The tables of all models, in the order of ``number``."""
        return KernelTables(list(self.profiles.values()), self.calibration)

    def tables_of(self, models: Iterable[ModelKey]) -> KernelTables:
        return self.tables.of([self.number[model] for model in models])

    @functools.cached_property
    def drain_ns(self) -> Floats:
        """The time in flight of a yielding request of each model: a stretch, or a longer kernel."""
        longest = [max(row[-1] for row in profile.busy_ns) for profile in self.profiles.values()]
        return np.maximum(np.array(longest, dtype=np.float64), GRAIN_NS)

    def digest(self, most_kernels: float) -> str:
        """A digest of all inputs of a score besides its set."""
        told = (_EDITION, self.topology, self.calibration, most_kernels, _PROMISED, _WARMUP)
        digest = hashlib.sha256(msgspec.json.encode(told, enc_hook=str))
        for model in sorted(self.profiles):
            profile = self.profiles[model]
            digest.update(msgspec.json.encode((profile.trace.digest, profile.request_ns)))
        return digest.hexdigest()

    def memory_bytes(self, model: ModelKey) -> int:
        footprint = self.profiles[model].footprint
        return 0 if footprint is None else footprint.total_bytes


class KeptScores(msgspec.Struct, frozen=True, kw_only=True):
    title: str = MARK.decode()
    digests: dict[str, str]  # by kind: of the inputs of its scores
    entries: tuple[tuple[str, Members, SetScore], ...]


def decode_scores(data: bytes, where: str) -> KeptScores:
    try:
        kept = msgspec.json.decode(data, type=KeptScores)
        for _, members, score in kept.entries:
            if {len(score.p99_ms), len(score.within)} != {len(members)}:
                raise msgspec.ValidationError("a score has not as many entries as its set")
        return kept
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArtefactError(f"{where} does not hold scores: {error}; remove it") from None


def unit_time_ns(profile: Profile) -> float:
    """A request's time on the whole device, each kernel counted by the part of it that it fills."""
    units = profile.sizes[-1]
    filled = np.minimum(profile.waves_at(units), 1.0)
    return float((profile.busy_at(units) * filled).sum())


def rounded_up(rate_rps: float) -> float:
    """To a step of the grid of rates, so that sets meet again."""
    return float(2.0 ** (math.ceil(_STEPS * math.log2(rate_rps) - 1e-9) / _STEPS))


def may_fit(kind: GpuKind, members: Members) -> bool:
    """Whether anything speaks against it by the profiles alone."""
    if len(members) > MAX_WORKERS:
        return False
    work = 0.0
    for member in members:
        request_ns = kind.request_ns(member.model)
        if request_ns > member.bound_ms * 1e6 or request_ns * member.rate_rps >= 1e9:
            return False
        work += kind.unit_time_ns[member.model] * member.rate_rps
    if work >= 1e9:
        return False
    workers = [
        WorkerMemory(name=str(member.model), footprint=kind.profiles[member.model].footprint)
        for member in members
    ]
    return memory_of(kind.topology, workers, lanes=0).fits


@dataclass
class Scorer:
    """Scores of sets, remembered. ``most_kernels`` bounds the length of one simulation."""

    kinds: Mapping[str, GpuKind]
    most_kernels: float = 1e6
    scores: dict[tuple[str, Members], SetScore] = field(default_factory=dict)
    simulated: int = 0  # simulations run
    _estimates: dict[tuple[str, Members], float] = field(default_factory=dict)
    _joules: dict[tuple[str, ModelKey], float] = field(default_factory=dict)
    _slower: dict[str, Floats] = field(init=False)  # NaN where not measured

    def __post_init__(self) -> None:
        self._slower = {
            name: np.full((len(kind.number), len(kind.number)), np.nan)
            for name, kind in self.kinds.items()
        }

    def estimate(self, kind: str, members: Members) -> float:
        """The largest p99 over bound in the coarse simulation, for the first policy that keeps the
        bounds, or the best policy."""
        key = (kind, members)
        if key not in self._estimates:
            worst = math.inf
            if may_fit(self.kinds[kind], members):
                for _, tail in self.coarse_tails(kind, members):
                    worst = min(worst, tail)
                    if worst <= 1 or len(members) == 1:
                        break
            self._estimates[key] = worst
        return self._estimates[key]

    def score(self, kind: str, members: Members) -> SetScore:
        key = (kind, members)
        if key not in self.scores:
            self.scores[key] = self._simulate(kind, members)
        return self.scores[key]

    def score_all(self, sets: Sequence[tuple[str, Members]], progress: Progress) -> list[SetScore]:
        """On all cores: compiled code holds no GIL."""
        new = [one for one in dict.fromkeys(sets) if one not in self.scores]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for number, _ in enumerate(threads.map(lambda one: self.score(*one), new)):
                progress.part(number / len(new))
        return [self.scores[one] for one in sets]

    def remember(self, path: Path) -> None:
        """Take over the scores of a file, if they are of the same profiles and constants."""
        try:
            kept = decode_scores(store.read_bytes(path), str(path))
        except FileNotFoundError:
            return
        except OSError as error:
            raise ArtefactError(f"cannot read {path}: {error.strerror or error}") from None
        for name, digest in self._digests().items():
            if kept.digests.get(name) == digest:
                mine = [entry for entry in kept.entries if entry[0] == name]
                self.scores.update({(kind, members): score for kind, members, score in mine})

    def keep(self, path: Path) -> None:
        """Write all scores, so that no set is simulated twice."""
        entries = tuple(
            (kind, members, score)
            for (kind, members), score in self.scores.items()
            if score.policy  # what profiles refuse is refused again as quickly
        )
        kept = KeptScores(digests=self._digests(), entries=entries)
        store.save_export(path, gzip.compress(encode_json(kept)), MARK)

    def _digests(self) -> dict[str, str]:
        return {name: kind.digest(self.most_kernels) for name, kind in self.kinds.items()}

    def joules(self, kind: str, model: ModelKey) -> float:
        """The energy of a request above an idle GPU's."""
        key = (kind, model)
        if key not in self._joules:
            device = self.kinds[kind]
            seen = glimpse_together(device, [model])
            above_w = seen.power_w - device.calibration.power.idle_w
            self._joules[key] = max(above_w / seen.rates_rps[0], 0.0)
        return self._joules[key]

    def _simulate(self, kind: str, members: Members) -> SetScore:
        best = refused(members)
        if not may_fit(self.kinds[kind], members):
            return best
        tails = dict(self.coarse_tails(kind, members))
        for policy in sorted(POLICIES, key=tails.__getitem__)[: len(members)]:
            if best.policy and tails[policy] > CLEARLY:
                continue
            found = simulate_set(self.kinds[kind], members, policy, self.most_kernels)
            self.simulated += 1
            if found.worst < best.worst:
                best = found
            if best.kept:
                break
        return best

    def policy_of(self, kind: str, members: Members) -> str:
        """The set's policy, by its score or by the coarse simulation."""
        known = self.scores.get((kind, members))
        if known is not None and known.policy:
            return known.policy
        tails = dict(self.coarse_tails(kind, members))
        return min(POLICIES, key=tails.__getitem__)

    def coarse_tails(self, kind: str, members: Members) -> Iterator[tuple[str, float]]:
        """By policy, the largest p99 over bound in the coarse simulation. Values above ``CLEARLY``
        are not exact. Policies are run lazily."""
        device = self.kinds[kind]
        told = (
            *_arrivals(members, window_seconds(device, members, self.most_kernels)),
            np.array([device.request_ns(member.model) for member in members]),
            np.array([member.bound_ms * 1e6 for member in members]),
            *self.beside(kind, members),
        )
        for policy in POLICIES:
            yield policy, _BIAS[policy] * tail_coarsely(*told, policy == "yield", CLEARLY)

    def beside(self, kind: str, members: Members) -> tuple[Floats, Floats]:
        """The members' times in flight when they yield, and the slowdown of each pair."""
        device = self.kinds[kind]
        models = [device.number[member.model] for member in members]
        slower = self._slower[kind][np.ix_(models, models)]
        if np.isnan(slower).any():
            self.measure_pairs(kind, {member.model for member in members})
            slower = self._slower[kind][np.ix_(models, models)]
        return device.drain_ns[models], slower

    def measure_pairs(self, kind: str, models: Iterable[ModelKey]) -> None:
        """Measure all pairs of these models on all cores. Callers do so before a search, which
        needs nearly every pair."""
        device, slower = self.kinds[kind], self._slower[kind]
        pairs = [
            (model, other)
            for model, other in itertools.combinations_with_replacement(sorted(models), 2)
            if np.isnan(slower[device.number[model], device.number[other]])
        ]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            costs = threads.map(lambda pair: measure_pair(device, *pair), pairs)
            for (model, other), (mine, theirs) in zip(pairs, costs, strict=True):
                one, two = device.number[model], device.number[other]
                slower[one, two], slower[two, one] = mine, theirs


def refused(members: Members) -> SetScore:
    """The score of an impossible set."""
    none = (0.0,) * len(members)
    return SetScore(
        policy="", p99_ms=(math.inf,) * len(members), within=none, power_w=0.0, worst=math.inf
    )


def plan_of(kind: GpuKind, members: Members, policy: str, names: Sequence[str] = ()) -> Plan:
    """The plan that would be deployed for the set."""
    mix = _mix_of(members, names)
    profiles = tuple(kind.profiles[member.model] for member in members)
    return policies.make_plan(policy, Problem(mix, kind.topology, profiles))


def simulate_set(
    kind: GpuKind,
    members: Members,
    policy: str,
    most_kernels: float,
    seed: int = 0,
    *,
    whole: bool = False,
) -> SetScore:
    """The simulated score of the set under a policy; ``seed`` draws the arrivals.

    The run ends as soon as a missed bound is certain. The score then covers the requests so far,
    which leaves out later requests in time. ``whole``: the run always goes to its end."""
    seconds = window_seconds(kind, members, most_kernels)
    plan = plan_of(kind, members, policy)
    load = load_of_mix(plan.mix, seconds, _WARMUP * seconds, seed)
    tables = kind.tables_of(member.model for member in members)
    bounds_ns = [member.bound_ms * 1e6 for member in members]
    offered = [
        _offered(load, worker, seconds * 1e9 - bound_ns)
        for worker, bound_ns in enumerate(bounds_ns)
    ]

    def answered(requests: Ints) -> Iterator[Floats]:
        for worker, bound_ns in enumerate(bounds_ns):
            yield _latencies(requests, worker, seconds * 1e9 - bound_ns)

    def is_missed(requests: Ints) -> bool:
        return any(
            np.count_nonzero(took_ns > bound_ns) > most_late(count)
            for took_ns, bound_ns, count in zip(answered(requests), bounds_ns, offered, strict=True)
        )

    seen = glimpse(plan, tables, load, seconds * 1e9, None if whole else is_missed)
    latencies_ns = list(answered(seen.requests))
    if whole or not is_missed(
        seen.requests
    ):  # the run went to its end: unanswered requests count as infinitely late
        latencies_ns = [
            np.append(took_ns, np.full(max(count - len(took_ns), 0), _NEVER_NS))
            for took_ns, count in zip(latencies_ns, offered, strict=True)
        ]
    tails_ms = [p99(took_ns) / 1e6 for took_ns in latencies_ns]
    return SetScore(
        policy=policy,
        p99_ms=tuple(tails_ms),
        within=tuple(
            float(np.mean(took_ns <= bound_ns)) if len(took_ns) else 1.0
            for took_ns, bound_ns in zip(latencies_ns, bounds_ns, strict=True)
        ),
        power_w=seen.power_w,
        worst=max(tail / member.bound_ms for tail, member in zip(tails_ms, members, strict=True)),
    )


def window_seconds(kind: GpuKind, members: Members, most_kernels: float) -> float:
    """How long a set is simulated, on the grid of rates."""
    kernels = [len(kind.profiles[member.model].trace.kernels) for member in members]
    rates = [member.rate_rps for member in members]
    kernels_per_s = sum(rate * count for rate, count in zip(rates, kernels, strict=True))
    longest_s = max(member.bound_ms for member in members) / 1e3
    return rounded_up(max(min(_PROMISED / min(rates), most_kernels / kernels_per_s), 4 * longest_s))


def measure_pair(kind: GpuKind, model: ModelKey, other: ModelKey) -> tuple[float, float]:
    """How much longer each takes beside the other, less 1: both back to back on plain streams."""
    rates = glimpse_together(kind, [model, other]).rates_rps
    mine, theirs = (
        max(1e9 / (rate * kind.request_ns(key)) - 1, 0.0) if rate > 0 else _STARVED
        for rate, key in zip(rates, (model, other), strict=True)
    )
    return mine, theirs


def glimpse_together(kind: GpuKind, models: Sequence[ModelKey]) -> Glimpse:
    """A dozen requests of the slowest, all back to back on plain streams."""
    profiles = [kind.profiles[model] for model in models]
    workers = tuple(MixWorker(name=f"{index}", model=model) for index, model in enumerate(models))
    plan = unpartitioned(kind.topology, profiles, Mix(name="together", workers=workers))
    tables = kind.tables_of(models)
    longest_ns = max(profile.request_ns[-1] for profile in profiles)
    return glimpse(plan, tables, closed_loop(len(models)), _BACK_TO_BACK * longest_ns)


def _mix_of(members: Members, names: Sequence[str] = ()) -> Mix:
    return Mix(
        name=",".join(
            f"{member.model}@{member.rate_rps:.6g}rps/{member.bound_ms:g}ms" for member in members
        ),
        workers=tuple(
            MixWorker(
                name=names[index] if names else f"{index}:{member.model}",
                model=member.model,
                rate_rps=member.rate_rps,
                bound=Bound(ms=member.bound_ms),
            )
            for index, member in enumerate(members)
        ),
    )


def _arrivals(members: Members, seconds: float) -> tuple[Floats, Ints]:
    """The arrivals of ``load_of_mix``, member after member, and the index of each member's first.
    No mix is made: a search calls this a thousand times a second."""
    warmup_s = _WARMUP * seconds
    span_s = seconds + warmup_s
    drawn = [
        _uniform(round(member.rate_rps * span_s, 9), index) for index, member in enumerate(members)
    ]
    first = np.array([0, *itertools.accumulate(map(len, drawn))])
    return (span_s * np.concatenate(drawn) - warmup_s) * 1e9, first


@functools.lru_cache(maxsize=4096)
def _uniform(expected: float, index: int) -> Floats:
    """Arrivals in a span of 1. Rates and spans are on one grid, so the same ones are asked for over
    and over."""
    return Poisson().draw(expected, 1.0, np.random.default_rng([0, index]))


def _offered(load: Load, worker: int, until_ns: float) -> int:
    """Requests that arrive while measured, and early enough to keep their bound."""
    times = load.arrivals[worker]
    assert times is not None
    return int(np.count_nonzero((times >= 0) & (times <= until_ns)))


def _latencies(requests: Ints, worker: int, until_ns: float) -> Floats:
    """Of those of them that were answered."""
    rows = requests[(requests[:, 0] == worker) & (requests[:, 1] <= until_ns)]
    rows = rows[rows[:, 1] >= 0]
    took: Floats = (rows[:, 3] - rows[:, 1]).astype(np.float64)
    return took
