"""``eclip profile``: measures profiles of models on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eclip.capture.measuring import measure_profiles
from eclip.cli import screen
from eclip.cli.options import GpuOption
from eclip.core.model_key import parse_model
from eclip.errors import DeviceError
from eclip.files import outputs, store


def profile(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Models: albert:8, or package.module:factory:8."),
    ],
    folder: Annotated[Path, typer.Option("-o", "--out", help="Folder for the profiles.")] = Path(
        "profiles"
    ),
    gpu: GpuOption = 0,
    energy_seconds: Annotated[
        float,
        typer.Option(
            "--energy-seconds",
            min=0.0,
            help="Measure energy N seconds per lane size; 0: never.",
        ),
    ] = 1.0,
    ncu: Annotated[
        bool, typer.Option("--ncu/--no-ncu", help="Count DRAM and L2 bytes with Nsight Compute.")
    ] = True,
    limit: Annotated[
        float, typer.Option("--limit", min=10.0, help="Stop measuring a model after N seconds.")
    ] = 180.0,
) -> None:
    """Measure every kernel of these models at every lane size of a GPU."""
    keys = list(dict.fromkeys(map(parse_model, models)))
    outputs.check_folder(folder)
    store.make_folder(folder)
    with screen.progress_bar("profiling") as progress:
        failed = measure_profiles(
            keys,
            folder,
            gpu=gpu,
            energy_seconds=energy_seconds,
            traffic=ncu,
            limit_seconds=limit,
            progress=progress,
        )
    screen.exit_if_stopped(progress, f"{folder} has the profiles so far; repeat to go on")
    if failed:
        names = ", ".join(map(str, failed))
        raise DeviceError(f"not profiled: {names}; see the reasons above")
    screen.out.print(f"{len(keys)} profiles in {folder}. Next: eclip plan MIX --profiles {folder}")
