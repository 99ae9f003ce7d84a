"""A contest: the policies of one mix on one device, run in turns under identical arrivals.

Whatever several policies need is made once: the device, its captures, the rates alone, the
sessions. What is tried before the rounds is in tryouts.py. What was measured stays in the contest
whatever happens later, so that an interrupt or a failure costs only what had not run yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from eclip.artefacts.calibration import Calibration
from eclip.artefacts.comparison import Trial
from eclip.artefacts.fingerprint import Fingerprint
from eclip.artefacts.measures import measure
from eclip.artefacts.mix import Mix
from eclip.artefacts.plan import Plan, fingerprint_of
from eclip.artefacts.profile import Profile
from eclip.artefacts.runlog import RunLog
from eclip.artefacts.topology import Topology
from eclip.cli import wiring
from eclip.cli.contest_options import PROCESSES, ContestOptions, known_policies
from eclip.cli.contest_processes import Started, start_processes
from eclip.devices.base import Closing, Window
from eclip.devices.load import Load, at_rates, load_of_csv, load_of_mix, long_enough
from eclip.errors import EclipError, UsageError

if TYPE_CHECKING:
    from eclip.artefacts.observations import ObservedRun
    from eclip.cli.tryouts import Tryouts
    from eclip.cli.verification import Verifier
    from eclip.devices.base import Device, Session
    from eclip.planning.policies import PolicyOptions
    from eclip.planning.search.candidates import Found
    from eclip.planning.search.objective import Objective

Result = TypeVar("Result")


@dataclass
class Entrant:
    """A policy with its plan, how its session is opened, and the logs of its runs."""

    plan: Plan
    open: Callable[[], contextlib.AbstractContextManager[Session]]
    setting: str = ""
    trials: tuple[Trial, ...] = ()
    logs: list[RunLog] = field(default_factory=list)

    @property
    def policy(self) -> str:
        return self.plan.policy


class Contest:
    def __init__(
        self,
        mix: Mix,
        topology: Topology,
        calibration: Calibration,
        profiles: tuple[Profile, ...],
        policy_options: PolicyOptions,
        run_options: wiring.RunOptions,
        options: ContestOptions,
        progress: wiring.Progress,
        planned: Sequence[Profile] = (),  # of plans from files, which may have other kernels
    ) -> None:
        if options.load_part is not None and (
            run_options.arrivals is not None
            or any(worker.rate_rps is not None for worker in mix.workers)
        ):
            raise UsageError("--load draws the arrivals; leave --arrivals and rates (@rps) out")
        self.mix = mix
        self.profiles = profiles
        self.entrants: list[Entrant] = []
        self.left_out: dict[str, str] = {}  # by policy: why
        self.alone_rps: tuple[float, ...] = ()
        self.driver: str | None = None
        self.observed: list[ObservedRun] = []  # while a search went on on the device
        self._topology = topology
        self._calibration = calibration
        self._policy_options = policy_options
        self._run = run_options
        self._options = options
        self._progress = progress
        self._strict = False
        self._done = 0
        self._total = 1
        self._device: Device[Any]
        self._sources = wiring.Sources(
            (*planned, *policy_options.others, *profiles), run_options.device, run_options.gpu
        )
        self._replayed: Load | None = None
        self._stopped = False

    @property
    def measured(self) -> list[Entrant]:
        return [entrant for entrant in self.entrants if entrant.logs]

    @property
    def fingerprint(self) -> Fingerprint:
        """Of all that a search could choose from."""
        return fingerprint_of(self._topology, (*self.profiles, *self._policy_options.others))

    def hold(self, policies: Sequence[str] | None, plans: Mapping[str, Plan]) -> None:
        """Run these policies, or all of them if None, and these plans under their names, which
        stand for a policy of the same name.

        Where all are wanted, one that cannot run here is left out; one that was named must run.
        """
        self._strict = policies is not None
        wanted = known_policies() if policies is None else policies
        names = self._choose(name for name in wanted if name not in plans)
        for name, plan in plans.items():
            if [(one.name, one.service) for one in plan.mix.workers] != [
                (one.name, one.service) for one in self.mix.workers
            ]:
                raise UsageError(f"the plan {name} is for {plan.mix.name}, not {self.mix.name}")
        if self._run.arrivals is not None:  # before anything takes time
            workers = [worker.name for worker in self.mix.workers]
            self._replayed = load_of_csv(self._run.arrivals, workers, self._run.seed)
        self._count(names, len(plans))
        with contextlib.ExitStack() as stack:
            self._device = wiring.make_device(
                self._topology, self._calibration, self._run, self._report
            )
            if isinstance(self._device, Closing):
                stack.enter_context(self._device)
            self.driver = wiring.driver_of(self._device)
            with (
                self._aside(lambda: self._simulate_searches(names)) as searches,
                self._aside(lambda: self._start_processes(names, stack)) as started,
            ):
                self._sources.all(self.profiles)  # which the alone rates and most plans need
            self._enter_all(names, plans, started.result(), searches, stack)
            self._run_rounds()

    # Who takes part

    def _choose(self, names: Iterable[str]) -> list[str]:
        """Without those that mean nothing on this device."""
        chosen = []
        for name in names:
            if self._run.device == "sim" and name in ("mps", "mps-model"):
                self._leave_out(name, UsageError("the simulator has no processes to run under MPS"))
            elif self._run.device == "sim" and name == "priority" and not self._strict:
                self._leave_out(name, UsageError("the simulator does not know stream priorities"))
            else:
                chosen.append(name)
        return chosen

    def _leave_out(self, policy: str, error: EclipError) -> None:
        if self._strict:
            raise type(error)(f"{policy}: {error}")
        self.left_out[policy] = str(error)

    def _start_processes(self, names: Sequence[str], stack: contextlib.ExitStack) -> list[Started]:
        if self._run.device == "sim":
            return []
        return start_processes(
            self._device,
            [name for name in PROCESSES if name in names],
            self._plan,
            self._options.processes,
            self._or_leave_out,
            stack,
        )

    def _enter_all(
        self,
        names: Sequence[str],
        plans: Mapping[str, Plan],
        started: Sequence[Started],
        searches: Future[list[tuple[Objective, Found]]],
        stack: contextlib.ExitStack,
    ) -> None:
        from eclip.lab.alone import alone_rates

        made: dict[str, Plan] = {}
        sessions = {name: mine for one in started for name, mine in one.sessions.items()}
        for name in names:
            if name not in (*sessions, *self.left_out, "masks", "search"):
                with self._or_leave_out(name):
                    made[name] = self._plan(name)
        for name, plan in plans.items():
            made[name] = msgspec.structs.replace(plan, policy=name)
        for one in started:
            with self._or_leave_out(*one.sessions):
                one.sets.wait()
        own = self._sources.all(self.profiles)
        self.alone_rps = alone_rates(self._device, self.profiles, own)
        for name in [*names, *plans]:
            with self._or_leave_out(name):
                if name in made:
                    self.entrants.append(self._entrant(made[name], stack))
                elif name == "search":
                    self.entrants += [
                        self._entrant(plan, stack)
                        for plan in self._confirm_searches(searches.result())
                    ]
                elif name == "masks":
                    self.entrants += [
                        self._entrant(one.plan, stack, setting=one.label, trials=one.trials)
                        for one in self._tryouts.sweep_masks()
                    ]
                elif name not in self.left_out:
                    self.entrants += [
                        Entrant(
                            one.plan,
                            functools.partial(_kept_open, session),
                            setting=one.label,
                            trials=one.trials,
                        )
                        for one, session in self._tryouts.sweep_processes(sessions[name])
                    ]
        if not self.entrants:
            raise UsageError(
                "no policy is left to run: "
                + "; ".join(f"{name}: {why}" for name, why in self.left_out.items())
            )

    @contextlib.contextmanager
    def _or_leave_out(self, *policies: str) -> Iterator[None]:
        try:
            yield
        except EclipError as error:
            for policy in policies:
                self._leave_out(policy, error)

    def _plan(self, policy: str, options: PolicyOptions | None = None) -> Plan:
        return wiring.make_plan(
            policy,
            self.mix,
            self._topology,
            self.profiles,
            self._calibration,
            options or self._policy_options,
        )

    def _simulate_searches(self, names: Sequence[str]) -> list[tuple[Objective, Found]]:
        """What a search that is to be verified finds by simulation, for every objective."""
        if self._verifier is None or "search" not in names:
            return []
        return [
            (aim, self._verifier.simulate(aim, self._go_on)) for aim in self._options.objectives
        ]

    @contextlib.contextmanager
    def _aside(self, work: Callable[[], Result]) -> Iterator[Future[Result]]:
        """Do this in another thread meanwhile; if the block fails, it stops too."""
        with ThreadPoolExecutor(1) as thread:
            try:
                yield thread.submit(work)
            except BaseException:
                self._stopped = True
                raise

    def _go_on(self, part: float) -> None:
        if self._stopped:
            raise UsageError("the comparison has ended")

    def _confirm_searches(self, searches: Sequence[tuple[Objective, Found]]) -> list[Plan]:
        """A plan for every objective: what the device confirms, or what simulation says."""
        if self._options.load_part is not None:
            # At part load the search is for that load, which had to be measured first.
            return [self._plan_for_load()]
        if self._verifier is not None:
            plans = self._tryouts.confirm(self._verifier, searches)
            self.observed = self._verifier.observed
            return plans
        return self._tryouts.name(
            [
                self._plan("search", dataclasses.replace(self._policy_options, objective=aim))
                for aim in self._options.objectives
            ]
        )

    @functools.cached_property
    def _verifier(self) -> Verifier | None:
        if self._options.verification is None or self._options.load_part is not None:
            return None
        return wiring.make_verifier(
            self.mix,
            self._topology,
            self.profiles,
            self._calibration,
            self._policy_options,
            self._options.verification,
        )

    def _plan_for_load(self) -> Plan:
        """What the search finds for the latency of the arrivals that the policies will meet."""
        from eclip.planning.search.objective import Objective

        arriving, aim = at_rates(self.mix, self._rates), Objective("latency")
        options = dataclasses.replace(self._policy_options, objective=aim)
        where = (arriving, self._topology, self.profiles, self._calibration, options)
        if (wanted := self._options.verification) is None:
            plan = wiring.make_plan("search", *where)
        else:
            verifier = wiring.make_verifier(*where, dataclasses.replace(wanted, refine_seconds=0.0))
            found = verifier.simulate(aim, self._go_on)
            plan = self._tryouts.confirm_for_load(verifier, found, aim)
        return msgspec.structs.replace(plan, mix=at_rates(plan.mix, [None] * len(plan.workers)))

    def _entrant(self, plan: Plan, stack: contextlib.ExitStack, **known: Any) -> Entrant:
        if self._options.reopen:
            self._open(plan).close()  # what cannot be opened must not wait for its turn
            return Entrant(plan, lambda: self._open(plan), **known)
        session = stack.enter_context(self._open(plan))
        return Entrant(plan, functools.partial(_kept_open, session), **known)

    def _open(self, plan: Plan) -> Session:
        return self._sources.open(self._device, plan)

    @functools.cached_property
    def _tryouts(self) -> Tryouts:
        from eclip.cli.tryouts import Tryouts
        from eclip.cli.verification import Opened
        from eclip.planning.problem import Problem

        return Tryouts(
            Problem(self.mix, self._topology, self.profiles),
            Opened(self._device, self._sources, self.alone_rps),
            self._options,
            self._run.seed,
            self._step,
        )

    # The rounds

    def _run_rounds(self) -> None:
        from eclip.lab.rounds import rotation

        load_of, window = self._arrivals()
        repeats = self._options.repeats
        if self._run.device != "sim":
            self._lap()
        for repeat, index in rotation(len(self.entrants), repeats):
            entrant = self.entrants[index]
            if entrant.policy in self.left_out:
                continue
            # Recording kernels takes a run of its own on a GPU; one a policy is enough.
            traced = window if repeat == repeats - 1 else dataclasses.replace(window, trace_ms=0.0)
            with self._or_leave_out(entrant.policy), entrant.open() as session:
                log = session.run(load_of(repeat), traced, self.alone_rps)
                # A session knows its plan by the policy's name alone.
                entrant.logs.append(msgspec.structs.replace(log, plan=entrant.plan))
            self._step()
        if not self.measured:
            raise UsageError(f"nothing could run: {'; '.join(self.left_out.values())}")

    def _lap(self) -> None:
        """Everybody once, not counted: whoever runs first finds a GPU in another state."""
        for entrant in self.entrants:
            with self._or_leave_out(entrant.policy), entrant.open() as session:
                self._tryouts.run(session)

    def _arrivals(self) -> tuple[Callable[[int], Load], Window]:
        """The load of every repeat, the same for all policies, and the window it is for."""
        window, seed = self._run.window, self._run.seed
        if (replayed := self._replayed) is not None:
            return lambda repeat: replayed, window
        mix, label = self.mix, None
        part = self._options.load_part
        if part is not None:
            rates = self._rates
            mix = at_rates(mix, rates)
            label = f"Poisson at {part:.0%} of the closed-loop rates under shared"
            seconds = long_enough(rates, self._options.requests) / self._options.repeats
            window = dataclasses.replace(
                window, seconds=seconds, trace_ms=min(window.trace_ms, 1000 * seconds)
            )

        def load_of(repeat: int) -> Load:
            load = load_of_mix(mix, window.seconds, window.warmup_seconds, seed + repeat)
            return load if label is None else dataclasses.replace(load, label=label)

        return load_of, window

    @functools.cached_property
    def _rates(self) -> list[float]:
        """The asked-for part of every worker's closed-loop rate under shared."""
        window = dataclasses.replace(self._run.window, trace_ms=0.0)
        load = load_of_mix(self.mix, window.seconds, window.warmup_seconds, self._run.seed)
        with self._open(self._plan("shared")) as session:
            workers = measure(session.run(load, window, self.alone_rps)).workers
        idle = [worker.name for worker in workers if worker.requests == 0]
        if idle:
            raise UsageError(
                f"{', '.join(idle)} completed no request under shared in {window.seconds:g} s; "
                f"give more --seconds"
            )
        return [(self._options.load_part or 1.0) * worker.rate_rps for worker in workers]

    # Progress

    def _count(self, names: Sequence[str], plans: int) -> None:
        """How many runs there will be, about."""
        trials = self._options.trials * len(self._options.objectives) if "masks" in names else 0
        self._total = trials + (len(names) + plans) * self._options.repeats

    def _step(self) -> None:
        self._done += 1
        self._report(0.0)

    def _report(self, part: float) -> None:
        self._progress(min(1.0, (self._done + part) / self._total))


def _kept_open(session: Session) -> contextlib.AbstractContextManager[Session]:
    return contextlib.nullcontext(session)
