"""``eclip record``: measures profiles of an unmodified command's models."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from eclip.cli import screen
from eclip.cli.options import GpuOption, TopologyOption, WorkersOption
from eclip.cli.screen import interrupt
from eclip.core.model_key import parse_model
from eclip.core.profile import Profile
from eclip.core.topology import Topology
from eclip.errors import UsageError
from eclip.files import outputs
from eclip.models.library import file_of
from eclip.planner.case import find_topology
from eclip.programs.record import CommandStopped, record_command
from eclip.programs.table import workers_by


def record(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="The command and its arguments.")
    ],
    models: Annotated[
        list[str],
        typer.Option(
            "--as", help="A worker's model, MODEL:BATCH, in order of first launch; repeatable."
        ),
    ],
    sizes: Annotated[
        str, typer.Option("--sizes", help="Lane sizes in units, like 32,64,132. Default: all.")
    ] = "",
    folder: Annotated[Path, typer.Option("-o", "--out", help="Folder for the profiles.")] = Path(
        "profiles"
    ),
    workers: WorkersOption = "stream",
    topology: TopologyOption = "h200",
    gpu: GpuOption = 0,
) -> None:
    """Measure the kernels that a command launches, on a lane of each size."""
    keys = [parse_model(text) for text in models]
    device = find_topology(topology)
    wanted = _sizes(sizes, device)
    by = workers_by(workers)
    outputs.check_folder(folder)
    if folder.is_dir():
        for key in keys:
            outputs.check_output(file_of(folder, key), Profile)
    try:
        profiles = record_command(
            command,
            keys,
            device,
            wanted,
            by,
            gpu=gpu,
            tell=lambda line: screen.err.print(line, style="dim"),
        )
    except CommandStopped as stopped:
        raise interrupt.Interrupt(stopped.signal) from None
    with contextlib.suppress(OSError):  # then the profiles are written elsewhere
        folder.mkdir(parents=True, exist_ok=True)
    troubles = [
        outputs.save_or_rescue(profile, file_of(folder, profile.model)) for profile in profiles
    ]
    for trouble in filter(None, troubles):
        raise trouble
    screen.out.print(
        f"{len(models)} profiles of {len(wanted)} sizes in {folder}. "
        f"Next: eclip plan {','.join(models)} --profiles {folder}"
    )


def _sizes(words: str, device: Topology) -> tuple[int, ...]:
    """The given sizes, rising, and the whole device, which every profile has."""
    if not words:
        return device.lane_sizes
    try:
        found = {int(word) for word in words.split(",")}
    except ValueError:
        raise UsageError(f"--sizes {words!r} is not a list of numbers like 32,64,132") from None
    return tuple(sorted(found | {device.units}))
