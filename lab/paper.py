"""The ECLIP paper beside us: the tables and the picture of docs/paper.md.

    PYTHONPATH=src python lab/paper.py

Runs the paper's seven mixes on the simulated MI50, keeps the rows in docs/paper.jsonl, and writes
the tables into docs/paper.md and the picture into docs/pictures/paper.svg. ``--draw`` only renders
the kept rows.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parents[1]))

from lab.support.kept import read_rows
from lab.support.paper_picture import draw_paper

import eclip
from eclip.core.calibration import Calibration
from eclip.core.mix import PAPER_MIXES
from eclip.core.plan import Plan
from eclip.planner.case import Case, make_case
from eclip.planner.exact import allocate
from eclip.planner.policies import PolicyOptions
from eclip.planner.pool import build_pool
from eclip.planner.table_i import TABLE_I

Row = dict[str, Any]

DOCS = Path(__file__).parents[1] / "docs"
PAGE, ROWS, PICTURE = DOCS / "paper.md", DOCS / "paper.jsonl", DOCS / "pictures" / "paper.svg"
BATCHES = (1, 2, 4, 8, 16, 32, 64)
BUDGETS = (0, 2, 7, 14, 28, 1_000)
IOCTL_NS = 55_400  # the paper's worst change of a queue's mask
EXAMPLE = np.array(
    [[50, 30, 25, 24], [20, 12, 11, 11], [40, 26, 21, 20], [10, 7, 6, 6]], dtype=np.float64
)
EXAMPLE_SIZES = (15, 30, 45, 60)


def device() -> Calibration:
    return make_case("paper/1", "mi50").calibration


def measured(case: Case, policy: str, seconds: float, switch_max: int = 14) -> tuple[Row, Plan]:
    plan = eclip.plan(case, policy=policy, options=PolicyOptions(switch_max=switch_max))
    log = eclip.run(plan, seconds=seconds, case=case, trace_ms=0)
    measures = eclip.measure(log)
    row = {
        "stp": measures.stp,
        "efficiency": measures.efficiency_per_kj,
        "switches": measures.switches_per_request,
    }
    return row, plan


def at_batch(mix: str, batch: int) -> str:
    return PAPER_MIXES[mix].replace(":8", f":{batch}")


def compare(mix: str, batch: int, calibration: Calibration, seconds: float) -> Row:
    """The gains of the policy `eclip` over plain streams and over time slices."""
    case = make_case(at_batch(mix, batch), "mi50", calibration=calibration)
    rows = {
        policy: measured(case, policy, seconds)[0] for policy in ("shared", "timeslice", "eclip")
    }
    ours = rows["eclip"]
    return {
        name: ours[key] / rows[other][key] - 1
        for name, key, other in (
            ("over_streams", "stp", "shared"),
            ("over_slices", "stp", "timeslice"),
            ("efficiency", "efficiency", "shared"),
        )
    }


def mixes() -> Iterator[Row]:
    for mix in PAPER_MIXES:
        case = make_case(mix, "mi50", calibration=device())
        switches = {name: measured(case, name, 1.0)[0]["switches"] for name in ("kernel", "eclip")}
        yield {"mix": mix, **compare(mix, 8, device(), 1.0), "switches": switches}


def batches() -> Iterator[Row]:
    known = device()
    nothing = replace(known.interference, cohabit=0.0, crowding=1.0)
    for batch in BATCHES:
        for name, calibration in (
            ("ours", known),
            ("kernels share no unit", replace(known, interference=nothing)),
        ):
            gains = [compare(mix, batch, calibration, seconds_at(batch)) for mix in PAPER_MIXES]
            yield {
                "batch": batch,
                "calibration": name,
                **{key: float(np.mean([gain[key] for gain in gains])) for key in gains[0]},
            }


def seconds_at(batch: int) -> float:
    return 0.6 if batch <= 16 else 2.0


def budgets() -> Iterator[Row]:
    for budget in BUDGETS:
        gains, switches = [], []
        for mix in PAPER_MIXES:
            case = make_case(mix, "mi50", calibration=device())
            streams = measured(case, "shared", 0.6)[0]
            ours = measured(case, "eclip", 0.6, budget)[0]
            gains.append([ours[key] / streams[key] - 1 for key in ("stp", "efficiency")])
            switches.append(ours["switches"])
        means = np.mean(gains, axis=0)
        yield {
            "budget": budget,
            "over_streams": float(means[0]),
            "efficiency": float(means[1]),
            "switches": float(np.mean(switches)),
        }


def alphas() -> Iterator[Row]:
    """The paper's problem with and without α: the part of kernels on all units."""
    for mix in PAPER_MIXES:
        case = make_case(mix, "mi50", calibration=device())
        problem = case.problem()
        workers = len(problem.profiles)
        pool = build_pool(problem.topology, workers)
        times = [problem.times(worker, pool.sizes) for worker in range(workers)]
        row: Row = {"mix": mix}
        for name, with_alpha in (("with", True), ("without", False)):
            best = allocate(times, pool.sizes, problem.topology.units, 14, with_alpha)
            chosen = np.concatenate(best.choices)
            row[name] = float(np.mean(chosen == len(pool.sizes) - 1))
            row[f"alpha_{name}"] = best.alpha
        yield row


