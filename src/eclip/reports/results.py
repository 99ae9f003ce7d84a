"""Results as Markdown: the tables of docs/results/comparisons.md, drawn from a results file.

Of several comparisons of one mix on one device under one load, the last counts. A ratio is always
taken inside a comparison, whose runs took turns; a mean over mixes is geometric. Simulated results
are in separate tables with a mark.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from eclip.core.measures import worst_off
from eclip.files.comparison import Comparison, Entry, Summary, background_of
from eclip.reports.labels import ABSENT, number

BEGIN = "<!-- begin: drawn by `eclip results`, do not edit -->"
END = "<!-- end: drawn by `eclip results` -->"

# What a policy is held against: the best of these, in its own comparison.
RIVALS = {
    "shared": ("shared",),
    "best MPS": ("mps", "mps-energy", "mps-model"),
    "best masks": ("masks", "masks-energy", "model"),
}
Value = Callable[[Summary], float]


@dataclass(frozen=True)
class ResultsTable:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def tables(comparisons: Sequence[Comparison]) -> list[ResultsTable]:
    found: list[ResultsTable] = []
    for kind in _kinds(comparisons):
        if kind[0].bounds_ms:
            found.append(_services(kind))
        elif kind[0].load_part is None:
            found += [_policies(kind), _means(kind)]
        else:
            found.append(_tails(kind))
    return [*found, *_model_errors(comparisons)]


def markdown(comparisons: Sequence[Comparison]) -> str:
    """All tables, as the part of a document between the marks."""
    parts = []
    for table in tables(comparisons):
        rows = [table.columns, tuple("---" for _ in table.columns), *table.rows]
        lines = ["| " + " | ".join(_escape(cell) for cell in row) + " |" for row in rows]
        parts += [f"### {table.title}", *([table.note] if table.note else []), "\n".join(lines)]
    return "\n\n".join(parts)


def replace_section(document: str, section: str) -> str:
    """The document with the text between its marks replaced; ValueError without marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there is no section between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{section}\n\n{END}{after}"


def _kinds(comparisons: Iterable[Comparison]) -> list[list[Comparison]]:
    """The last comparison of every mix, by device, load and main objective; measured ones first."""
    groups: dict[tuple[object, ...], dict[str, Comparison]] = {}
    for one in comparisons:
        key = (one.modelled, one.device, one.load_part or 0.0, _load(one), _main_objective(one))
        groups.setdefault(key, {}).pop(one.mix, None)
        groups[key][one.mix] = one
    return [
        sorted(groups[key].values(), key=lambda one: one.mix)
        for key in sorted(groups, key=lambda key: tuple(map(str, key)))
    ]


def _load(one: Comparison) -> str:
    if one.bounds_ms:  # every mix has rates of its own
        return "services"
    return one.load if one.load_part is None else "Poisson"


def _main_objective(one: Comparison) -> str:
    """The first objective. Policies chosen for another objective have its name in their own."""
    return one.objective.partition(",")[0]


def _title(what: str, kind: Sequence[Comparison]) -> str:
    first = kind[0]
    main = _main_objective(first)
    objective = "" if main == "throughput" else f", settings tried for {main}"
    modelled = "modelled: " if first.modelled else ""
    load = "the mix's arrivals" if first.bounds_ms else first.load
    return f"{what} ({modelled}{first.device}, {load}{objective})"


def _note(kind: Sequence[Comparison]) -> str:
    dates = sorted({one.date[:10] for one in kind})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    commands = [one.command.replace(one.mix, "MIX") for one in kind]
    common = max(dict.fromkeys(commands), key=commands.count)
    others = [one.mix for one, mine in zip(kind, commands, strict=True) if mine != common]
    text = f"`{common}`, {when}, eclip {kind[-1].eclip}."
    if others:
        text += f" Other options for {', '.join(others)}: see the file."
    left_out = dict.fromkeys(why for one in kind for why in one.left_out)
    if left_out:
        text += f" Left out: {'; '.join(left_out)}."
    return text


