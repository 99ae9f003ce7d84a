"""Promises: are bounds kept, on the calibration that a plan was made on and on other devices?

    PYTHONPATH=.:src python3 lab/promises.py FOLDER [--first 1000 --cases 150] [--minutes 9]
        [--ways yield,search] [--shape poisson] [--hindsight 30]
    PYTHONPATH=.:src python3 lab/promises.py FOLDER --table

Random cases (lab/support/random_cases.py) are planned on the built-in calibration, by `yield` and
by `search` with 12 batches. Each plan runs for 20,000 requests a service on the calibration and on
two devices drawn around it, with the same arrivals. A run counts where `yield` keeps every bound
with other seeds, at most 0.5% late. A row a case and device is in FOLDER/rows.jsonl as soon as it
is there, and the next call goes on. All of it is simulated, so all numbers are modelled.

Hindsight is the best fixed plan of those that the search tried: run on the same arrivals, with most
background, it keeps every bound. Nothing that plans beforehand can know it.

Seeds below 1000 are for development. Do not tune by others.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lab.support.kept import add_rows, read_rows
from lab.support.promise_runs import Trial, rows_of_case
from lab.support.promise_tables import print_tables

from eclip.core.shapes import shape_of


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--cases", type=int, default=150)
    parser.add_argument("--step", type=int, default=1, help="every so-manieth seed")
    parser.add_argument("--devices", type=int, default=3, help="the calibration, and drawn ones")
    parser.add_argument("--requests", type=int, default=20_000, help="of a service on the mean")
    parser.add_argument("--batches", type=int, default=12, help="of the search")
    parser.add_argument("--hindsight", type=int, default=0, help="for the first so many cases")
    parser.add_argument("--shape", default="poisson", help="of arrivals in runs, not in plans")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no case after these")
    parser.add_argument("--table", action="store_true", help="print what is there, run nothing")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.table:
        rows = [row for path in sorted(given.folder.glob("rows*.jsonl")) for row in read_rows(path)]
        print_tables(rows)
        return
    trial = Trial(given.requests, given.batches, given.devices, shape_of(given.shape))
    # A file for each process, so that several may run at a time.
    file = given.folder / f"rows-{given.first}.jsonl"
    done = {row["case"] for row in read_rows(file)}
    until = time.monotonic() + 60 * given.minutes
    for number in range(given.cases):
        seed = given.first + given.step * number
        if seed in done:
            continue
        if time.monotonic() > until:
            print("out of time; the same command goes on")
            return
        begun = time.monotonic()
        rows = rows_of_case(seed, trial, hindsight=number < given.hindsight)
        add_rows(file, rows)
        ways = {
            way: [f"{max(row['ways'][way]['late']):.2%}" for row in rows]
            for way in rows[0].get("ways", {})
        }
        took_s = time.monotonic() - begun
        print(f"{seed}: {rows[0].get('refused') or ways} in {took_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
