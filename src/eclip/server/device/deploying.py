"""Deploying: from a configuration and rates to specs for the fronts and a plan for the device.

Every instance of a service has a worker per bucket in the plan. All buckets of an instance behave
alike at joints, so a search looks at one worker an instance, at the bucket that its rate asks for,
and the rules that it finds go for all of them.

A bound goes from a request's last byte to its answer. What a bucket takes with the device to itself
must be within it; a bucket that is not is left out, or refused where it was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from eclip.core.memory import WorkerMemory, memory_of
from eclip.core.mix import MAX_WORKERS, Background, Bound, Mix, MixWorker
from eclip.core.model_key import ModelKey, parse_model
from eclip.core.plan import Plan, Promise, unpartitioned
from eclip.core.profile import Profile
from eclip.errors import UsageError
from eclip.files import store
from eclip.models.files import name_of
from eclip.planner.alone import p99_alone_ns
from eclip.planner.case import Case
from eclip.planner.evaluate import SimEvaluator
from eclip.planner.joints import JointRules, promise_of
from eclip.planner.policies import make_plan
from eclip.planner.search.giving import search_rules
from eclip.planner.search.objective import Objective
from eclip.planner.search.proposals import Proposer
from eclip.server.config import MOST_BATCH, YIELD, ServiceSettings, ServingConfig
from eclip.server.control import Deployment, ServiceSpec
from eclip.server.device.claim import shares_gpu
from eclip.server.device.host import ServingHost, find_host
from eclip.server.device.models import (
    check_file,
    check_model,
    function_of,
    info_of,
    slots_of,
    tensors_of,
)
from eclip.server.device.parts import Parts
from eclip.server.log import ServerLog

_USUAL_BATCHES = (1, 8, 32, 4, 2, 16)  # the most useful first
_FEW = 3  # of them, before there are more instances
_PACE = "squeezenet"  # whose times a CPU function takes unless told otherwise
_ASSUMED_LOAD = 0.2  # of what a service could do alone, where no rate is given
_EASY_LOAD = 0.6  # the smallest bucket that is busy no more than this is what a rate asks for
# Of one instance, by what its smallest bucket takes alone. Beside others that is two to three times
# as long, and rates may grow by half before there is another plan: so it is half busy at most.
_EASY_ALONE = 0.15
_STOPS_NS = 2_000_000  # after which a request that was given up stops at the latest
_MOST_INSTANCES = 4  # of one model on one GPU, chosen by ourselves
_MOST_LOAD = 0.9  # beyond it queues grow for ever, also in a simulation


@dataclass(frozen=True)
class Resolved:
    """A service with its buckets' profiles."""

    settings: ServiceSettings  # with the number of its instances
    profiles: tuple[Profile, ...]  # one a bucket, rising
    rate_rps: float

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(profile.model.batch for profile in self.profiles)

    @property
    def times_ns(self) -> tuple[int, ...]:
        return tuple(profile.request_ns[-1] for profile in self.profiles)

    @property
    def smallest(self) -> Resolved:
        """With one instance and the smallest bucket only."""
        settings = msgspec.structs.replace(self.settings, instances=1)
        return replace(self, settings=settings, profiles=self.profiles[:1])

    @property
    def usual(self) -> Profile:
        """Of the bucket that its rate asks for."""
        share = self.rate_rps / self.settings.replicas
        for profile in self.profiles:
            if share / profile.model.batch * profile.request_ns[-1] <= _EASY_LOAD * 1e9:
                return profile
        return self.profiles[-1]

    def worker(self, instance: int, profile: Profile, bound_ns: int | None) -> MixWorker:
        settings = self.settings
        most_rps = _MOST_LOAD * 1e9 / profile.request_ns[-1]
        share = min(self.rate_rps / settings.replicas / profile.model.batch, most_rps)
        background = settings.tier == "background"
        return MixWorker(
            name=f"{settings.name}.{instance + 1}:{profile.model.batch}",
            model=profile.model,
            rate_rps=None if background or bound_ns is None else share,
            bound=None if bound_ns is None else Bound(ms=bound_ns / 1e6),
            background=Background(weight=settings.weight, floor=settings.floor)
            if background
            else None,
        )


