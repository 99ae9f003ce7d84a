"""Which way of sharing should I take? The ways side by side, and the frontier they lie on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eclip.core.plan import Evidence, Trial
from eclip.files.comparison import SettingTrial, Summary
from eclip.planner.search.objective import Objective, Score
from eclip.reports.chapters import Chapter, SharingWay, worst_p99
from eclip.reports.drawing import Points, Scale, Scatter, scale_of
from eclip.reports.labels import (
    ABSENT,
    gain,
    is_baseline,
    number,
    percent,
    policy_words,
)
from eclip.reports.verdict import Verdict

_OVER_BOUND = "worst p99 over its bound"
_MOST_OVER = 10.0  # times a bound; larger values are drawn at the edge


@dataclass(frozen=True)
class BarCell:
    text: str
    note: str = ""  # the comparison with plain streams
    part: float | None = None  # percent of the track; None: nothing to draw
    spread: tuple[float, float] | None = None  # of its runs, in percent
    best: bool = False
    state: str = ""  # kept, missed


@dataclass(frozen=True)
class BarColumn:
    """Values of all ways on one track."""

    title: str
    short: str  # on a narrow screen
    hint: str
    cells: tuple[BarCell, ...]
    plain: float | None  # where plain streams are, in percent
    baseline: float | None  # ... and the best baseline
    dots: bool = False  # a logarithmic track has no zero that a bar could begin at
    bound: float | None = None


@dataclass(frozen=True)
class WayHead:
    rank: int
    label: str
    words: str
    kind: str  # plain streams, baseline or nothing
    take: bool


@dataclass(frozen=True)
class Sight:
    """A measure: its value and how it is written."""

    title: str
    short: str
    hint: str
    value: Callable[[Summary], float | None]
    text: Callable[[float], str] = number
    less: bool = False  # the less the better
    log: bool = False


def heads(chapter: Chapter, verdict: Verdict) -> list[WayHead]:
    return [
        WayHead(
            rank=rank,
            label=way.label,
            words=policy_words(way.policy) + (f": {way.setting}" if way.setting else ""),
            kind=_kind(way.policy),
            take=verdict.decided and way is verdict.take,
        )
        for rank, way in enumerate(chapter.ran, start=1)
    ]


def _kind(policy: str) -> str:
    if policy == "shared":
        return "plain streams"
    return "baseline" if is_baseline(policy) else ""


def columns(chapter: Chapter, verdict: Verdict) -> list[BarColumn]:
    """Throughput, tails and efficiency of every way; for services bounds and background first."""
    throughput = Sight("Throughput", "STP", "STP, more is better", lambda score: score.stp)
    efficiency = Sight(
        "Efficiency",
        "STP·s per kJ",
        "STP·s per kJ, more is better",
        lambda score: score.efficiency_per_kj or None,
    )
    tail = Sight(
        "Worst p99",
        "worst p99, ms",
        "ms of the slowest model, less is better",
        worst_p99,
        less=True,
    )
    if not chapter.services:
        return [_column(chapter, verdict, one) for one in (throughput, tail, efficiency)]
    sights = [
        Sight(
            "Bounds kept",
            "p99 over bound",
            f"{_OVER_BOUND}, log scale to {_MOST_OVER:g}×",
            lambda score: _finite(chapter.worst_tail(score)),
            _times,
            less=True,
            log=True,
        ),
        Sight("Background", "background", "of its rate alone", chapter.background, percent),
        throughput,
        efficiency,
    ]
    if not sum(chapter.weights):
        del sights[1]
    return [_column(chapter, verdict, one) for one in sights]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _times(value: float) -> str:
    return f"{number(value)}×"


def _column(chapter: Chapter, verdict: Verdict, sight: Sight) -> BarColumn:
    ways = chapter.ran
    values = [None if way.together is None else sight.value(way.together) for way in ways]
    known = [value for value in values if value is not None]
    scale = _over_bound(known) if sight.log else scale_of(known, zero=True, log=False)
    texts = [ABSENT if value is None else sight.text(value) for value in values]
    best = sight.text((min if sight.less else max)(known)) if len(set(texts)) > 1 else None
    plain = chapter.way("shared")
    of_plain = None if plain is None or plain.together is None else sight.value(plain.together)
    cells = []
    for way, value, text in zip(ways, values, texts, strict=True):
        state = note = ""
        if sight.log and way.together is not None:
            kept, bounds = chapter.kept(way.together), len(chapter.services)
            state = "kept" if kept == bounds else "missed"
            note = state if bounds == 1 else f"{kept} of {bounds} kept"
        elif value is not None and of_plain and way is not plain:
            note = gain(value / of_plain)
        cells.append(
            BarCell(
                text=text,
                note=note,
                part=None if value is None else scale.place(value),
                spread=_spread(way, sight, scale),
                best=text == best and not sight.log,
                state=state,
            )
        )
    return BarColumn(
        title=sight.title,
        short=sight.short,
        hint=sight.hint,
        cells=tuple(cells),
        plain=_mark(plain, sight, scale),
        baseline=_mark(verdict.baseline, sight, scale),
        dots=sight.log,
        bound=scale.place(1.0) if sight.log else None,
    )


def _over_bound(values: Sequence[float]) -> Scale:
    return scale_of([*(min(value, _MOST_OVER) for value in values), 1.0], log=True)


def _mark(way: SharingWay | None, sight: Sight, scale: Scale) -> float | None:
    value = None if way is None or way.together is None else sight.value(way.together)
    return None if value is None else scale.place(value)


def _spread(way: SharingWay, sight: Sight, scale: Scale) -> tuple[float, float] | None:
    values = [value for run in way.runs if (value := sight.value(run)) is not None]
    return (scale.place(min(values)), scale.place(max(values))) if len(values) > 1 else None


def all_numbers(chapter: Chapter) -> tuple[list[str], list[list[str]]]:
    """A table of the numbers that are not in the picture."""
    titles = ["way", "rounds", "STP, least to most", "fairness", "power, W", "switches a request"]
    rows = []
    for way in chapter.ran:
        if (score := way.together) is None:
            continue
        stps = [run.stp for run in way.runs]
        switches = None
        if way.plan is not None:
            switches = sum(part.switches for part in way.plan.main.assignments)
        rows.append(
            [
                way.label,
                str(len(way.runs)),
                f"{min(stps):.3f} to {max(stps):.3f}" if len(stps) > 1 else f"{score.stp:.3f}",
                f"{score.fairness:.2f}",
                number(score.power_w or None),
                ABSENT if switches is None else f"{switches:,}",
            ]
        )
    return titles, rows


def frontier(chapter: Chapter, verdict: Verdict) -> Scatter | None:
    """Everything that was simulated, tried and run; None where there is nothing to weigh."""
    serving = bool(chapter.services)
    if serving and not sum(chapter.weights):
        return None
    sets = [*_searched(chapter, serving), *_tried(chapter, serving)]
    runs = []
    for rank, way in enumerate(chapter.ran, start=1):
        if way.together is not None and (place := _run_place(chapter, way.together, serving)):
            runs.append((rank, way, place))
    if not runs:
        return None
    sets.append(
        Points(
            "a way as it ran, with its number",
            "run",
            [place for _, _, place in reversed(runs)],
            [f"{rank} {way.label}: {_place_words(place, serving)}" for rank, way, place in runs][
                ::-1
            ],
            [rank for rank, _, _ in reversed(runs)],
        )
    )
    if verdict.take is not None:
        chosen = [(way, place) for _, way, place in runs if way is verdict.take]
        sets.append(
            Points(
                "the best",
                "chosen",
                [place for _, place in chosen],
                [f"{way.label}: {_place_words(place, serving)}" for way, place in chosen],
            )
        )
    places = [place for one in sets for place in one.places]
    if all(y == 0 for _, y in places):  # no energy was measured
        return None
    words = "; ".join(
        f"{rank} {way.label}: {_place_words(place, serving)}" for rank, way, place in runs
    )
    return Scatter(
        x=scale_of([100 * x if serving else x for x, _ in places], log=False),
        y=_over_bound([y for _, y in places])
        if serving
        else scale_of([y for _, y in places], log=False),
        x_title="background, % of its rate alone: more is better"
        if serving
        else "throughput (STP): more is better",
        y_title=f"{_OVER_BOUND}, log scale to {_MOST_OVER:g}×: less is better"
        if serving
        else "efficiency (STP·s per kJ): more is better",
        sets=[_in_percent(one) for one in sets] if serving else sets,
        words=words,
        bound=1.0 if serving else None,
    )


def _in_percent(one: Points) -> Points:
    return one._replace(places=[(100 * x, y) for x, y in one.places])


def _run_place(chapter: Chapter, score: Summary, serving: bool) -> tuple[float, float] | None:
    if not serving:
        return score.stp, score.efficiency_per_kj
    tail = chapter.worst_tail(score)
    return (chapter.background(score), tail) if math.isfinite(tail) else None


def _place_words(place: tuple[float, float], serving: bool) -> str:
    if serving:
        return f"background {percent(place[0])}, {_OVER_BOUND} {_times(place[1])}"
    return f"STP {number(place[0])}, {number(place[1])} STP·s/kJ"


def _evidence(chapter: Chapter) -> list[Evidence]:
    found = [plan.evidence for plan in chapter.plans if plan.evidence is not None]
    return [one for one in found if (one.objective == "slo") == bool(chapter.services)]


def _searched(chapter: Chapter, serving: bool) -> list[Points]:
    """Simulated plans, and which of them nothing beats."""
    sets = []
    for one in _evidence(chapter):
        best = (
            [(each.background, each.worst_tail) for each in one.tradeoffs if each.worst_tail]
            if serving
            else list(one.frontier)
        )
        if one.simulated:
            name = f"one of {one.evaluated:,} plans that the search simulated"
            sets.append(Points(name, "simulated", one.simulated))
        if best:
            name = "the frontier of the search, the too unfair ones included"
            if serving:
                name = "the frontier of the search: no plan beats it in both"
            sets.append(Points(name, "front", sorted(best), line=True))
    return sets


def _tried(chapter: Chapter, serving: bool) -> list[Points]:
    """The trials before the runs: settings of swept policies, finalists of a search."""
    sets = []
    for way in chapter.ran:
        tried = [
            (one.setting, place) for one in way.trials if (place := _setting_place(one, serving))
        ]
        if tried:
            sets.append(
                _trial_points(f"a setting tried for {way.label}", "setting", tried, serving)
            )
    for one in _evidence(chapter):
        trials = [
            (trial.label, place)
            for trial in one.trials
            if (place := _trial_place(chapter, trial, serving))
        ]
        if trials:
            name = "a finalist of the search, as tried"
            sets.append(_trial_points(name, "trial", trials, serving))
    return sets


def _trial_points(
    name: str, sign: str, tried: Sequence[tuple[str, tuple[float, float]]], serving: bool
) -> Points:
    words = [f"{label}: {_place_words(place, serving)}" for label, place in tried]
    return Points(name, sign, [place for _, place in tried], words)


def _setting_place(setting: SettingTrial, serving: bool) -> tuple[float, float] | None:
    if not serving:
        return setting.stp, setting.efficiency_per_kj
    if setting.background is None or setting.worst_tail is None:
        return None
    return setting.background, setting.worst_tail


def _trial_place(chapter: Chapter, trial: Trial, serving: bool) -> tuple[float, float] | None:
    tails = tuple(math.inf if p99 is None else p99 for p99 in trial.p99_ms)
    score = Score(trial.ratios, trial.power_w, tails)
    if not serving:
        return score.stp, score.efficiency
    aim = Objective("slo", weights=chapter.weights, bounds_ms=chapter.bounds_ms)
    tail = aim.worst_tail(score)
    return (aim.background(score), tail) if math.isfinite(tail) else None


def trial_table(chapter: Chapter) -> tuple[list[str], list[list[str]]]:
    """All tried settings and finalists as a table."""
    serving = bool(chapter.services)
    titles = ["tried", *(["background", _OVER_BOUND] if serving else ["STP", "STP·s/kJ"]), "note"]
    rows = []
    for way in chapter.ran:
        same = sum(setting.setting == way.setting for setting in way.trials)
        taken = "taken" if same == 1 else f"one of these {same} was taken: they differ in slices"
        for setting in way.trials:
            place = _setting_place(setting, serving)
            note = taken if setting.setting == way.setting else ""
            rows.append([f"{way.label}: {setting.setting}", *_place_cells(place, serving), note])
    for one in _evidence(chapter):
        for trial in one.trials:
            note = "taken" if trial.chosen else "; ".join(trial.refused)
            place = _trial_place(chapter, trial, serving)
            rows.append([f"search: {trial.label}", *_place_cells(place, serving), note])
    return titles, rows


def _place_cells(place: tuple[float, float] | None, serving: bool) -> list[str]:
    if place is None:
        return [ABSENT, ABSENT]
    first = percent(place[0]) if serving else number(place[0])
    return [first, _times(place[1]) if serving else number(place[1])]
