"""Placement: which services share which GPU of a fleet, and under which plan.

Pure functions: a fleet and scores in, a placement out. Small fleets are solved exactly
(``exact.py``) where that is asked for, others by local search (``packing.py``). This module names
GPUs: a service with two or more instances never has all of them in one machine, where there are
two, and what runs already stays where it is if it can.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from eclip.errors import ArtefactError, PlanningError, UsageError
from eclip.files import store
from eclip.files.encoding import encode_json
from eclip.fleet.place import exact
from eclip.fleet.place.packing import pack
from eclip.fleet.place.problem import PARTS, Bin, Held, Packing, PackingProblem
from eclip.fleet.place.scores import Scorer
from eclip.fleet.place.spec import Fleet, GpuId, gpu_ids
from eclip.progress import Progress

DEFAULT_SECONDS = 20.0
ASSUMED = (
    "modelled: every GPU was simulated kernel by kernel with its plan, Poisson arrivals, rates "
    "rounded up to steps of 4.4%, warm instances; networks and hosts cost nothing"
)


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    service: str
    share: float  # of the service's rate
    rate_rps: float
    p99_ms: float
    bound_ms: float


class PlacedGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU in use: its instances, and the policy of its plan."""

    gpu: GpuId
    policy: str
    instances: tuple[Instance, ...]
    power_w: float

    @property
    def shares(self) -> dict[str, float]:
        return {instance.service: instance.share for instance in self.instances}


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    objective: str
    gpus: tuple[PlacedGpu, ...]  # those in use
    refused: dict[str, float]  # the part of a service's rate that found no room
    goodput_rps: float
    power_w: float
    reserve: float = 0.0  # of the fleet: p99s are at (1 + reserve) times the rates
    exact: bool = False
    assumed: str = ASSUMED


def place(
    fleet: Fleet,
    scorer: Scorer,
    objective: str = "fewest",
    *,
    running: Placement | None = None,
    seconds: float = DEFAULT_SECONDS,
    steps: int | None = None,
    seed: int = 0,
    parts: int = PARTS,
    progress: Progress | None = None,
) -> Placement:
    """The best placement found, starting from ``running`` if given.

    With ``steps`` instead of ``seconds`` the search is reproducible, for a scorer that knows the
    same sets.
    """
    begun = time.monotonic()
    progress = progress or Progress()
    problem = PackingProblem(fleet, scorer, objective, parts)
    free = Counter(gpu.kind for gpu in gpu_ids(fleet))
    start = None
    if running is not None:
        start = packing_of(running, problem)
        free.subtract(one.kind for one in start.bins)
    left_s = max(seconds - (time.monotonic() - begun), 0.0)  # measuring pairs takes its time, too
    packing = pack(
        problem, dict(free), start=start, seconds=left_s, steps=steps, seed=seed, progress=progress
    )
    return name_gpus(packing, problem)


def place_exactly(
    fleet: Fleet, scorer: Scorer, objective: str = "fewest", *, progress: Progress | None = None
) -> Placement:
    """The best placement of a small fleet, with a proof. Services have the fewest possible
    instances."""
    problem = PackingProblem(fleet, scorer, objective, parts=1)
    return name_gpus(exact.solve(problem, progress), problem, exact=True)


def load_placement(path: Path) -> Placement:
    """A placement from a file that ``eclip fleet plan -o`` wrote."""
    try:
        return decode_placement(path.read_bytes(), str(path))
    except OSError as error:
        raise ArtefactError(f"cannot read {path}: {error.strerror or error}") from None


def decode_placement(data: bytes, where: str) -> Placement:
    try:
        return msgspec.json.decode(data, type=Placement)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArtefactError(f"{where} is no placement: {error}") from None


def save_placement(placement: Placement, path: Path) -> None:
    text = msgspec.json.format(encode_json(placement), indent=1)
    store.save_export(path, text + b"\n", ASSUMED.encode())


def packing_of(running: Placement, problem: PackingProblem) -> Packing:
    """A placement as bins of a fleet that may have other services, rates and GPUs by now. Bins that
    would miss a bound give instances away."""
    there = set(gpu_ids(problem.fleet))
    index = {service.name: number for number, service in enumerate(problem.fleet.services)}
    left = problem.instances()
    bins = []
    for placed in running.gpus:
        if placed.gpu not in there:
            continue  # it has gone
        held: Held = {}
        for instance in placed.instances:
            service = index.get(instance.service)
            if service is None or service not in left:
                continue
            wanted = max(1, round(instance.share * problem.parts[service]))
            held[service] = min(wanted, left[service])
            left[service] -= held[service]
            if not left[service]:
                del left[service]
        if held:
            bins.append(Bin(placed.gpu.kind, held, placed.gpu))
    return Packing(bins, left)


