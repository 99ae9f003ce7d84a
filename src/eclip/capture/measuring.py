"""Measuring profiles: models to files in a folder, on a GPU.

Measuring happens in a child process with a time limit per model, because a kernel that needs all
its blocks resident can hang on a small lane, and a crash must not stop the other models. A model
that hangs or fails is reported, and a new child measures the next models. Finished profiles are on
disk: an interrupted run goes on where it stopped, and an existing profile is never measured again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from eclip.capture.traffic import with_traffic
from eclip.core.model_key import ModelKey
from eclip.core.profile import Profile
from eclip.errors import DeviceError
from eclip.files import store
from eclip.models.library import file_of
from eclip.progress import Progress

_CHILD = (sys.executable, "-m", "eclip.capture.profiler")
_START_SECONDS = 120.0  # imports, and a context on the GPU
_END_SECONDS = 10.0
_ENDED = -1
_MOST_WORDS = 500  # characters of a reason
_NCU_SECONDS = 60.0  # a model, and as long again to start


def measure_profiles(
    models: Sequence[ModelKey],
    folder: Path,
    *,
    gpu: int = 0,
    energy_seconds: float = 1.0,  # per lane size; 0 measures none
    traffic: bool = True,  # count DRAM and L2 bytes with Nsight Compute
    limit_seconds: float = 180.0,  # that one model may take
    quick: bool = False,  # times only: no energy, no memory traffic, nothing beside stressors
    progress: Progress,
) -> list[ModelKey]:
    """Measure every kernel of these models at every lane size; those that failed, with the reasons
    told to the progress."""
    if importlib.util.find_spec("torch") is None:
        raise DeviceError("the package torch is missing; see `eclip doctor`")
    missing = [model for model in models if not file_of(folder, model).exists()]
    for model in models:
        if model not in missing:
            progress.warn(
                f"{file_of(folder, model)} exists and is kept; remove it to measure again"
            )
    failed: list[ModelKey] = []
    done = 0

    def finished() -> None:
        nonlocal done
        done += 1
        progress.part(done / len(missing))

    progress.phase(f"profiling {len(missing)} models")
    command = [str(gpu), "0" if quick else str(energy_seconds), "quick" if quick else "full"]
    command.append(str(folder))
    while done < len(missing) and not progress.stopped:
        rest = [str(model) for model in missing[done:]]
        reason = _measure([*command, *rest], rest, limit_seconds, finished, progress)
        if reason is not None:  # go on with the next one in a fresh child
            progress.warn(reason)
            failed.append(missing[done])
            finished()
    measured = [model for model in models if file_of(folder, model).exists()]
    if traffic and not quick and not progress.stopped:
        failed += _count_traffic(measured, folder, gpu, progress)
    return failed


def _count_traffic(
    models: Sequence[ModelKey], folder: Path, gpu: int, progress: Progress
) -> list[ModelKey]:
    """Add DRAM and L2 bytes to the profiles that lack them; the models that could not be counted.

    All in one run of ncu, which takes long to start; where that fails, each in a run of its own.
    """
    found = [store.load(file_of(folder, model), Profile) for model in models]
    waiting = [profile for profile in found if not any(profile.l2_bytes)]
    batches = [waiting] if waiting else []
    failed = []
    progress.phase(f"counting the memory traffic of {len(waiting)} models")
    while batches and not progress.stopped:
        progress.part(1 - sum(map(len, batches)) / len(waiting))
        batch = batches.pop(0)
        try:
            for counted in with_traffic(batch, gpu, _NCU_SECONDS * (1 + len(batch))):
                store.save(counted, file_of(folder, counted.model))
        except DeviceError as error:
            if len(batch) > 1:
                batches += [[profile] for profile in batch]
            else:
                progress.warn(f"{batch[0].model} has no memory traffic: {error}")
                failed.append(batch[0].model)
    return failed


def _measure(
    arguments: Sequence[str],
    keys: Sequence[str],
    limit: float,
    finished: Callable[[], None],
    progress: Progress,
) -> str | None:
    """Measure in a child until all models are done, a stop is requested, or a model fails. Returns
    the reason of a failure.

    DeviceError: the child failed before the first model, so no model can be measured.
    """
    with tempfile.TemporaryFile() as errors:  # an unread pipe would fill up
        child = subprocess.Popen(
            [*_CHILD, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_pass_on, args=(child.stdout, lines), daemon=True).start()
        try:
            begin = _said("ready", lines, _START_SECONDS)
            if begin is None or begin == _ENDED:
                raise DeviceError(f"no model can be measured: {_why(child, errors, 0)}")
            for key in keys:
                said = _said(f"done {key}", lines, limit)
                if said is None:
                    return f"{key} took more than {limit:g} s and was stopped"
                if said == _ENDED:
                    return f"{key}: {_why(child, errors, begin)}"
                begin = said
                finished()
                if progress.stopped:
                    break
            return None
        finally:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver
                child.wait(_END_SECONDS)


def _pass_on(output: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    with output:
        for line in output:
            lines.put(line.rstrip("\n"))
    lines.put(None)


def _said(word: str, lines: queue.SimpleQueue[str | None], seconds: float) -> int | None:
    """The size of stderr when the child said ``word``; _ENDED if the child ended before; None after
    ``seconds``. Output of a model's own code is skipped.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None
        if line is None:
            return _ENDED
        said, _, size = line.rpartition(" ")
        if said == word and size.isdecimal():
            return int(size)


def _why(child: subprocess.Popen[str], errors: IO[bytes], begin: int) -> str:
    """The reason of a child's end: its last line of stderr, or the signal that killed it."""
    try:
        code = child.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        return "the measuring process hangs"
    if code < 0:
        return f"the measuring process died of {signal.Signals(-code).name}"
    errors.seek(begin)
    words = errors.read().decode(errors="replace").strip().splitlines()
    return (
        words[-1][:_MOST_WORDS].removeprefix("eclip: ")
        if words
        else f"the measuring process ended with exit code {code}"
    )
