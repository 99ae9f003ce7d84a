"""Replicas: processes of one command, started again when they fail and ended together.

One thread does everything, woken by what happens: a process ends, writes a line, is due to start
again, or a signal comes. Each replica has a process group of its own, which ends with its first
process: what a failed replica leaves behind would keep its port and its GPU memory. The first
process stays a zombie until then, so that its number cannot become another group's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from eclip.cuda.processes.mps import MpsDaemon, client_variables
from eclip.cuda.uuid import uuid_of
from eclip.errors import UsageError

INDEX = "{index}"  # in the command: the replica's number
VARIABLE = "ECLIP_REPLICA"
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LONGEST_LINE = 1 << 16
_PR_SET_PDEATHSIG = 1
_BY_MPS = (
    "the replicas share an MPS server of their own: a GPU fault in one of them, such as an illegal "
    "address, ends all of them"
)
_IN_TURNS = (
    "without --mps the GPU runs the replicas in turns; a GPU fault in one leaves the others alone"
)


@dataclass(frozen=True)
class Patience:
    """How replicas are started again, and how long they may take to end; in seconds."""

    restarts: int = 5  # of a replica in a row
    first: float = 1.0  # before the first of them; doubled for each further one
    longest: float = 30.0
    settled: float = 60.0  # a replica that ran so long has not failed in a row
    end: float = 30.0  # from a signal until what still runs is killed


@dataclass
class Replica:
    index: int
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    running: bool = False
    began: float = 0.0
    failures: int = 0  # in a row
    restarts: int = 0  # in all
    due: float | None = None  # when it is started again
    code: int = 0  # of its last process, as a shell would give it
    pipes: dict[int, _Pipe] = field(default_factory=dict)  # by descriptor


@dataclass
class _Pipe:
    source: IO[bytes]
    target: IO[bytes]
    rest: bytes = b""  # of a line that has not ended


def commands_of(command: Sequence[str], replicas: int) -> list[list[str]]:
    """The command of each replica: its number stands for ``{index}`` in every word."""
    return [[word.replace(INDEX, str(index)) for word in command] for index in range(replicas)]


@dataclass(frozen=True)
class Replication:
    """How many replicas a command has, and how they share the GPU. Calling it runs them."""

    replicas: int
    say: Callable[[str], None]
    patience: Patience = Patience()
    mps_gpu: int | None = None  # the GPU of an MPS server of their own; None: no server

    def __call__(
        self, command: Sequence[str], environment: dict[str, str]
    ) -> tuple[int, int | None]:
        with contextlib.ExitStack() as stack:
            if self.mps_gpu is None and self.replicas > 1:
                self.say(_IN_TURNS)
            if self.mps_gpu is not None:
                uuid = uuid_of(self.mps_gpu)
                daemon = stack.enter_context(MpsDaemon(uuid))
                environment = environment | client_variables(uuid, daemon.pipes)
                if "ECLIP_GPU" in environment:
                    environment["ECLIP_GPU"] = "0"  # the only GPU that its clients see
                self.say(_BY_MPS)
            running = Replicas(command, self.replicas, environment, self.say, self.patience)
            return running.run(), running.signal


class Replicas:
    """All replicas of a command, until the last of them has ended for good."""

    def __init__(
        self,
        command: Sequence[str],
        replicas: int,
        environment: Mapping[str, str],
        say: Callable[[str], None],
        patience: Patience,
    ) -> None:
        """``say`` prints a line for a person."""
        commands = commands_of(command, replicas)
        self.replicas = [Replica(index, words) for index, words in enumerate(commands)]
        self.signal: int | None = None  # the first that was passed on
        self._environment = environment
        self._say = say
        self._patience = patience
        self._signals: list[int] = []
        self._kill_at: float | None = None
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Start all and wait for all; the first exit status that is not 0."""
        with self._listening():
            try:
                for replica in self.replicas:
                    if not self._signals:
                        self._start(replica)
                while self._go_on():
                    for key, _ in self._selector.select(self._timeout()):
                        key.data()
                    self._pass_on()
                    self._keep_time()
            finally:
                self._end_all()
        return next((one.code for one in self.replicas if one.code), 0)

    def _go_on(self) -> bool:
        return any(one.running or one.due is not None for one in self.replicas)

    # --- A replica's life ------------------------------------------------------------------------

    def _start(self, replica: Replica) -> None:
        _bury(replica)
        replica.due, replica.began = None, time.monotonic()
        try:
            process = subprocess.Popen(
                replica.command,
                env={**self._environment, VARIABLE: str(replica.index)},
                stdin=subprocess.DEVNULL,  # replicas cannot share one
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
                preexec_fn=functools.partial(_end_with, os.getpid()),
            )
        except OSError as error:
            reason = f"cannot run {replica.command[0]}: {error.strerror or error}"
            if replica.restarts == 0:
                raise UsageError(reason) from None
            self._say(f"replica {replica.index}: {reason}")
            replica.code = 127
            return
        replica.process, replica.running = process, True
        descriptor = os.pidfd_open(process.pid)
        self._selector.register(
            descriptor,
            selectors.EVENT_READ,
            functools.partial(self._ended, replica, descriptor),
        )
        for source, target in (
            (process.stdout, sys.stdout.buffer),
            (process.stderr, sys.stderr.buffer),
        ):
            assert source is not None
            os.set_blocking(source.fileno(), False)
            pipe = _Pipe(source, target)
            replica.pipes[source.fileno()] = pipe
            read = functools.partial(self._read, replica, pipe)
            self._selector.register(source, selectors.EVENT_READ, read)

    def _ended(self, replica: Replica, descriptor: int) -> None:
        found = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if found is None:
            return
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _send(replica, signal.SIGTERM)  # to what it has left behind
        self._close_pipes(replica)
        replica.running = False
        exited = found.si_code == os.CLD_EXITED
        replica.code = found.si_status if exited else 128 + found.si_status
        if replica.code != 0 and self.signal is None:
            name = "" if exited else signal.Signals(found.si_status).name
            self._plan_restart(replica, name or f"status {replica.code}")

    def _plan_restart(self, replica: Replica, what: str) -> None:
        patience, lasted = self._patience, time.monotonic() - replica.began
        replica.failures = 1 if lasted >= patience.settled else replica.failures + 1
        ended = f"replica {replica.index} ended with {what} after {lasted:.1f} s"
        if replica.failures > patience.restarts:
            self._say(
                f"{ended} and is given up, after {replica.restarts} restarts; the others go on"
            )
            return
        wait = min(patience.first * 2 ** (replica.failures - 1), patience.longest)
        replica.due = time.monotonic() + wait
        replica.restarts += 1
        self._say(
            f"{ended}; it starts again in {wait:g} s "
            f"({replica.failures} of {patience.restarts} in a row)"
        )

    # --- Output ----------------------------------------------------------------------------------

    def _read(self, replica: Replica, pipe: _Pipe) -> bool:
        """Pass on what is in the pipe; False: nothing was there."""
        got = None if pipe.source.closed else pipe.source.read(_LONGEST_LINE)
        if got is None:
            return False
        if not got:
            self._close_pipe(replica, pipe)
            return False
        *lines, pipe.rest = (pipe.rest + got).split(b"\n")
        if len(pipe.rest) >= _LONGEST_LINE:
            lines, pipe.rest = [*lines, pipe.rest], b""
        self._write(replica, pipe, lines)
        return True

    def _write(self, replica: Replica, pipe: _Pipe, lines: Sequence[bytes]) -> None:
        name = f"{replica.index} | ".encode()
        with contextlib.suppress(ValueError):  # our own stream is closed
            pipe.target.write(b"".join(name + line + b"\n" for line in lines))
            pipe.target.flush()

    def _close_pipe(self, replica: Replica, pipe: _Pipe) -> None:
        if pipe.rest:
            self._write(replica, pipe, [pipe.rest])
        replica.pipes.pop(pipe.source.fileno(), None)
        self._selector.unregister(pipe.source)
        pipe.source.close()

    def _close_pipes(self, replica: Replica) -> None:
        """With what is still in them. A process that was left behind may hold the other end."""
        for pipe in tuple(replica.pipes.values()):
            while self._read(replica, pipe):
                pass
            if not pipe.source.closed:
                self._close_pipe(replica, pipe)

    # --- Signals and time ------------------------------------------------------------------------

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """While the block lasts, signals are noted and wake the loop."""
        inward, outward = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        kept = {
            number: signal.getsignal(number)
            for number in _PASSED_ON
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        woken_by = signal.set_wakeup_fd(outward, warn_on_full_buffer=False)
        self._selector.register(
            inward, selectors.EVENT_READ, functools.partial(os.read, inward, 1 << 10)
        )
        try:
            for number in kept:
                signal.signal(number, lambda number, _: self._signals.append(number))
            yield
        finally:
            for number, old in kept.items():
                signal.signal(number, signal.SIG_DFL if old is None else old)
            signal.set_wakeup_fd(woken_by)
            self._selector.close()
            for descriptor in (inward, outward):
                os.close(descriptor)

    def _pass_on(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if self.signal is None:
                self.signal = number
                self._kill_at = time.monotonic() + self._patience.end
            for replica in self.replicas:
                if replica.due is not None:
                    replica.due = None
                if replica.running:
                    _send(replica, number)

    def _keep_time(self) -> None:
        now = time.monotonic()
        for replica in self.replicas:
            if replica.due is not None and now >= replica.due:
                self._start(replica)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            left = [str(one.index) for one in self.replicas if one.running]
            self._say(
                f"killed after {self._patience.end:g} s, because they did not end: "
                f"{', '.join(left)}"
            )
            for replica in self.replicas:
                if replica.running:
                    _send(replica, signal.SIGKILL)

    def _timeout(self) -> float | None:
        times = [one.due for one in self.replicas if one.due is not None]
        times += [self._kill_at] if self._kill_at is not None else []
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _end_all(self) -> None:
        """Nothing is left running, also after an error of ours."""
        for replica in self.replicas:
            _bury(replica)
            self._close_pipes(replica)


def _send(replica: Replica, number: int) -> None:
    if replica.process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(replica.process.pid, number)


def _bury(replica: Replica) -> None:
    """End what is left of the replica's process group."""
    if replica.process is not None:
        _send(replica, signal.SIGKILL)
        replica.process.wait()
        replica.process = None


_libc: Any = ctypes.CDLL(None)


def _end_with(parent: int) -> None:
    """In a child before it becomes the command: the kernel ends it if eclip is killed."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)
