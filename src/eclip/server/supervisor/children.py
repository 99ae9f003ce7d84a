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

from eclip.cuda.processes.mps import python_path
from eclip.errors import DeviceError, UsageError
from eclip.server.bell import Bell
from eclip.server.control import Channel, Deployment, Message
from eclip.server.supervisor.planner_process import PlanAnswer, PlanRequest

_CHILD = "import sys; from eclip.server.{module} import main; main({argument})"
_LEAVE_S = 10.0
_BACK_OFF_S = (0.0, 0.0, 0.5, 1.0, 2.0, 5.0)  # before a process is started again
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


class Child:
    """A process at the other end of a channel. ``ended`` is set when it has gone, and only after
    the last of its words was heard."""

    def __init__(self, channel: Channel, process: asyncio.subprocess.Process) -> None:
        self.channel = channel
        self.process = process
        self.ended = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    def listen(self, hear: Callable[[Message], None], bell: Bell) -> None:
        """Hand on what it says, and ring when it has said something or has ended."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                while (received := self.channel.receive()) is not None:
                    hear(received[0])
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

    def close(self) -> None:
        if self.channel.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self.channel.fileno())
            self.channel.close()


async def start_child(module: str) -> Child:
    """A process that runs ``main`` of a module of the server with its end of a channel."""
    channel, theirs = Channel.pair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-c",
            _CHILD.format(module=module, argument="int(sys.argv[1])"),
            str(theirs.fileno()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else None,
            env=os.environ | {"PYTHONPATH": python_path()},
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # an interrupt from the keyboard is for the server
        )
    return Child(channel, process)


class Planners:
    """Runs planner processes, one at a time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.pid: int | None = None  # of the one that runs

    async def plan(self, request: PlanRequest) -> Deployment:
        async with self._lock:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-c",
                _CHILD.format(module="supervisor.planner_process", argument=""),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": python_path()},
                start_new_session=True,
            )
            self.pid = process.pid
            try:
                output, _ = await process.communicate(msgspec.msgpack.encode(request))
            finally:
                self.pid = None
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)  # a child of it may be measuring
                    await process.communicate()  # its pipes must not outlive the event loop
        if process.returncode != 0:
            raise DeviceError(f"the planner process ended with status {process.returncode}")
        answer = msgspec.msgpack.decode(output, type=PlanAnswer)
        if answer.deployment is None:
            raise UsageError(answer.error)
        return answer.deployment


def _has_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True
