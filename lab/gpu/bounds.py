"""Are bounds kept on a GPU? Four pairs, two bounds, several ways, the same arrivals.

    PYTHONPATH=.:src python lab/gpu/bounds.py PLANS --make LABEL          (no GPU is needed)
    PYTHONPATH=.:src:.gpu-deps python3 lab/gpu/bounds.py PLANS --run FOLDER [--minutes 7]

``--make`` plans each pair at each bound by `search` with twelve batches, on the built-in
calibration, and by `yield` and stream priorities; another checkout may add its plans under its own
label. ``--run`` opens each pair once and runs its plans in turns. A row for each run is in
FOLDER/bounds.jsonl at once: p99, the share of late requests, background over its rate alone.
Lateness is judged by the bound of the plans with the label ``search``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from lab.support.kept import read_rows
from lab.support.tables import print_table

import eclip
from eclip.core.device import Window
from eclip.core.load import load_of_mix
from eclip.core.plan import Plan
from eclip.devices import open_device
from eclip.files import store
from eclip.planner.case import make_case
from eclip.rig.rig import Rig

# Service at its rate (0.35 of what the model can do alone) and background. Development saw none.
PAIRS = (
    ("gpt2:1@502rps", "densenet201:32"),
    ("efficientnet:1@403rps", "bert:32"),
    ("resnet50:8@314rps", "convnext:32"),
    ("mobilenet_v3:1@544rps", "resnext101:32"),
)
BOUNDS = ("1.3x", "2x")
OTHERS = ("yield", "priority")
REQUESTS = 4000
WARMUP_S = 0.3
SEED = 11


def mix_of(pair: Sequence[str], bound: str) -> str:
    return f"{pair[0]}/{bound},{pair[1]}@background"


def make(folder: Path, label: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, pair in enumerate(PAIRS):
        for bound in BOUNDS:
            for policy in ("search", *OTHERS):
                name = label if policy == "search" else policy
                file = folder / f"{name}-{number}-{bound}.json"
                if file.exists():
                    continue
                begin = time.monotonic()
                mix = mix_of(pair, bound)
                batches = 12 if policy == "search" else None
                store.save(eclip.plan(mix, policy=policy, batches=batches), file)
                print(f"{file.name}: {mix}, {time.monotonic() - begin:.0f} s", flush=True)


def run(plans: Path, folder: Path, device_name: str, minutes: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * minutes
    with (folder / "bounds.jsonl").open("a") as file:
        for number, pair in enumerate(PAIRS):
            try:
                for row in run_pair(plans, number, pair, device_name, until):
                    file.write(json.dumps(row) + "\n")
                    file.flush()
            except Exception:  # the other pairs are still to be run
                traceback.print_exc()
    show(read_rows(folder / "bounds.jsonl"))


def run_pair(
    plans: Path, number: int, pair: Sequence[str], device_name: str, until: float
) -> list[dict[str, Any]]:
    files = sorted(plans.glob(f"*-{number}-*.json"))
    loaded = {file.stem: store.load(file, Plan) for file in files}
    seconds = REQUESTS / float(pair[0].partition("@")[2].removesuffix("rps"))
    case = make_case(mix_of(pair, BOUNDS[0]))
    load = load_of_mix(case.mix, seconds, WARMUP_S, SEED)
    window = Window(seconds=seconds, warmup_seconds=WARMUP_S, trace_ms=0)
    bounds = {bound: bound_ns(loaded[f"search-{number}-{bound}"]) for bound in BOUNDS}
    rows: list[dict[str, Any]] = []
    seen: dict[str, str] = {}
    with Rig(case, open_device(device_name, case.topology, case.calibration)) as rig:
        rig.prepare()
        rig.measure_alone()
        alone = rig.run_once(rig.plain, load.only(0), window)
        rows.append({"pair": pair, "way": "alone", **measured(alone, bounds)})
        for name, plan in loaded.items():
            way, _, bound = name.split("-")
            # `yield` and priorities are the same at each bound.
            if way in OTHERS and seen.setdefault(way, name) != name:
                continue
            if time.monotonic() > until:
                print(f"no time is left for {name}")
                break
            log = rig.run_once(plan, load, window)
            given = bounds if way in OTHERS else {bound: bounds[bound]}
            rows.append({"pair": pair, "way": way, "bound": bound, **measured(log, given)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def bound_ns(plan: Plan) -> int:
    promise = plan.workers[0].promise
    assert promise is not None
    return promise.bound_ns


def measured(log: Any, bounds: dict[str, int]) -> dict[str, Any]:
    requests = log.requests
    took = np.array(
        [
            end - arrival
            for worker, arrival, end in zip(
                requests.worker, requests.arrival_ns, requests.end_ns, strict=True
            )
            if worker == 0
        ]
    )
    background = sum(worker == 1 for worker in requests.worker) / (log.duration_ns / 1e9)
    return {
        "requests": len(took),
        "p50_ms": float(np.quantile(took, 0.5) / 1e6),
        "p99_ms": float(np.quantile(took, 0.99) / 1e6),
        "background": background / log.alone_rps[1],
        "late": {bound: float(np.mean(took > limit)) for bound, limit in bounds.items()},
        "bound_ms": {bound: limit / 1e6 for bound, limit in bounds.items()},
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        late = ", ".join(f"{part:.2%} > {bound}" for bound, part in row["late"].items())
        lines.append(
            [
                " + ".join(row["pair"]),
                row["way"] if len(row["late"]) > 1 else f"{row['way']} {row['bound']}",
                f"{row['requests']}",
                f"{row['p50_ms']:.2f}",
                f"{row['p99_ms']:.2f}",
                ", ".join(f"{bound:.2f}" for bound in row["bound_ms"].values()),
                late,
                f"{row['background']:.3f}",
            ]
        )
    columns = ["pair", "way", "requests", "p50 ms", "p99 ms", "bound ms", "late", "background"]
    print_table("Bounds", columns, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("plans", type=Path)
    parser.add_argument("--make", metavar="LABEL")
    parser.add_argument("--run", type=Path, metavar="FOLDER")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=7.0)
    options = parser.parse_args()
    if options.make:
        make(options.plans, options.make)
    if options.run:
        run(options.plans, options.run, options.device, options.minutes)


if __name__ == "__main__":
    main()