def costs() -> Iterator[Row]:
    """What barriers and changes of masks cost in the two ways that change lanes."""
    known = device()
    base = known.costs
    ways = {
        "as it is: a barrier where the lane changes": base,
        "barriers cost nothing": replace(base, barrier_ns=0, switch_ns=0),
        "each change of a lane takes 55.4 µs, as by IOCTL": replace(base, barrier_ns=IOCTL_NS),
    }
    calibrations = {name: replace(known, costs=cost) for name, cost in ways.items()}
    each = replace(known.compute, gap_ns=known.compute.gap_ns + base.barrier_ns)
    calibrations["a barrier before each kernel"] = replace(known, compute=each)
    cases = {mix: make_case(mix, "mi50", calibration=known) for mix in PAPER_MIXES}
    streams = {mix: rates(case, "shared") for mix, case in cases.items()}
    for name, calibration in calibrations.items():
        row: Row = {"way": name}
        for policy in ("kernel", "eclip"):
            gains = []
            for mix in PAPER_MIXES:
                case = make_case(mix, "mi50", calibration=calibration)
                alone, plain = streams[mix]
                _, ours = rates(case, policy)
                gains.append(float(np.sum(ours / alone) / np.sum(plain / alone)) - 1)
            row[policy] = float(np.mean(gains))
        yield row


def rates(case: Case, policy: str) -> tuple[Any, Any]:
    """The workers' rates alone and together."""
    log = eclip.run(eclip.plan(case, policy=policy), seconds=0.6, case=case, trace_ms=0)
    workers = eclip.measure(log).workers
    return (
        np.array([worker.alone_rps for worker in workers]),
        np.array([worker.rate_rps for worker in workers]),
    )


def queues() -> Iterator[Row]:
    """The shared lane of all CUs against a lane of all CUs for each worker."""
    known = device()
    topology = make_case("paper/1", "mi50").topology
    for count in (topology.hardware_queues, 32):
        with_queues = replace(topology, hardware_queues=count)
        gains = []
        for mix in PAPER_MIXES:
            case = make_case(mix, with_queues, calibration=known)
            streams = measured(case, "shared", 0.6)[0]
            ours = measured(case, "eclip", 0.6)[0]
            gains.append([ours[key] / streams[key] - 1 for key in ("stp", "efficiency")])
        means = np.mean(gains, axis=0)
        yield {
            "queues": count,
            "over_streams": float(means[0]),
            "efficiency": float(means[1]),
        }


def example() -> Iterator[Row]:
    """The worked example: the best choice of each number of switches, by trying all 256."""
    for limit in range(3):
        for with_alpha in (False, True):
            best = min(
                (
                    (1 + np.mean([EXAMPLE_SIZES[c] for c in choice]) / 60 if with_alpha else 1)
                    * EXAMPLE[np.arange(4), list(choice)].sum(),
                    switched,
                    choice,
                )
                for choice in itertools.product(range(4), repeat=4)
                if (switched := int(np.count_nonzero(np.diff(choice)))) <= limit
            )
            yield {
                "limit": limit,
                "alpha": with_alpha,
                "value": float(best[0]),
                "sizes": [EXAMPLE_SIZES[c] for c in best[2]],
            }


def picture() -> Iterator[Row]:
    """The plan of the paper's third mix, and the first milliseconds of its run."""
    case = make_case("paper/3", "mi50", calibration=device())
    plan = eclip.plan(case, policy="eclip")
    log = eclip.run(plan, seconds=0.2, case=case, trace_ms=60)
    units = np.array(plan.topology.slice_units)
    for worker, part in enumerate(plan.main.assignments):
        yield {
            "worker": plan.workers[worker].name,
            "groups": [
                [int(units[list(plan.lanes[group.lane].mask)].sum()), group.kernels]
                for group in part.groups
            ],
            "spans": [
                [int(units[list(plan.lanes[lane].mask)].sum()), start, end]
                for owner, _, lane, start, end in sorted(log.kernels.rows(), key=lambda row: row[3])
                if owner == worker and start < 40_000_000
            ],
        }
    yield {
        "lanes": [
            ["all" if lane.owner < 0 else plan.workers[lane.owner].name, list(lane.mask)]
            for lane in plan.lanes
        ]
    }


