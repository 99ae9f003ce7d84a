"""The comparisons of docs/results/comparisons.md on a GPU, one after the other in one process.

    PYTHONPATH=src:.gpu-deps python3 lab/gpu/mixes.py [--NAME VALUE ...] FOLDER MIX [MIX ...]

Each is `eclip.compare(MIX, device="cuda")`; modules are imported and models captured once for all
of them, since that is most of what happens before the first run. Options are those of
`eclip.compare` and of `eclip.CompareOptions`, with the values that the tables were made with unless
given. FOLDER gets the results file, and a folder for each mix with its tables, plans, runs and
observations. A comparison that fails is named and the next one begins.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import eclip
import eclip.contest.compare
from eclip.core.device import Device
from eclip.core.profile import Profile
from eclip.files import store
from eclip.planner.case import Case
from eclip.reports.results import markdown
from eclip.rig.rig import Stand

OPTIONS = eclip.CompareOptions(
    verify=3, refine=10.0, search_seconds=4.0, trials=9, trial_seconds=0.25, processes=15
)


class KeptStand(Stand):
    """Captures every worker's model only once, for all comparisons."""

    _kept: ClassVar[dict[Any, Any]] = {}

    def __init__(self, case: Case, device: Device, extra: Iterable[Profile] = ()) -> None:
        super().__init__(case, device, extra)
        self._made = self._kept

    def close(self) -> None:
        self.device.close()


def compare(mix: str, given: argparse.Namespace) -> int:
    """An exit code, as `eclip compare` would give one."""
    mine = given.folder / mix.replace("/", "-").replace(":", "-").replace(",", "-")
    options = dataclasses.replace(
        OPTIONS,
        command=shlex.join(["python", *sys.argv]),
        **{field: getattr(given, field) for field in _fields()},
    )
    try:
        outcome = eclip.compare(
            eclip.case(mix, profiles=given.profiles),
            given.policies,
            device="cuda",
            objective=given.objective,
            seconds=given.seconds,
            repeats=given.repeats,
            load=given.load,
            options=options,
        )
        store.append(outcome.comparison, given.folder / "results.jsonl")
        outcome.save(mine)
        (mine / "tables.md").write_text(markdown([outcome.comparison]) + "\n")
    except eclip.EclipError as error:
        print(f"{mix}: {error}", flush=True)
        return 2
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _fields() -> dict[str, type]:
    """Options that are numbers, by name."""
    every = {one.name: type(getattr(OPTIONS, one.name)) for one in dataclasses.fields(OPTIONS)}
    return {name: kind for name, kind in every.items() if kind in (int, float)}


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("mixes", nargs="+", metavar="MIX")
    arguments.add_argument("--policies", default="all")
    arguments.add_argument("--objective", default="throughput,energy")
    arguments.add_argument("--seconds", type=float, default=0.5)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--load", type=float)
    arguments.add_argument("--profiles", action="append", default=[])
    for name, kind in _fields().items():
        arguments.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=getattr(OPTIONS, name)
        )
    given = arguments.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    eclip.contest.compare.Stand = KeptStand  # type: ignore[attr-defined]
    for mix in given.mixes:
        begin = time.monotonic()
        code = compare(mix, given)
        print(f"{mix}: exit code {code}, {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