def _warnings(resolved: Sequence[Resolved]) -> tuple[str, ...]:
    """Rates that cannot be served, even in the batches that keep least of the device busy."""
    asked = sum(
        service.rate_rps * min(_work_ns(one) / one.model.batch for one in service.profiles) / 1e9
        for service in resolved
        if service.settings.tier == "service"
    )
    if asked <= 1.0:
        return ()
    return (
        f"the rates ask for {asked:.1f} times what the device can do with full batches: requests "
        f"will be refused; lower the rates, or use more GPUs",
    )


def _work_ns(profile: Profile) -> float:
    """What a batch keeps from others: on the size of lane that suits it best, its time there times
    that part of the device."""
    lanes = zip(profile.sizes, profile.request_ns, strict=True)
    return min(units * took_ns for units, took_ns in lanes) / profile.sizes[-1]


def _cost_ns(profile: Profile, instances: int) -> int:
    """What a batch takes while so many instances are busy on the device."""
    return max(profile.request_ns[-1], round(instances * _work_ns(profile)))


def make_deployment(
    config: ServingConfig,
    rates_rps: Mapping[str, float],
    *,
    generation: int,
    folder: Path,
    seconds: float = 0.0,
    log: ServerLog | None = None,
    parts: Parts | None = None,
    smallest: bool = False,
) -> Deployment:
    """What to deploy for these services. ``rates_rps``: as measured, by name; the configuration's
    for the others. ``seconds`` of search; without, background yields to services. With a
    ``log`` models that have no profile are measured. ``smallest``: of every service one instance
    and its smallest bucket, which are ready soon."""
    parts = parts or Parts()
    with parts.part("device"):
        host = find_host(config.server, log)
    with parts.part("profiling"):
        host.measure(_unprofiled(config, host))
    with parts.part("profiles"):
        found = resolve(config, host, rates_rps)
        resolved = [one.smallest if smallest else one for one in found]
    with parts.part("plan"):
        bounds_ns = [_bound_ns(service, host) for service in resolved]
        full = _case(resolved, bounds_ns, host, every_bucket=True)
        if config.server.policy in (None, YIELD):
            in_turn = config.server.policy == YIELD or shares_gpu()
            plan, notes = _plan(resolved, bounds_ns, host, full, seconds, in_turn=in_turn)
        else:
            plan, notes = make_plan(config.server.policy, full.problem()), ()
    path = folder / f"plan-{generation}.json.gz"
    store.save(plan, path)
    served = [one.settings.replicas for one in resolved if one.settings.tier == "service"]
    return Deployment(
        generation=generation,
        server=config.server,
        specs=tuple(
            _spec(service, bound_ns, host, served, config.server.policy, of.batches[-1])
            for service, of, bound_ns in zip(resolved, found, bounds_ns, strict=True)
        ),
        plan=str(path),
        rates_rps={service.settings.name: service.rate_rps for service in resolved},
        assumed=tuple(one.name for one in config.services if _rate(one, rates_rps) is None),
        uuid=host.uuid,
        device=host.title,
        slices=len(host.topology.slice_units),
        homes=_homes(plan, resolved),
        policy=plan.policy,
        notes=(*notes, *_warnings(resolved)),
        parts=parts.take(),
    )


