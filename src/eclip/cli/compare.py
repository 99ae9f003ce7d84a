"""``eclip compare``: one mix under several policies, side by side."""

from __future__ import annotations

import functools
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import eclip
from eclip.artefacts import outputs, store
from eclip.artefacts.comparison import Comparison, Entry
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
    load_of,
    named_plans,
    settings_of,
)
from eclip.errors import EclipError, UsageError
from eclip.planning.table_i import TABLE_I
from eclip.reports.marks import REPORT_MARK


def compare(
    mix: MixArgument,
    policies: Annotated[
        str,
        typer.Option(
            "--policies",
            help="Policies to run, separated by commas: shared, priority, timeslice, mps, "
            "mps-model, model, masks, kernel, eclip, search; or all that can run here.",
        ),
    ] = "all",
    plan: Annotated[
        list[str] | None,
        typer.Option(
            "--plan", help="A plan file that takes part too, as FILE or NAME=FILE; repeatable."
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Rounds to run; each has another order of policies.")
    ] = 1,
    load: Annotated[
        str | None,
        typer.Option(
            "--load",
            metavar="PART|CSV",
            help="0.6: Poisson arrivals at 60% of every worker's closed-loop rate under shared. A "
            "CSV time_s,worker: arrivals from that file.",
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            "--objective",
            help="What mps, masks and search optimise: throughput, energy, latency, or several "
            "separated by commas. Throughput unless given; latency where the mix has rates.",
        ),
    ] = None,
    search_seconds: SearchSecondsOption = 20.0,
    verify: Annotated[
        int,
        typer.Option("--verify", min=0, help="search: try the best N plans on the device."),
    ] = 0,
    refine: RefineOption = 0.0,
    results: Annotated[
        Path | None, typer.Option("--results", help="Add the comparison to this results file.")
    ] = None,
    report_file: Annotated[
        Path | None, typer.Option("--report", help="Also write the HTML report here.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Also keep plans and run logs in this folder."),
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
            help="A rarely used setting; repeatable. Names: warmup, trace-ms, requests, fairness, "
            "batches, earlier, trials, trial-seconds, processes, reopen, switch-max, tolerance, "
            "tail, usual-kernels. docs/commands.md explains them.",
        ),
    ] = None,
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a mix under several policies in turns, with identical arrivals, and compare them.

    Kernels are recorded only if they are kept (--report, --out).
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
        raise UsageError("--verify and --refine go with the policy search")
    part = load_of(load)
    if refine and isinstance(part, float):
        raise UsageError("--refine searches under full load; leave it or --load out")
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
    show(outcome, as_json)
    kept.report()
    raise_failure(outcome, kept)
    screen.exit_if_stopped(progress, f"{_ran(outcome)}{kept.words}")
    screen.exit_if_missed(outcome.missed, strict)


class Kept:
    """Files that were written, and errors of those that could not be."""

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
    """Write what is asked for; what fails lands beside, and the rest is still written."""
    kept = Kept()
    if results is not None:
        kept.add(results, outputs.append_or_rescue(outcome.comparison, results))
    if folder is not None:
        kept.add(folder, outputs.rescue(outcome.save, folder))
    if report_file is not None:
        kept.add(report_file, outputs.rescue(functools.partial(_draw, outcome), report_file))
    return kept


def raise_failure(outcome: eclip.Outcome, kept: Kept) -> None:
    """End with 1 if the comparison ended early by a failure, after what it measured is kept."""
    if outcome.failure is not None:
        raise EclipError(
            f"the comparison ended early: {outcome.failure}; {_ran(outcome)}{kept.words}"
        )


def _draw(outcome: eclip.Outcome, path: Path) -> None:
    eclip.report(outcome, path)


def show(outcome: eclip.Outcome, as_json: bool) -> None:
    """Print a comparison: all runs of a policy together, and how far they lie apart."""
    comparison = outcome.comparison
    for line in comparison.left_out:
        policy, _, why = line.partition(": ")
        screen.warn(f"{policy} is left out: {why}")
    for warning in comparison.warnings:
        screen.warn(warning)
    measures = list(outcome.measures.values())
    if as_json:
        screen.print_json(
            {
                "mix": comparison.mix,
                "topology": comparison.topology,
                "device": comparison.device,
                "modelled": comparison.modelled,
                "load": comparison.load,
                "seed": comparison.seed,
                "policies": measures,
                "best": outcome.best,
                "table_i": _table_i(comparison),
                "comparison": comparison,
                "warnings": comparison.warnings,
            }
        )
        return
    each_s = next(iter(outcome.logs.values())).duration_ns / 1e9
    rounds = f", {comparison.repeats} rounds, each in another order"
    screen.print_facts(
        [
            ("mix", comparison.mix),
            ("device", comparison.device),
            (
                "load",
                f"{comparison.load}, seed {comparison.seed}, {each_s:g} s"
                + (rounds if comparison.repeats > 1 else ""),
            ),
        ]
    )
    aim = "latency" if comparison.load_part else comparison.objective.split(",")[0]
    screen.print_measures(measures, aim)
    if comparison.repeats > 1:
        _print_spreads(comparison)
    _print_settings(comparison)
    if comparison.load_part is not None:
        _print_tails(comparison)
    _print_table_i(comparison)


def _ran(outcome: eclip.Outcome) -> str:
    """``13 of 50 runs were measured``"""
    ran = sum(len(entry.runs) for entry in outcome.comparison.entries)
    return f"{ran} of {ran + outcome.runs_left} runs were measured"


def _print_spreads(comparison: Comparison) -> None:
    most = max(len(entry.runs) for entry in comparison.entries)
    screen.print_table(
        f"{screen.runs_title(most)}{screen.modelled_note(comparison.modelled)}",
        ["policy", "runs", "mean", "median", "min", "max", "vs shared"],
        (
            [
                entry.policy,
                str(len(entry.runs)),
                *(f"{value:.3f}" for value in spread([run.stp for run in entry.runs])),
                "" if gain is None else f"{gain:+.1%}",
            ]
            for entry in comparison.entries
            for gain in (comparison.gain(entry),)
        ),
    )


def _print_settings(comparison: Comparison) -> None:
    chosen = [
        (entry.policy, f"{entry.setting}, the best of {len(entry.trials)} that were tried")
        for entry in comparison.entries
        if entry.setting and entry.trials
    ]
    if chosen:
        screen.print_facts(chosen)
        screen.out.print()


def spread(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Mean, median, least and greatest."""
    return statistics.fmean(values), statistics.median(values), min(values), max(values)


def _print_tails(comparison: Comparison) -> None:
    plain = comparison.entry("shared")
    screen.print_table(
        f"p99 of all runs together{screen.modelled_note(comparison.modelled)}",
        ["worker", "policy", "requests", "p99 ms", "vs shared"],
        (
            [
                name if entry is comparison.entries[0] else "",
                entry.policy,
                str(entry.together.requests[index]),
                screen.number(entry.together.p99_ms[index], 2),
                _ratio(entry, plain, index),
            ]
            for index, name in enumerate(comparison.workers)
            for entry in comparison.entries
        ),
        names=2,
    )


def _ratio(entry: Entry, plain: Entry | None, worker: int) -> str:
    p99_ms = entry.together.p99_ms[worker]
    plain_ms = None if plain is None else plain.together.p99_ms[worker]
    return "" if p99_ms is None or not plain_ms else f"{p99_ms / plain_ms:.2f}x"


def _print_table_i(comparison: Comparison) -> None:
    table = _table_i(comparison)
    if table is None or not table["ours"]:
        return
    screen.print_table(
        "Lane switches per request: the ECLIP paper's Table I (MI50, measured) and ours",
        ["", *table["paper"], *(f"ours: {name}" for name in table["ours"])],
        [
            [
                comparison.mix,
                *map(str, table["paper"].values()),
                *map(str, table["ours"].values()),
            ]
        ],
    )


def _table_i(comparison: Comparison) -> dict[str, dict[str, Any]] | None:
    printed = TABLE_I.get(comparison.mix)
    if printed is None:
        return None
    ours = {
        entry.policy: sum(entry.switches)
        for entry in comparison.entries
        if entry.policy in ("kernel", "eclip")
    }
    return {"paper": printed, "ours": ours}
