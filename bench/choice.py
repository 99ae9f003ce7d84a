"""Claim of docs/results.md: how much of what a search gains is the choice of kernels.

    PYTHONPATH=src python bench/choice.py

For every measured mix whose models have kernels for fewer units: STP under plain streams and with
the best static masks, each also with those kernels for everybody (trials of the search, docs/runs),
and under the plan that was deployed. Then all trials that differ in their kernels only: what other
kernels gave there, measured and simulated.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from eclip import store
from eclip.cli import screen, wiring
from eclip.comparison import Comparison
from eclip.devices.sim.fit import Replay
from eclip.observations import Observations, ObservedRun
from eclip.report.results import geometric_mean

DOCS = Path(__file__).parents[1] / "docs"


def stp(run: ObservedRun) -> float:
    return sum(rate / alone for rate, alone in zip(run.rates_rps, run.alone_rps, strict=True))


def with_other_kernels(observed: Observations) -> tuple[float, float] | None:
    """With all units for everybody, and in the best of the swept masks."""
    slices = len(observed.fingerprint.slice_units)
    whole: list[float] = []
    masked: list[float] = []
    for run in observed.runs:
        if run.kind == "other kernels":
            (whole if min(home.most for home in run.homes) == slices else masked).append(stp(run))
    return (whole[0], max(masked)) if whole and masked else None


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


def gains(observed: Observations) -> list[tuple[float, float]]:
    """STP with other kernels over that with the own ones: measured, simulated."""
    topology = wiring.find_topology("h200")
    calibration = wiring.find_calibration(None, topology)
    replay = Replay(observed, topology, wiring.find_observed(observed, topology, calibration, []))
    found = []
    for pair in pairs(replay):
        runs = [replay.runs[index] for index in pair]
        said = [
            msgspec.structs.replace(run, rates_rps=tuple(one.rates_rps))
            for run, one in zip(runs, replay.simulate(pair, calibration), strict=True)
        ]
        found.append((stp(runs[0]) / stp(runs[1]), stp(said[0]) / stp(said[1])))
    return found


def main() -> None:
    measured = {
        one.mix: one
        for one in store.load_results(DOCS / "results.jsonl")
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
    screen.print_table("STP", columns, rows)
    given, said = (geometric_mean(column) for column in zip(*alike, strict=True))
    likeness = np.corrcoef(np.array(alike).T)[0, 1]
    screen.out.print(
        f"{len(alike)} pairs of trials with the same masks: {given - 1:+.1%} measured, "
        f"{said - 1:+.1%} modelled, correlation {likeness:.2f}"
    )


if __name__ == "__main__":
    main()
