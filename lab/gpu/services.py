"""Claims of docs/results/services.md: services beside background work that gives way at joints.

    PYTHONPATH=.:src:.gpu-deps python3 lab/gpu/services.py FOLDER [--quick] [--minutes 9]

For every pair and load: the service alone, the background alone, and both together in several ways
(lab/support/contenders.py), each in a session of its own, all open at once and measured in turns
with the same arrivals. Loads are parts of what the service can serve alone. Every result is a line
of FOLDER/services.jsonl as soon as it is known, and its latencies are in FOLDER/latencies; a table
comes last. Models without a profile are profiled first, into FOLDER/profiles.

``--device sim`` is a rehearsal: zoo models stand for the workloads that only a GPU has. To measure
all that is claimed in one visit, see lab/gpu/visit.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of what is experimental
sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.support.contenders import APART, BOUNDED, CORE, KNOWN, WAYS
from lab.support.effort import Effort, Task
from lab.support.measuring import run_task
from lab.support.pairs import PAIRS
from lab.support.results_of_services import finish, show, summarise
from lab.support.workshop import Bench, Shelf

from eclip.core.shapes import shape_of
from eclip.devices import open_device
from eclip.planner.case import find_calibration, find_topology

SETS = {"all": tuple(WAYS), "core": CORE, "apart": tuple(APART), "bounded": tuple(BOUNDED)}


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[float]:
    return [float(word) for word in words(text)]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", "--only", type=words, default=list(PAIRS))
    parser.add_argument("--skip", type=words, default=[])
    parser.add_argument("--loads", type=_numbers, default=[0.35])
    parser.add_argument("--ways", default="all", help=f"{', '.join(SETS)}, or some of {KNOWN}")
    parser.add_argument("--requests", type=int, default=1000, help="of a service, over all rounds")
    parser.add_argument("--most-seconds", type=float, default=2.5, help="of one run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=60.0, help="start nothing new after that")
    parser.add_argument("--grain-us", type=float, default=150.0)
    parser.add_argument("--floor", type=float, default=0.0, help="of the background")
    parser.add_argument("--shape", default="poisson", help="of arrivals: bursts, azure-code, …")
    parser.add_argument("--again", action="store_true", help="alone twice, to see the noise")
    parser.add_argument("--busy-cores", action="store_true", help="beside spinning CPU cores")
    parser.add_argument("--quick", action="store_true", help="core ways, one short round")
    parser.add_argument("--profile-only", action="store_true")
    parser.add_argument(
        "--later", action="store_true", help="no intervals yet: --finish gives them"
    )
    parser.add_argument("--finish", action="store_true", help="only that, of what FOLDER has")
    parser.add_argument("--profiles", type=Path, action="append", default=[])
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    if options.quick:
        options.ways, options.rounds, options.requests = "core", 1, 350
    options.ways = SETS.get(options.ways) or tuple(words(options.ways))
    unknown = [name for name in (*options.pairs, *options.skip) if name not in PAIRS]
    unknown += [way for way in options.ways if way not in KNOWN]
    unknown += [] if shape_of(options.shape) else [options.shape]
    if unknown:
        parser.error(f"no such pair, way or shape: {', '.join(unknown)}")
    options.pairs = [name for name in options.pairs if name not in options.skip]
    return options


def open_bench(
    folder: Path, device: str, profiles: Sequence[Path] = (), grain_us: float = 150.0
) -> Bench:
    topology = find_topology("h200")
    calibration = find_calibration(None, topology)
    opened = open_device(device, topology, calibration)
    shelf = Shelf(folder, tuple(profiles), topology, calibration, opened.modelled)
    shelf.own.mkdir(parents=True, exist_ok=True)
    return Bench(opened, shelf, round(1e3 * grain_us))


def task_of(options: argparse.Namespace, pair: str) -> Task:
    effort = Effort(options.requests, rounds=options.rounds, most_s=options.most_seconds)
    return Task(
        pair,
        tuple(options.loads),
        options.ways,
        effort,
        options.shape,
        options.floor,
        options.busy_cores,
        options.again,
    )


def measure(options: argparse.Namespace) -> tuple[Bench, int]:
    """The results, and how many pairs failed."""
    bench = open_bench(options.folder, options.device, options.profiles, options.grain_us)
    failed = 0
    with bench.device:
        for name in options.pairs:
            if time.monotonic() - bench.began > 60 * options.minutes:
                bench.say(f"{name} and what follows left out: no time")
                break
            try:
                if options.profile_only:
                    for worker, model in enumerate(PAIRS[name].models):
                        bench.profile(model, worker)
                else:
                    run_task(bench, task_of(options, name))
            except Exception as error:
                failed += 1
                traceback.print_exc()
                bench.keep({"pair": name, "error": f"{type(error).__name__}: {error}"})
        bench.made.clear()
    return bench, failed


def main() -> int:
    options = parse()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows, failed = [], 0
    if not options.finish:
        bench, failed = measure(options)
        rows = bench.rows
    if options.finish or (rows and not options.later):
        rows = finish(options.folder)
    show(rows)
    summarise(rows)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