def resolve(
    config: ServingConfig, host: ServingHost, rates_rps: Mapping[str, float]
) -> list[Resolved]:
    """Every service with its instances and buckets: those asked for, or as many as memory, the
    bound and the number of workers allow, one after another for all services."""
    wanted = _instances(config, host, rates_rps)
    buckets = [
        [_in_time(settings, batch, host) for batch in settings.batches or (1,)]
        for settings in wanted
    ]
    late = [MOST_BATCH + 1] * len(wanted)  # the smallest bucket that is
    for batch in _USUAL_BATCHES[1:]:
        for index, settings in enumerate(wanted):
            everybody = _everybody(wanted, buckets)
            full = len(everybody) + settings.replicas > MAX_WORKERS
            if settings.batches or not settings.batched or full or batch > late[index]:
                continue
            if not host.has(_key(settings, batch, host)):
                continue
            profile = _profile(settings, batch, host)
            if _is_late(settings, profile):
                late[index] = batch
            elif _fit(host, [*everybody, *[profile] * settings.replicas]):
                buckets[index].append(profile)
    found = []
    for settings, profiles in zip(wanted, buckets, strict=True):
        profiles.sort(key=lambda profile: profile.model.batch)
        rate = _rate(settings, rates_rps)
        if rate is None:
            rate = _ASSUMED_LOAD * settings.replicas * 1e9 / profiles[0].request_ns[-1]
        found.append(Resolved(settings, tuple(profiles), rate))
    return found


def _unprofiled(config: ServingConfig, host: ServingHost) -> list[ModelKey]:
    """What must be measured first: the buckets that were asked for, or of a model that was never
    measured all usual ones. A model with some measured buckets is served in these."""
    found: list[ModelKey] = []
    for settings in config.services if host.computes else ():
        _check(settings, host)
        usual = sorted(_USUAL_BATCHES) if settings.batched else [1]
        keys = [_key(settings, batch, host) for batch in settings.batches or usual]
        if settings.batches or not host.has(keys[0]):
            found += [key for key in keys if not host.has(key)]
    return found


def _in_time(settings: ServiceSettings, batch: int, host: ServingHost) -> Profile:
    """The profile of a bucket that there must be."""
    profile = _profile(settings, batch, host)
    if _is_late(settings, profile):
        raise UsageError(
            f"service {settings.name!r}: bound {settings.promised} cannot be kept: a batch of "
            f"{batch} takes {profile.request_ns[-1] / 1e6:.2f} ms with the device to itself; ask "
            f"for a longer bound or smaller batches"
        )
    return profile


def _everybody(
    services: Sequence[ServiceSettings], buckets: Sequence[Sequence[Profile]]
) -> list[Profile]:
    """One for every worker."""
    return [
        profile
        for settings, profiles in zip(services, buckets, strict=True)
        for _ in range(settings.replicas)
        for profile in profiles
    ]


def _rate(settings: ServiceSettings, rates_rps: Mapping[str, float]) -> float | None:
    return rates_rps.get(settings.name, settings.rate)


def _is_late(settings: ServiceSettings, profile: Profile) -> bool:
    """Even with the device to itself; a bound in times of that is always kept then."""
    bound = settings.promised
    return bound is not None and bound.ms is not None and profile.request_ns[-1] > 1e6 * bound.ms


def _instances(
    config: ServingConfig, host: ServingHost, rates_rps: Mapping[str, float]
) -> list[ServiceSettings]:
    """The services with their numbers of instances. Where these are ours to choose: as many as the
    rate asks for, as far as memory and the number of workers allow; one, if no rate is known, or
    where a policy is to be compared with.

    Requests of one instance wait for each other. Most models leave most of the device idle at small
    batches, so instances run beside each other, as long as the device has room
    (front/front_queue.py).
    """
    wanted = []
    for settings in config.services:
        _check(settings, host)
        rate = _rate(settings, rates_rps)
        replicas = settings.replicas
        ours = settings.instances is None and config.server.policy is None
        if ours and settings.tier == "service" and rate is not None:
            replicas = _wanted(settings, rate, host)
        wanted.append(msgspec.structs.replace(settings, instances=replicas))
    asked = [settings.instances for settings in config.services]
    for count in range(_MOST_INSTANCES, 1, -1):  # who has most gives up first
        for index, settings in enumerate(wanted):
            if asked[index] is None and settings.replicas >= count and not _have_room(wanted, host):
                wanted[index] = msgspec.structs.replace(settings, instances=settings.replicas - 1)
    return wanted


