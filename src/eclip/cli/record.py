"""``eclip record``: an unmodified command, once per lane size, to profiles of what it serves."""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eclip.artefacts import outputs
from eclip.artefacts.profile import Profile
from eclip.cli import interrupt, screen, wiring
from eclip.cli.options import GpuOption, TopologyOption, WorkersOption
from eclip.errors import DeviceError, MismatchError, UsageError
from eclip.frontends.library import file_of, split_key

if TYPE_CHECKING:
    from eclip.artefacts.topology import Topology
    from eclip.frontends.recorded import Launches, Requests


def record(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="The command and its arguments.")
    ],
    models: Annotated[
        list[str],
        typer.Option("--as", help="model:batch of a worker, in order of first launch; repeatable."),
    ],
    sizes: Annotated[
        str, typer.Option("--sizes", help="Lane sizes: 32,64,132. All of the device's if left out.")
    ] = "",
    folder: Annotated[Path, typer.Option("-o", "--out", help="Folder for the profiles.")] = Path(
        "profiles"
    ),
    workers: WorkersOption = "stream",
    topology: TopologyOption = "h200",
    gpu: GpuOption = 0,
) -> None:
    """Measure what a command launches, every kernel on a lane of each size."""
    from eclip.frontends.recorded import make_profile
    from eclip.runtime.table import record_table

    for key in models:
        split_key(key)
    device = wiring.find_topology(topology)
    wanted = _sizes(sizes, device)
    outputs.check_folder(folder)
    if folder.is_dir():
        for key in models:
            outputs.check_output(file_of(folder, key), Profile)
    by = wiring.workers_by(workers)
    tables = [record_table(device, size, by) for size in wanted]
    recordings = []
    for size, table in zip(wanted, tables, strict=True):
        screen.err.print(f"recording on {size} {device.unit_name}s", style="dim")
        recordings.append(_record(command, table, size, gpu, models))
    source = f"recorded from `{' '.join(command)}` on {time.strftime('%Y-%m-%d')}"
    profiles = [
        make_profile(key, device, wanted, [recording[index] for recording in recordings], source)
        for index, key in enumerate(models)
    ]
    with contextlib.suppress(OSError):  # then the profiles are written elsewhere
        folder.mkdir(parents=True, exist_ok=True)
    troubles = [
        outputs.save_or_rescue(profile, file_of(folder, key))
        for key, profile in zip(models, profiles, strict=True)
    ]
    for trouble in filter(None, troubles):
        raise trouble
    screen.out.print(
        f"{len(models)} profiles of {len(wanted)} sizes in {folder}. "
        f"Next: eclip plan {','.join(models)} --profiles {folder}"
    )


def _sizes(words: str, device: Topology) -> tuple[int, ...]:
    """The sizes asked for, rising, and the whole device: a profile ends with it."""
    if not words:
        return device.lane_sizes
    try:
        found = {int(word) for word in words.split(",")}
    except ValueError:
        raise UsageError(f"--sizes {words!r} is not a list of numbers like 32,64,132") from None
    return tuple(sorted(found | {device.units}))


def _record(
    command: list[str], table: bytes, size: int, gpu: int, models: list[str]
) -> list[Requests]:
    """The requests of every worker on lanes of one size."""
    from eclip.frontends.recorded import read_recording
    from eclip.frontends.transparent import run_under

    with tempfile.TemporaryDirectory(prefix="eclip-") as place:
        log = Path(place) / "recording"
        outcome = run_under(command, table, gpu, record_to=log)
        if outcome.signal is not None:
            raise interrupt.Interrupt(outcome.signal)
        if outcome.code != 0:
            raise DeviceError(f"the command ended with status {outcome.code} on {size} units")
        found = read_recording(log)
    graphs = sum(counts["graph_launches"] for counts in outcome.counters.values())
    return _busiest(found, models, graphs)


def _busiest(found: list[Launches], models: list[str], graphs: int) -> list[Requests]:
    """The workers that launched most as requests, in the order of their first launch."""
    from eclip.frontends.recorded import find_requests

    requests: list[Requests] = []
    reasons = []
    for launches in found:
        try:
            requests.append(find_requests(launches))
        except MismatchError as error:
            reasons.append(str(error))
    if len(requests) < len(models):
        why = f" ({reasons[0]})" if reasons else ""
        if graphs:
            why += (
                f"; {graphs} graphs were launched, whose kernels cannot be told apart: let the "
                f"program run without graphs to be recorded"
            )
        raise DeviceError(
            f"{len(found)} workers launched kernels that libeclip saw, {len(requests)} of them "
            f"serve requests, {len(models)} were named with --as{why}"
        )
    ranked = sorted(range(len(requests)), key=lambda index: -requests[index].busy_ns.size)
    return [requests[index] for index in sorted(ranked[: len(models)])]