def name_gpus(packing: Packing, problem: PackingProblem, *, exact: bool = False) -> Placement:
    """The packing on GPUs of the fleet."""
    choose_gpus(packing.bins, problem)
    names = Counter(str(one.gpu) for one in packing.bins)
    if twice := [name for name, count in names.items() if count > 1]:
        raise PlanningError(f"more than one set was given to {', '.join(twice)}")
    placed = []
    served: dict[str, float] = defaultdict(float)
    for one in sorted(packing.bins, key=lambda one: str(one.gpu)):
        assert one.gpu is not None
        score = problem.score(one)
        order = sorted(one.held, key=lambda service: problem.member(service, one.held[service]))
        instances = []
        for service, p99_ms in zip(order, score.p99_ms, strict=True):
            asked = problem.fleet.services[service]
            share = one.held[service] / problem.parts[service]
            served[asked.name] += share
            instances.append(
                Instance(
                    service=asked.name,
                    share=share,
                    rate_rps=asked.rate_rps * share,
                    p99_ms=p99_ms,
                    bound_ms=asked.bound_ms,
                )
            )
        placed.append(
            PlacedGpu(
                gpu=one.gpu,
                policy=score.policy,
                instances=tuple(instances),
                power_w=score.power_w,
            )
        )
    services = problem.fleet.services
    return Placement(
        objective=problem.objective,
        gpus=tuple(placed),
        refused={
            service.name: 1 - served[service.name]
            for service in services
            if served[service.name] < 1 - 1e-9
        },
        goodput_rps=sum(service.rate_rps * min(served[service.name], 1.0) for service in services),
        power_w=sum(one.power_w for one in placed),
        reserve=problem.fleet.reserve,
        exact=exact,
    )


def choose_gpus(bins: Sequence[Bin], problem: PackingProblem) -> None:
    """A GPU for every bin without one, such that no service is in one machine only."""
    taken = {one.gpu for one in bins}
    free: dict[str, list[GpuId]] = defaultdict(list)
    for gpu in gpu_ids(problem.fleet):
        if gpu not in taken:
            free[gpu.kind].append(gpu)
    homes: dict[int, list[Bin]] = defaultdict(list)
    for one in bins:
        for service in one.held:
            homes[service].append(one)
    machines_left = {kind: _round_robin(gpus) for kind, gpus in free.items()}
    for one in bins:
        if one.gpu is None:
            avoid = {
                bin_.gpu.machine
                for service in one.held
                for bin_ in homes[service]
                if bin_.gpu is not None and len(homes[service]) > 1
            }
            queue = machines_left[one.kind]
            chosen = next((gpu for gpu in queue if gpu.machine not in avoid), queue[0])
            queue.remove(chosen)
            one.gpu = chosen
    if len({group.machine for group in problem.fleet.gpus}) > 1:
        for service, where in homes.items():
            if len(where) > 1 and len(_machines(where)) == 1:
                name = problem.fleet.services[service].name
                _move_apart(name, where, bins, homes, machines_left)


def _machines(bins: Sequence[Bin]) -> set[str]:
    return {one.gpu.machine for one in bins if one.gpu is not None}


def _move_apart(
    name: str,
    where: list[Bin],
    bins: Sequence[Bin],
    homes: dict[int, list[Bin]],
    free: dict[str, list[GpuId]],
) -> None:
    """Give one of the service's bins a GPU in another machine: a free one, or another bin's."""
    (machine,) = _machines(where)
    for one in where:
        for gpu in free.get(one.kind, []):
            if gpu.machine != machine:
                free[one.kind].remove(gpu)
                assert one.gpu is not None
                free[one.kind].append(one.gpu)
                one.gpu = gpu
                return
    for one in where:
        for other in bins:
            if other.kind != one.kind or other.gpu is None or other.gpu.machine == machine:
                continue
            one.gpu, other.gpu = other.gpu, one.gpu
            if all(
                len(homes[held]) < 2 or len(_machines(homes[held])) > 1
                for held in (*one.held, *other.held)
            ):
                return
            one.gpu, other.gpu = other.gpu, one.gpu
    raise UsageError(
        f"the instances of service {name!r} cannot be put on two machines; add a {where[0].kind} "
        f"in another machine"
    )


def _round_robin(gpus: Sequence[GpuId]) -> list[GpuId]:
    """The first GPU of every machine, then the second of every machine, and so on, so that
    neighbours in the list are on different machines."""
    return sorted(gpus, key=lambda gpu: (gpu.index, gpu.machine))
