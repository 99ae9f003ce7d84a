"""Claims of docs/results/simulator.md: the simulator against runs that it was not fitted to.

    PYTHONPATH=src python lab/agreement.py [--calibration FILE] [OBSERVATIONS ...]

For every file of one mix (those of docs/runs by default): mean absolute error of the workers' rates
and of the power, with this calibration or the built-in one, for plans without and with switches,
and the rank correlation of simulated with measured STP; then the errors once more with those on all
other runs of the file taken off, as in a search on the device; then the best runs. Runs with stream
priorities, which the simulator does not know, are only in the last table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from lab.support.tables import print_table

from eclip.core.calibration import Calibration
from eclip.core.topology import Topology
from eclip.files import store
from eclip.files.observations import Observations, ObservedRun
from eclip.planner.case import find_calibration, find_observed, find_topology
from eclip.planner.search.correction import Corrected
from eclip.planner.search.objective import Score
from eclip.tune.fit import Errors, Replay

DOCS = Path(__file__).parents[1] / "docs"
RUNS = DOCS / "runs"
PROFILES = DOCS / "profiles"  # of kernels that were tried there and serve nobody
BEST = 8
LEAST_FAIRNESS = 0.7


def replay_of(observations: Observations, topology: Topology, calibration: Calibration) -> Replay:
    if len(observations.mixes) != 1:
        sys.exit(
            "a search on the device has one mix; give observations of `eclip compare --refine`"
        )
    profiles = find_observed(observations, topology, calibration, [PROFILES])
    return Replay(observations, topology, profiles)


def left_out_one_by_one(
    replay: Replay, indices: Sequence[int], calibration: Calibration
) -> tuple[float, float]:
    """Mean absolute error of rates and of power, every run predicted from all others."""
    runs = [replay.runs[index] for index in indices]
    plans = [replay.plans[index] for index in indices]
    tails = (0.0,) * len(runs[0].alone_rps)
    said = {
        id(plan): Score(_ratios(run, one.rates_rps), one.power_w, tails)
        for plan, run, one in zip(plans, runs, replay.simulate(indices, calibration), strict=True)
    }
    measured = [_score(run) for run in runs]
    rates, power = [], []
    for left in range(len(plans)):
        corrected = Corrected(lambda wanted: [said[id(plan)] for plan in wanted])
        corrected.learn(
            [plan for index, plan in enumerate(plans) if index != left],
            [score for index, score in enumerate(measured) if index != left],
        )
        (found,) = corrected.expected([plans[left]])
        rates.append(np.abs(np.divide(found.ratios, measured[left].ratios) - 1).mean())
        power.append(abs(found.power_w / measured[left].power_w - 1))
    return float(np.mean(rates)), float(np.mean(power))


def rank_correlation(replay: Replay, indices: Sequence[int], calibration: Calibration) -> float:
    """Of simulated with measured STP."""
    runs = [replay.runs[index] for index in indices]
    said = [
        sum(_ratios(run, one.rates_rps))
        for run, one in zip(runs, replay.simulate(indices, calibration), strict=True)
    ]
    given = [_score(run).stp for run in runs]
    return float(np.corrcoef(np.argsort(np.argsort(said)), np.argsort(np.argsort(given)))[0, 1])


def best_finalist(runs: Sequence[ObservedRun]) -> tuple[float, str]:
    """STP of the best plan that simulation proposed, over that of the best that was measured; and
    of what kind this was."""
    fair = {run: _score(run).stp for run in runs if _score(run).fairness >= LEAST_FAIRNESS}
    found = [stp for run, stp in fair.items() if "finalist" in run.kind]
    best = max(fair, key=lambda run: fair[run])
    return (max(found) if found else 0.0) / fair[best], best.kind


def _score(run: ObservedRun) -> Score:
    return Score(run.ratios, run.power_w, (0.0,) * len(run.ratios))


def _ratios(run: ObservedRun, rates_rps: Sequence[float]) -> tuple[float, ...]:
    return tuple(rate / alone for rate, alone in zip(rates_rps, run.alone_rps, strict=True))


def cells(errors: Errors) -> list[str]:
    if errors.runs == 0:
        return ["0", "", ""]
    return [str(errors.runs), f"{errors.rate:.1%}", f"{errors.power:.1%}"]


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("files", nargs="*", type=Path)
    arguments.add_argument("--calibration", type=Path)
    given = arguments.parse_args()
    files = given.files or sorted(RUNS.glob("*.json.gz"))
    topology = find_topology("h200")
    calibration = find_calibration(given.calibration, topology)
    rows, corrected, best, figures = [], [], [], []
    for file in files:
        replay = replay_of(store.load(file, Observations), topology, calibration)
        still = replay.usable()
        switching = [
            index
            for index, plan in enumerate(replay.plans)
            if index not in still and not any(lane.priority for lane in plan.lanes)
        ]
        parts = (sorted([*still, *switching]), still, switching)
        errors = [cells(replay.errors(part, calibration)) for part in parts]
        ranks = rank_correlation(replay, parts[0], calibration)
        rows.append([file.name, *(cell for each in errors for cell in each), f"{ranks:.2f}"])
        finalist, kind = best_finalist(replay.runs)
        rates, power = left_out_one_by_one(replay, parts[0], calibration)
        corrected.append(
            [
                file.name, str(len(parts[0])), f"{rates:.1%}", f"{power:.1%}",
                f"{finalist:.3f}", kind,
            ]
        )  # fmt: skip
        of_all = replay.errors(parts[0], calibration)
        figures.append((of_all.runs, of_all.rate, of_all.power, ranks, rates, power))
        scored = []
        for run, plan in zip(replay.runs, replay.plans, strict=True):
            homes = " ".join(
                f"{home.first}{'+' if home.step > 0 else '-'}{home.most}"
                + (f"p{home.priority}" if home.priority else "")
                + (f"~{home.kernels_for}" if home.kernels_for else "")
                for home in run.homes
            )
            switches = sum(part.switches for part in plan.main.assignments)
            gave = _score(run)
            scored.append((gave.stp, gave.fairness, run.power_w, switches, run.kind, homes))
        for stp, fairness, power, switches, kind, homes in sorted(scored, reverse=True)[:BEST]:
            shown = [f"{stp:.3f}", f"{fairness:.2f}", f"{power:.0f}", str(switches), kind, homes]
            best.append([file.name, *shown])
    runs = str(sum(each[0] for each in figures))
    _, *means = np.mean(figures, axis=0)
    simulated, expected = ([f"{mean:.1%}" for mean in means[at : at + 2]] for at in (0, 3))
    rows.append(["mean", runs, *simulated, *[""] * 6, f"{means[2]:.2f}"])
    corrected.append(["mean", runs, *expected, "", ""])
    columns = ["runs", "rates", "power"]
    print_table(
        "Simulated against measured: all, without switches, with switches; rank correlation of all",
        ["file", *columns, *columns, *columns, "ranks"],
        rows,
    )
    print_table(
        "Every run predicted by a simulation that is corrected by the others; STP of the best plan "
        f"of the simulation over the best that was measured, fairness at least {LEAST_FAIRNESS}",
        ["file", *columns, "best finalist", "the best was"],
        corrected,
    )
    print_table(
        "The best that were measured; a home is its first slice, direction and largest size, its "
        "priority (p) and the units its kernels are chosen for (~)",
        ["file", "STP", "fairness", "W", "switches", "kind", "homes"],
        best,
    )


if __name__ == "__main__":
    main()