def _policies(kind: Sequence[Comparison]) -> ResultsTable:
    rows = []
    for one in kind:
        for entry in one.entries:
            score = entry.together
            stps = [run.stp for run in entry.runs]
            rows.append(
                (
                    one.mix if entry is one.entries[0] else "",
                    entry.policy,
                    entry.setting,
                    f"{score.stp:.3f}",
                    f"{min(stps):.3f} to {max(stps):.3f} ({len(stps)})" if len(stps) > 1 else "",
                    f"{score.fairness:.2f}",
                    f"{score.power_w:.0f}",
                    f"{score.efficiency_per_kj:.2f}",
                    _milli(score.joules_per_request),
                    ", ".join(number(tail) for tail in score.p99_ms),
                    str(sum(entry.switches)),
                )
            )
    columns = (
        "mix", "policy", "setting", "STP", "range (runs)", "fairness", "W", "STP·s/kJ",
        "mJ/request", "p99 per worker, ms", "switches",
    )  # fmt: skip
    return ResultsTable(_title("Policies", kind), columns, tuple(rows), _note(kind))


def _services(kind: Sequence[Comparison]) -> ResultsTable:
    """Every service against the same requests alone, and what background gets beside it."""
    rows = []
    for one in kind:
        for entry in one.entries:
            background = f"{background_of(entry.together, one):.1%}"
            for excess in entry.services:
                first = excess is entry.services[0]
                index = one.workers.index(excess.name)
                rows.append(
                    (
                        one.mix if first and entry is one.entries[0] else "",
                        entry.policy if first else "",
                        entry.setting if first else "",
                        excess.name,
                        str(excess.requests),
                        number(entry.together.p50_ms[index]),
                        number(entry.together.p99_ms[index]),
                        number(one.bounds_ms[index]),
                        f"{excess.p99_ratio.value:.2f} ({excess.p99_ratio.low:.2f} to "
                        f"{excess.p99_ratio.high:.2f})",
                        number(excess.excess_us.p99 / 1e3),
                        number(excess.excess_us.longest / 1e3),
                        background if first else "",
                        f"{entry.together.power_w:.0f}" if first else "",
                    )
                )
    columns = (
        "mix", "policy", "setting", "service", "requests", "p50, ms", "p99, ms", "bound, ms",
        "p99 ÷ alone (95%)", "p99 of excess, ms", "longest excess, ms", "background of alone", "W",
    )  # fmt: skip
    note = f"{_note(kind)} Alone is with the same arrivals. A mean over background is weighted."
    return ResultsTable(_title("Services", kind), columns, tuple(rows), note)


def _means(kind: Sequence[Comparison]) -> ResultsTable:
    """Geometric means over the mixes that have both; the worst mix in brackets."""
    policies = dict.fromkeys(entry.policy for one in kind for entry in one.entries)
    rows = []
    for policy in policies:
        having = [(one, entry) for one in kind if (entry := one.entry(policy)) is not None]
        fairness = min(entry.together.fairness for _, entry in having)
        rows.append(
            (
                policy,
                str(len(having)),
                *(_against(having, rivals, lambda score: score.stp) for rivals in RIVALS.values()),
                *(
                    _against(having, rivals, lambda score: score.efficiency_per_kj)
                    for rivals in RIVALS.values()
                ),
                f"{fairness:.2f}",
            )
        )
    columns = (
        "policy",
        "mixes",
        *(f"STP ÷ {rival}" for rival in RIVALS),
        *(f"efficiency ÷ {rival}" for rival in RIVALS),
        "least fairness",
    )
    note = "Geometric means over the mixes, the smallest ratio in brackets."
    return ResultsTable(_title("Means over the mixes", kind), columns, tuple(rows), note)


