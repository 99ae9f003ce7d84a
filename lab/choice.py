"""Claim of docs/results/throughput.md: how much of what a search gains is the choice of kernels.

    PYTHONPATH=src python lab/choice.py

For every measured mix whose models have kernels for fewer units: STP under plain streams and with
the best static masks, each also with such kernels for somebody (the best trial of the search,
docs/runs), and under the plan that was deployed. Then all trials that differ in their kernels only:
what kernels for so many units gave there, measured and simulated.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from lab.support.tables import print_table

from eclip.files import store
from eclip.files.comparison import Comparison
from eclip.files.observations import Observations
from eclip.planner.case import find_calibration, find_observed, find_topology
from eclip.reports.results import geometric_mean
from eclip.tune.fit import Replay

DOCS = Path(__file__).parents[1] / "docs"
PROFILES = DOCS / "profiles"  # of kernels that were tried there and serve nobody
LEAST_FAIRNESS = 0.7


def with_other_kernels(observed: Observations) -> tuple[float, float] | None:
    """The most with all units for everybody, and with one mask for each that was fair enough."""
    slices = len(observed.fingerprint.slice_units)
    whole, masked = [0.0], [0.0]
    for run in observed.runs:
        if any(home.switch_max or home.priority for home in run.homes):
            continue
        if not any(home.kernels_for for home in run.homes):
            continue
        if min(home.most for home in run.homes) == slices:
            whole.append(sum(run.ratios))
        elif min(run.ratios) / max(run.ratios) >= LEAST_FAIRNESS:
            masked.append(sum(run.ratios))
    return (max(whole), max(masked)) if max(whole) and max(masked) else None


def rates(one: Comparison) -> list[float]:
    entries = [one.entry(policy) for policy in ("shared", "masks", "search")]
    return [entry.together.stp for entry in entries if entry is not None]


def pairs(replay: Replay) -> list[tuple[int, int]]:
    """Runs with other kernels, each with the one that has the same homes and the own kernels."""
    own = {run.homes: index for index, run in enumerate(replay.runs)}
    found = []
    for index, run in enumerate(replay.runs):
        homes = tuple(msgspec.structs.replace(home, kernels_for=0) for home in run.homes)
        if homes != run.homes and homes in own and not any(home.priority for home in homes):
            found.append((index, own[homes]))
    return found


def gains(observed: Observations) -> list[tuple[str, float, float]]:
    """STP with other kernels over that with the own ones: for how many units, measured,
    simulated."""
    topology = find_topology("h200")
    calibration = find_calibration(None, topology)
    profiles = find_observed(observed, topology, calibration, [PROFILES])
    replay = Replay(observed, topology, profiles)
    found = []
    for pair in pairs(replay):
        runs = [replay.runs[index] for index in pair]
        said = [
            msgspec.structs.replace(run, rates_rps=tuple(one.rates_rps))
            for run, one in zip(runs, replay.simulate(pair, calibration), strict=True)
        ]
        units = {home.kernels_for for home in runs[0].homes if home.kernels_for}
        title = " and ".join(map(str, sorted(units)))
        given, simulated = ([sum(one.ratios) for one in pair_of] for pair_of in (runs, said))
        found.append((title, given[0] / given[1], simulated[0] / simulated[1]))
    return found


def main() -> None:
    measured = {
        one.mix: one
        for one in store.load_results(DOCS / "results.jsonl").comparisons
        if not one.modelled and one.load_part is None
    }
    rows, ratios, alike = [], [], []
    for file in sorted((DOCS / "runs").glob("*.json.gz")):
        observed = store.load(file, Observations)
        (mix,) = observed.mixes
        found = with_other_kernels(observed)
        if found is None:
            continue
        alike += gains(observed)
        plain, masks, search = rates(measured[mix])
        rows.append([mix, *(f"{x:.3f}" for x in (plain, found[0], masks, found[1], search))])
        ratios.append((found[0] / plain, found[1] / masks, search / masks))
    means = [geometric_mean(column) for column in zip(*ratios, strict=True)]
    plainly, masked, deployed = (f"{mean - 1:+.1%}" for mean in means)
    rows.append(["mean", "", plainly, "", masked, f"{deployed} over masks"])
    columns = ["mix", "plain", "other kernels", "masks", "other kernels", "search"]
    print_table("STP", columns, rows)
    rows = []
    for title in ("any", *sorted({each[0] for each in alike})):
        pairs_of = [each[1:] for each in alike if title in ("any", each[0])]
        given, said = (geometric_mean(column) for column in zip(*pairs_of, strict=True))
        likeness = np.corrcoef(np.array(pairs_of).T)[0, 1] if len(pairs_of) > 2 else np.nan
        shown = [f"{given - 1:+.1%}", f"{said - 1:+.1%}", f"{likeness:.2f}"]
        rows.append([title, str(len(pairs_of)), *shown])
    print_table(
        "Pairs of trials with the same masks, one with other kernels: what these gave",
        ["kernels for", "pairs", "measured", "modelled", "correlation"],
        rows,
    )


if __name__ == "__main__":
    main()
