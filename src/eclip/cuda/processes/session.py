"""Workers in separate processes: time-slicing and MPS, as in common use.

A set of processes serves one plan; several sets can be open at once and take turns, because a
process that waits for its next window costs the GPU nothing. Each process builds the same model and
launches its whole captured graph on one stream from the same loop as a session inside one process.
All processes of a window begin at one instant of their common clock. A failure of one process
closes its set and names the worker; no process outlives its set. Workers that give way to each
other share a board of their set, with a row each.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from eclip.core.device import Closing, Window, check_load
from eclip.core.load import CLOSED_LOOP, Load
from eclip.core.memory import check_memory, memory_of_plan
from eclip.core.plan import Plan, Processes
from eclip.core.runlog import RunLog
from eclip.core.topology import Topology
from eclip.cuda.processes.child import Attachment, Facts, Failure, Job, Order, Served, now_ns
from eclip.cuda.processes.mps import (
    BELOW_NORMAL,
    NORMAL,
    PRIORITY,
    SHARE,
    MpsDaemon,
    client_variables,
    python_path,
)
from eclip.desk import Submitting
from eclip.errors import DeviceError, MismatchError, UsageError
from eclip.gpu.board import Board, private_board
from eclip.gpu.energy import EnergyCounter, mean_power_w
from eclip.gpu.recording import NO_KERNELS, make_log, since, window_warnings

_BUILD_SECONDS = 300.0
_LEAD_S = 0.02  # from sending orders to the instant at which all begin
_ANSWER_SECONDS = 30.0  # after the end of a window
_LEAVE_SECONDS = 10.0  # for a child to end by itself
# With an empty pipe directory a process runs without MPS, even if the host has a daemon.
_NO_PIPES = Path("/nonexistent")
_CHILD = "import sys; from eclip.cuda.processes.child import main; main(int(sys.argv[1]))"


@dataclass(frozen=True)
class Host:
    """The GPU that processes run on, as the parent sees it."""

    uuid: str
    title: str
    topology: Topology
    counter: EnergyCounter


class ProcessSets(Closing):
    """Sets of processes, one per plan, and the MPS daemon where one needs it.

    All processes start at once: importing and capturing takes seconds, mostly of CPU time. The
    caller may do other work meanwhile, and calls ``wait`` before the first run. All plans with
    shares have one daemon, so a failure of one plan ends the others.
    """

    def __init__(self, host: Host, plans: Sequence[Plan], jobs: Sequence[Sequence[Job]]) -> None:
        """``jobs``: for every plan, the jobs of its workers (see child.py)."""
        self.sessions: list[ProcessSession] = []
        self._host = host
        self._daemon: MpsDaemon | None = None
        self._stack = contextlib.ExitStack()
        try:
            if any(isinstance(plan.sharing, Processes) for plan in plans):
                self._daemon = self._stack.enter_context(MpsDaemon(host.uuid))
            for plan, of_workers in zip(plans, jobs, strict=True):
                session = ProcessSession(host, plan, self._daemon)
                self._stack.callback(session.close)
                session.start(of_workers)
                self.sessions.append(session)
        except BaseException:
            self.close()
            raise

    def wait(self) -> None:
        """Until every process is ready to run."""
        try:
            children = [child for session in self.sessions for child in session.children]
            answers = _Answers(children)
            answers.wait(now_ns() + round(_BUILD_SECONDS * 1e9), "was not ready")
            if self._daemon is not None:  # its server, too, computes on the GPU
                self._host.counter.ours |= self._daemon.pids()
            for session in self.sessions:
                session.check([answers.of[child] for child in session.children])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for session in self.sessions:
            session.dismiss()  # all of them leave at once; closing waits for each
        self._stack.close()


class ProcessSession(Submitting):
    """The processes of one plan. A failure or an interrupt during a run closes it."""

    def __init__(self, host: Host, plan: Plan, daemon: MpsDaemon | None) -> None:
        self.plan = plan
        self.facts: list[Facts] = []  # per worker
        self.children: list[_Child] = []
        self._host = host
        self._daemon = daemon
        self._board: Board | None = None
        self._label = _label(plan)
        _check_stays(plan)
        self._warnings = plan.fingerprint.check(
            host.topology.fingerprint, "the plan", host.topology.title
        )
        need = memory_of_plan(plan, host.topology, processes=len(plan.workers))
        check_memory(need, f"the plan with {self._label}")

    def start(self, jobs: Sequence[Job]) -> None:
        models = [job.model for job in jobs]
        if models != list(self.plan.models):
            raise MismatchError(
                f"the plan has {len(self.plan.workers)} workers, "
                f"{', '.join(map(str, self.plan.models))}; the jobs given are for "
                f"{', '.join(map(str, models)) or 'no worker'}"
            )
        attachments = self._make_board() if self.plan.gives_way else [None] * len(jobs)
        for index, (worker, job) in enumerate(zip(self.plan.workers, jobs, strict=True)):
            child = _Child(
                name=f"{worker.name} ({self._label})",
                environment=self._environment(index),
                board=self._board,
            )
            self.children.append(child)
            self._host.counter.ours.add(child.pid)
            child.send(replace(job, attachment=attachments[index]))

    def _environment(self, worker: int) -> dict[str, str]:
        sharing = self.plan.sharing
        if not isinstance(sharing, Processes) or self._daemon is None:
            return _environment(self._host.uuid, _NO_PIPES, {})
        priority = BELOW_NORMAL if worker in sharing.below_normal else NORMAL
        asked = {SHARE: str(sharing.shares[worker]), PRIORITY: str(priority)}
        return _environment(self._host.uuid, self._daemon.pipes, asked)

    def _make_board(self) -> Sequence[Attachment | None]:
        """A row for every worker. Its process says that it runs, so that one which is stopped or
        killed counts as idle although the rows are ours."""
        self._board = private_board()
        rows = self._board.claim_all(self.plan.workers, beats=False)
        descriptor = self._board.descriptor
        return [Attachment(self.plan, worker, rows, descriptor) for worker in self.plan.everyone]

    def check(self, facts: Sequence[Facts]) -> None:
        """Refuse processes that share the GPU in another way than asked, or run other kernels."""
        plan, under_mps = self.plan, isinstance(self.plan.sharing, Processes)
        other = []
        for worker, child, fact in zip(plan.workers, self.children, facts, strict=True):
            if fact.mps != under_mps:
                raise DeviceError(
                    f"worker {child.name} {'is no client of MPS' if under_mps else 'is under MPS'}"
                    ", so it would not share the GPU as asked"
                )
            if fact.trace != plan.fingerprint.traces[str(worker.model)]:
                other.append(worker.name)
        if other and not under_mps:
            raise MismatchError(
                f"{', '.join(other)} launches other kernels in a process of its own than its plan "
                f"was made for; measure it again with `eclip profile`"
            )
        if other:
            # The libraries choose kernels for as many units as the driver shows them.
            self._warnings += (
                f"under {self._label} libraries chose other kernels for {', '.join(other)}",
            )
        self.facts = list(facts)

    def run(self, load: Load, window: Window) -> RunLog:
        plan = self.plan
        check_load(plan, load)
        if not self.children:
            raise DeviceError(f"the processes of {self._label} have ended")
        warnings = [*self._warnings, *window_warnings(window)]
        counter = self._host.counter
        if others := counter.other_processes():
            warnings.append(f"other processes used the GPU: {', '.join(map(str, others))}")
        duration_ns = round(window.seconds * 1e9)
        begin_ns = now_ns() + round(_LEAD_S * 1e9)
        zero = begin_ns + round(window.warmup_seconds * 1e9)
        try:
            for child, arrivals in zip(self.children, load.arrivals, strict=True):
                due = None if arrivals is CLOSED_LOOP else arrivals + zero
                child.send(Order(begin_ns, zero + duration_ns, due))
            answers = _Answers(self.children)
            power = mean_power_w(counter, zero, zero + duration_ns, answers.failed)
            deadline_ns = zero + duration_ns + round(_ANSWER_SECONDS * 1e9)
            answers.wait(deadline_ns, "did not report its window")
        except BaseException:
            self.close()
            raise
        served: list[Served] = [answers.of[child] for child in self.children]
        warnings += [
            f"worker {child.name} began {(window_served.began_ns - zero) / 1e6:.1f} ms late"
            for child, window_served in zip(self.children, served, strict=True)
            if window_served.began_ns > zero
        ]
        return make_log(
            plan,
            self._host.title,
            load,
            [since(worker.rows, zero) for worker in served],
            [fact.kernels for fact in self.facts],
            NO_KERNELS,
            duration_ns,
            power,
            warnings,
        )

    def dismiss(self) -> None:
        """Tell every process to leave, without waiting for it."""
        for child in self.children:
            child.dismiss()

    def close(self) -> None:
        self.dismiss()
        for child in self.children:
            child.reap()
            self._host.counter.ours.discard(child.pid)
        self.children = []
        if self._board is not None:
            self._board.close()


class _Child:
    """The parent's end of one process."""

    def __init__(self, name: str, environment: dict[str, str], board: Board | None) -> None:
        self.name = name
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self.connection, of_child = Pipe()
        with of_child:
            passed = [of_child.fileno(), *([] if board is None else [board.descriptor])]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD, str(of_child.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                env=environment,
                pass_fds=passed,
                start_new_session=True,  # an interrupt from the keyboard is for the parent
            )
        self.pid = self._process.pid

    def send(self, message: Any) -> None:
        try:
            self.connection.send(message)
        except OSError:
            raise self._death() from None

    def receive(self) -> Any:
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(message, Failure):
            raise message.kind(f"worker {self.name}: {message.reason}")
        return message

    def _death(self) -> DeviceError:
        try:
            status = self._process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            return DeviceError(f"worker {self.name} closed its connection")
        if status == -signal.SIGKILL:
            return DeviceError(f"worker {self.name} was killed; is there enough memory?")
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return DeviceError(f"worker {self.name} ended {how}: {last}")

    def dismiss(self) -> None:
        self.connection.close()

    def reap(self) -> None:
        """Wait for the process to end; terminate, then kill it if it does not."""
        for insist, seconds in (
            (None, _LEAVE_SECONDS),
            (self._process.terminate, _LEAVE_SECONDS),
            (self._process.kill, None),
        ):
            if insist is not None:
                insist()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
                break
        self._said.close()


