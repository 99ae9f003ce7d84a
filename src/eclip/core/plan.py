"""Plan: for every worker of a mix, which lane each kernel takes.

Lanes belong to the plan and are made once; a variant says, for the workers it is keyed by, how
their kernels are cut into groups (runs on one lane). Always: groups cover a worker's kernels
exactly, two neighbouring groups differ in lane, and a worker uses only its own lanes or the one
owned by all.

A worker may have joints: kernel positions, the same in all variants, at which it reads the board
and goes on, moves to another lane, or yields. It gives way to services, and to background that is
owed its floor. Among services the one with less slack goes first, so no two workers can wait for
each other.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from eclip.core.display import html_table, number
from eclip.core.fingerprint import Fingerprint
from eclip.core.footprint import Footprint
from eclip.core.mix import LONGEST_BOUND_MS, Mix, mix_of
from eclip.core.model_key import ModelKey
from eclip.core.profile import Profile
from eclip.core.topology import Mask, Topology
from eclip.errors import MismatchError

ALL_WORKERS = -1
FOREIGN = -1  # in a rule: services of other sessions on the same device
MOST_DEPTH = 2
P99_GAIN = 0.005  # of an account whose service has a bound on its p99
LEAST_GAIN, MOST_GAIN = 1e-5, P99_GAIN
EVERYTHING = 100  # percent
MOST_VARIANTS = 16  # of one worker: a device keeps an executable for each


# Defaults are left out of files, so that plans without priorities are what they always were.
class Lane(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    owner: int  # index of a worker, or ALL_WORKERS
    mask: Mask
    priority: int = 0  # kernels of a lane with a higher one go first where they compete


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Consecutive kernels on one lane, and how long they should take there undisturbed."""

    lane: int
    kernels: int
    predicted_ns: int


class Assignment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    worker: int
    groups: tuple[Group, ...]

    @property
    def switches(self) -> int:
        return len(self.groups) - 1


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The assignments of a request that starts while these workers, or some of them, are active.

    Of several variants that fit, the one keyed by the fewest workers counts.
    """

    active: tuple[int, ...]
    assignments: tuple[Assignment, ...]


class Slack(enum.Enum):
    """How much time a busy service has left, less what its requests still need."""

    PLENTY = "plenty"
    SOME = "some"
    NONE = "none"


class Rule(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What a worker does at a joint while one of these services is busy.

    It applies if the service has this much slack or less. Between two services it applies if the
    other one has less slack than this one, whatever the level.
    """

    to: tuple[int, ...]  # workers with a promise, or FOREIGN
    slack: Slack = Slack.PLENTY
    lane: int | None = None  # where it moves; None: it yields, and launches nothing


class Joints(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    rename={"rules": "reactions"},  # as files of version 0.1 have it
):
    """Where a worker may give way, and to whom. The head of a request is always a joint."""

    at: tuple[int, ...]  # kernels at which a stretch begins, rising, without 0
    depth: int  # stretches in flight, the running one included
    rules: tuple[Rule, ...]  # the first that applies counts; if none does it goes on
    stretch_ns: tuple[int, ...]  # what each takes, undisturbed on the whole device
    # The longest that runs in one piece, where stretches have copies that are cut into parts; None:
    # none has.
    piece_ns: int | None = None
    floors_first: tuple[int, ...] = ()  # background that it yields to while their floor is owed

    @property
    def longest_ns(self) -> int:
        return max(self.stretch_ns) if self.piece_ns is None else self.piece_ns

    def __post_init__(self) -> None:
        if list(self.at) != sorted(set(self.at)) or (self.at and self.at[0] < 1):
            raise ValueError("joints are rising kernel positions above 0")
        if not 1 <= self.depth <= MOST_DEPTH:
            raise ValueError(f"the depth is 1 to {MOST_DEPTH} stretches, not {self.depth}")
        if len(self.stretch_ns) != len(self.at) + 1 or min(self.stretch_ns) < 0:
            raise ValueError("every stretch needs a time of at least 0 ns")
        if self.piece_ns is not None and not 0 <= self.piece_ns <= max(self.stretch_ns):
            raise ValueError("a piece takes at least 0 ns and no longer than the longest stretch")


