"""What docs/results/services.md and docs/results/comparisons.md claim, measured in one visit.

    PYTHONPATH=.:src:.gpu-deps python3 lab/gpu/visit.py FOLDER [--stages ...] [--minutes 9]

Parts run in order of importance (lab/support/stages.py). Each is a contest of eclip's own; what it
gave is in FOLDER at once. A part begins only if it should end in time, and one that is done is not
done again: so the same command in the next call goes on. Without a GPU:

    --plan      what is left, and the seconds that it should take
    --device sim --scale 0.1    a rehearsal of everything
    --finish    after the visit: simulate the same arrivals, and write tables.md
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of what is experimental
sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.support.always_busy import run_always_busy
from lab.support.kept import Row, read_rows
from lab.support.measuring import replayed, run_part
from lab.support.pairs import PAIRS
from lab.support.promises import tables_of
from lab.support.stages import (
    BEGIN_S,
    LOOP,
    STAGES,
    Part,
    done_parts,
    expected,
    fitting,
    note_done,
    scaled,
)
from lab.support.tables import print_table
from lab.support.workshop import RESULTS, Bench, Shelf

from eclip.errors import EclipError


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stages", type=words, default=list(STAGES))
    parser.add_argument("--pairs", type=words, default=[], help="only these")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--scale", type=float, default=1.0, help="of requests: a rehearsal's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profiles", type=Path, action="append", default=[])
    parser.add_argument("--plan", action="store_true", help="only say what would take how long")
    parser.add_argument("--finish", action="store_true", help="only write the tables")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.stages if name not in STAGES]
    unknown += [name for name in options.pairs if name not in PAIRS]
    if unknown:
        parser.error(f"no such stage or pair: {', '.join(unknown)}")
    return options


def parts_of(options: argparse.Namespace) -> list[Part]:
    return [
        scaled(part, options.scale)
        for name in options.stages
        for part in STAGES[name]
        if not options.pairs or part.pair in options.pairs
    ]


def shelf_of(options: argparse.Namespace) -> Shelf:
    return Shelf.at(options.folder, options.profiles, rehearsal=options.device == "sim")


def show_plan(parts: Sequence[Part], shelf: Shelf) -> None:
    done, left = done_parts(shelf.folder), expected(parts, shelf)
    lines, total = [], BEGIN_S
    for part in parts:
        total += left.get(part.name, 0.0)
        seconds = done.get(part.name, left.get(part.name, 0.0))
        state = "done" if part.name in done else ""
        lines.append([part.name, state, f"{seconds:.0f}", f"{total:.0f}"])
    print_table("Seconds on the GPU", ["part", "", "seconds", "by then"], lines)


def visit(options: argparse.Namespace) -> int:
    """How many parts failed."""
    begin = time.monotonic()
    bench = Bench.at(options.folder, options.device, options.profiles)
    parts = parts_of(options)
    failed: list[str] = []
    with bench.device:
        while True:
            left_s = 60 * options.minutes - (time.monotonic() - begin)
            expected_s = expected(parts, bench.shelf, map(str, bench.profiles))
            for name in failed:
                expected_s.pop(name, None)
            part = fitting(parts, expected_s, left_s)
            if part is None:
                break
            bench.say(f"{part.name}: {expected_s[part.name]:.0f} s expected, {left_s:.0f} s left")
            started = time.monotonic()
            try:
                (run_always_busy if part.stage == LOOP else run_part)(bench, part)
                note_done(options.folder, part, time.monotonic() - started)
            except Exception as error:
                failed.append(part.name)
                if not isinstance(error, EclipError):
                    traceback.print_exc()
                reason = f"{type(error).__name__}: {error}"
                bench.say(reason)
                bench.keep({"part": part.name, "stage": part.stage, "error": reason})
            bench.say(f"{part.name}: took {time.monotonic() - started:.0f} s")
        bench.made.clear()
    missing = [part.name for part in parts if part.name not in done_parts(options.folder)]
    bench.say(f"{len(missing)} parts are left: {'; '.join(missing) or 'none'}")
    return len(failed)


def finish(options: argparse.Namespace) -> None:
    """Rows with what the simulator says of the same arrivals, and the tables of them."""
    shelf, parts = shelf_of(options), {part.name: part for part in parts_of(options)}
    rows = read_rows(options.folder / RESULTS)
    ways: dict[str, list[str]] = {}
    for row in rows:
        if row.get("services") and "simulated" not in row and row["part"] in parts:
            ways.setdefault(row["part"], []).append(row["way"])
    said = {name: replayed(parts[name], shelf, mine) for name, mine in ways.items()}
    for row in rows:
        if (found := said.get(row["part"], {}).get(row.get("way", ""))) is not None:
            row["simulated"] = _in_short(found)
    partial = options.folder / "services.partial"
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.rename(options.folder / RESULTS)
    tables = tables_of(rows)
    lines = [json.dumps(dataclasses.asdict(table), ensure_ascii=False) for table in tables]
    (options.folder / "tables.jsonl").write_text("".join(f"{line}\n" for line in lines))
    print("\n".join(table.markdown() for table in tables))
    for row in rows:
        if "error" in row:
            print(f"{row['part']}: {row['error']}")


def _in_short(row: Row) -> Row:
    ratios = [found["p99_ratio"]["value"] for found in row["services"]]
    return {"background": row["background"], "p99_ratios": ratios}


def main() -> int:
    options = parse()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.plan:
        show_plan(parts_of(options), shelf_of(options))
    elif options.finish:
        finish(options)
    else:
        return int(visit(options) > 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
