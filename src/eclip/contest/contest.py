"""A contest: the policies of one mix on one device, run in turns under identical arrivals.

The device, its captures, the rates alone and the sessions are made once for all policies. Swept
policies try their settings first (sweep.py); a search may continue on the device (explore.py,
finals.py). Finished runs stay in the contest, so that a stop request or a failure loses only the
runs that are still to come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from eclip.contest.confirm.bounds import (
    alone_logs,
    promises_on,
    search_services,
    with_bounds,
)
from eclip.contest.confirm.explore import Explorer, Verification
from eclip.contest.confirm.finals import confirm
from eclip.contest.confirm.plans import make_plan, search_options
from eclip.contest.confirm.sweep import MOST_CLIENTS, Setting, Sweep, equal_shares
from eclip.core.device import Capability, Session, StartedSessions
from eclip.core.mix import Mix
from eclip.core.plan import Plan, Promise
from eclip.core.runlog import RunLog
from eclip.errors import (
    EclipError,
    StoppedError,
    UsageError,
    check_number,
    check_whole,
    unknown_name,
)
from eclip.files.comparison import SettingTrial
from eclip.files.observations import ObservedRun
from eclip.planner.case import Case
from eclip.planner.policies import POLICIES, PolicyOptions, with_shares
from eclip.planner.search.candidates import Found
from eclip.planner.search.objective import Objective
from eclip.planner.tiers import FOR_SERVICES, LAUNCHES, needs_alone, promising
from eclip.progress import Progress
from eclip.rig.arrivals import DEFAULT_REQUESTS, Arrivals
from eclip.rig.rig import Rig
from eclip.rig.rounds import rotation

Result = TypeVar("Result")

# Baselines first, each before the policies that are compared with it.
_ORDER = (
    "shared",
    "priority",
    "timeslice",
    "mps",
    "mps-model",
    "model",
    "masks",
    "kernel",
    "eclip",
    *FOR_SERVICES,
    "search",
)
# Default policies for a mix with services: usual ways to share a GPU, and parts of eclip's search.
_WITH_SERVICES = (
    "shared",
    "priority",
    "priority-segments",
    "timeslice",
    "mps",
    "masks",
    *LAUNCHES,
    "yield",
    "move",
    "search",
)
_IN_PROCESSES = ("timeslice", "mps", "mps-model")  # where the device runs processes
_NEEDS = {
    **dict.fromkeys(FOR_SERVICES, (Capability.JOINTS,)),
    "priority": (Capability.PRIORITIES,),
    "priority-segments": (Capability.PRIORITIES, Capability.JOINTS),
    "timeslice": (Capability.TURNS,),
    "mps": (Capability.PROCESSES,),
    "mps-model": (Capability.PROCESSES,),
}
_BACKGROUND_SHARES = (50, 25, 75, 40)  # percent, beside services with all units
_TRIAL_REQUESTS = 300  # of the rarest service, in a trial that is to tell a p99
_MOST_TRIAL_S = 3.0


@dataclass(frozen=True)
class CompareOptions:
    """Settings that few comparisons change."""

    seed: int = 0  # of arrivals, phases, sweeps and searches
    warmup: float = 0.1  # seconds before a run is measured
    trace_ms: float = 0.0  # of every policy's last run: kernels are recorded
    requests: int = DEFAULT_REQUESTS  # of all workers in all repeats, under a part load
    fairness: float | None = None  # floor of sweeps and searches; None: see Objective
    search_seconds: float = 20.0
    batches: int | None = None  # of the search: exactly this many, instead of seconds
    verify: int = 0  # of the search: try this many of its best plans on the device
    refine: float = 0.0  # of the search: before that, search on the device for this many seconds
    earlier: str | Path | None = None  # of the search: observations of an earlier one to start from
    trials: int = 24  # of static masks, for every objective
    trial_seconds: float = 0.3
    processes: int = 30  # at once, at most; thins the sweep of MPS shares
    reopen: bool = False  # open every session anew for every run
    switch_max: int = 14  # eclip: lane switches per request and worker
    tolerance: float = 0.05  # model, kernel: slowdown that still counts as right-sized
    command: str = "eclip.compare(…)"  # what would repeat it, for a person

    def __post_init__(self) -> None:
        for name in ("seed", "verify", "switch_max"):
            check_whole(name, getattr(self, name))
        for name in ("requests", "trials", "processes"):
            check_whole(name, getattr(self, name), 1)
        for name in ("warmup", "trace_ms", "search_seconds", "refine", "trial_seconds"):
            check_number(name, getattr(self, name))
        if self.batches is not None:
            check_whole("batches", self.batches)


@dataclass(frozen=True)
class ContestOptions:
    policies: tuple[str, ...] | None = None  # None: all that can run here
    plans: Mapping[str, Plan] = field(default_factory=dict)  # take part too, by name
    objectives: tuple[Objective, ...] = ()  # what is swept or searched for: a plan for each
    repeats: int = 1
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    verification: Verification | None = None  # of what a search finds
    settings: CompareOptions = field(default_factory=CompareOptions)

    def __post_init__(self) -> None:
        check_whole("repeats", self.repeats, 1)
        if self.policies == () and not self.plans:
            raise UsageError("policies is empty; name at least one, or leave it out for all")
        if not 0 < self.settings.trial_seconds <= 60:
            raise UsageError("a trial takes above 0 and at most 60 s")
        if not self.objectives:
            raise UsageError("a contest needs an objective")
        if len(set(self.objectives)) != len(self.objectives):
            raise UsageError("an objective is named twice; name each once")
        for name in self.policies or ():
            if name not in known_policies():
                raise unknown_name("policy", name, ["all", *known_policies()])


def known_policies() -> list[str]:
    """The names of all policies, in the order of their runs."""
    return [*_ORDER, *(name for name in POLICIES if name not in _ORDER)]


def usual_policies(mix: Mix) -> list[str]:
    """The policies that take part unless the user names some."""
    if mix.services:
        return list(_WITH_SERVICES)
    return [name for name in known_policies() if name not in FOR_SERVICES]


@dataclass
class Entrant:
    """A policy with its plan, how its session is opened, and the logs of its runs."""

    plan: Plan
    open: Callable[[], contextlib.AbstractContextManager[Session]]
    setting: str = ""
    trials: tuple[SettingTrial, ...] = ()
    logs: list[RunLog] = field(default_factory=list)

    @property
    def policy(self) -> str:
        return self.plan.policy


class Contest:
    def __init__(
        self, rig: Rig, arrivals: Arrivals, options: ContestOptions, progress: Progress
    ) -> None:
        self.rig = rig
        self.options = options
        self.entrants: list[Entrant] = []
        self.left_out: dict[str, str] = {}  # by policy: why
        self.observed: list[ObservedRun] = []  # runs of a search on the device
        self.alone: dict[int, dict[int, RunLog]] = {}  # services alone, by seed of the arrivals
        self._arrivals = arrivals
        self._progress = progress
        self._stack = contextlib.ExitStack()

    @functools.cached_property
    def _sweep(self) -> Sweep:
        seconds, mix = self.options.settings.trial_seconds, self.rig.case.mix
        if mix.services:
            slowest = min(mix.workers[service].rate_rps or 1.0 for service in mix.services)
            seconds = max(seconds, min(_TRIAL_REQUESTS / slowest, _MOST_TRIAL_S))
        aims, seed = self.options.objectives, self.options.settings.seed
        return Sweep(self.rig, aims, seconds, seed, self._progress)

    @property
    def measured(self) -> list[Entrant]:
        return [entrant for entrant in self.entrants if entrant.logs]

    def hold(self) -> None:
        """Run every policy that takes part. A named policy that cannot run raises; without names,
        policies that cannot run here are left out."""
        names = self._choose()
        with self._stack:
            self._progress.phase("preparing")
            with _aside(lambda quiet: self._simulate(names, quiet), self._progress) as searches:
                started = self._start_processes(names)
                self.rig.prepare()
            for processes in started:
                with self._or_leave_out(*processes.plans):
                    processes.sets.wait()
            self.rig.measure_alone()
            self._progress.phase("measuring services alone")
            promises = promises_on(self.rig, lambda: _services_alone(self, self._arrivals, 0))
            self.options = _promising(self.options, self.rig.case.mix, promises)
            for name in [*names, *self.options.plans]:
                if not self._progress.stopped and name not in self.left_out:
                    with self._or_leave_out(name):
                        self._enter(name, started, searches)
            if not self.entrants and self.left_out:
                raise UsageError(
                    "no policy is left to run: "
                    + "; ".join(f"{name}: {why}" for name, why in self.left_out.items())
                )
            self._run_rounds()

    def _choose(self) -> list[str]:
        """The policies that take part. A plan given under a policy's name replaces that policy."""
        chosen = []
        for name in self.options.policies or usual_policies(self.rig.case.mix):
            if name in self.options.plans:
                continue
            missing = [
                need for need in _NEEDS.get(name, ()) if need not in self.rig.device.capabilities
            ]
            if missing:
                device = self.rig.device.title
                self._leave_out(name, UsageError(f"{device} has no {missing[0].value}"))
            else:
                chosen.append(name)
        return chosen

    def _leave_out(self, policy: str, error: EclipError) -> None:
        if self.options.policies is not None:
            raise type(error)(f"{policy}: {error}")
        self.left_out[policy] = str(error)

    @contextlib.contextmanager
    def _or_leave_out(self, *policies: str) -> Iterator[None]:
        try:
            yield
        except StoppedError:
            pass  # callers check the stop request themselves
        except EclipError as error:
            for policy in policies:
                self._leave_out(policy, error)

    def _enter(
        self,
        name: str,
        started: Sequence[_Started],
        searches: Future[list[tuple[Objective, Found]]],
    ) -> None:
        """Make the entrants of one policy or given plan."""
        processes = next((group for group in started if name in group.plans), None)
        self._progress.phase(f"opening {name}")
        if name in self.options.plans:
            self._add(msgspec.structs.replace(self.options.plans[name], policy=name))
        elif processes is not None:
            promises = self.options.policy.promises  # measured since they were started
            plans = [with_bounds(plan, promises) for plan in processes.plans[name]]
            sessions = processes.sessions[name]
            for setting, session in self._sweep.processes(plans, sessions):
                self.entrants.append(
                    Entrant(
                        setting.plan,
                        _kept_open(session),
                        setting=setting.label,
                        trials=setting.trials,
                    )
                )
        elif name == "masks":
            self._progress.phase("trying static masks")
            promises = self.options.policy.promises
            for setting in self._sweep.masks(self.options.settings.trials):
                self._add(promising(setting.plan, promises), setting)
        elif name == "search":
            for plan in self._search(searches):
                self._add(plan)
        else:
            self._add(make_plan(self.rig.case, name, self.options.policy))

    def _add(self, plan: Plan, setting: Setting | None = None) -> None:
        """An entrant whose session stays open, or is opened for every run."""
        known: dict[str, Any] = {}
        if setting is not None:
            known = {"setting": setting.label, "trials": setting.trials}
        session = self.rig.open(plan)
        if self.options.settings.reopen:
            session.close()  # what cannot be opened must not wait for its turn
            opener: Callable[[], Any] = functools.partial(self.rig.open, plan)
        else:
            opener = _kept_open(self._stack.enter_context(session))
        self.entrants.append(Entrant(plan, opener, **known))

    def _start_processes(self, names: Sequence[str]) -> list[_Started]:
        """Start the processes of these policies without waiting; all under MPS share one daemon."""
        if Capability.PROCESSES not in self.rig.device.capabilities:
            return []
        policies = [name for name in _IN_PROCESSES if name in names]
        others = sum(name != "mps" for name in policies)
        started = []
        for under_mps in (False, True):
            plans = {
                name: _process_plans(self.rig.case, self.options, name, others)
                for name in policies
                if (name != "timeslice") == under_mps
            }
            if not plans:
                continue
            with self._or_leave_out(*plans):
                sets = self.rig.start([plan for swept in plans.values() for plan in swept])
                self._stack.callback(sets.close)
                sessions = iter(sets.sessions)
                owned = {name: [next(sessions) for _ in swept] for name, swept in plans.items()}
                started.append(_Started(sets, plans, owned))
        return started

    def _simulate(self, names: Sequence[str], progress: Progress) -> list[tuple[Objective, Found]]:
        """For every objective, the results by simulation of a search with verification."""
        if "search" not in names or (explorer := self._explorer) is None:
            return []
        mix = self.rig.case.mix
        return [
            (bound := aim.for_mix(mix, {}), explorer.simulate(bound, progress))
            for aim in self.options.objectives
            if aim.kind != "slo"
        ]

    @functools.cached_property
    def _explorer(self) -> Explorer | None:
        how = self.options.verification
        if how is None:
            return None
        if self._arrivals.part is not None:
            how = dataclasses.replace(how, refine_seconds=0.0)
        case = self.rig.case
        return Explorer(
            case.problem(choosing=True),
            self.rig.evaluator,
            search_options(case, self.options.policy),
            how,
        )

    def _search(self, searches: Future[list[tuple[Objective, Found]]]) -> list[Plan]:
        """A plan for every objective, confirmed by the device, or by simulation alone."""
        aims = self.options.objectives
        found = dict(searches.result())
        explorer = self._explorer if found else None
        if explorer is not None:
            explorer.options = search_options(self.rig.case, self.options.policy)
            # All objectives first: a trial for one objective counts for the others.
            self._progress.phase("searching on the device")
            for aim, one in found.items():
                known = self._sweep.best_masks(aim)
                explorer.explore(one, aim, self.rig, self._sweep.trials, self._progress, known)
            self.observed = explorer.observed
        return [self._sweep.named(self._searched(aim, explorer, found), aim) for aim in aims]

    def _searched(
        self, aim: Objective, explorer: Explorer | None, found: Mapping[Objective, Found]
    ) -> Plan:
        options, how = self.options, self.options.verification
        if explorer is not None and aim in found:
            self._progress.phase("trying the finalists")
            sweep = self._sweep
            return confirm(
                explorer, found[aim], aim, self.rig, sweep.trials, sweep.window, self._progress
            )
        policy = dataclasses.replace(options.policy, objective=aim)
        if how is not None:
            return search_services(self.rig, policy, how.finalists, self._progress)
        self._progress.phase("searching")
        case, promises = self.rig.case, policy.promises
        if needs_alone(case.mix):
            # A search simulates its own arrivals. With a bound from other arrivals, all its plans
            # would be late, or too careful.
            policy = dataclasses.replace(policy, promises={})
        return with_bounds(make_plan(case, "search", policy, self.rig.evaluator), promises)

    def _run_rounds(self) -> None:
        """Run every entrant once a round. On a GPU an uncounted lap comes first, since the first
        run would find a colder GPU than the others."""
        repeats, window = self.options.repeats, self._arrivals.window(self.rig)
        if not self.rig.device.modelled:
            for entrant in self.entrants:
                with self._or_leave_out(entrant.policy), entrant.open() as session:
                    self._sweep.run(session, entrant.plan)
        self._progress.phase("measuring")
        total = len(self.entrants) * repeats
        try:
            for done, (repeat, index) in enumerate(rotation(len(self.entrants), repeats)):
                if done % len(self.entrants) == 0 and not self._progress.stopped:
                    with contextlib.suppress(StoppedError):
                        if done:
                            self.rig.measure_alone()
                        _services_alone(self, self._arrivals, repeat)
                if self._progress.stopped:
                    break
                entrant = self.entrants[index]
                if entrant.policy in self.left_out:
                    continue
                # On a GPU recording kernels takes a separate run, so it is done once a policy.
                last = repeat == repeats - 1
                traced = window if last else dataclasses.replace(window, trace_ms=0.0)
                load = self._arrivals.load(self.rig, repeat)
                with self._or_leave_out(entrant.policy), entrant.open() as session:
                    log = self.rig.run(session, entrant.plan, load, traced)
                    if not self._progress.stopped:  # otherwise it may have been cut short
                        entrant.logs.append(log)
                self._progress.part((done + 1) / total)
        finally:  # a log of an early round gets the rates alone of all rounds, also after a failure
            promises: Mapping[int, Promise] = {}
            if self.alone and needs_alone(self.rig.case.mix):  # all rounds' arrivals count
                promises = promises_on(self.rig, self.alone.values)
            for entrant in self.measured:
                entrant.plan = with_bounds(entrant.plan, promises)
                known = {"plan": entrant.plan, "alone_rps": self.rig.alone_rps}
                entrant.logs = [msgspec.structs.replace(log, **known) for log in entrant.logs]
        if not self.measured and not self._progress.stopped:
            raise UsageError(f"nothing could run: {'; '.join(self.left_out.values())}")


