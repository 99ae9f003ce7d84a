"""``eclip demo``: the main job in one command: compare the policies and draw the report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eclip.artefacts.mix import parse_mix
from eclip.cli import outcome, report, screen, wiring
from eclip.cli.contest import Contest
from eclip.cli.contest_options import ContestOptions
from eclip.cli.options import DeviceOption, GpuOption, JsonOption, SeedOption, TopologyOption

_POLICIES = ("shared", "timeslice", "model", "kernel", "eclip", "search")  # one of every kind
_BATCHES = 12  # of the search: some seconds, and the same plan every time


def demo(
    mix: Annotated[
        str, typer.Option("--mix", help="The workers, as for `eclip compare`.")
    ] = "paper/3",
    folder: Annotated[Path, typer.Option("-o", "--out", help="Where to put everything.")] = Path(
        "eclip-demo"
    ),
    topology: TopologyOption = "h200",
    device: DeviceOption = "sim",
    gpu: GpuOption = 0,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare all ways of sharing a GPU on one mix and write plans, run logs, report and trace."""
    from eclip.devices.base import Window
    from eclip.planning.policies import PolicyOptions

    options = wiring.RunOptions(
        device=device, window=Window(seconds=3.0), seed=seed, arrivals=None, gpu=gpu
    )
    wanted = parse_mix(mix)
    shape = wiring.find_topology(topology)
    constants = wiring.find_calibration(None, shape)
    profiles = wiring.find_profiles(wanted, shape, constants, [])
    others = wiring.find_other_kernels(wanted, shape, [])
    with screen.progress_bar(f"comparing {wanted.name}") as progress:
        contest = Contest(
            wanted,
            shape,
            constants,
            profiles,
            PolicyOptions(batches=_BATCHES, others=others),
            options,
            ContestOptions(),
            progress.part_or_end,
        )
        contest.hold(_POLICIES, {})
    outcome.keep(contest, folder)
    with screen.progress_bar("drawing the report"):
        logs = [entrant.logs[-1] for entrant in contest.measured]
        report.write_report(logs, (*others, *profiles), folder / "report.html")
        report.write_trace(logs[-1], (*others, *profiles), folder / "search.trace.json.gz")
    outcome.show(contest, ContestOptions(), as_json)
    if as_json:
        return
    screen.print_facts(
        [
            ("report", f"{folder / 'report.html'} (open it in a browser)"),
            ("timeline", f"{folder / 'search.trace.json.gz'} (open it in Perfetto)"),
            ("plan", f"eclip explain {folder / 'search.plan.json'}"),
        ]
    )