class Promise(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What a service is to keep, in times that a joint can compare."""

    bound_ns: int  # of a request, from arrival to completion
    request_ns: int  # that a request takes alone
    some_ns: int  # less slack than this is not plenty
    none_ns: int  # less than this is none
    # Credit for lateness that a request in time earns (core/credit.py); 0: the service has no
    # account, as in plans of version 0.1.
    gain: float = 0.0

    def __post_init__(self) -> None:
        if self.bound_ns < 1 or self.request_ns < 1:
            raise ValueError("a bound and the time of a request are at least 1 ns")
        if self.bound_ns > 1e6 * LONGEST_BOUND_MS:
            raise ValueError("a bound is at most a day")
        if not 0 <= self.none_ns <= self.some_ns:
            raise ValueError("slack limits are at least 0, and none_ns at most some_ns")
        if self.gain and not LEAST_GAIN <= self.gain <= MOST_GAIN:
            raise ValueError(f"a gain is 0, or {LEAST_GAIN} to {MOST_GAIN} of a late request")


class PlannedWorker(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    name: str
    model: ModelKey  # of its trace and profile
    kernels: int
    why: str  # in words, for ``eclip explain``
    footprint: Footprint | None = None  # its profile's; None: not known
    joints: Joints | None = None  # None: it never gives way
    promise: Promise | None = None  # of a service
    floor: float = 0.0  # least part of its rate alone, below which it does not yield

    def __post_init__(self) -> None:
        if not 0 <= self.floor < 1:
            raise ValueError(f"{self.name}: a floor is a part of the rate alone, 0 to below 1")
        if self.joints is not None and self.joints.at and self.joints.at[-1] >= self.kernels:
            raise ValueError(f"{self.name} has a joint behind its last kernel")


class Tradeoff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What background gets in one plan, and what that costs services; simulated."""

    label: str
    background: float  # weighted mean of the parts of their rates alone
    worst_tail: float | None  # largest p99 of a service over its bound; None: no request completed


class ServiceTrial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A service beside others against the same requests alone, in the same session."""

    name: str
    requests: int
    p50_ms: float
    p99_ms: float
    longest_ms: float
    excess_p50_ms: float  # of a request's latency over its latency alone
    excess_p99_ms: float
    excess_longest_ms: float
    p99_ratio: float  # over the p99 alone, with its 95% interval
    p99_ratio_low: float
    p99_ratio_high: float
    busy: float  # part of the time alone in which it had a request


class Trial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one plan gave when it was tried before deployment."""

    label: str
    ratios: tuple[float, ...]  # per worker: rate in the mix over rate alone
    power_w: float  # 0: too short for the energy counter
    p99_ms: tuple[float | None, ...]  # None: no request completed
    chosen: bool
    refused: tuple[str, ...] = ()  # floors and bounds that it missed, in words
    services: tuple[ServiceTrial, ...] = ()  # where they were measured beside running alone


class Evidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a search came to its plan: enough to repeat it, and what was measured."""

    objective: str
    seed: int
    batches: int
    evaluated: int  # plans, by simulation
    tried: int = 0  # plans, each for a moment on the device
    frontier: tuple[
        tuple[float, float], ...
    ]  # (STP, STP·s/kJ) of plans none of which beats another
    device: str  # where the trials ran
    modelled: bool  # ... which was a simulator
    trials: tuple[Trial, ...]
    bounds_ms: tuple[float | None, ...] = ()  # on the p99, one per worker; empty: none were given
    missed: tuple[str, ...] = ()  # promises that the plan does not keep, in words
    tradeoffs: tuple[Tradeoff, ...] = ()  # of services: plans none of which beats another
    # What every simulated plan gave: (STP, STP·s/kJ); for services (background, worst p99 over its
    # bound).
    simulated: tuple[tuple[float, float], ...] = ()

    def check(self, workers: int) -> None:
        """Raise ValueError if this is not the evidence of a plan of so many workers."""
        if sum(trial.chosen for trial in self.trials) != 1:
            raise ValueError("of the trials of a search, one is the chosen plan's")
        if len(self.bounds_ms) != workers and (self.bounds_ms or self.objective == "slo"):
            raise ValueError(f"the evidence of a search needs the bounds of {workers} workers")
        for trial in self.trials:
            if {len(trial.ratios), len(trial.p99_ms)} != {workers}:
                raise ValueError(f"the trial {trial.label!r} needs a ratio and p99 of every worker")


class Lanes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="lanes"):
    """All workers run at once in one process, every kernel group on its lane."""


class Turns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="turns"):
    """Workers take turns of the whole device, as separate processes do."""


class Processes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="processes"):
    """A process for every worker, each on at most its share of the units: NVIDIA's MPS."""

    shares: tuple[int, ...]  # percent, one per worker
    below_normal: tuple[int, ...] = ()  # workers whose clients have less priority than the others

    def __post_init__(self) -> None:
        if not all(1 <= share <= EVERYTHING for share in self.shares):
            raise ValueError(f"a share is 1 to 100 percent, not {self.label}")
        for worker in self.below_normal:
            if not 0 <= worker < len(self.shares):
                raise ValueError(f"worker {worker} has less priority, and does not exist")

    @property
    def label(self) -> str:
        """``60%`` or ``60/30/10%``; with priorities ``100%, 2 below normal``, workers counted
        from 1"""
        distinct = self.shares[:1] if len(set(self.shares)) == 1 else self.shares
        shares = f"{'/'.join(map(str, distinct))}%"
        if not self.below_normal:
            return shares
        return f"{shares}, {'/'.join(str(worker + 1) for worker in self.below_normal)} below normal"


Sharing = Lanes | Turns | Processes


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which lane every kernel of a mix takes on a device, and why. Shows itself in a notebook."""

    mix: Mix
    policy: str
    topology: Topology
    fingerprint: Fingerprint
    modelled: bool  # made from modelled profiles
    workers: tuple[PlannedWorker, ...]
    lanes: tuple[Lane, ...]
    variants: tuple[Variant, ...]
    why: str
    sharing: Sharing = Lanes()
    evidence: Evidence | None = None  # of a search

    def __post_init__(self) -> None:
        if not self.workers or not self.variants:
            raise ValueError("a plan needs at least one worker and one variant")
        if len(self.workers) != len(self.mix.workers):
            raise ValueError("a plan needs one entry for every worker of its mix")
        for worker, wanted in zip(self.workers, self.mix.workers, strict=True):
            if (worker.name, worker.model) != (wanted.name, wanted.model):
                raise ValueError(
                    f"worker {worker.name} ({worker.model}) is not the mix's {wanted.name} "
                    f"({wanted.model})"
                )
        try:
            self.fingerprint.check(self.topology.fingerprint, "the plan", "its topology")
        except MismatchError as error:
            raise ValueError(str(error)) from None
        for index, lane in enumerate(self.lanes):
            if lane.owner != ALL_WORKERS and not 0 <= lane.owner < len(self.workers):
                raise ValueError(f"lane {index} belongs to worker {lane.owner}, who does not exist")
            if not lane.mask:
                raise ValueError(f"lane {index} has an empty mask")
            if lane.priority < 0:
                raise ValueError(f"lane {index} has the priority {lane.priority}; 0 is the lowest")
            self.topology.units_of(lane.mask)
        if isinstance(self.sharing, Processes) and len(self.sharing.shares) != len(self.workers):
            raise ValueError(
                f"{len(self.sharing.shares)} shares given for {len(self.workers)} workers"
            )
        keys = [variant.active for variant in self.variants]
        if len(set(keys)) != len(keys):
            raise ValueError("two variants are keyed by the same workers")
        if self.everyone not in keys:
            raise ValueError("no variant says what to do while every worker is active")
        for variant in self.variants:
            self._check_variant(variant)
        for index in self.everyone:
            self._check_joints(index)
        if self.evidence is not None:
            self.evidence.check(len(self.workers))

    def _check_joints(self, index: int) -> None:
        worker = self.workers[index]
        for other in worker.joints.floors_first if worker.joints else ():
            if worker.promise is not None:
                raise ValueError(f"{worker.name} is a service, and yields to services only")
            if other == index or not 0 <= other < len(self.workers):
                raise ValueError(f"{worker.name} yields to worker {other}; name another one")
            if not self.workers[other].floor:
                raise ValueError(
                    f"{worker.name} yields to {self.workers[other].name}, who has no floor"
                )
        for rule in worker.joints.rules if worker.joints else ():
            if not rule.to:
                raise ValueError(f"{worker.name} has a rule that names no service")
            for other in rule.to:
                if other == index or not FOREIGN <= other < len(self.workers):
                    raise ValueError(f"{worker.name} gives way to worker {other}; name another one")
                if other != FOREIGN and self.workers[other].promise is None:
                    raise ValueError(
                        f"{worker.name} gives way to {self.workers[other].name}, who has no "
                        f"promise to keep"
                    )
            if rule.lane is None:
                continue
            if not 0 <= rule.lane < len(self.lanes):
                raise ValueError(f"{worker.name} moves to lane {rule.lane}; it does not exist")
            if self.lanes[rule.lane].owner not in (index, ALL_WORKERS):
                raise ValueError(f"{worker.name} moves to lane {rule.lane} of another worker")

    def _check_variant(self, variant: Variant) -> None:
        if list(variant.active) != sorted(set(variant.active) & set(self.everyone)):
            raise ValueError(f"a variant is keyed by {variant.active}: not rising worker indices")
        if tuple(part.worker for part in variant.assignments) != variant.active:
            raise ValueError("a variant needs one assignment for each of its workers, in order")
        for part in variant.assignments:
            worker = self.workers[part.worker]
            if worker.kernels < 1:
                raise ValueError(f"{worker.name} has no kernels")
            previous = None
            for group in part.groups:
                if not 0 <= group.lane < len(self.lanes):
                    raise ValueError(f"{worker.name} uses lane {group.lane}, which does not exist")
                if self.lanes[group.lane].owner not in (part.worker, ALL_WORKERS):
                    raise ValueError(f"{worker.name} uses lane {group.lane} of another worker")
                if group.kernels < 1 or group.lane == previous:
                    raise ValueError(
                        f"{worker.name} has an empty group or two in a row on one lane"
                    )
                previous = group.lane
            if sum(group.kernels for group in part.groups) != worker.kernels:
                raise ValueError(f"the groups of {worker.name} do not cover its kernels")

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(len(self.workers)))

    @property
    def models(self) -> tuple[ModelKey, ...]:
        """Of every worker: which profiles, traces and sources it needs."""
        return tuple(worker.model for worker in self.workers)

    @property
    def gives_way(self) -> bool:
        """Some worker has joints, so the device decides while it runs."""
        return any(worker.joints is not None for worker in self.workers)

    @property
    def has_tiers(self) -> bool:
        """Some worker gives way or has a promise, so other processes may want to know."""
        return self.gives_way or any(worker.promise is not None for worker in self.workers)

    @property
    def has_accounts(self) -> bool:
        """Some service has an account of its lateness (core/credit.py)."""
        return any(worker.promise is not None and worker.promise.gain for worker in self.workers)

    @property
    def main(self) -> Variant:
        """The variant for all workers active."""
        return next(variant for variant in self.variants if variant.active == self.everyone)

    @property
    def aliased(self) -> bool:
        """More lanes than hardware queues: some will wait on each other for no reason."""
        apart = not isinstance(self.sharing, Lanes)  # every process has all queues to itself
        return not apart and len(self.lanes) > self.topology.hardware_queues

    def __repr__(self) -> str:
        return (
            f"Plan({self.policy} for {self.mix.name} on {self.topology.name}, "
            f"{len(self.workers)} workers, {len(self.lanes)} lanes, "
            f"{sum(part.switches for part in self.main.assignments)} switches)"
        )

    def _repr_html_(self) -> str:
        unit = self.topology.unit_name
        return html_table(
            f"{self.policy} for {self.mix.name} on {self.topology.title}: {self.why}",
            ["worker", "kernels", "groups", f"{unit}s", "ms undisturbed"],
            (
                [
                    self.workers[part.worker].name,
                    str(self.workers[part.worker].kernels),
                    str(len(part.groups)),
                    "/".join(map(str, sorted({self.units(group.lane) for group in part.groups}))),
                    number(sum(group.predicted_ns for group in part.groups) / 1e6, 3),
                ]
                for part in self.main.assignments
            ),
        )

    def time_by_units(self, part: Assignment) -> dict[int, float]:
        """The part of a request's time that it spends on lanes of each size."""
        total = sum(group.predicted_ns for group in part.groups) or 1
        shares: dict[int, float] = {}
        for group in part.groups:
            units = self.units(group.lane)
            shares[units] = shares.get(units, 0.0) + group.predicted_ns / total
        return shares

    def confines(self, worker: int) -> bool:
        """Whether a lane of the worker leaves units out: then it may be slower even alone."""
        return any(
            lane.owner == worker and self.units(index) < self.topology.units
            for index, lane in enumerate(self.lanes)
        )

    def units(self, lane: int) -> int:
        return self.topology.units_of(self.lanes[lane].mask)


def account_warnings(plan: Plan) -> tuple[str, ...]:
    """What a plan of a search lacks that was made before there were accounts (core/credit.py)."""
    rules = any(worker.joints and worker.joints.rules for worker in plan.workers)
    if plan.policy != "search" or not rules or plan.has_accounts:
        return ()
    return (
        "the plan was made by an eclip without accounts of lateness: its rules hold whatever its "
        "services get; plan again",
    )


def fingerprint_of(topology: Topology, profiles: Sequence[Profile]) -> Fingerprint:
    """What a plan for these profiles must find again where it runs. Digests are taken from the
    profiles, which hold those of their own traces: hashing kernels again takes milliseconds."""
    for profile in profiles:
        profile.fingerprint.check(
            topology.fingerprint, f"the profile of {profile.model}", topology.title
        )
    return msgspec.structs.replace(
        topology.fingerprint,
        traces={key: own for one in profiles for key, own in one.fingerprint.traces.items()},
        driver=profiles[0].fingerprint.driver,
        libraries=profiles[0].fingerprint.libraries,
    )


def unpartitioned(topology: Topology, profiles: Sequence[Profile], mix: Mix | None = None) -> Plan:
    """Every worker on a lane of its own with all units: plain streams, and what "alone" means."""
    mix = mix or mix_of(profile.model for profile in profiles)
    return Plan(
        mix=mix,
        policy="shared",
        topology=topology,
        fingerprint=fingerprint_of(topology, profiles),
        modelled=any(profile.modelled for profile in profiles),
        workers=tuple(
            PlannedWorker(
                name=worker.name,
                model=profile.model,
                kernels=len(profile.trace.kernels),
                why=f"every kernel may use all {topology.units} {topology.unit_name}s",
                footprint=profile.footprint,
            )
            for worker, profile in zip(mix.workers, profiles, strict=True)
        ),
        lanes=tuple(Lane(index, topology.full) for index in range(len(profiles))),
        variants=(
            Variant(
                active=tuple(range(len(profiles))),
                assignments=tuple(
                    Assignment(
                        index, (Group(index, len(profile.trace.kernels), profile.request_ns[-1]),)
                    )
                    for index, profile in enumerate(profiles)
                ),
            ),
        ),
        why="plain streams: the hardware shares the units as kernels come",
    )
