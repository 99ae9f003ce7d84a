"""Running a server: in the foreground, where signals steer it, or behind a ``with`` block."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from eclip.core.device import Closing
from eclip.errors import EclipError
from eclip.server.config import ServerSettings, ServingConfig
from eclip.server.log import ServerLog
from eclip.server.messages import ModelInfo
from eclip.server.supervisor.server import Supervisor

T = TypeVar("T")
_WATCH_S = 1.0


def run_server(
    config: ServingConfig,
    read_again: Callable[[], ServingConfig],
    log: ServerLog,
    started: Callable[[ServerSettings], None],
    file: Path | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends the grace time. SIGHUP reads the
    configuration again, as a change of its ``file`` does where the configuration says so.
    ``started`` is told where the server listens."""
    asyncio.run(_run(config, read_again, log, started, file))


async def _run(
    config: ServingConfig,
    read_again: Callable[[], ServingConfig],
    log: ServerLog,
    started: Callable[[ServerSettings], None],
    file: Path | None,
) -> None:
    supervisor = Supervisor(config, log)
    stopped = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def stop() -> None:
        starting.cancel()
        await supervisor.stop()
        if supervisor.stopped:
            stopped.set()

    async def reload() -> None:
        try:
            await supervisor.reload(read_again())
        except (EclipError, OSError) as error:
            log.write("the configuration stays as it was", reason=str(error))

    def begin(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.create_task(work())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop = asyncio.get_running_loop()
    starting = asyncio.ensure_future(supervisor.start())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, begin, stop)
    loop.add_signal_handler(signal.SIGHUP, begin, reload)

    async def watch() -> None:
        server = config.server
        names = (file, server.token_file, server.tls_cert, server.tls_key)
        files = [Path(name) for name in names if name is not None]
        taken = last = _stamps(files)
        while True:
            await asyncio.sleep(_WATCH_S)
            before, last = last, _stamps(files)
            if last == before and last != taken:  # whatever writes them has finished
                taken = last
                log.write("files have changed and are read again")
                await reload()

    async def fail() -> None:
        await supervisor.bell.until(lambda: supervisor.chores.failure is not None)
        stopped.set()

    try:
        await starting
        started(supervisor.server)
        begin(fail)
        if config.server.watch:
            begin(watch)
    except asyncio.CancelledError:  # asked to stop before it was ready
        pass
    except BaseException:
        await supervisor.close()
        raise
    await stopped.wait()
    if not supervisor.stopped:
        await supervisor.close()
        supervisor.chores.check()


def _stamps(files: Sequence[Path]) -> list[tuple[int, int] | None]:
    """By which a changed file is known, also where a link now leads to another one."""
    found: list[tuple[int, int] | None] = []
    for file in files:
        try:
            state = file.stat()
            found.append((state.st_ino, state.st_mtime_ns))
        except OSError:
            found.append(None)
    return found


class RunningServer(Closing):
    """A server in a thread of its own; it is ready when this is made."""

    def __init__(
        self, config: ServingConfig, log: ServerLog | None = None, *, guests: int = 0
    ) -> None:
        log = log or ServerLog(quiet=True)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._supervisor = self._call(self._start(config, log, guests))
        except BaseException:
            self._end()
            raise

    @staticmethod
    async def _start(config: ServingConfig, log: ServerLog, guests: int) -> Supervisor:
        supervisor = Supervisor(config, log, guests=guests)
        try:
            await supervisor.start()
        except BaseException:
            await supervisor.close()
            raise
        return supervisor

    @property
    def url(self) -> str:
        """Of HTTP; a browser shows the live page there."""
        server = self._supervisor.server
        scheme = "http" if server.tls_cert is None else "https"
        return f"{scheme}://{server.host}:{server.http_port}"

    @property
    def grpc(self) -> str:
        """Host and port of gRPC."""
        server = self._supervisor.server
        return f"{server.host}:{server.grpc_port}"

    @property
    def door(self) -> Path | None:
        """Where guests of this machine come in, if any may."""
        return self._supervisor.door

    def models(self) -> dict[str, ModelInfo]:
        """Those that are loaded."""
        offer = self._supervisor.services.offer(0)
        return {spec.name: spec.info for spec in offer.specs}

    def failed(self) -> dict[str, str]:
        """Those that could not be loaded, and why."""
        return dict(self._supervisor.services.failed)

    def change(self, config: ServingConfig) -> None:
        """Serve this from now on; raises what is wrong with it, and then nothing has changed."""
        self._call(self._supervisor.reload(config))

    def __repr__(self) -> str:
        return f"RunningServer({self.url})"

    def close(self) -> None:
        """Answer what is open, then end."""
        if self._thread.is_alive():
            self._call(self._supervisor.stop())
            self._end()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
