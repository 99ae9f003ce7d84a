"""Claim of docs/results.md: how much of what a search gains is the choice of kernels.

    PYTHONPATH=src python bench/choice.py

For every measured mix whose models have kernels for fewer units: STP under plain streams and with
the best static masks, each also with those kernels for everybody (trials of the search, docs/runs),
and under the plan that was deployed.
"""

from __future__ import annotations

from pathlib import Path

from eclip import store
from eclip.cli import screen
from eclip.comparison import Comparison
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


def main() -> None:
    measured = {
        one.mix: one
        for one in store.load_results(DOCS / "results.jsonl")
        if not one.modelled and one.load_part is None
    }
    rows, ratios = [], []
    for file in sorted((DOCS / "runs").glob("*.json.gz")):
        observed = store.load(file, Observations)
        (mix,) = observed.mixes
        found = with_other_kernels(observed)
        if found is None:
            continue
        plain, masks, search = rates(measured[mix])
        rows.append([mix, *(f"{x:.3f}" for x in (plain, found[0], masks, found[1], search))])
        ratios.append((found[0] / plain, found[1] / masks, search / masks))
    means = [geometric_mean(column) for column in zip(*ratios, strict=True)]
    plainly, masked, deployed = (f"{mean - 1:+.1%}" for mean in means)
    rows.append(["mean", "", plainly, "", masked, f"{deployed} over masks"])
    columns = ["mix", "plain", "other kernels", "masks", "other kernels", "search"]
    screen.print_table("STP", columns, rows)


if __name__ == "__main__":
    main()