def _wanted(settings: ServiceSettings, rate: float, host: ServingHost) -> int:
    """Instances for a rate."""
    smallest = _profile(settings, min(settings.batches or (1,)), host)
    load = rate / smallest.model.batch * smallest.request_ns[-1] / 1e9
    return min(max(1, math.ceil(load / _EASY_ALONE)), _MOST_INSTANCES)


def _few(settings: ServiceSettings) -> tuple[int, ...]:
    return _USUAL_BATCHES[: _FEW if settings.batched else 1]


def _have_room(services: Sequence[ServiceSettings], host: ServingHost) -> bool:
    """With the buckets that were asked for, or a few."""
    workers = sum(
        settings.replicas * len(settings.batches or _few(settings)) for settings in services
    )
    buckets = [
        [_profile(settings, batch, host) for batch in settings.batches or (1,)]
        for settings in services
    ]
    return workers <= MAX_WORKERS and _fit(host, _everybody(services, buckets))


def _check(settings: ServiceSettings, host: ServingHost) -> None:
    """Refuse what cannot be served on this device."""
    check_model(settings)
    if settings.computes_on_cpu and host.computes:
        raise UsageError(
            f"service {settings.name!r}: a CPU function gives answers on a simulator only; "
            f'write device = "sim", or give a model'
        )
    if settings.file is not None and host.computes:
        check_file(settings, settings.file)


def profiles_of(specs: Sequence[ServiceSpec], host: ServingHost) -> list[Profile]:
    """Of every worker of a deployment's plan, in its order."""
    profiles: list[Profile] = []
    for spec in specs:
        of_buckets = [_profile(spec.settings, batch, host) for batch in spec.buckets]
        profiles += of_buckets * spec.settings.replicas
    return profiles


def _profile(settings: ServiceSettings, batch: int, host: ServingHost) -> Profile:
    try:
        return host.profile(_key(settings, batch, host))
    except UsageError as error:
        where = "" if host.computes else "profile: "  # there it may be another model's
        raise UsageError(f"service {settings.name!r}: {where}{error}") from None


def _key(settings: ServiceSettings, batch: int, host: ServingHost) -> ModelKey:
    """The model whose profile a service has; on a simulator that may be another's."""
    if settings.profile is not None and not host.computes:
        return parse_model(f"{settings.profile}:{batch}")
    if settings.computes_on_cpu:
        return ModelKey(_PACE, batch)
    if settings.model is None:
        return ModelKey(name_of(settings.name), batch)
    return parse_model(f"{settings.model}:{batch}")


def _fit(host: ServingHost, profiles: Sequence[Profile]) -> bool:
    workers = [WorkerMemory(name=str(one.model), footprint=one.footprint) for one in profiles]
    return memory_of(host.topology, workers, lanes=host.topology.hardware_queues).fits


def _spec(
    service: Resolved,
    bound_ns: int | None,
    host: ServingHost,
    served: Sequence[int],
    policy: str | None,
    largest: int,
) -> ServiceSpec:
    """``served``: the instances of every service here. A request may have ``largest`` rows, now or
    when its bucket is there."""
    settings = service.settings
    function = function_of(settings)
    computed = host.computes or function is not None
    inputs, outputs = tensors_of(settings, computed=computed)
    # Background gives way on the device. Other policies are there to compare with.
    waits = settings.tier == "service" and policy is None
    return ServiceSpec(
        id=0,
        row=0,
        settings=settings,
        info=info_of(settings, inputs, outputs, largest),
        buckets=service.batches,
        times_ns=service.times_ns,
        costs_ns=tuple(_cost_ns(profile, sum(served)) for profile in service.profiles),
        least_costs_ns=tuple(_cost_ns(profile, len(served)) for profile in service.profiles),
        parts=tuple(
            _work_ns(profile) / profile.request_ns[-1] if waits else 0.0
            for profile in service.profiles
        ),
        bound_ns=bound_ns,
        slots=slots_of(settings, inputs, outputs, service.batches[-1]),
        function=function,
        timing_only=not computed,
    )


