"""The tables of a visit: what was promised of services, what was measured, and whether it held."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from lab.support.contenders import OURS
from lab.support.kept import Row

ENOUGH = 1000  # requests for a p99
LOOP_BOUND, LEAST_BESIDE_LOOP = 1.3, 0.2
PLAIN = "yield"  # what a search is held against


@dataclass
class Table:
    title: str
    columns: Sequence[str]
    lines: list[Sequence[str]] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)

    def judge(self, what: str, value: float | None, limit: float, *, at_most: bool = True) -> None:
        """One sentence: measured, target, kept or by how much it was missed."""
        sign = "at most" if at_most else "at least"
        if value is None or np.isnan(value):
            self.verdicts.append(f"{what}: {sign} {limit:g}; not measured")
            return
        kept = value <= limit if at_most else value >= limit
        ending = "kept" if kept else f"**missed** by {_rounded(abs(value - limit))}"
        self.verdicts.append(f"{what}: {_rounded(value)}, {sign} {limit:g}; {ending}")

    def markdown(self) -> str:
        parts = [f"#### {self.title}", ""]
        if self.lines:
            parts += [f"| {' | '.join(self.columns)} |", "|" + "---|" * len(self.columns)]
            parts += [f"| {' | '.join(line)} |" for line in self.lines]
            parts.append("")
        parts += [f"- {verdict}" for verdict in self.verdicts]
        return "\n".join([*parts, ""])


def tables_of(rows: Sequence[Row]) -> list[Table]:
    shared = [row for row in rows if row.get("services")]
    return [
        bounds(shared),
        against_yielding(shared),
        against_baselines(shared),
        always_busy([row for row in rows if "alone_p99_ms" in row]),
        simulated(shared),
    ]


def _rounded(value: float) -> str:
    """To three digits, without an exponent."""
    return np.format_float_positional(value, precision=3, fractional=False, trim="-")


def _where(row: Row) -> list[str]:
    extra = [row["shape"]] * (row["shape"] != "poisson")
    extra += [f"floor {row['floor']:g}"] * bool(row["floor"])
    return [row["pair"], f"{row['load']:g}", ", ".join(extra), f"{row['bound']:g}"]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def keeps(row: Row) -> bool:
    """By the p99 of what ended; a queue that grows keeps no bound."""
    return all(found["kept"] for found in row["services"])


def bounds(rows: Iterable[Row]) -> Table:
    table = Table(
        f"p99 of services over their p99 alone; * fewer than {ENOUGH:,} requests",
        ["pair", "load", "", "bound", "way", "requests", "p99 ÷ alone (95%)", "simulated", "kept",
         "p99 excess µs", "background", "÷ (1 - u)", "plan"],
    )  # fmt: skip
    missed = dict.fromkeys(OURS, 0)
    runs = dict.fromkeys(OURS, 0)
    for row in rows:
        for index, found in enumerate(row["services"]):
            ratio, said = found["p99_ratio"], row.get("simulated")
            few = "*" if found["requests"] < ENOUGH else ""
            table.lines.append(
                [*_where(row), row["way"], f"{found['requests']:,}{few}",
                 f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
                 "" if said is None else f"{said['p99_ratios'][index]:.2f}",
                 "yes" if found["kept"] else "**no**",
                 f"{found['excess_us']['p99']:.0f}", f"{row['background']:.3f}",
                 f"{row['background_over_rest']:.3f}",
                 row["why"] if row["way"] == "search" else row["setting"]]
            )  # fmt: skip
        if row["way"] in OURS:
            runs[row["way"]] += 1
            missed[row["way"]] += not keeps(row)
    for way, count in runs.items():
        table.judge(f"{way}: bounds missed, of {count}", missed[way] if count else None, 0)
    return table


def _by_part(rows: Iterable[Row]) -> Iterable[dict[str, Row]]:
    """By way: what was measured in turns, with the same arrivals."""
    parts: dict[str, dict[str, Row]] = {}
    for row in rows:
        parts.setdefault(row["part"], {})[row["way"]] = row
    return parts.values()


def against_yielding(rows: Iterable[Row]) -> Table:
    table = Table(
        f"Background of a search over that of {PLAIN}",
        ["pair", "load", "", "bound", "search", PLAIN, "ratio", f"kept by search, {PLAIN}"],
    )
    gains, lost = [], 0
    for ways in _by_part(rows):
        if not {"search", PLAIN} <= ways.keys() or not ways[PLAIN]["background"]:
            continue
        ours, plain = ways["search"], ways[PLAIN]
        gains.append(ours["background"] / plain["background"])
        lost += keeps(plain) and not keeps(ours)
        kept = ", ".join("yes" if keeps(one) else "**no**" for one in (ours, plain))
        table.lines.append(
            [*_where(ours), f"{ours['background']:.3f}", f"{plain['background']:.3f}",
             f"{gains[-1]:.2f}", kept]
        )  # fmt: skip
    table.judge(f"kept by {PLAIN} and missed by search", lost if gains else None, 0)
    table.judge("search ÷ yield, least", min(gains, default=None), 1.0, at_most=False)
    table.judge("search ÷ yield, mean", _mean(gains), 1.0, at_most=False)
    return table


def against_baselines(rows: Iterable[Row]) -> Table:
    """A baseline is swept: of its settings the one that did best in trials takes part."""
    table = Table(
        "Background (requests/s) of ours and of the best baseline that keeps the same bound",
        ["pair", "load", "", "bound", "ours", "baseline", "which", "ours ÷ baseline"],
    )
    ratios, none = [], 0
    for ways in _by_part(rows):
        if ways.keys() <= set(OURS):
            continue
        mine = max(
            (one for way, one in ways.items() if way in OURS and keeps(one)),
            key=_background,
            default=None,
        )
        best = max(
            (one for way, one in ways.items() if way not in OURS and keeps(one)),
            key=_background,
            default=None,
        )
        ours = 0.0 if mine is None else _background(mine)
        where = _where(next(iter(ways.values())))
        if best is None:
            none += 1
            table.lines.append([*where, f"{ours:.1f}", "none", "", ""])
            continue
        ratios.append(ours / _background(best))
        table.lines.append(
            [*where, f"{ours:.1f}", f"{_background(best):.1f}", best["way"], f"{ratios[-1]:.2f}"]
        )
    table.judge("ours ÷ baseline, least", min(ratios, default=None), 1.0, at_most=False)
    table.judge("ours ÷ baseline, mean", _mean(ratios), 1.15, at_most=False)
    table.verdicts.append(f"where no baseline keeps the bound: {none} cases")
    return table


def _background(row: Mapping[str, float]) -> float:
    return row["background_rps"]


def always_busy(rows: Iterable[Row]) -> Table:
    """Background that only yields gets nothing here."""
    table = Table(
        "A service that is always busy, and what is left beside it",
        ["pair", "way", "steps", "p99 ms", "alone", "p50 ÷ alone", "p99 ÷ alone", "background"],
    )
    kept = []
    for row in rows:
        table.lines.append(
            [row["pair"], row["way"], f"{row['requests']:,}", f"{row['p99_ms']:.2f}",
             f"{row['alone_p99_ms']:.2f}", f"{row['p50_ratio']:.2f}", f"{row['p99_ratio']:.2f}",
             f"{row['background']:.3f}"]
        )  # fmt: skip
        if row["p99_ratio"] <= LOOP_BOUND:
            kept.append(row["background"])
    what = f"background with a p99 of at most {LOOP_BOUND} times alone, best way"
    table.judge(what, max(kept, default=None), LEAST_BESIDE_LOOP, at_most=False)
    return table


def simulated(rows: Iterable[Row]) -> Table:
    table = Table(
        "Simulator against hardware, same arrivals",
        ["pair", "load", "", "bound", "way", "background", "simulated", "off"],
    )
    offs = []
    for row in rows:
        if (said := row.get("simulated")) is None or not row["background"]:
            continue
        off = said["background"] / row["background"] - 1
        offs.append(abs(off))
        table.lines.append(
            [*_where(row), row["way"], f"{row['background']:.3f}", f"{said['background']:.3f}",
             f"{off:+.1%}"]
        )  # fmt: skip
    table.judge("background off, mean", _mean(offs), 0.05)
    table.judge("background off, worst", max(offs, default=None), 0.12)
    return table
