"""Prints a comparison: policies and workers side by side, spreads, settings, tails."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import eclip
from eclip.cli import screen
from eclip.cli.screen import measured
from eclip.files.comparison import Comparison, Entry
from eclip.planner.table_i import TABLE_I
from eclip.reports.chapters import Named, chapters_of
from eclip.reports.verdict import judge


def show(outcome: eclip.Outcome, as_json: bool) -> None:
    """Print a comparison: all runs of a policy together, and how far they lie apart."""
    comparison = outcome.comparison
    warn(comparison)
    measures = list(outcome.measures.values())
    if as_json:
        screen.print_json(describe(outcome))
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
    measured.print_measures(measures, outcome.best, comparison.aim)
    if comparison.repeats > 1:
        _print_spreads(comparison)
    _print_settings(comparison)
    if comparison.load_part is not None:
        _print_tails(comparison)
    _print_table_i(comparison)
    screen.out.print(f"\n{verdict(outcome)}", style="bold")


def verdict(outcome: eclip.Outcome) -> str:
    """The best way of sharing, in a sentence, or why that is not decided."""
    (chapter,) = chapters_of([Named(outcome)])
    return judge(chapter).sentence


def warn(comparison: Comparison) -> None:
    """Print the policies left out, with reasons, and the comparison's warnings."""
    for line in comparison.left_out:
        policy, _, why = line.partition(": ")
        screen.warn(f"{policy} is left out: {why}")
    for warning in comparison.warnings:
        screen.warn(warning)


def describe(outcome: eclip.Outcome) -> dict[str, Any]:
    """The outcome as plain data."""
    comparison = outcome.comparison
    return {
        "mix": comparison.mix,
        "topology": comparison.topology,
        "device": comparison.device,
        "modelled": comparison.modelled,
        "load": comparison.load,
        "seed": comparison.seed,
        "policies": list(outcome.measures.values()),
        "best": outcome.best,
        "verdict": verdict(outcome),
        "table_i": _table_i(comparison),
        "comparison": comparison,
        "warnings": comparison.warnings,
    }


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
