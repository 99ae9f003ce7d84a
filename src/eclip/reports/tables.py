"""The tables: the policies side by side, and every worker under every policy.

A cell is text that already carries what it needs to be read. The best value of a column is marked
where one direction is better and the values, as printed, are not all equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from eclip.artefacts.measures import Measures, WorkerMeasures
from eclip.artefacts.runlog import RunLog
from eclip.reports.labels import number

Better = Callable[[Sequence[float]], float]  # min or max
Values = Sequence[float | None]


class Cell(msgspec.Struct, frozen=True):
    text: str
    best: bool = False


class Column(msgspec.Struct, frozen=True):
    title: str
    unit: str


class Row(msgspec.Struct, frozen=True):
    label: str
    modelled: bool
    cells: tuple[Cell, ...]


class Block(msgspec.Struct, frozen=True):
    """Rows that are compared with each other; a worker's, or all there are."""

    rows: tuple[Row, ...]
    worker: int = 0
    title: str = ""


class Table(msgspec.Struct, frozen=True):
    columns: tuple[Column, ...]
    blocks: tuple[Block, ...]


def worst_p99(measures: Measures) -> float | None:
    """The slowest worker's p99; none while a worker waits for its first completion."""
    tails = [worker.p99_ms for worker in measures.workers]
    known = [tail for tail in tails if tail is not None]
    return max(known) if len(known) == len(tails) else None


def energy_per_request(all_measures: Sequence[Measures]) -> tuple[list[float | None], str]:
    """One value per run in a unit that suits them all. No energy means that none was recorded."""
    joules = [each.joules_per_request or None for each in all_measures]
    if max((value for value in joules if value is not None), default=0.0) >= 1:
        return joules, "J"
    return [None if value is None else 1000 * value for value in joules], "mJ"


def summary(labels: Sequence[str], all_measures: Sequence[Measures]) -> Table:
    energy, energy_unit = energy_per_request(all_measures)
    columns: list[tuple[Column, Values, Better | None]] = [
        (Column("throughput", "STP"), [each.stp for each in all_measures], max),
        (Column("fairness", "0 to 1"), [each.fairness for each in all_measures], max),
        (Column("slowest worker's p99", "ms"), [worst_p99(each) for each in all_measures], min),
        (Column("energy per request", energy_unit), energy, min),
        (
            Column("efficiency", "STP·s/kJ"),
            [each.efficiency_per_kj or None for each in all_measures],
            max,
        ),
        (Column("power", "W"), [each.power_w or None for each in all_measures], None),
        (
            Column("lane switches", "per request, summed"),
            [each.switches_per_request for each in all_measures],
            None,
        ),
    ]
    modelled = [each.modelled for each in all_measures]
    return Table(tuple(part[0] for part in columns), (_block(labels, modelled, columns),))


def per_worker(
    labels: Sequence[str], logs: Sequence[RunLog], all_measures: Sequence[Measures]
) -> Table:
    blocks = []
    columns: list[tuple[Column, Values, Better | None]] = []
    for worker, planned in enumerate(logs[0].plan.workers):
        mine: list[WorkerMeasures] = [each.workers[worker] for each in all_measures]
        columns = [
            (Column("p50", "ms"), [each.p50_ms for each in mine], min),
            (Column("p95", "ms"), [each.p95_ms for each in mine], min),
            (Column("p99", "ms"), [each.p99_ms for each in mine], min),
            (Column("rate", "requests/s"), [each.rate_rps for each in mine], max),
            (Column("ratio", "of the rate alone"), [each.ratio for each in mine], max),
            (Column("completed", "requests"), [each.requests for each in mine], None),
            (Column("unfinished", "requests"), [log.unfinished[worker] for log in logs], None),
            (
                Column("barriers", "per completed request"),
                [
                    log.counters[worker].barriers / each.requests if each.requests else None
                    for log, each in zip(logs, mine, strict=True)
                ],
                None,
            ),
            (
                Column("false waits", "ms"),
                [_ms(log.counters[worker].false_wait_ns) for log in logs],
                None,
            ),
        ]
        block = _block(labels, [log.modelled for log in logs], columns)
        blocks.append(Block(block.rows, worker, planned.name))
    return Table(tuple(part[0] for part in columns), tuple(blocks))


def _ms(time_ns: int | None) -> float | None:
    return None if time_ns is None else time_ns / 1e6


def _block(
    labels: Sequence[str],
    modelled: Sequence[bool],
    columns: Sequence[tuple[Column, Values, Better | None]],
) -> Block:
    cells = [_cells(values, better) for _, values, better in columns]
    rows = zip(labels, modelled, zip(*cells, strict=True), strict=True)
    return Block(tuple(Row(label, is_modelled, tuple(row)) for label, is_modelled, row in rows))


def _cells(values: Values, better: Better | None) -> list[Cell]:
    texts = [_count(value) if isinstance(value, int) else number(value) for value in values]
    known = [value for value in values if value is not None]
    best = None
    if better is not None and known and len(set(texts)) > 1:
        best = number(better(known))
    return [Cell(text, best=text == best) for text in texts]


def _count(value: int) -> str:
    return f"{value:,}"
