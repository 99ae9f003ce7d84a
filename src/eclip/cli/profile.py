"""``eclip profile``: models to measured profiles, on a GPU.

Measuring happens in a child process with a time limit per model, because a kernel that needs all
its blocks resident can hang on a small lane. What is done is on disk: an interrupted run goes on
where it stopped, and a profile that exists is never measured again.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from eclip import store
from eclip.cli import screen
from eclip.cli.options import GpuOption
from eclip.errors import DeviceError, UsageError
from eclip.frontends.library import file_of
from eclip.frontends.traffic import with_traffic
from eclip.profile import Profile

_NCU_SECONDS = 60.0  # a model, and as long again to start


def profile(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="albert:8, or package.module:factory:8."),
    ],
    folder: Annotated[Path, typer.Option("-o", "--out", help="Folder for the profiles.")] = Path(
        "profiles"
    ),
    gpu: GpuOption = 0,
    energy_seconds: Annotated[
        float, typer.Option("--energy-seconds", min=0.0, help="Per lane size; 0 measures none.")
    ] = 1.0,
    ncu: Annotated[
        bool, typer.Option("--ncu/--no-ncu", help="Count DRAM and L2 bytes with Nsight Compute.")
    ] = True,
    limit: Annotated[
        float, typer.Option("--limit", min=10.0, help="Seconds one model may take.")
    ] = 180.0,
) -> None:
    """Measure every kernel of these models at every lane size of a GPU."""
    keys = list(dict.fromkeys(models))
    missing = [key for key in keys if not file_of(folder, key).exists()]
    if importlib.util.find_spec("torch") is None:
        raise DeviceError("the package torch is missing; see `eclip doctor`")
    for key in keys:
        if key not in missing:
            screen.warn(f"{file_of(folder, key)} exists and is kept; remove it to measure again")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot use the folder {folder}: {error.strerror or error}") from None
    failed: list[str] = []
    with screen.progress_bar(f"profiling {len(missing)} models") as progress:
        done = 0

        def finished() -> None:
            nonlocal done
            done += 1
            progress(done / len(missing))

        command = [str(gpu), str(energy_seconds), str(folder)]
        while done < len(missing):
            reason = _measure([*command, *missing[done:]], missing[done:], limit, finished)
            if reason is not None:  # go on with the next one in a fresh child
                screen.warn(reason)
                failed.append(missing[done])
                finished()
    if ncu:
        _count_traffic([key for key in keys if key not in failed], folder, gpu)
    if failed:
        raise DeviceError(f"not profiled: {', '.join(failed)}; the reasons stand above")
    screen.out.print(f"{len(keys)} profiles in {folder}. Next: eclip plan MIX --profiles {folder}")


def _count_traffic(keys: list[str], folder: Path, gpu: int) -> None:
    """Add DRAM and L2 bytes to the profiles that lack them, all in one run of ncu."""
    found = [store.load(file_of(folder, key), Profile) for key in keys]
    lacking = [one for one in found if not any(one.l2_bytes)]
    if lacking:
        with screen.progress_bar(f"counting the memory traffic of {len(lacking)} models"):
            for counted in with_traffic(lacking, gpu, _NCU_SECONDS * (1 + len(lacking))):
                store.save(counted, file_of(folder, counted.key))


def _measure(
    arguments: list[str], keys: list[str], limit: float, finished: Callable[[], None]
) -> str | None:
    """Measure in a child until it is through, or a model fails: then the reason."""
    child = subprocess.Popen(
        [sys.executable, "-m", "eclip.frontends.profiler", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for key in keys:
            line = _line_within(child, limit)
            if line is None:
                return f"{key} took more than {limit:g} s and was stopped"
            if line != f"done {key}\n":
                _, errors = child.communicate()
                reasons = errors.strip().splitlines()
                return f"{key}: {reasons[-1] if reasons else 'could not be measured'}"
            finished()
        return None
    finally:
        child.kill()
        child.wait()


def _line_within(child: subprocess.Popen[str], seconds: float) -> str | None:
    """The child's next line, empty at its end, or None if it does not come in time."""
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(child.stdout.readline()), daemon=True)  # type: ignore[union-attr]
    reader.start()
    reader.join(seconds)
    return found[0] if found else None
