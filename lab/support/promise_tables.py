"""Tables of lab/promises.py, with intervals over cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from lab.support.kept import Row
from lab.support.promise_runs import KEPT
from lab.support.tables import print_table

BEYOND = 0.015  # late share that no run on any device may exceed
_DRAWS = 2_000


def print_tables(rows: Sequence[Row]) -> None:
    ran = [row for row in rows if "ways" in row]
    refused = len({row["case"] for row in rows if "refused" in row})
    chosen = [row for row in ran if row["yield_keeps"]]
    cases = len({row["case"] for row in ran})
    print(
        f"{cases} cases, {len(ran)} runs; yield keeps {len(chosen)} (other arrivals, at most 0.5% "
        f"late); {refused} cases refused: no plan kept their bounds\n"
    )
    groups = {
        "planned device": [row for row in chosen if row["device"] == 0],
        "drawn devices": [row for row in chosen if row["device"] != 0],
        "all": chosen,
    }
    columns = ["", "runs", "missed", "cases", "cases with a miss, 95%", "above 1.5%", "worst late"]
    for way in ("yield", "search"):
        lines = [[name, *_kept(group, way)] for name, group in groups.items()]
        print_table(f"{way}: late share of the worst service at most 1%", columns, lines)
    _print_background(groups)
    _print_hindsight([row for row in chosen if row.get("hindsight")])


def _print_background(groups: dict[str, list[Row]]) -> None:
    lines = []
    for name, group in groups.items():
        gains = np.array([_gain(row) for row in group])
        if len(gains):
            low, high = by_case(group, lambda part: float(np.mean([_gain(row) for row in part])))
            lines.append(
                [name, str(len(gains)), f"{gains.mean():.3f}", f"{low:.3f} to {high:.3f}",
                 f"{gains.min():.3f}", str(int((gains < 0.99).sum())), f"{gains.max():.3f}"]
            )  # fmt: skip
    columns = ["", "runs", "mean", "95% by case", "least", "below 0.99", "most"]
    print_table("Background of search over that of yield", columns, lines)


def _print_hindsight(rows: Sequence[Row]) -> None:
    loose = [row for row in rows if min(row["bounds"]) >= 1.3 and row["load"] >= 0.35]
    shares = [share for row in loose if (share := share_of_hindsight(row)) is not None]
    kept = [row for row in loose if max(row["ways"]["search"]["late"]) <= KEPT]
    said = [share for row in kept if (share := share_of_hindsight(row)) is not None]
    if shares:
        print(
            f"(search - yield) / (hindsight - yield), bounds of 1.3 at least, loads of 0.35 at "
            f"least: mean {np.mean(shares):.2f} of {len(shares)} runs (of sums "
            f"{_share_of_sums(loose):.2f}); of the {len(said)} that search keeps "
            f"{np.mean(said) if said else float('nan'):.2f}; missed bounds count as gained nothing "
            f"in neither"
        )


def share_of_hindsight(row: Row) -> float | None:
    """None where hindsight gains less than 1% over yield."""
    base = row["ways"]["yield"]["background"]
    best = row["hindsight"]["background"]
    if best < 1.01 * base:
        return None
    return float((row["ways"]["search"]["background"] - base) / (best - base))


def _share_of_sums(rows: Sequence[Row]) -> float:
    counted = [row for row in rows if share_of_hindsight(row) is not None]
    base = sum(row["ways"]["yield"]["background"] for row in counted)
    gained = sum(row["ways"]["search"]["background"] for row in counted) - base
    return float(gained / (sum(row["hindsight"]["background"] for row in counted) - base))


def _kept(rows: Sequence[Row], way: str) -> list[str]:
    late = [max(row["ways"][way]["late"]) for row in rows]
    missed = [row["case"] for row, share in zip(rows, late, strict=True) if share > KEPT]
    cases = len({row["case"] for row in rows})
    low, high = interval_of(len(set(missed)), cases)
    return [
        str(len(rows)),
        str(len(missed)),
        str(cases),
        f"{len(set(missed))}, {low:.1%} to {high:.1%}",
        str(sum(share > BEYOND for share in late)),
        f"{max(late, default=0.0):.2%}",
    ]


def _gain(row: Row) -> float:
    base = row["ways"]["yield"]["background"]
    return float(row["ways"]["search"]["background"] / base) if base else 1.0


def by_case(
    rows: Sequence[Row], measure: Callable[[Sequence[Row]], float], seed: int = 0
) -> tuple[float, float]:
    """The 95% interval of a measure, by drawing cases with replacement: a case's devices share its
    plan."""
    cases: dict[int, list[Row]] = {}
    for row in rows:
        cases.setdefault(row["case"], []).append(row)
    parts = list(cases.values())
    if not parts:
        return float("nan"), float("nan")
    random = np.random.default_rng(seed)
    drawn = [
        measure(
            [row for index in random.integers(len(parts), size=len(parts)) for row in parts[index]]
        )
        for _ in range(_DRAWS)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def interval_of(count: int, of: int) -> tuple[float, float]:
    """The 95% interval of a share, exact for a binomial number (Clopper and Pearson)."""
    if not of:
        return 0.0, 1.0
    low = 0.0 if not count else _solve(lambda p: 1 - _at_most(count - 1, of, p), 0.025)
    high = 1.0 if count == of else _solve(lambda p: 1 - _at_most(count, of, p), 0.975)
    return low, high


def _at_most(count: int, of: int, p: float) -> float:
    return math.fsum(math.comb(of, k) * p**k * (1 - p) ** (of - k) for k in range(count + 1))


def _solve(rising: Callable[[float], float], value: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return low