class _Answers:
    """One answer of every child, in order of arrival; the first failure is raised."""

    def __init__(self, children: Sequence[_Child]) -> None:
        self.of: dict[_Child, Any] = {}
        self._pending = {child.connection: child for child in children}

    def _take(self, seconds: float) -> None:
        for connection in wait(list(self._pending), seconds):
            child = self._pending.pop(connection)  # type: ignore[call-overload]
            self.of[child] = child.receive()

    def failed(self) -> bool:
        """Raises if a child failed."""
        self._take(0)
        return False

    def wait(self, deadline_ns: int, trouble: str) -> None:
        while self._pending:
            self._take(0.1)
            if self._pending and now_ns() > deadline_ns:
                late = ", ".join(child.name for child in self._pending.values())
                raise DeviceError(f"worker {late} {trouble} in time")


class LoneSession(Submitting):
    """The session of one plan with its own processes and daemon, which end with it."""

    def __init__(self, host: Host, plan: Plan, jobs: Sequence[Job]) -> None:
        self._sets = ProcessSets(host, [plan], [jobs])
        self._sets.wait()

    def run(self, load: Load, window: Window) -> RunLog:
        return self._sets.sessions[0].run(load, window)

    def close(self) -> None:
        self._sets.close()


def _label(plan: Plan) -> str:
    """``timeslice`` or ``mps 60/30/10%``"""
    return f"mps {plan.sharing.label}" if isinstance(plan.sharing, Processes) else "timeslice"


def _check_stays(plan: Plan) -> None:
    """Refuse rules that move workers: a process has one stream, and no lanes to move to."""
    for worker in plan.workers:
        rules = worker.joints.rules if worker.joints else ()
        if any(rule.lane is not None for rule in rules):
            raise UsageError(
                f"{worker.name} is planned to move to another lane, and a separate process has no "
                f"lanes; plan it to yield, or use a policy with lanes"
            )


def _environment(uuid: str, pipes: Path, asked: dict[str, str]) -> dict[str, str]:
    """The environment of a child; ``asked``: variables for MPS."""
    environment = os.environ | client_variables(uuid, pipes) | {"PYTHONPATH": python_path()}
    # One stream needs few hardware queues, and those of one MPS client are taken from the others.
    for variable in ("CUDA_DEVICE_MAX_CONNECTIONS", SHARE, PRIORITY):
        environment.pop(variable, None)
    # Many processes build models at once: with threads for all cores each, they would thrash.
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment | asked
