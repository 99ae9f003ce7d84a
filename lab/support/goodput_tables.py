"""What lab/serving/goodput.py found, as tables, with what makes a number worth less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab.support.beside import BATCH, LEAST_PART, MODEL, misses, part_of_free
from lab.support.kept import Row
from lab.support.knee import MOST_LOAD, STEP, WANTED
from lab.support.tables import print_table

LATE_PART = 0.2  # of the shortest bound, that the generator may be late itself
REST_PART = 0.5  # of a bound, above which a service has little room even at rest


def title_of(key: Mapping[str, Any]) -> str:
    mix, times = key["mix"], key["bound"]
    return ", ".join([f"{mix}, bound {times:g}", *([key["way"]] if "way" in key else [])])


def print_goodput(rows: Sequence[Row], ways: Sequence[str]) -> None:
    lines = []
    for mix, times in dict.fromkeys((row["key"]["mix"], row["key"]["bound"]) for row in rows):
        of_ways = {
            row["key"]["way"]: row
            for row in rows
            if row["key"] | {"mix": mix, "bound": times} == row["key"]
        }
        lines.append(
            [
                title_of({"mix": mix, "bound": times}),
                *(_cell(of_ways.get(way)) for way in ways),
                *(_ratio(of_ways, other) for other in ("streams", "mps")),
                "; ".join(remark for row in of_ways.values() for remark in _remarks(row)),
            ]
        )
    columns = ["mix", *ways, "eclip ÷ streams", "eclip ÷ mps", "remarks"]
    title = f"Load at which {WANTED:.0%} keep their bounds, of the device's time at batch 1"
    print_table(title, columns, lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "error" in row:
        return "failed"
    most = row["goodput"] * STEP > MOST_LOAD and all(
        run["attained"] >= WANTED for run in row["runs"]
    )
    return f"{'≥ ' if most else ''}{row['goodput']:.2f}"


def _ratio(of_ways: Mapping[str, Row], other: str) -> str:
    ours, theirs = (of_ways.get(way, {}).get("goodput") for way in ("eclip", other))
    return f"{ours / theirs:.2f}" if ours is not None and theirs else ""


def _remarks(row: Row) -> list[str]:
    """What makes a number worth less."""
    way = row["key"]["way"]
    if "error" in row:
        return [f"{way}: {row['error']}"]
    remarks = [
        f"{way}: {name} takes {row['rest_ms'][name] / bound_ms:.0%} of its bound at rest"
        for name, bound_ms in row["bounds_ms"].items()
        if row["rest_ms"][name] > REST_PART * bound_ms
    ]
    of_loads = {run["load"]: run for run in row["runs"]}  # the last try of each
    missed = [run for run in of_loads.values() if run["attained"] < WANTED]
    lowest = min(missed, key=lambda run: run["load"], default=None)
    if lowest is not None and generator_was_late(lowest, row["bounds_ms"]):
        remarks.append(f"{way}: generator late")  # so the front may be the limit, not the device
    if row.get("mps_clients") != row.get("servers"):
        remarks.append(f"{way}: {row['mps_clients']} of {row['servers']} servers under MPS")
    return remarks


def generator_was_late(run: Mapping[str, Any], bounds_ms: Mapping[str, float]) -> bool:
    return bool(run["generator_late_ms"] > LATE_PART * min(bounds_ms.values()))


def print_beside(rows: Sequence[Row], part: float) -> None:
    lines = [
        [title_of(row["key"]), *[""] * 7, row["error"]]
        if "error" in row
        else [
            title_of(row["key"]), f"{row['load']:.2f}", f"{row['busy_share']:.2f}",
            f"{row['attained_alone']:.2%}", f"{row['attained']:.2%}", f"{row['worst']:.2%}",
            f"{row['beside_rps'] / row['alone_rps']:.3f}", f"{part_of_free(row):.2f}",
            ", ".join(misses(row)),
        ]
        for row in rows
    ]  # fmt: skip
    columns = ["mix", "load", "busy", "in time alone", "in time", "worst service"]
    columns += ["background", "÷ (1 - busy)", "missed"]
    title = (
        f"eclip at {part:.0%} of its goodput, {MODEL} at batch {BATCH} beside; wanted: "
        f"{WANTED:.0%} in time, background ÷ (1 - busy) of {LEAST_PART}"
    )
    print_table(title, columns, lines)
