"""``eclip compare``: one mix under several policies, side by side."""

from __future__ import annotations

import functools
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

import eclip
from eclip.cli import screen
from eclip.cli.options import (
    CalibrationOption,
    DeviceOption,
    JsonOption,
    MixArgument,
    ProfilesOption,
    RefineOption,
    SearchSecondsOption,
    SecondsOption,
    SeedOption,
    StrictOption,
    TopologyOption,
    VerifyOption,
    load_of,
    named_plans,
    settings_of,
)
from eclip.cli.screen import comparisons
from eclip.errors import EclipError, UsageError
from eclip.files import outputs, store
from eclip.reports.marks import REPORT_MARK


def compare(
    mix: MixArgument,
    policies: Annotated[
        str,
        typer.Option(
            "--policies",
            help="Policies to run, separated by commas: shared, priority, timeslice, mps, "
            "mps-model, model, masks, kernel, eclip, search; for mixes with services also "
            "priority-segments, launches-16-8, launches-4-2, launches-1-1, yield, move; or all "
            "that can run here.",
        ),
    ] = "all",
    plan: Annotated[
        list[str] | None,
        typer.Option("--plan", help="Also run this plan, given as FILE or NAME=FILE; repeatable."),
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Run N rounds, each with another order of policies.")
    ] = 1,
    load: Annotated[
        str | None,
        typer.Option(
            "--load",
            metavar="PART|SHAPE|CSV",
            help="0.6: Poisson arrivals at 60% of every worker's closed-loop rate under shared. "
            "poisson, bursts, bursts:on=100ms,off=200ms, azure-code or azure-conv: this shape of "
            "arrivals, at the mix's rates. A CSV time_s,worker: arrivals from that file.",
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            "--objective",
            help="The goal of mps, masks and search: throughput, energy, slo, or several separated "
            "by commas. Default: slo for a mix with services, otherwise throughput.",
        ),
    ] = None,
    search_seconds: SearchSecondsOption = 20.0,
    verify: VerifyOption = 0,
    refine: RefineOption = 0.0,
    results: Annotated[
        Path | None, typer.Option("--results", help="Add the comparison to this results file.")
    ] = None,
    report_file: Annotated[
        Path | None, typer.Option("--report", help="Also write an HTML report to this file.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Also write plans and run logs to this folder."),
    ] = None,
    topology: TopologyOption = "h200",
    device: DeviceOption = "sim",
    seconds: SecondsOption = 2.0,
    seed: SeedOption = 0,
    calibration: CalibrationOption = None,
    profiles: ProfilesOption = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Change a rare setting; repeatable. Names: warmup, trace-ms, requests, fairness, "
            "batches, earlier, trials, trial-seconds, processes, reopen, switch-max, tolerance, "
            "tail, usual-kernels. docs/commands.md explains them.",
        ),
    ] = None,
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a mix under several policies in turns, with identical arrivals, and compare them.

    Kernels are recorded only with --report or --out.
    """
    given = settings_of(
        settings or [],
        eclip.CompareOptions,
        {"tail": bool, "usual_kernels": bool},
        besides=("seed", "search_seconds", "verify", "refine", "command"),
    )
    if report_file is not None or folder is not None:
        given.setdefault("trace_ms", min(20.0, 1000 * seconds))
    chosen = [name.strip() for name in policies.split(",")]
    if (verify or refine) and not {"all", "search"} & {*chosen}:
        raise UsageError("--verify and --refine need the policy search")
    part = load_of(load)
    if refine and isinstance(part, float):
        raise UsageError("--refine searches under full load and cannot be combined with --load")
    if results is not None:
        for warning in store.check_results(results):
            screen.warn(warning)
    if report_file is not None:
        outputs.check_output(report_file, REPORT_MARK)
    if folder is not None:
        outputs.check_folder(folder)
    case = eclip.case(
        mix,
        topology,
        calibration=calibration,
        profiles=profiles or [],
        tail=given.pop("tail", False),
        usual_kernels=given.pop("usual_kernels", False),
    )
    options = eclip.CompareOptions(
        seed=seed,
        search_seconds=search_seconds,
        verify=verify,
        refine=refine,
        command=shlex.join(["eclip", *sys.argv[1:]]),
        **given,
    )
    with screen.progress_bar(f"comparing {case.mix.name}") as progress:
        outcome = eclip.compare(
            case,
            policies,
            device=device,
            objective=objective,
            seconds=seconds,
            repeats=repeats,
            load=part,
            plans=named_plans(plan or []),
            options=options,
            progress=progress,
        )
        kept = keep(outcome, results=results, folder=folder, report_file=report_file)
    comparisons.show(outcome, as_json)
    kept.report()
    raise_failure(outcome, kept)
    screen.exit_if_stopped(progress, f"{_ran(outcome)}{kept.words}")
    screen.exit_if_missed(_short_of(outcome), strict)


class Kept:
    """The written files, and the errors of failed writes."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.errors: list[outputs.RescuedError] = []

    def add(self, path: Path | None, error: outputs.RescuedError | None) -> None:
        if error is not None:
            self.errors.append(error)
        elif path is not None:
            self.files.append(str(path))

    @property
    def words(self) -> str:
        return f"; kept in {', '.join(self.files)}" if self.files else ""

    def report(self) -> None:
        """Raise the first error, after everything else was tried and printed."""
        for error in self.errors[1:]:
            screen.warn(str(error))
        if self.errors:
            raise self.errors[0]


def keep(
    outcome: eclip.Outcome,
    *,
    results: Path | None = None,
    folder: Path | None = None,
    report_file: Path | None = None,
) -> Kept:
    """Write the requested files. A failed write goes to another place; the others go on."""
    kept = Kept()
    if results is not None:
        kept.add(results, outputs.append_or_rescue(outcome.comparison, results))
    if folder is not None:
        kept.add(folder, outputs.rescue(outcome.save, folder))
    if report_file is not None:
        kept.add(report_file, outputs.rescue(functools.partial(_draw, outcome), report_file))
    return kept


def raise_failure(outcome: eclip.Outcome, kept: Kept) -> None:
    """End with 1 if a failure ended the comparison early. Its results were written before."""
    if outcome.failure is not None:
        raise EclipError(
            f"the comparison ended early: {outcome.failure}; {_ran(outcome)}{kept.words}"
        )


def _draw(outcome: eclip.Outcome, path: Path) -> None:
    eclip.report(outcome, path)


def _short_of(outcome: eclip.Outcome) -> list[str]:
    """A sentence with the policies that miss a promise; the tables say by how much."""
    names = dict.fromkeys(words.partition(": ")[0] for words in outcome.missed)
    if not names:
        return []
    ran = len(outcome.comparison.entries)
    return [f"{len(names)} of {ran} are overloaded or miss a bound or floor: {', '.join(names)}"]


def _ran(outcome: eclip.Outcome) -> str:
    """``13 of 50 runs were measured``"""
    ran = sum(len(entry.runs) for entry in outcome.comparison.entries)
    return f"{ran} of {ran + outcome.runs_left} runs were measured"
