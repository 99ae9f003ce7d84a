"""Child processes of the server: started with a channel, ended without fail."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from eclip.core.device import Closing
from eclip.cuda.processes.mps import python_path
from eclip.errors import DeviceError, UsageError
from eclip.server.bell import Bell
from eclip.server.control import Channel, Deployment, Message
from eclip.server.log import ServerLog
from eclip.server.supervisor.planner_process import PlanAnswer, PlanRequest

Say = Callable[[int], None]
_CHILD = "import sys; from eclip.server.{module} import main; main({argument})"
_LEAVE_S = 10.0
_BACK_OFF_S = (0.0, 0.0, 0.5, 1.0, 2.0, 5.0)  # before a process is started again
_LOOK_S = 0.5
_PIPE_BYTES = 65536
_STEADY_S = 5.0  # that a process lives: then its next death counts as its first


class Chores:
    """What a server does besides answering, for as long as it lives. ``failure`` is what ended one
    of them: then the server is of no use."""

    def __init__(self, bell: Bell) -> None:
        self.failure: BaseException | None = None
        self._bell = bell
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = error
            self._bell.ring()

    def check(self) -> None:
        """That all of them go on."""
        if self.failure is not None:
            raise DeviceError(f"the server cannot go on: {self.failure}") from self.failure

    async def end(self) -> None:
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class BackOff:
    """How long to wait before a process that died is started again."""

    def __init__(self) -> None:
        self._deaths = 0
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.monotonic()

    def pause_s(self) -> float:
        steady = time.monotonic() - self._began > _STEADY_S
        self._deaths = 1 if steady else self._deaths + 1
        return _BACK_OFF_S[min(self._deaths, len(_BACK_OFF_S)) - 1]


class Output(Closing):
    """What a process writes to its standard output and error, line by line into the log. The pipe
    never blocks the process: what finds no room in it is lost."""

    def __init__(self, who: str, log: ServerLog) -> None:
        self._who = who
        self._log = log
        self._rest = b""
        self._read, self.descriptor = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self.descriptor, False)
        asyncio.get_running_loop().add_reader(self._read, self._take)

    def started(self) -> None:
        """The process has its end."""
        os.close(self.descriptor)
        self.descriptor = -1

    def close(self) -> None:
        if self.descriptor >= 0:
            self.started()
        while self._take():
            pass
        if self._read >= 0:
            self._end()

    def _take(self) -> bool:
        """Whether there was something."""
        try:
            data = b"" if self._read < 0 else os.read(self._read, _PIPE_BYTES)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data or len(self._rest) > _PIPE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._log.relay(self._who, line)
        if not data and self._read >= 0:
            self._end()
        return bool(data)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._read)
        os.close(self._read)
        self._read = -1


class Child:
    """A process at the other end of a channel. ``ended`` is set when it has gone, and only after
    the last of its words was heard."""

    def __init__(
        self,
        channel: Channel,
        process: asyncio.subprocess.Process,
        output: Output | None = None,
    ) -> None:
        self.channel = channel
        self.process = process
        self._output = output
        self.ended = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    def listen(self, hear: Callable[[Message, list[int]], None], bell: Bell) -> None:
        """Hand on what it says, and ring when it has said something or has ended."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                while (received := self.channel.receive()) is not None:
                    hear(*received)
                    bell.ring()
            except EOFError:
                loop.remove_reader(self.channel.fileno())

        async def watch() -> None:
            await self.process.wait()
            if self.channel.fileno() >= 0:
                read()
                loop.remove_reader(self.channel.fileno())
            self.ended.set()
            bell.ring()

        loop.add_reader(self.channel.fileno(), read)
        self._watch = asyncio.create_task(watch())

    async def end(self, seconds: float = _LEAVE_S) -> None:
        """Wait for its end; one that does not leave is made to."""
        try:
            async with asyncio.timeout(seconds):
                await self.ended.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.ended.wait()

    async def kill(self) -> None:
        """At once, without waiting for the child."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        self.close()

    async def until_ended(self, beat: Callable[[], int], most_silent_s: float, say: Say) -> None:
        """Wait for its end. A process whose heartbeat stands still, stopped or stuck, is ended
        here. Looks are counted and not seconds: where everything was stopped, the server was,
        too."""
        before, silent = 0, 0
        while not self.ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self.ended.wait()
            last, before = before, beat()
            silent = silent + 1 if before == last else 0
            if silent == round(most_silent_s / _LOOK_S):
                say(self.pid)
                await self.end(0.0)

    def close(self) -> None:
        if self.channel.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self.channel.fileno())
            self.channel.close()
        if self._output is not None:
            self._output.close()


async def start_child(module: str, log: ServerLog) -> Child:
    """A process that runs ``main`` of a module of the server with its end of a channel."""
    channel, theirs = Channel.pair()
    output = Output(module.partition(".")[0], log)
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-c",
            _CHILD.format(module=module, argument="int(sys.argv[1])"),
            str(theirs.fileno()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output.descriptor,
            stderr=output.descriptor,
            env=os.environ | {"PYTHONPATH": python_path()},
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # an interrupt from the keyboard is for the server
        )
    output.started()
    return Child(channel, process, output)


class Planners:
    """Runs planner processes, one at a time."""

    def __init__(self, log: ServerLog) -> None:
        self._log = log
        self._lock = asyncio.Lock()
        self.pid: int | None = None  # of the one that runs

    async def plan(self, request: PlanRequest) -> Deployment:
        async with self._lock, contextlib.AsyncExitStack() as stack:
            output = stack.enter_context(Output("planner", self._log))
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-c",
                _CHILD.format(module="supervisor.planner_process", argument=""),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output.descriptor,
                env=os.environ | {"PYTHONPATH": python_path()},
                start_new_session=True,
            )
            output.started()
            self.pid = process.pid
            try:
                said, _ = await process.communicate(msgspec.msgpack.encode(request))
            finally:
                self.pid = None
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)  # a child of it may be measuring
                    await process.communicate()  # its pipes must not outlive the event loop
        if process.returncode != 0:
            raise DeviceError(f"the planner process ended with status {process.returncode}")
        answer = msgspec.msgpack.decode(said, type=PlanAnswer)
        if answer.deployment is None:
            raise UsageError(answer.error)
        return answer.deployment
