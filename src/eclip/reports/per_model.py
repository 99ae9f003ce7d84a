"""The part of the report on each model: latency, excess and rates of every worker in every way."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from eclip.core.measures import falls_behind
from eclip.files.comparison import Summary
from eclip.reports.chapters import Chapter, SharingWay
from eclip.reports.drawing import Scale, axis, distribution_words, scale_of, strip
from eclip.reports.labels import ABSENT, number, percent
from eclip.reports.verdict import Verdict

_FEW = 4  # ways that are all shown at once


@dataclass(frozen=True)
class ModelRow:
    rank: int
    label: str
    take: bool
    strip: Markup | str
    p50: str
    p99: str
    state: str  # kept, missed or nothing
    served: str
    overloaded: bool
    offered: str
    share: str  # served of offered, or of the rate alone
    requests: str
    excess: Markup | str = ""
    excess_words: str = ""  # p50 and p99 of the excess
    ratio: str = ""  # of the p99 over alone, with its interval


@dataclass(frozen=True)
class ModelCard:
    worker: int
    name: str
    model: str
    words: str
    answer: str  # the best way's effect on the model, against plain streams
    axis: Markup
    bound: str  # where it is, for the axis
    bound_at: float | None
    rows: tuple[ModelRow, ...]  # of the ways to choose between: best, best baseline, plain streams
    others: tuple[ModelRow, ...]
    offers: bool  # requests arrive, instead of coming back to back
    excess_axis: Markup | None = None
    log: bool = False
    excess_log: bool = False


def cards(chapter: Chapter, verdict: Verdict) -> list[ModelCard]:
    return [_card(chapter, worker, verdict) for worker in range(len(chapter.workers))]


def _card(chapter: Chapter, worker: int, verdict: Verdict) -> ModelCard:
    first = [verdict.take, verdict.baseline, chapter.way("shared")]
    rows: tuple[list[ModelRow], list[ModelRow]] = ([], [])
    curves = [_curve(way, worker) for way in chapter.ran]
    bound = chapter.bounds_ms[worker]
    ends = [value for curve in curves for value in curve]
    scale = scale_of([*ends, *([bound] if bound else [])], zero=True)
    excesses = [way.excess(chapter.workers[worker]) for way in chapter.ran]
    costs = [
        value / 1e3
        for one in excesses
        if one and one.excess_us.curve
        for value in one.excess_us.curve
    ]
    excess_scale = _excess_scale(costs) if costs else None
    for rank, way in enumerate(chapter.ran, start=1):
        take = verdict.decided and way is verdict.take
        row = _row(chapter, rank, worker, way, (scale, excess_scale), take)
        rows[0 if any(way is one for one in first) or len(chapter.ran) <= _FEW else 1].append(row)
    name = chapter.workers[worker]
    models = dict.fromkeys(str(plan.models[worker]) for plan in chapter.plans)
    return ModelCard(
        worker=worker,
        name=name,
        model=", ".join(models or [str(chapter.models[worker])]),
        words=_words(chapter, worker),
        answer=_answer(chapter, worker, verdict.take),
        axis=axis(scale),
        bound="" if bound is None else f"bound {number(bound)} ms",
        bound_at=None if bound is None else scale.place(bound),
        rows=tuple(rows[0]),
        others=tuple(rows[1]),
        offers=any(row.offered != ABSENT for row in (*rows[0], *rows[1])),
        excess_axis=None if excess_scale is None else axis(excess_scale),
        log=scale.log,
        excess_log=excess_scale is not None and excess_scale.log,
    )


def _excess_scale(costs: list[float]) -> Scale:
    """Where sharing costs little it may be below 0, which a logarithmic scale has no place for; it
    then begins at a hundredth of a millisecond."""
    return scale_of([max(value, 0.01) for value in costs])


def _curve(way: SharingWay, worker: int) -> tuple[float, ...]:
    """At measures.LEVELS, or only p50 and p99, where no more was kept."""
    if way.latencies_ms or way.together is None:
        return way.latencies_ms[worker] if way.latencies_ms else ()
    p50, p99 = way.together.p50_ms[worker], way.together.p99_ms[worker]
    return () if p50 is None or p99 is None else (p50, p99)


def _words(chapter: Chapter, worker: int) -> str:
    name, bound = chapter.workers[worker], chapter.bounds_ms[worker]
    scores = [way.together for way in chapter.ran if way.together is not None]
    offered = next((score.offered_rps[worker] for score in scores), None)
    rate_rps = chapter.alone_rps[worker]
    alone = f"alone it serves {number(rate_rps)} requests/s, one in {number(1e3 / rate_rps)} ms"
    if bound is not None:
        alone = f"alone it could serve {number(rate_rps)} requests/s"
        excess = next((one for way in chapter.ran if (one := way.excess(name))), None)
        if excess is not None:
            p50, p99 = (number(value) for value in (excess.alone_ms.p50, excess.alone_ms.p99))
            alone += f", and these arrivals with p50 {p50} ms and p99 {p99} ms"
        return f"A service: its p99 may be at most {number(bound)} ms; {alone}."
    if chapter.services:
        return f"Background work: it runs whenever it may; {alone}."
    if offered is None and "closed loop" not in chapter.load:
        return f"{alone[0].upper()}{alone[1:]}."
    if offered is None:
        return f"Closed loop: the next request starts when the last one ends; {alone}."
    return f"Requests arrive at {number(offered)}/s; {alone}."


def _answer(chapter: Chapter, worker: int, best: SharingWay | None) -> str:
    """``With search its p99 is 4.03 ms and it serves 258/s; with plain streams …``"""
    plain = chapter.way("shared")
    if best is None or best.together is None:
        return ""
    first = _tail_and_rate(chapter, best.together, worker, " and it serves")
    words = f"With {best.label} its p99 is {first}"
    if plain is None or plain.together is None or plain is best:
        return f"{words}."
    return f"{words}; with plain streams {_tail_and_rate(chapter, plain.together, worker, ' and')}."


def _tail_and_rate(chapter: Chapter, score: Summary, worker: int, between: str) -> str:
    rate = f"{number(score.rate_rps[worker])}/s ({_share(chapter, score, worker)})"
    return f"{number(score.p99_ms[worker])} ms{between} {rate}"


def _share(chapter: Chapter, score: Summary, worker: int) -> str:
    """The share that is served of the offered rate, or else of the rate alone."""
    offered, rate = score.offered_rps[worker], score.rate_rps[worker]
    if offered is None:
        return f"{percent(rate / chapter.alone_rps[worker], 0)} of alone"
    return f"{percent(rate / offered, 0)} of offered" if offered else ABSENT


def _row(
    chapter: Chapter,
    rank: int,
    worker: int,
    way: SharingWay,
    scales: tuple[Scale, Scale | None],  # of latency and of excess
    take: bool,
) -> ModelRow:
    scale, excess_scale = scales
    score = way.together
    if score is None:
        raise ValueError(f"{way.label} has not run")
    bound, p99 = chapter.bounds_ms[worker], score.p99_ms[worker]
    curve = _curve(way, worker)
    excess = way.excess(chapter.workers[worker])
    cost: Markup | str = ""
    cost_words = ratio = ""
    overloaded = _overloaded(score, worker)
    if excess is not None and overloaded:
        cost_words, ratio = "a queue that grows", "more in a longer run"
    elif excess is not None:
        costs = [value / 1e3 for value in excess.excess_us.curve]
        cost_words = f"{_ms(excess.excess_us.p50)} · {_ms(excess.excess_us.p99)}"
        one = excess.p99_ratio
        ratio = f"{number(one.value)}× ({number(one.low)} to {number(one.high)})"
        if excess_scale is not None and costs:
            words = distribution_words(f"excess under {way.label}", costs, "ms")
            cost = strip(costs, excess_scale, None, words)
    words = distribution_words(f"latency under {way.label}", curve, "ms") if curve else ""
    return ModelRow(
        rank=rank,
        label=way.label,
        take=take,
        strip=strip(curve, scale, bound, words) if curve else "",
        p50=number(score.p50_ms[worker]),
        p99=number(p99),
        state="" if bound is None else "kept" if p99 is not None and p99 <= bound else "missed",
        served=number(score.rate_rps[worker]),
        overloaded=overloaded,
        offered=_offered(score, worker),
        share=_share(chapter, score, worker),
        requests=f"{score.requests[worker]:,}",
        excess=cost,
        excess_words=cost_words,
        ratio=ratio,
    )


def _ms(value_us: float) -> str:
    return number(value_us / 1e3)


def _overloaded(score: Summary, worker: int) -> bool:
    offered = score.offered_rps[worker]
    return offered is not None and falls_behind(offered, score.rate_rps[worker], score.seconds)


def _offered(score: Summary, worker: int) -> str:
    offered = score.offered_rps[worker]
    return ABSENT if offered is None else number(offered)
