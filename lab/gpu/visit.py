"""All that docs/results/services.md claims of services, measured in one visit to a GPU.

    PYTHONPATH=.:src:.gpu-deps python3 lab/gpu/visit.py FOLDER [--minutes 9]

Stages run in order of importance, part by part. Each result is in FOLDER at once. A part begins
only if it should end in time, and one that is done is not done again: so the same command in the
next call goes on. Before a visit, without a GPU:

    --plan      what is left, and the seconds that it should take
    --prepare   search for the plans that keep bounds, where profiles are known (minutes)
    --device sim --scale 0.1    a rehearsal of everything

and after it ``--finish`` adds intervals and what the simulator says of the same arrivals, and
writes the tables, one for every promise, and points.jsonl, which docs/services.jsonl is a copy of.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of what is experimental
sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.gpu.services import open_bench, words
from lab.support import bounded, deaths, together
from lab.support.always_busy import run_always_busy
from lab.support.contenders import BOUNDED
from lab.support.effort import BEGIN_S, Task, expected_s
from lab.support.entrants import plan_file, save_plans
from lab.support.kept import add_rows
from lab.support.measuring import at_rates, mix_of_pair, run_task
from lab.support.pairs import PAIRS
from lab.support.promises import tables_of
from lab.support.replayed import with_replays
from lab.support.results_of_services import finish, write_rows
from lab.support.services_picture import points_of
from lab.support.stages import (
    Part,
    done_parts,
    fitting,
    note_done,
    other_seconds,
    scaled,
    stages,
)
from lab.support.tables import print_table
from lab.support.workshop import Bench, Shelf

from eclip.core.device import Window
from eclip.errors import EclipError
from eclip.planner.case import Case, find_calibration, find_topology

PREPARE_S = 20.0  # of one search
REHEARSED = Window(0.2, 0.05, trace_ms=0.0)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stages", type=words, default=list(stages()))
    parser.add_argument("--pairs", type=words, default=list(PAIRS), help="only these")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--scale", type=float, default=1.0, help="of requests: a rehearsal's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profiles", type=Path, action="append", default=[])
    parser.add_argument("--search-seconds", type=float, default=PREPARE_S, help="of --prepare")
    parser.add_argument("--plan", action="store_true", help="only say what would take how long")
    parser.add_argument("--prepare", action="store_true", help="only search for plans")
    parser.add_argument("--finish", action="store_true", help="only write the tables")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.stages if name not in stages()]
    unknown += [name for name in options.pairs if name not in PAIRS]
    if unknown:
        parser.error(f"no such stage or pair: {', '.join(unknown)}")
    return options


def parts_of(options: argparse.Namespace) -> list[Part]:
    return [
        scaled(part, options.scale)
        for name in options.stages
        for part in stages()[name]
        if part.task is None or part.task.pair in options.pairs
    ]


def shelf_of(options: argparse.Namespace) -> Shelf:
    topology = find_topology("h200")
    calibration = find_calibration(None, topology)
    rehearsal = options.device == "sim"
    return Shelf(options.folder, tuple(options.profiles), topology, calibration, rehearsal)


def reckoned(
    parts: Sequence[Part], shelf: Shelf, captured: Collection[str] = ()
) -> dict[str, float]:
    """Seconds of every part that is left, by its name, in this order, in one process."""
    done = done_parts(shelf.folder)
    tasks = [part.task for part in parts if part.task is not None and part.name not in done]
    found = expected_s(
        tasks,
        shelf.request_ms,
        lambda model: shelf.find(model) is not None,
        lambda task, load, way: plan_file(shelf.folder, task, load, way).is_file(),
        captured,
    )
    return {
        part.name: other_seconds(part) if part.task is None else found.get(part.task, 0.0)
        for part in parts
    }


def show_plan(parts: Sequence[Part], shelf: Shelf) -> None:
    done, expected = done_parts(shelf.folder), reckoned(parts, shelf)
    lines, total = [], BEGIN_S
    for part in parts:
        if part.name in done:
            lines.append([part.name, "done", f"{done[part.name]:.0f}", f"{total:.0f}"])
            continue
        total += expected[part.name]
        lines.append([part.name, "", f"{expected[part.name]:.0f}", f"{total:.0f}"])
    print_table("Seconds on the GPU", ["part", "", "seconds", "by then"], lines)
    totals: dict[str, float] = {}
    for part in parts:
        if part.name not in done:
            totals[part.stage] = totals.get(part.stage, 0.0) + expected[part.name]
    rows = [[name, f"{seconds:.0f}"] for name, seconds in totals.items()]
    rows.append([f"all, and {BEGIN_S:.0f} s to begin", f"{total:.0f}"])
    print_table("Stages", ["stage", "seconds"], rows)


def prepare(parts: Sequence[Part], shelf: Shelf, seconds: float) -> None:
    """Search for what is not there yet, at rates that profiles let expect."""
    for part in parts:
        if part.task is None:
            continue
        for load in part.task.loads:
            try:
                _prepare(part.task, load, shelf, seconds)
            except EclipError as error:
                print(f"{part.name} at {load:g}: {error}", flush=True)


def _prepare(task: Task, load: float, shelf: Shelf, seconds: float) -> None:
    if not task.bounded_at(load):
        return
    found = [shelf.find(model) for model in PAIRS[task.pair].models]
    profiles = tuple(one for one in found if one is not None)
    if len(profiles) < len(found):
        print(f"{task.name}: has to be profiled first", flush=True)
        return
    files = {way: plan_file(shelf.folder, task, load, way) for way in task.bounded_at(load)}
    missing = [way for way, path in files.items() if bounded.kept_plan(path, profiles) is None]
    if not missing:
        return
    rates = [load * 1e9 / one.request_ns[-1] / (len(profiles) - 1) for one in profiles[:-1]]
    mix = at_rates(mix_of_pair([one.model for one in profiles], profiles, task.floor), rates)
    case = Case(mix, shelf.topology, shelf.calibration, profiles)
    plans = bounded.search_plans(case, missing, seconds)
    save_plans(plans, files)
    for way, plan in plans.items():
        print(f"{task.pair} at {load:g}, {way}, {BOUNDED[way][0]:g}x: {plan.why}", flush=True)


def run_part(bench: Bench, part: Part, device: str) -> None:
    if part.stage == "loop" and part.task is not None:
        run_always_busy(bench, part.task)
    elif part.task is not None:
        run_task(bench, part.task)
    elif part.stage == "deaths":
        for row in deaths.run_deaths(device, bench.folder):
            bench.keep(row | {"device": bench.device.title})
    else:
        together.run_mix(bench, part.mix, REHEARSED if bench.device.modelled else together.WINDOW)


def visit(options: argparse.Namespace) -> int:
    """How many parts failed."""
    begin = time.monotonic()
    bench = open_bench(options.folder, options.device, options.profiles)
    parts = parts_of(options)
    failed: list[str] = []
    with bench.device:
        while True:
            done = done_parts(options.folder) | dict.fromkeys(failed, 0.0)
            left_s = 60 * options.minutes - (time.monotonic() - begin)
            captured = [str(model) for model in bench.profiles]
            expected = reckoned(parts, bench.shelf, captured)
            part = fitting(parts, expected, done, left_s)
            if part is None:
                break
            bench.say(f"{part.name}: {expected[part.name]:.0f} s expected, {left_s:.0f} s left")
            started = time.monotonic()
            try:
                run_part(bench, part, options.device)
                note_done(options.folder, part, time.monotonic() - started)
            except Exception as error:
                failed.append(part.name)
                traceback.print_exc()
                reason = f"{type(error).__name__}: {error}"
                bench.keep({"stage": part.stage, "part": part.name, "error": reason})
            bench.say(f"{part.name}: took {time.monotonic() - started:.0f} s")
        bench.made.clear()
    missing = [part.name for part in parts if part.name not in done_parts(options.folder)]
    bench.say(f"{len(missing)} parts are left: {'; '.join(missing) or 'none'}")
    return len(failed)


def write_tables(options: argparse.Namespace) -> None:
    rows = with_replays(finish(options.folder), shelf_of(options))
    write_rows(options.folder, rows)
    text = "\n".join(table.markdown() for table in tables_of(rows))
    (options.folder / "tables.md").write_text(text)
    points = options.folder / "points.jsonl"
    points.unlink(missing_ok=True)
    add_rows(points, points_of(rows))
    print(text)
    for row in rows:
        if "error" in row:
            print(f"failed: {row}")


def main() -> int:
    options = parse()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.plan:
        show_plan(parts_of(options), shelf_of(options))
    elif options.prepare:
        prepare(parts_of(options), shelf_of(options), options.search_seconds)
    elif options.finish:
        write_tables(options)
    else:
        return int(visit(options) > 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