def _bound_ns(service: Resolved, host: ServingHost) -> int | None:
    """The bound in time; of one that is so many times the p99 alone, by simulation."""
    match service.settings.promised:
        case Bound(ms=float(bound_ms)):
            return round(1e6 * bound_ms)
        case Bound(times_alone=float(times)):
            return round(times * _p99_alone_ns(service, host))
        case _:
            return None


def _p99_alone_ns(service: Resolved, host: ServingHost) -> float:
    profile = service.usual
    (times,) = SimEvaluator(host.topology, [profile], host.calibration).alone_ns
    return p99_alone_ns(service.worker(0, profile, round(1e9)).rate_rps or 0.0, times)


def _case(
    resolved: Sequence[Resolved],
    bounds_ns: Sequence[int | None],
    host: ServingHost,
    *,
    every_bucket: bool,
) -> Case:
    """A worker for every instance: one a bucket, or one at the bucket that its rate asks for."""
    workers, profiles = [], []
    for service, bound_ns in zip(resolved, bounds_ns, strict=True):
        for instance in range(service.settings.replicas):
            for profile in service.profiles if every_bucket else (service.usual,):
                workers.append(service.worker(instance, profile, bound_ns))
                profiles.append(profile)
    name = ", ".join(service.settings.name for service in resolved)
    mix = Mix(name=name, workers=tuple(workers))
    return Case(
        mix, host.topology, host.calibration, tuple(profiles), host.folders, usual_kernels=True
    )


def _promises(case: Case) -> dict[int, Promise]:
    return {
        index: promise_of(case.mix.workers[index], case.profiles[index], 0.0)
        for index in case.mix.services
    }


def _plan(
    resolved: Sequence[Resolved],
    bounds_ns: Sequence[int | None],
    host: ServingHost,
    full: Case,
    seconds: float,
    *,
    in_turn: bool,
) -> tuple[Plan, tuple[str, ...]]:
    """``in_turn``: services go one after another, the one with less slack first. Otherwise they run
    together, since what waits in fronts is not seen on the device: it could not tell whose turn it
    is."""
    promises = _promises(full)
    if not promises and not shares_gpu():  # nobody to give way to
        return unpartitioned(full.topology, full.profiles, full.mix), ()
    services = None if in_turn else JointRules(yields=None, grain_ns=_STOPS_NS)
    proposer = Proposer(full.problem(), promises, services)
    background = any(service.settings.tier == "background" for service in resolved)
    if not (seconds and promises and background):
        return proposer.plan(proposer.all_alike(JointRules())), ()
    case = _case(resolved, bounds_ns, host, every_bucket=False)
    kept = _promises(case)
    found = search_rules(
        case.problem(),
        kept,
        SimEvaluator.of(case),
        Objective("slo").for_mix(case.mix, kept),
        seconds=seconds,
        services=services,
    )
    best = found.candidates[0]
    note = (
        f"best of {found.evaluated} plans: worst tail {best.tail:.2f} of its bound, "
        f"background {best.background:.2f}"
    )
    instances = [service for service in resolved for _ in range(service.settings.replicas)]
    each = [
        rules
        for rules, service in zip(best.proposal.each, instances, strict=True)
        for _ in service.profiles
    ]
    return proposer.plan(replace(best.proposal, each=tuple(each))), (note,)


def _homes(plan: Plan, resolved: Sequence[Resolved]) -> dict[str, tuple[int, ...]]:
    """The slices of every service's lanes while nobody makes it give way."""
    homes: dict[str, tuple[int, ...]] = {}
    first = 0
    for service in resolved:
        workers = len(service.profiles) * service.settings.replicas
        lanes = {
            group.lane
            for assignment in plan.main.assignments[first : first + workers]
            for group in assignment.groups
        }
        homes[service.settings.name] = tuple(
            sorted({one for lane in lanes for one in plan.lanes[lane].mask})
        )
        first += workers
    return homes
