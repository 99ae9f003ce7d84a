"""The outcome of a contest: its line of a results file, its files, its tables."""

from __future__ import annotations

import datetime
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from eclip import __version__
from eclip.artefacts import store
from eclip.artefacts.comparison import Comparison, Entry, plan_digest, score_of
from eclip.artefacts.measures import measure, measure_together
from eclip.artefacts.observations import Observations
from eclip.cli import screen
from eclip.cli.contest import Contest
from eclip.cli.contest_options import ContestOptions
from eclip.errors import UsageError


def keep(contest: Contest, folder: Path) -> None:
    """Write every plan and its last run log into a folder, made if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot use the folder {folder}: {error.strerror or error}") from None
    for entrant in contest.measured:
        # A plan has no shares: run again from a file, MPS's would be plain streams.
        if not entrant.policy.startswith("mps"):
            store.save(entrant.plan, folder / f"{entrant.policy}.plan.json")
        store.save(entrant.logs[-1], folder / f"{entrant.policy}.run.json")
    if contest.observed:
        store.save(observations_of(contest), folder / "observations.json.gz")


def observations_of(contest: Contest) -> Observations:
    """What a search tried on the device, as ``eclip calibrate`` reads it."""
    now = datetime.datetime.now(datetime.UTC)
    return Observations(
        fingerprint=contest.fingerprint,
        source=f"eclip compare {contest.mix.name}: what a search tried on the device",
        date=now.date(),
        runs=tuple(contest.observed),
        modelled=contest.measured[0].logs[0].modelled,
    )


def comparison_of(contest: Contest, options: ContestOptions) -> Comparison:
    first = contest.measured[0].logs[0]
    return Comparison(
        mix=contest.mix.name,
        workers=tuple(worker.name for worker in contest.mix.workers),
        models=contest.mix.models,
        topology=first.plan.topology.name,
        device=first.device,
        driver=contest.driver,
        modelled=first.modelled,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=shlex.join(["eclip", *sys.argv[1:]]),
        eclip=__version__,
        load=first.load,
        load_part=options.load_part,
        seed=first.seed,
        repeats=options.repeats,
        objective=",".join(aim.kind for aim in options.objectives),
        alone_rps=contest.alone_rps,
        entries=tuple(
            Entry(
                policy=entrant.policy,
                setting=entrant.setting,
                plan=plan_digest(entrant.plan),
                switches=tuple(part.switches for part in entrant.plan.main.assignments),
                runs=tuple(score_of(measure(log)) for log in entrant.logs),
                together=score_of(measure_together(entrant.logs)),
                trials=entrant.trials,
            )
            for entrant in contest.measured
        ),
        left_out=tuple(f"{policy}: {why}" for policy, why in contest.left_out.items()),
        warnings=_warnings(contest),
    )


def show(contest: Contest, options: ContestOptions, as_json: bool) -> None:
    """Print a contest: all runs of a policy together, and how far they lie apart."""
    for policy, why in contest.left_out.items():
        screen.warn(f"{policy} is left out: {why}")
    for warning in _warnings(contest):
        screen.warn(warning)
    comparison = comparison_of(contest, options)
    measures = [measure_together(entrant.logs) for entrant in contest.measured]
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
                "table_i": _table_i(comparison),
                "comparison": comparison,
                "warnings": comparison.warnings,
            }
        )
        return
    rounds = f", {options.repeats} rounds in rotated order" if options.repeats > 1 else ""
    each_s = contest.measured[0].logs[0].duration_ns / 1e9
    screen.print_facts(
        [
            ("mix", comparison.mix),
            ("device", comparison.device),
            ("load", f"{comparison.load}, seed {comparison.seed}, {each_s:g} s{rounds}"),
        ]
    )
    screen.print_measures(measures)
    if options.repeats > 1 or any(entry.setting for entry in comparison.entries):
        _print_spreads(comparison)
    if options.load_part is not None:
        _print_tails(comparison)
    _print_table_i(comparison)


def _print_spreads(comparison: Comparison) -> None:
    plain = comparison.entry("shared")
    screen.print_table(
        f"STP of {comparison.repeats} runs{screen.modelled_note(comparison.modelled)}",
        ["policy", "setting", "mean", "median", "min", "max", "of shared"],
        (
            [
                entry.policy,
                entry.setting,
                *(f"{value:.3f}" for value in spread([run.stp for run in entry.runs])),
                "" if plain is None else f"{entry.together.stp / plain.together.stp:.3f}",
            ]
            for entry in comparison.entries
        ),
        names=2,
    )


def spread(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Mean, median, least and greatest."""
    return statistics.fmean(values), statistics.median(values), min(values), max(values)


def _print_tails(comparison: Comparison) -> None:
    plain = comparison.entry("shared")
    screen.print_table(
        f"p99 of all runs together{screen.modelled_note(comparison.modelled)}",
        ["worker", "policy", "requests", "p99 ms", "of shared"],
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
    mine = entry.together.p99_ms[worker]
    theirs = None if plain is None else plain.together.p99_ms[worker]
    return "" if mine is None or not theirs else f"{mine / theirs:.2f}"


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


def _table_i(comparison: Comparison) -> dict[str, dict[str, int]] | None:
    from eclip.planning.paper import TABLE_I

    printed = TABLE_I.get(comparison.mix)
    if printed is None:
        return None
    ours = {
        entry.policy: sum(entry.switches)
        for entry in comparison.entries
        if entry.policy in ("kernel", "eclip")
    }
    return {"paper": printed, "ours": ours}


def _warnings(contest: Contest) -> tuple[str, ...]:
    logs = [log for entrant in contest.measured for log in entrant.logs]
    return tuple(dict.fromkeys(warning for log in logs for warning in log.warnings))