def _promising(options: ContestOptions, mix: Mix, promises: dict[int, Promise]) -> ContestOptions:
    """From here on plans and objectives say what services are promised."""
    return dataclasses.replace(
        options,
        objectives=tuple(aim.for_mix(mix, promises) for aim in options.objectives),
        policy=dataclasses.replace(options.policy, promises=promises),
        plans={
            name: with_bounds(_in_mix(plan, mix), promises) for name, plan in options.plans.items()
        },
    )


def _in_mix(plan: Plan, mix: Mix) -> Plan:
    """The plan for this mix's rates and promises; it may have been made for others."""
    workers = [
        msgspec.structs.replace(asked, model=model)
        for asked, model in zip(mix.workers, plan.models, strict=True)
    ]
    return msgspec.structs.replace(plan, mix=msgspec.structs.replace(mix, workers=tuple(workers)))


def _process_plans(case: Case, options: ContestOptions, name: str, others: int) -> list[Plan]:
    if name != "mps":
        return [make_plan(case, name, options.policy)]
    shared = make_plan(case, "shared", options.policy)
    workers, services = len(shared.workers), case.mix.services
    # The others have a set each, and one of them is under MPS, too.
    sets = max(1, min(options.settings.processes // workers - others, MOST_CLIENTS // workers - 1))
    wanted = [(share,) * workers for share in equal_shares(workers, sets)]
    if services:  # they have all units, and background a share
        wanted[1:1] = [
            tuple(100 if worker in services else share for worker in range(workers))
            for share in _BACKGROUND_SHARES
        ]
    return [with_shares(shared, shares) for shares in list(dict.fromkeys(wanted))[:sets]]


def _services_alone(
    contest: Contest, arrivals: Arrivals, repeat: int
) -> Iterable[Mapping[int, RunLog]]:
    """Every service alone under plain streams, with the arrivals of this round, and what is known
    of others. A modelled device would repeat itself, so it runs no arrivals twice."""
    rig = contest.rig
    if rig.case.mix.services:
        load = arrivals.load(rig, repeat)
        if load.seed not in contest.alone or not rig.device.modelled:
            contest.alone[load.seed] = alone_logs(rig, load, arrivals.window(rig))
    return contest.alone.values()


def _kept_open(session: Session) -> Callable[[], contextlib.AbstractContextManager[Session]]:
    return lambda: contextlib.nullcontext(session)


@dataclass(frozen=True)
class _Started:
    """Processes that were started together, and whose they are."""

    sets: StartedSessions
    plans: dict[str, list[Plan]]  # by policy
    sessions: dict[str, list[Session]]


@contextlib.contextmanager
def _aside(work: Callable[[Progress], Result], progress: Progress) -> Iterator[Future[Result]]:
    """Do the work in another thread while the block runs; if the block fails, the work is asked to
    stop."""
    quiet = Progress(progress)
    with ThreadPoolExecutor(1) as thread:
        try:
            yield thread.submit(work, quiet)
        except BaseException:
            quiet.stop()
            raise
