"""Closing: everything is released, last made first, whatever state it is in and whatever fails.

A session's belongings are closed in one order: nothing new begins, loops in flight end,
the lanes are waited for, and then executables go before the graphs they came from, graphs before
the streams they were captured on, streams before their contexts. What cannot be waited for may
still be in use, so it is never released: a context that has failed for good gives nothing back
anyway, and destructors of torch's objects end the process when the driver refuses them. Closing
twice is closing once. Failures on the way are one DeviceError at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from eclip.core.device import Closing
from eclip.errors import DeviceError
from eclip.gpu.steps import Ints
from eclip.gpu.worker_loop import Runner


def never_free(thing: Any) -> None:
    """Hold a reference until the process exits, interpreter shutdown included."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class Owner(Closing):
    """In a ``with`` block that fails, its error stays the one that is raised."""

    def __exit__(self, *error: object) -> None:
        raised = error[1]
        if not isinstance(raised, BaseException):
            self.close()
            return
        with noting(raised):
            self.close()


@contextlib.contextmanager
def noting(raised: BaseException) -> Iterator[None]:
    """An error while closing after another one becomes a note of that one."""
    try:
        yield
    except DeviceError as error:
        raised.add_note(f"while closing: {error}")


class Releases:
    """What is to be released, last one first."""

    def __init__(self) -> None:
        self._todo: list[functools.partial[Any]] = []

    def callback(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._todo.append(functools.partial(function, *arguments))

    def take_over(self, other: Releases) -> None:
        """What the other one had comes before what this one has."""
        self._todo += other._todo
        other._todo = []

    def close(self) -> None:
        """Try every release; an interrupt meanwhile is raised when all are done."""
        failed: list[str] = []
        interrupt: BaseException | None = None
        while self._todo:
            release = self._todo.pop()
            try:
                release()
            except Exception as error:
                failed.append(str(error))
            except BaseException as error:
                interrupt = error
            del release  # what it held goes now, while what is below it is still there
        if interrupt is not None:
            raise interrupt
        if failed:
            raise DeviceError("; ".join(dict.fromkeys(failed)))

    def abandon(self) -> None:
        """Release none of it, ever."""
        todo, self._todo = self._todo, []
        never_free(todo)


class WaitingGpu(Protocol):
    """What closing asks of a GPU."""

    def ready_to_close(self) -> contextlib.AbstractContextManager[None]:
        """Whichever thread this is (the garbage collector takes any): releases work while the block
        lasts, and a capture of other code neither forbids a release nor suffers from it."""
        ...

    def wait_for(self, stream: Any) -> None:
        """Until everything on the stream is done."""
        ...


class Belongings:
    """What a session owns. It does not know the session, so it can be closed when that is gone."""

    def __init__(self, gpu: WaitingGpu, sources: Any) -> None:
        """``sources`` are in use as long as the lanes may be, though others own them."""
        self.releases = Releases()
        self.streams: list[Any] = []  # of the lanes, to wait for
        self.closed = False
        self.ending: Ints = np.zeros(1, dtype=np.int64)  # set then: a worker that yields goes on
        self._gpu = gpu
        self._sources = sources
        self._closing = threading.Lock()
        self._done = False
        self._changed = threading.Condition()
        self._users: list[int] = []  # threads that use what is here
        self._runs: list[tuple[Sequence[Runner], Ints]] = []

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """While the block lasts, nothing is released."""
        thread = threading.get_ident()
        with self._changed:
            if self.closed:
                raise DeviceError("the session is closed; open the plan again")
            self._users.append(thread)
        try:
            yield
        finally:
            with self._changed:
                self._users.remove(thread)
                self._changed.notify_all()

    @contextlib.contextmanager
    def running(self, runners: Sequence[Runner], stop: Ints) -> Iterator[None]:
        """The workers' loops while the block lasts; at its end, or when it is interrupted, they
        stop after the request in flight. It waits for all of them."""
        run = (runners, stop)
        with self.in_use():
            self._runs.append(run)
            if self.closed:  # since this block began, by a thread that has not seen the run
                stop[0] = 1
            try:
                for runner in runners:
                    runner.start()
                yield
            finally:
                stop[0] = 1
                _join_all(runners)
                self._runs.remove(run)

    def begin(self, runners: Sequence[Runner], stop: Ints) -> None:
        """Loops that run until this is closed."""
        with self._changed:
            if self.closed:
                raise DeviceError("the session is closed; open the plan again")
            try:
                for runner in runners:
                    runner.start()
            except BaseException:
                stop[0] = 1
                _join_all(runners)
                raise
            self._runs.append((runners, stop))

    def close(self) -> None:
        """An interrupt meanwhile leaves the rest to the next call."""
        with self._changed:
            self.closed = True
            self.ending[0] = 1
        with self._closing:
            if self._done:
                return
            self._end_runs()
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(self._gpu.ready_to_close())
                    for stream in self.streams:
                        self._gpu.wait_for(stream)
                except DeviceError as error:
                    self._done = True
                    self.releases.abandon()
                    never_free(self._sources)
                    raise DeviceError(
                        f"the session's lanes cannot be waited for, so what they use is left as "
                        f"it is; start the process again: {error}"
                    ) from None
                try:
                    self.releases.close()
                finally:
                    self._done = True
                    self._sources = None

    def _end_runs(self) -> None:
        for runners, stop in list(self._runs):
            stop[0] = 1
            _join_all(runners)
        me = threading.get_ident()
        with self._changed:  # this thread may be in a run below: its loops have ended
            self._changed.wait_for(lambda: all(user == me for user in self._users))

    def close_quietly(self) -> None:
        """For a session that was never closed; errors have no receiver."""
        with contextlib.suppress(DeviceError):
            self.close()


def _join_all(runners: Sequence[Runner]) -> None:
    """Wait for every loop; an interrupt meanwhile is raised afterwards."""
    try:
        for runner in runners:
            if runner.ident is not None:
                runner.join()
    except KeyboardInterrupt:
        _join_all(runners)
        raise
