"""Claims of docs/results/programs.md about libeclip: what a launch and a graph update cost.

    make gpu-transparent                                       on a host with a GPU, g++ and make
    PYTHONPATH=src python3 lab/gpu/transparent.py --standin  the same on the stand-in driver,
                                                               whose times mean nothing

Builds what it needs, runs `costs` natively and under tables, in turns, and prints what was found,
and which of the promised limits hold. What a launch costs over native is the mean of the turns,
with its 95% interval. With --keep FILE, a turn's rows are in FILE as soon as they are there.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.support.kept import Row, add_rows

from eclip.core.mix import mix_of
from eclip.core.model_key import ModelKey
from eclip.core.plan import Assignment, Group, Lane, Plan, PlannedWorker, Variant
from eclip.core.program import lower
from eclip.core.topology import Mask, Topology
from eclip.core.trace import Kernel, Trace, with_traces
from eclip.files import store
from eclip.programs.table import WorkersBy, plan_table

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "src" / "eclip" / "lib" / "libeclip.so"
STANDIN = ROOT / "native" / "build" / "plain"
# What a kernel of grid 1 and one of grid 2 take; nothing: the whole device, so the user's stream.
WAYS: dict[str, Sequence[str]] = {
    "hook": ("0-15", "0-15"),
    "redirected": ("0-7", "0-7"),
    "barrier": ("0-7", "8-15"),
}
PROMISED_NS = {"hook": 200, "redirected": 500, "barrier": 1500}
NATIVE, ASKING = "native", {"always asks": "always", "never asks": "never"}
TURNS, GRAPH_TURNS = 6, 2
WITHIN_95 = 2.571  # standard errors, by Student's t for six values


def make_table(topology: Topology, masks: Sequence[str]) -> bytes:
    kernels = tuple(Kernel(name="empty", grid=(n, 1, 1), block=(32, 1, 1)) for n in (1, 2))
    trace = Trace(model=ModelKey("empty", 1), kernels=kernels)
    mix = mix_of([ModelKey("empty", 1)])
    same = masks[0] == masks[1]
    lanes = tuple(Lane(0, Mask.parse(mask)) for mask in dict.fromkeys(masks))
    groups = (Group(0, 2, 1),) if same else (Group(0, 1, 1), Group(1, 1, 1))
    plan = Plan(
        mix=mix,
        policy="bench",
        topology=topology,
        fingerprint=with_traces(topology.fingerprint, [trace]),
        modelled=False,
        workers=(
            PlannedWorker(name=mix.workers[0].name, model=trace.model, kernels=2, why="bench"),
        ),
        lanes=lanes,
        variants=(Variant((0,), (Assignment(0, groups),)),),
        why="bench",
    )
    return plan_table(lower(plan, [trace]), [trace], WorkersBy.STREAM)


def build(folder: Path, standin: bool) -> Path:
    make = ["make", "-s", "-C", str(ROOT / "native"), "library"]
    subprocess.run([*make, "tests"] if standin else make, check=True)
    program = folder / "costs"
    driver = STANDIN / "libcuda.so.1" if standin else find_driver()
    source = str(Path(__file__).with_name("costs.cpp"))
    command = ["g++", "-std=c++20", "-O2", source, "-o", str(program), str(driver)]
    subprocess.run(command, check=True)
    return program


def find_driver() -> Path:
    """Where the loader finds it: not every host has it where the linker would look."""
    ctypes.CDLL("libcuda.so.1")
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libcuda.so"):
            return path
    raise SystemExit("eclip: there is no CUDA driver here; try --standin")


def run(program: Path, what: str, repeats: int, standin: bool, **variables: str) -> list[Row]:
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32", **variables}
    if standin:
        environment["LD_LIBRARY_PATH"] = str(STANDIN)
    done = subprocess.run(
        [str(program), what, "--repeats", str(repeats)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def slope_ns(rows: Sequence[Row]) -> float:
    """Per idle stream."""
    return float(np.polyfit([row["idle"] for row in rows], [row["ns"] for row in rows], 1)[0])


Turns = dict[str, list[list[Row]]]  # of every way: the rows of its turns


def middle(turns: Sequence[Sequence[Row]]) -> list[Row]:
    """Every row with the medians of its numbers over the turns."""
    return [
        same[0]
        | {key: float(np.median([row[key] for row in same])) for key in same[0] if "ns" in key}
        for same in zip(*turns, strict=True)
    ]


def over_native(found: Turns, way: str, stream: str, waits: bool) -> tuple[float, float, float]:
    """What a launch costs more beside no idle stream: the mean of the turns, and its interval."""
    mine, plain = (
        [select(rows, stream, waits)[0]["ns"] for rows in found[name]] for name in (way, NATIVE)
    )
    differences = np.subtract(mine, plain)
    mean = float(differences.mean())
    error = float(differences.std(ddof=1)) / len(differences) ** 0.5
    return mean, mean - WITHIN_95 * error, mean + WITHIN_95 * error


def print_launches(found: Turns) -> None:
    heads = f"{'ns':>9}{'over':>9}{'95%':>16}{'10-90%':>9}{'ns/idle':>9}"
    print(f"\n{'way':15}{'stream':9}{'waits':7}{heads}")
    for way, turns in found.items():
        for stream in ("default", "own"):
            for waits in (False, True):
                mine = select(middle(turns), stream, waits)
                mean, low, high = over_native(found, way, stream, waits)
                interval = f"{low:+.0f} to {high:+.0f}"
                print(
                    f"{way:15}{stream:9}{'yes' if waits else 'no':7}{mine[0]['ns']:9.0f}"
                    f"{mean:+9.0f}{interval:>16}{spread_of(mine):9.1%}{slope_ns(mine):9.2f}"
                )


def select(rows: Sequence[Row], stream: str, waits: bool) -> list[Row]:
    return [row for row in rows if (row["stream"], row["waits"]) == (stream, waits)]


def spread_of(rows: Sequence[Row]) -> float:
    """10th to 90th percentile over the median, in the middle of all numbers of idle streams."""
    return float(np.median([(row["high_ns"] - row["low_ns"]) / row["ns"] for row in rows]))


def print_promises(found: Turns) -> None:
    """Every promise of launches: what was found, the limit, and by how much it is missed."""
    print(f"\n{'promise':58}{'found':>9}{'limit':>9}")
    for way, most_ns in PROMISED_NS.items():
        for stream in ("default", "own"):
            for waits in (False, True):
                mine, plain = (select(middle(found[name]), stream, waits) for name in (way, NATIVE))
                what = f"{way}, {stream} stream, {'waiting' if waits else 'launch only'}: "
                if not waits:
                    over = over_native(found, way, stream, waits)
                    print_promise(f"{what}ns over native", over[0], most_ns)
                most = max(1.0, slope_ns(plain))
                print_promise(f"{what}ns per idle stream", slope_ns(mine), most)
                most = 100 * spread_of(plain) + 3
                print_promise(f"{what}spread in %", 100 * spread_of(mine), most)


def print_promise(what: str, found: float, most: float) -> None:
    verdict = "holds" if found <= most else f"MISSED by {found - most:.2f}"
    print(f"{what:58}{found:9.2f}{most:9.2f}  {verdict}")


def print_lanes(rows: Sequence[Row]) -> None:
    """What the driver itself takes for a launch into a lane, by any way to call it."""
    print(f"\n{'without libeclip':20}{'current':10}{'launched':18}{'ns':>8}{'over':>8}")
    for row in rows:
        over = row["ns"] - rows[0]["ns"]
        words = f"{row['stream']:20}{row['current']:10}{row['launched']:18}"
        print(f"{words}{row['ns']:8.0f}{over:+8.0f}")


def print_graphs(found: dict[str, list[Row]]) -> None:
    names = ("instantiate", "set_all", "update", "launch")
    print(f"\n{'way':14}{'nodes':>7}" + "".join(f"{name + ' µs':>16}" for name in names))
    for way, rows in found.items():
        for row in rows:
            times = "".join(f"{row[f'{name}_ns'] / 1000:16.1f}" for name in names)
            print(f"{way:14}{row['nodes']:7}{times}")


def measure(
    program: Path, folder: Path, repeats: int, standin: bool, keep: Path | None
) -> tuple[Turns, Turns]:
    """Launches and graphs of every way, in turns, so that what drifts meets all alike."""
    topology = store.load_builtin("h200", Topology)
    variables: dict[str, dict[str, str]] = {NATIVE: {}}
    for way, masks in WAYS.items():
        (folder / way).write_bytes(make_table(topology, masks))
        variables[way] = {"LD_PRELOAD": str(LIBRARY), "ECLIP_TABLE": str(folder / way)}
    for way, asking in ASKING.items():  # what asking first would cost or save
        variables[way] = variables["barrier"] | {"ECLIP_ASK": asking}
    launches: Turns = {way: [] for way in variables}
    graphs: Turns = {way: [] for way in (NATIVE, *WAYS)}
    for turn in range(TURNS):
        for way, under in variables.items():
            rows = run(program, "launch", max(4, repeats // TURNS), standin, **under)
            launches[way].append(rows)
            if keep is not None:
                add_rows(keep, [{"turn": turn, "way": way, **row} for row in rows])
            if way in graphs and turn < GRAPH_TURNS:
                graphs[way].append(run(program, "graph", 10, standin, **under))
    return launches, graphs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--standin", action="store_true")
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    repeats = 24 if given.standin else 120
    with tempfile.TemporaryDirectory() as place:
        program = build(Path(place), given.standin)
        launches, graphs = measure(program, Path(place), repeats, given.standin, given.keep)
        print_launches(launches)
        print_promises(launches)
        print_graphs({way: middle(turns) for way, turns in graphs.items()})
        print_lanes(run(program, "lane", repeats, given.standin))


if __name__ == "__main__":
    main()