PARTS = {
    "mixes": mixes,
    "batches": batches,
    "budgets": budgets,
    "alphas": alphas,
    "costs": costs,
    "queues": queues,
    "example": example,
    "picture": picture,
}


# --- Tables -----------------------------------------------------------------------------------


def percent(part: float) -> str:
    return f"{part:+.1%}".replace("-", "\u2212")


def tables_of(rows: Sequence[Row]) -> dict[str, str]:
    by_part: dict[str, list[Row]] = {}
    for row in rows:
        by_part.setdefault(row["part"], []).append(row)
    return {
        "mixes": table(
            "mix | content | over plain streams | over time slices | efficiency over plain streams"
            " | switches KW: paper, ours | switches ECLIP: paper, ours",
            (
                f"{row['mix'][-1]} | {PAPER_MIXES[row['mix']].replace(':8', '')} | "
                f"{percent(row['over_streams'])} | {percent(row['over_slices'])} | "
                f"{percent(row['efficiency'])} | "
                f"{TABLE_I[row['mix']]['KW-prealloc']}, {row['switches']['kernel']:.0f} | "
                f"{TABLE_I[row['mix']]['ECLIP']}, {row['switches']['eclip']:.0f}"
                for row in by_part["mixes"]
            ),
        ),
        "batches": table(
            "batch | calibration | over plain streams | over time slices | efficiency over plain"
            " streams",
            (
                f"{row['batch']} | {row['calibration']} | {percent(row['over_streams'])} | "
                f"{percent(row['over_slices'])} | {percent(row['efficiency'])}"
                for row in by_part["batches"]
            ),
        ),
        "budgets": table(
            "switch budget of a worker | switches a request | over plain streams | efficiency",
            (
                f"{row['budget']:,} | {row['switches']:.0f} | {percent(row['over_streams'])} | "
                f"{percent(row['efficiency'])}"
                for row in by_part["budgets"]
            ),
        ),
        "alphas": table(
            "mix | kernels on all units with α | without α | α with | α without",
            (
                f"{row['mix'][-1]} | {row['with']:.0%} | {row['without']:.0%} | "
                f"{row['alpha_with']:.2f} | {row['alpha_without']:.2f}"
                for row in by_part["alphas"]
            ),
        ),
        "costs": table(
            "what a change of lanes costs | `kernel` over plain streams | `eclip` over plain"
            " streams",
            (
                f"{row['way']} | {percent(row['kernel'])} | {percent(row['eclip'])}"
                for row in by_part["costs"]
            ),
        ),
        "queues": table(
            "hardware queues | lanes of all CUs | over plain streams | efficiency",
            (
                f"{row['queues']} | {'all workers share one' if row['queues'] == 8 else 'one each'}"
                f" | {percent(row['over_streams'])} | {percent(row['efficiency'])}"
                for row in by_part["queues"]
            ),
        ),
        "example": table(
            "switches allowed | T alone | sizes | (1 + α)·T | sizes",
            (
                f"{plain['limit']} | {plain['value']:g} | {words(plain)} | {ours['value']:g} | "
                f"{words(ours)}"
                for plain, ours in zip(
                    by_part["example"][::2], by_part["example"][1::2], strict=True
                )
            ),
        ),
    }


def words(row: Row) -> str:
    return ", ".join(map(str, row["sizes"]))


def table(head: str, lines: Iterator[str]) -> str:
    columns = head.count("|") + 1
    return "\n".join([f"| {head} |", "|" + "---|" * columns, *(f"| {line} |" for line in lines)])


def filled(page: str, tables: dict[str, str]) -> str:
    """The page with each table between its two marks."""
    for name, text in tables.items():
        begin, end = f"<!-- table: {name} -->", "<!-- end -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
    return page


def main() -> None:
    if "--draw" not in sys.argv:
        with ROWS.open("w") as file:
            for name, part in PARTS.items():
                for row in part():
                    file.write(json.dumps({"part": name, **row}) + "\n")
                print(f"{name} is done", flush=True)
    rows = read_rows(ROWS)
    PAGE.write_text(filled(PAGE.read_text(), tables_of(rows)))
    draw_paper([row for row in rows if row["part"] == "picture"]).save(PICTURE)


if __name__ == "__main__":
    main()
