"""``eclip demo``: compares the ways of sharing a GPU for models back to back, and for a service
beside background work; prints a verdict for each, and writes one report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import eclip
from eclip.cli import compare, screen
from eclip.cli.options import DeviceOption, JsonOption, SeedOption, TopologyOption
from eclip.cli.screen import comparisons, measured
from eclip.files import outputs
from eclip.reports.marks import REPORT_MARK

_ROUNDS = 3  # the fewest for which a verdict has an interval
_TRACE_MS = 10.0
# By part: batches of the search, so that it takes some seconds and finds the same every time;
# seconds of a run.
_BATCHES = (12, 6)
_SECONDS = (1.0, 2.0)


def demo(
    mix: Annotated[
        str, typer.Option("--mix", help="Models that run back to back, as for `eclip compare`.")
    ] = "paper/3",
    services: Annotated[
        str | None,
        typer.Option(
            "--services",
            help="A mix of a service and background work. Default: bert:1 at 30% of its rate alone "
            "beside vgg19:32; on an H200 this is bert:1@300rps/5ms,vgg19:32@background.",
        ),
    ] = None,
    folder: Annotated[Path, typer.Option("-o", "--out", help="Folder for all files.")] = Path(
        "eclip-demo"
    ),
    topology: TopologyOption = "h200",
    device: DeviceOption = "sim",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare all ways of sharing a GPU on two mixes; write plans, run logs and a report."""
    outputs.check_folder(folder)
    page = folder / "report.html"
    if folder.is_dir():
        outputs.check_output(page, REPORT_MARK)
    wanted = (mix, services or _usual_services(topology))
    cases = [eclip.case(one, topology) for one in wanted]
    done: list[eclip.Outcome] = []
    for part, (case, name) in enumerate(zip(cases, ("closed-loop", "services"), strict=True)):
        with screen.progress_bar(f"part {part + 1} of 2: {case.mix.name}") as progress:
            outcome = eclip.compare(
                case,
                device=device,
                seconds=_SECONDS[part],
                repeats=_ROUNDS,
                options=eclip.CompareOptions(
                    seed=seed,
                    batches=_BATCHES[part],
                    trace_ms=_TRACE_MS,
                    command=f"eclip demo, part {part + 1}",
                ),
                progress=progress,
            )
            kept = compare.keep(outcome, folder=folder / name)
        done.append(outcome)
        comparisons.warn(outcome.comparison)
        if not as_json:
            title = ("Models back to back", "A service beside background work")[part]
            screen.out.print(f"\n{part + 1}. {title}: {case.mix.name}", style="bold")
            _tell(outcome)
        kept.report()
        compare.raise_failure(outcome, kept)
        if progress.stopped:
            break
    eclip.report(done, page)
    if as_json:
        screen.print_json(
            {
                "report": str(page),
                "parts": [comparisons.describe(outcome) for outcome in done],
            }
        )
    else:
        best = folder / "closed-loop" / f"{done[0].best}.plan.json"
        screen.print_facts(
            [
                ("report", f"{page} (open it in a browser)"),
                ("a plan", f"eclip explain {best}"),
            ]
        )
    screen.exit_if_stopped(progress, f"{folder} has the results so far")


def _usual_services(topology: str) -> str:
    """A mix with a bound that any device can keep: five times the service's time alone."""
    (profile,) = eclip.case("bert:1", topology).profiles
    alone_s = profile.request_ns[-1] / 1e9
    rate_rps, bound_ms = (float(f"{value:.2g}") for value in (0.3 / alone_s, 5e3 * alone_s))
    return f"bert:1@{rate_rps:g}rps/{bound_ms:g}ms,vgg19:32@background"


def _tell(outcome: eclip.Outcome) -> None:
    """Print all ways and the verdict."""
    measures = list(outcome.measures.values())
    measured.print_policies(measures, outcome.best, outcome.comparison.aim)
    screen.out.print(f"{comparisons.verdict(outcome)}\n", style="bold")
