"""``eclip demo``: the main job in one command: compare the policies and draw the report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import eclip
from eclip.artefacts import outputs
from eclip.cli import compare, screen
from eclip.cli.options import DeviceOption, JsonOption, SeedOption, TopologyOption
from eclip.cli.screen import comparisons

_POLICIES = ("shared", "timeslice", "model", "masks", "kernel", "eclip", "search")
_BATCHES = 12  # of the search: some seconds, and the same plan every time
_SECONDS = 3.0


def demo(
    mix: Annotated[
        str, typer.Option("--mix", help="The workers, as for `eclip compare`.")
    ] = "paper/3",
    folder: Annotated[Path, typer.Option("-o", "--out", help="Folder for all files.")] = Path(
        "eclip-demo"
    ),
    topology: TopologyOption = "h200",
    device: DeviceOption = "sim",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare the ways of sharing a GPU on one mix; write plans, run logs, a report and a trace."""
    outputs.check_folder(folder)
    case = eclip.case(mix, topology)
    with screen.progress_bar(f"comparing {case.mix.name}") as progress:
        outcome = eclip.compare(
            case,
            _POLICIES,
            device=device,
            seconds=_SECONDS,
            options=eclip.CompareOptions(seed=seed, batches=_BATCHES, trace_ms=20.0),
            progress=progress,
        )
        last = list(outcome.logs)[-1]  # search, unless a stop came before it ran
        trace = folder / f"{last}.trace.json.gz"
        kept = compare.keep(outcome, folder=folder)
        if not kept.errors:
            progress.phase("drawing the report")
            eclip.report(outcome, folder / "report.html", trace=trace)
    comparisons.show(outcome, as_json)
    kept.report()
    compare.raise_failure(outcome, kept)
    if not as_json:
        screen.print_facts(
            [
                ("report", f"{folder / 'report.html'} (open it in a browser)"),
                ("timeline", f"{trace} (open it in Perfetto)"),
                ("plan", f"eclip explain {folder / f'{last}.plan.json'}"),
            ]
        )
    screen.exit_if_stopped(progress, f"{folder} has what was measured")
