"""A contest: the policies of one mix on one device, run in turns under identical arrivals.

Whatever several policies need is made once: the device, its captures, the rates alone, the
sessions. Swept policies try their settings first (sweep.py), a search may go on on the device
(explore.py, finals.py). What was measured stays in the contest whatever happens later, so that a
stop request or a failure costs only what had not run yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from eclip.artefacts.comparison import SettingTrial
from eclip.artefacts.observations import ObservedRun
from eclip.artefacts.plan import Plan
from eclip.artefacts.runlog import RunLog
from eclip.devices.base import Capability, Session, StartedSessions, Window
from eclip.errors import EclipError, StoppedError, UsageError, unknown_name
from eclip.lab.arrivals import Arrivals
from eclip.lab.evaluate import SimEvaluator
from eclip.lab.explore import Explorer, Verification
from eclip.lab.finals import confirm
from eclip.lab.plans import make_plan, search_options
from eclip.lab.rounds import rotation
from eclip.lab.stand import Stand
from eclip.lab.sweep import MOST_CLIENTS, Setting, Sweep, equal_shares
from eclip.planning.policies import POLICIES, PolicyOptions, with_shares
from eclip.planning.search.candidates import Found
from eclip.planning.search.objective import Objective
from eclip.progress import Progress

Result = TypeVar("Result")

# Baselines first, each before what it is a baseline for.
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
    "search",
)
_IN_PROCESSES = ("timeslice", "mps", "mps-model")  # where the device runs processes
_NEEDS = {
    "priority": Capability.PRIORITIES,
    "timeslice": Capability.TURNS,
    "mps": Capability.PROCESSES,
    "mps-model": Capability.PROCESSES,
}


@dataclass(frozen=True)
class ContestOptions:
    policies: tuple[str, ...] | None = None  # None: all that can run here
    plans: Mapping[str, Plan] = field(default_factory=dict)  # take part too, by name
    objectives: tuple[Objective, ...] = ()  # what is swept or searched for: a plan for each
    window: Window = field(default_factory=Window)
    repeats: int = 1
    seed: int = 0
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    verification: Verification | None = None  # of what a search finds
    trials: int = 24  # of static masks, for every objective
    trial_seconds: float = 0.3
    processes: int = 30  # at most so many at once; the MPS sweep is thinned to fit
    reopen: bool = False  # open every session anew for every run

    def __post_init__(self) -> None:
        if min(self.repeats, self.trials, self.processes) < 1:
            raise UsageError("repeats, trials and processes start at 1")
        if not 0 < self.trial_seconds <= 60:
            raise UsageError("a trial takes above 0 and at most 60 s")
        if not self.objectives:
            raise UsageError("a contest needs an objective")
        if len(set(self.objectives)) != len(self.objectives):
            raise UsageError("an objective is named twice; name each once")
        for name in self.policies or ():
            if name not in _ORDER:
                raise unknown_name("policy", name, ["all", *_ORDER])


def known_policies() -> list[str]:
    """Every name that a comparison understands, in the order in which they run."""
    return [*_ORDER, *(name for name in POLICIES if name not in _ORDER)]


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
        self, stand: Stand, arrivals: Arrivals, options: ContestOptions, progress: Progress
    ) -> None:
        self.stand = stand
        self.options = options
        self.entrants: list[Entrant] = []
        self.left_out: dict[str, str] = {}  # by policy: why
        self.observed: list[ObservedRun] = []  # while a search went on on the device
        self._arrivals = arrivals
        self._progress = progress
        self._sweep = Sweep(
            stand, options.objectives, options.trial_seconds, options.seed, progress
        )
        self._stack = contextlib.ExitStack()

    @property
    def measured(self) -> list[Entrant]:
        return [entrant for entrant in self.entrants if entrant.logs]

    def hold(self) -> None:
        """Run every policy that takes part. One that was named must run; without names, those that
        cannot run here are left out."""
        names = self._choose()
        with self._stack:
            self._progress.phase("preparing")
            with (
                _aside(lambda quiet: self._simulate(names, quiet), self._progress) as searches,
                _aside(lambda _: self._start_processes(names), self._progress) as started,
            ):
                self.stand.prepare()
            for processes in started.result():
                with self._or_leave_out(*processes.plans):
                    processes.sets.wait()
            self.stand.measure_alone()
            for name in [*names, *self.options.plans]:
                if not self._progress.stopped and name not in self.left_out:
                    with self._or_leave_out(name):
                        self._enter(name, started.result(), searches)
            if not self.entrants and self.left_out:
                raise UsageError(
                    "no policy is left to run: "
                    + "; ".join(f"{name}: {why}" for name, why in self.left_out.items())
                )
            self._run_rounds()

    def _choose(self) -> list[str]:
        """Who takes part; a plan given under a policy's name stands for it."""
        chosen = []
        for name in self.options.policies or known_policies():
            need = _NEEDS.get(name)
            if name in self.options.plans:
                continue
            if need is not None and need not in self.stand.device.capabilities:
                device = self.stand.device.title
                self._leave_out(name, UsageError(f"{device} has no {need.value}"))
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
            pass  # whoever goes on looks at the request itself
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
            plans, sessions = processes.plans[name], processes.sessions[name]
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
            for setting in self._sweep.masks(self.options.trials):
                self._add(setting.plan, setting)
        elif name == "search":
            for plan in self._search(searches):
                self._add(plan)
        else:
            self._add(make_plan(self.stand.case, name, self.options.policy))

    def _add(self, plan: Plan, setting: Setting | None = None) -> None:
        """An entrant whose session stays open, or is opened for every run."""
        known: dict[str, Any] = {}
        if setting is not None:
            known = {"setting": setting.label, "trials": setting.trials}
        session = self.stand.open(plan)
        if self.options.reopen:
            session.close()  # what cannot be opened must not wait for its turn
            opener: Callable[[], Any] = functools.partial(self.stand.open, plan)
        else:
            opener = _kept_open(self._stack.enter_context(session))
        self.entrants.append(Entrant(plan, opener, **known))

    def _start_processes(self, names: Sequence[str]) -> list[_Started]:
        """Start the processes of these policies without waiting; all under MPS share one daemon."""
        if Capability.PROCESSES not in self.stand.device.capabilities:
            return []
        policies = [name for name in _IN_PROCESSES if name in names]
        others = sum(name != "mps" for name in policies)
        started = []
        for under_mps in (False, True):
            plans = {
                name: self._process_plans(name, others)
                for name in policies
                if (name != "timeslice") == under_mps
            }
            if not plans:
                continue
            with self._or_leave_out(*plans):
                sets = self.stand.start([plan for swept in plans.values() for plan in swept])
                self._stack.callback(sets.close)
                sessions = iter(sets.sessions)
                owned = {name: [next(sessions) for _ in swept] for name, swept in plans.items()}
                started.append(_Started(sets, plans, owned))
        return started

    def _process_plans(self, name: str, others: int) -> list[Plan]:
        if name != "mps":
            return [make_plan(self.stand.case, name, self.options.policy)]
        shared = make_plan(self.stand.case, "shared", self.options.policy)
        workers = len(shared.workers)
        # The others have a set each, and one of them is under MPS, too.
        sets = min(self.options.processes // workers - others, MOST_CLIENTS // workers - 1)
        shares = equal_shares(workers, max(1, sets))
        return [with_shares(shared, (share,) * workers) for share in shares]

    def _simulate(self, names: Sequence[str], progress: Progress) -> list[tuple[Objective, Found]]:
        """What a search that is to be verified finds by simulation, for every objective."""
        if "search" not in names or (explorer := self._explorer) is None:
            return []
        return [(aim, explorer.simulate(aim, progress)) for aim in self.options.objectives]

    @functools.cached_property
    def _explorer(self) -> Explorer | None:
        how = self.options.verification
        if how is None:
            return None
        if self._arrivals.part is not None:
            how = dataclasses.replace(how, refine_seconds=0.0)
        case = self.stand.case
        return Explorer(
            case.problem(choosing=True),
            SimEvaluator.of(case),
            search_options(case, self.options.policy),
            how,
        )

    def _search(self, searches: Future[list[tuple[Objective, Found]]]) -> list[Plan]:
        """A plan for every objective: what the device confirms, or what simulation says."""
        explorer, aims = self._explorer, self.options.objectives
        if explorer is None:
            self._progress.phase("searching")
            options = [dataclasses.replace(self.options.policy, objective=aim) for aim in aims]
            plans = [make_plan(self.stand.case, "search", option) for option in options]
        else:
            # All of it first: what is tried for one objective may serve another.
            self._progress.phase("searching on the device")
            trials, window = self._sweep.trials, self._sweep.window
            for aim, found in searches.result():
                known = self._sweep.best_masks(aim)
                explorer.explore(found, aim, self.stand, trials, self._progress, known)
            self._progress.phase("trying the finalists")
            plans = [
                confirm(explorer, found, aim, self.stand, trials, window, self._progress)
                for aim, found in searches.result()
            ]
            self.observed = explorer.observed
        return [self._sweep.named(plan, aim) for plan, aim in zip(plans, aims, strict=True)]

    def _run_rounds(self) -> None:
        """Run every entrant once a round. On a GPU one lap before is not counted: the first to run
        finds the GPU colder than the others do."""
        repeats, window = self.options.repeats, self._arrivals.window(self.stand)
        if not self.stand.device.modelled:
            for entrant in self.entrants:
                with self._or_leave_out(entrant.policy), entrant.open() as session:
                    self._sweep.run(session, entrant.plan)
        self._progress.phase("measuring")
        total = len(self.entrants) * repeats
        try:
            for done, (repeat, index) in enumerate(rotation(len(self.entrants), repeats)):
                if done % len(self.entrants) == 0 and done and not self._progress.stopped:
                    with contextlib.suppress(StoppedError):
                        self.stand.measure_alone()
                if self._progress.stopped:
                    break
                entrant = self.entrants[index]
                if entrant.policy in self.left_out:
                    continue
                # Recording kernels takes a run of its own on a GPU; one a policy is enough.
                last = repeat == repeats - 1
                traced = window if last else dataclasses.replace(window, trace_ms=0.0)
                load = self._arrivals.load(self.stand, repeat)
                with self._or_leave_out(entrant.policy), entrant.open() as session:
                    log = self.stand.run(session, entrant.plan, load, traced)
                    if not self._progress.stopped:  # otherwise it may have been cut short
                        entrant.logs.append(log)
                self._progress.part((done + 1) / total)
        finally:  # a log of an early round gets the rates alone of all rounds, also after a failure
            for entrant in self.measured:
                alone_rps = self.stand.alone_rps
                entrant.logs = [
                    msgspec.structs.replace(log, alone_rps=alone_rps) for log in entrant.logs
                ]
        if not self.measured and not self._progress.stopped:
            raise UsageError(f"nothing could run: {'; '.join(self.left_out.values())}")


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