def _against(
    having: Sequence[tuple[Comparison, Entry]], rivals: Sequence[str], value: Value
) -> str:
    ratios = []
    for one, entry in having:
        theirs = [value(rival.together) for name in rivals if (rival := one.entry(name))]
        mine = value(entry.together)
        if theirs and max(theirs) > 0 and mine > 0:
            ratios.append(mine / max(theirs))
    if not ratios:
        return ABSENT
    return f"{geometric_mean(ratios):.3f} ({min(ratios):.3f})"


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def _tails(kind: Sequence[Comparison]) -> ResultsTable:
    rows = []
    for one in kind:
        plain = one.entry("shared")
        for entry in one.entries:
            ratios = [] if plain is None else _ratios(entry.together.p99_ms, plain.together.p99_ms)
            known = [ratio for ratio in ratios if ratio is not None]
            theirs = ratios[worst_off(plain.together.p99_ms, one.alone_rps)] if plain else None
            rows.append(
                (
                    one.mix if entry is one.entries[0] else "",
                    entry.policy,
                    entry.setting,
                    str(sum(entry.together.requests)),
                    ", ".join(number(tail) for tail in entry.together.p99_ms),
                    ", ".join(ABSENT if r is None else f"{r:.2f}" for r in ratios) or ABSENT,
                    f"{max(known):.2f}" if known else ABSENT,
                    ABSENT if theirs is None else f"{theirs:.2f}",
                    _milli(entry.together.joules_per_request),
                )
            )
    columns = (
        "mix", "policy", "setting", "requests", "p99 per worker, ms", "÷ shared", "worst",
        "worst-off model", "mJ/request",
    )  # fmt: skip
    note = (
        f"{_note(kind)} The worst-off model is the one with the worst p99 under shared against its "
        f"time alone; its column is that model's p99 ÷ shared."
    )
    return ResultsTable(_title("Latency", kind), columns, tuple(rows), note)


def _ratios(mine: Sequence[float | None], theirs: Sequence[float | None]) -> list[float | None]:
    return [
        None if one is None or not other else one / other
        for one, other in zip(mine, theirs, strict=True)
    ]


def _model_errors(comparisons: Sequence[Comparison]) -> list[ResultsTable]:
    """The simulator against hardware, for plans that both ran in closed loop or one load."""
    kinds = [kind for kind in _kinds(comparisons) if kind[0].load_part is None]
    modelled = {
        (one.mix, one.topology, one.load, entry.policy, entry.plan): entry
        for kind in kinds
        for one in kind
        if one.modelled
        for entry in one.entries
    }
    rows: list[tuple[str, ...]] = []
    errors: dict[str, list[float]] = {}  # by policy
    powers: dict[str, list[float]] = {}
    for one in (one for kind in kinds for one in kind if not one.modelled):
        for entry in one.entries:
            key = (one.mix, one.topology, one.load, entry.policy, entry.plan)
            if (guess := modelled.get(key)) is None:
                continue
            mine = [
                100 * abs(a / b - 1)
                for a, b in zip(guess.together.rate_rps, entry.together.rate_rps, strict=True)
                if b
            ]
            if not mine or not entry.together.power_w:
                continue
            power = 100 * (guess.together.power_w / entry.together.power_w - 1)
            errors.setdefault(entry.policy, []).extend(mine)
            powers.setdefault(entry.policy, []).append(abs(power))
            rows.append(
                (
                    one.mix,
                    entry.policy,
                    f"{entry.together.stp:.3f}",
                    f"{guess.together.stp:.3f}",
                    f"{statistics.fmean(mine):.1f}%",
                    f"{power:+.1f}%",
                )
            )
    if not rows:
        return []
    rows += [_mean_error(policy, errors[policy], powers[policy]) for policy in errors]
    rows.append(_mean_error("all", [*chain(*errors.values())], [*chain(*powers.values())]))
    columns = (
        "mix", "policy", "STP measured", "STP modelled", "rates: mean absolute error",
        "power: error",
    )  # fmt: skip
    note = "Only plans that both ran. The last rows have means of absolute errors."
    return [ResultsTable("Simulator against hardware", columns, tuple(rows), note)]


def _mean_error(what: str, errors: Sequence[float], powers: Sequence[float]) -> tuple[str, ...]:
    return (
        "mean", what, "", "", f"{statistics.fmean(errors):.1f}%", f"{statistics.fmean(powers):.1f}%"
    )  # fmt: skip


def _milli(joules: float | None) -> str:
    return number(None if joules is None else 1000 * joules)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
