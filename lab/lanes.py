"""Claims of docs/results/services.md: services that only lanes protect, simulated against measured.

    PYTHONPATH=src python lab/lanes.py [--calibration FILE]

For every row of docs/services.jsonl with background on a mask and profiles in the package: the
p99 over that alone and the background's rate, measured and by this calibration or the built-in one.
Arrivals are those of the measurement, at rates from the profile instead of its measured capacity.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from lab.support.effort import Effort
from lab.support.pairs import PAIRS
from lab.support.replayed import replay
from lab.support.tables import print_table
from lab.support.workshop import Shelf

from eclip.planner.case import find_calibration, find_topology
from eclip.planner.search.giving import LANES_MARGIN

ROWS = Path(__file__).parents[1] / "docs" / "services.jsonl"
GRAIN_US = 150.0


def as_measured(row: dict[str, Any], shelf: Shelf) -> dict[str, Any] | None:
    """The row with what a replay wants to know; None: the package lacks a profile."""
    service, *others = (shelf.find(model) for model in PAIRS[row["pair"]].models)
    if service is None or None in others:
        return None
    rate_rps = row["load"] * 1e9 / (service.request_ns[-1] + shelf.calibration.costs.launch_ns)
    effort = Effort()
    whole, brief = effort.window(rate_rps), effort.brief_window(rate_rps)
    return row | {
        "rates": [rate_rps],
        "floor": 0.0,
        "grain_us": GRAIN_US,
        "seconds": whole.seconds,
        "warmup": whole.warmup_seconds,
        "runs": 1,
        "run_seconds": min(whole.seconds, brief.seconds),
    }


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--calibration", type=Path)
    topology = find_topology("h200")
    calibration = find_calibration(arguments.parse_args().calibration, topology)
    table, apart = [], []
    with tempfile.TemporaryDirectory() as empty:
        shelf = Shelf(Path(empty), (), topology, calibration, rehearsal=False)
        for row in map(json.loads, ROWS.read_text().splitlines()):
            known = row["way"].startswith("masks") and as_measured(row, shelf)
            said = replay(known, shelf) if known else None
            if said is None:
                continue
            tail = said["services"][0]["p99_ratio"]["value"]
            off = row["p99_ratio"] / tail
            apart.append(off)
            table.append(
                [
                    row["pair"], f"{row['load']:g}", row["way"],
                    f"{row['background']:.3f}", f"{said['background']:.3f}",
                    f"{row['p99_ratio']:.2f}", f"{tail:.2f}", f"{off:.2f}",
                ]
            )  # fmt: skip
    print_table(
        "Services that only lanes protect",
        [
            "pair", "load", "way", "background", "simulated", "p99 ÷ alone", "simulated",
            "measured ÷ simulated",
        ],
        table,
    )  # fmt: skip
    within = sum(off <= LANES_MARGIN for off in apart)
    print(
        f"\np99 measured ÷ simulated: {np.median(apart):.2f} in the middle, at most "
        f"{LANES_MARGIN:g} in {within} of {len(apart)} rows; mean of |log| "
        f"{np.abs(np.log(apart)).mean():.3f}"
    )


if __name__ == "__main__":
    main()
