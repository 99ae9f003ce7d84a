"""A private MPS daemon with its own pipes, stopped when its owner closes it or dies.

A guard process starts NVIDIA's control daemon and waits for its owner to close a pipe; the kernel
closes the pipe if the owner is killed. Then the guard asks the daemon to quit, kills remaining
processes, and removes the directory. Other daemons on the host, and the GPU's compute mode, are not
touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from eclip.core.device import Closing
from eclip.errors import DeviceError

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"
NORMAL, BELOW_NORMAL = 0, 1  # of PRIORITY; NVIDIA calls it a hint

_START_SECONDS = 20.0
_LISTEN_SECONDS = 5.0
_QUIT_SECONDS = 10.0
_GUARD = "import sys; from eclip.cuda.processes.mps import guard; guard(sys.argv[1])"


class MpsDaemon(Closing):
    """The owner's end. ``pipes`` is the directory that clients name in their environment."""

    def __init__(self, uuid: str) -> None:
        """For the GPU with this UUID. Indices would be renumbered by the daemon for its clients."""
        if shutil.which(CONTROL) is None:
            raise DeviceError(
                f"{CONTROL} is not on the PATH, so MPS cannot run; it comes with NVIDIA's driver "
                "(package nvidia-compute-utils), or leave mps out"
            )
        # A session of its own: an interrupt from the keyboard is for the owner.
        self._guard = subprocess.Popen(
            [sys.executable, "-P", "-c", _GUARD, uuid],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": python_path()},
            start_new_session=True,
        )
        try:
            said = self._guard.stdout.readline().strip() if self._guard.stdout else ""
            answer, _, rest = said.partition(" ")
            if answer != "ready":
                raise DeviceError(f"the MPS daemon did not start: {rest or 'its guard died'}")
        except BaseException:
            self.close()
            raise
        self.pipes = Path(rest)

    def pids(self) -> set[int]:
        """The daemon and its servers."""
        return {pid for pid in _pids_in(self.pipes) if _program(pid).startswith("nvidia-cuda-mps")}

    def close(self) -> None:
        for pipe in (self._guard.stdin, self._guard.stdout):
            if pipe is not None:
                pipe.close()
        self._guard.wait()  # it has time limits of its own


def python_path() -> str:
    """PYTHONPATH with which a child can import the same modules as this process."""
    return os.pathsep.join(path or str(Path.cwd()) for path in sys.path)


def client_variables(uuid: str, pipes: Path) -> dict[str, str]:
    """What a client of the daemon with these pipes needs in its environment."""
    # By UUID: indices mean something else to clients of a daemon that shows them one GPU.
    return {"CUDA_VISIBLE_DEVICES": uuid, PIPES: str(pipes)}


def guard(uuid: str) -> None:
    """The guard's whole life."""
    signal.signal(signal.SIGTERM, _leave)
    # A socket's path has at most 107 characters, which a long TMPDIR would leave no room for.
    folder = Path(tempfile.mkdtemp(prefix=f"eclip-mps-{os.getppid()}-", dir="/tmp"))
    try:
        with _running(folder, uuid):
            sys.stdout.write(f"ready {folder}\n")
            sys.stdout.flush()
            sys.stdin.read()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except DeviceError as error:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.write(f"failed {error}\n")
            sys.stdout.flush()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _leave(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: a daemon must not be left behind
    sys.exit(0)


@contextlib.contextmanager
def _running(folder: Path, uuid: str) -> Iterator[None]:
    environment = os.environ | {
        PIPES: str(folder),
        "CUDA_MPS_LOG_DIRECTORY": str(folder),
        "CUDA_VISIBLE_DEVICES": uuid,
    }
    # A client's settings: the daemon would take them for limits of all its clients.
    for variable in (SHARE, PRIORITY):
        environment.pop(variable, None)
    try:
        _start(folder, environment)
        yield
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            _control(folder, environment, [], "quit\n", _QUIT_SECONDS)
            _wait_for_end(folder, _QUIT_SECONDS)
        while left := _pids_in(folder):  # again: one may have started another meanwhile
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def _start(folder: Path, environment: dict[str, str]) -> None:
    try:
        status = _control(folder, environment, ["-d"], "", _START_SECONDS)
        deadline = time.monotonic() + _LISTEN_SECONDS
        asked = "get_default_active_thread_percentage\n"
        # It has forked; whether it listens, only an answer tells.
        while status == 0 and _control(folder, environment, [], asked, _START_SECONDS) != 0:
            if time.monotonic() > deadline:
                raise DeviceError(f"it does not listen ({_last_line(folder)})")
            time.sleep(0.05)
    except subprocess.TimeoutExpired:
        raise DeviceError(f"no answer in {_START_SECONDS:g} s ({_last_line(folder)})") from None
    except OSError as error:
        raise DeviceError(f"{CONTROL}: {error.strerror}") from None
    if status != 0:
        raise DeviceError(f"{CONTROL} ended with status {status} ({_last_line(folder)})")


def _control(
    folder: Path, environment: dict[str, str], options: list[str], text: str, seconds: float
) -> int:
    # Files, not pipes: a daemon that keeps them open would keep us waiting for their end.
    with (folder / "said.log").open("a") as said:
        return subprocess.run(
            [CONTROL, *options],
            input=text.encode(),
            stdout=said,
            stderr=said,
            env=environment,
            timeout=seconds,
            check=False,
        ).returncode


def _last_line(folder: Path) -> str:
    """The last line of the daemon's log or, without a log, of its output."""
    for name in ("control.log", "said.log"):
        with contextlib.suppress(OSError):
            lines = (folder / name).read_text(errors="replace").split("\n")
            if last := next((line.strip() for line in reversed(lines) if line.strip()), ""):
                return last
    return "it said nothing"


def _wait_for_end(folder: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while _pids_in(folder) and time.monotonic() < deadline:
        time.sleep(0.02)


def _pids_in(folder: Path) -> set[int]:
    """Processes whose environment names this directory, which is unique, as theirs."""
    wanted = f"{PIPES}={folder}".encode()
    found = set()
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(process.name)
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found


def _program(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
