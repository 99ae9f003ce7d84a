"""The verdict: the best way of sharing, in one sentence with an interval, or "not decided".

Ways are compared round by round, since runs of a round follow each other closely. The interval is
Student's for the mean of the logarithms, and needs three rounds. A bound counts as kept if the
whole interval of the p99 lies below the bound.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from eclip.core.display import told_apart
from eclip.files.comparison import Summary, floors_over_served
from eclip.files.excess import PairedRatio
from eclip.reports.chapters import Chapter, SharingWay
from eclip.reports.labels import count, is_baseline, listed, number, percent

FEWEST_ROUNDS = 3
_MUCH_LESS = 0.9  # of the rate under plain streams: models with less are named
# Student's t for a 95% interval by degrees of freedom; beyond the last it hardly changes.
_STUDENT = (
    *(12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23),
    *(2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09),
)
# The meaning of a value of 0 in a round, by the aim.
_NOTHING = {
    "throughput": "no request completed",
    "energy": "no energy was measured",
    "tails": "a model completed no request",
    "slo": "background completed nothing",
}
Value = Callable[[Summary], float]


@dataclass(frozen=True)
class Verdict:
    sentence: str
    decided: bool
    take: SharingWay | None = None  # the best way, decided or not; None: nothing ran
    baseline: SharingWay | None = None  # the best baseline besides plain streams


def judge(chapter: Chapter) -> Verdict:
    ran = chapter.ran
    if not ran:
        return Verdict("Not decided: these plans have not run yet.", decided=False)
    if len(ran) == 1:
        words = f"Not decided: {ran[0].label} is the only way that ran."
        return Verdict(words, decided=False, take=ran[0])
    verdict = (_judge_services if chapter.aim == "slo" else _judge_most)(chapter, ran)
    return replace(verdict, sentence=verdict.sentence + _same_as(verdict.take, ran))


def _same_as(take: SharingWay | None, ran: Sequence[SharingWay]) -> str:
    """A sentence on the ways whose plan is identical to ``take``'s; empty if none or all are."""
    same = [way.label for way in ran if take and way is not take and way.digest == take.digest]
    if take is None or not same or len(same) == len(ran) - 1:
        return ""
    return f" {listed(same)} {'runs' if len(same) == 1 else 'run'} the same plan as {take.label}."


def compared(mine: SharingWay, theirs: SharingWay, value: Value) -> PairedRatio | None:
    """The ratio of their values, with its interval; None: too few common rounds, or a 0."""
    if not mine.contest or mine.contest != theirs.contest:
        return None  # no common rounds
    pairs = list(zip(mine.runs, theirs.runs, strict=False))
    ours, others = ([value(pair[side]) for pair in pairs] for side in (0, 1))
    if len(pairs) < FEWEST_ROUNDS or min(*ours, *others) <= 0:
        return None
    logs = [math.log(a / b) for a, b in zip(ours, others, strict=True)]
    reach = _STUDENT[min(len(logs) - 1, len(_STUDENT)) - 1] * statistics.stdev(logs)
    reach /= math.sqrt(len(logs))
    middle = statistics.fmean(logs)
    return PairedRatio(
        value=math.exp(middle), low=math.exp(middle - reach), high=math.exp(middle + reach)
    )


def _judge_most(chapter: Chapter, ran: Sequence[SharingWay]) -> Verdict:
    best = ran[0]
    second = next((way for way in ran if way.digest != best.digest), None)
    plain, baseline = chapter.way("shared"), _best_baseline(ran, best)
    rivals = [(way, name) for way, name in _named(plain, baseline) if way is not best]
    gains = [words for way, name in rivals if (words := _gain(chapter, best, way, name))]
    if second is None:
        return Verdict(f"Not decided: all ways run the same plan as {best.label}.", False, best)
    ratio = compared(best, second, chapter.value)
    if ratio is None:
        had = f" {best.label} was best here, with {listed(gains)}." if gains else ""
        why = _unsure(best, second, _NOTHING[chapter.aim])
        return Verdict(f"Not decided: {why}.{had}", False, best, baseline)
    if ratio.low <= 1:
        words = (
            f"Not decided between {best.label} and {second.label}: {best.label} has "
            f"{_more(chapter, ratio)} than {second.label}, {_interval(chapter, ratio)}."
        )
        words += f" Against the others {best.label} has {listed(gains)}." if gains else ""
        return Verdict(words, False, best, baseline)
    words = f"Take {best.label}: {listed(gains)}." if gains else f"Take {best.label}."
    return Verdict(words + _who_pays(chapter, best, plain), True, best, baseline)


def _who_pays(chapter: Chapter, best: SharingWay, plain: SharingWay | None) -> str:
    """A sentence on models that get much less than under plain streams."""
    if plain is None or plain.together is None or best.together is None:
        return ""
    pairs = zip(chapter.workers, best.together.rate_rps, plain.together.rate_rps, strict=True)
    less = [
        f"{name} serves {number(mine)}/s instead of {number(theirs)}/s"
        for name, mine, theirs in pairs
        if mine < _MUCH_LESS * theirs
    ]
    return f" Against plain streams {listed(less)}." if less else ""


def _unsure(mine: SharingWay, theirs: SharingWay, nothing: str) -> str:
    """The reason why their ratio is not known; ``nothing``: the meaning of a value of 0."""
    rounds = min(len(mine.runs), len(theirs.runs))
    if rounds < FEWEST_ROUNDS:
        return f"{count(rounds, 'round')} cannot tell a gain from chance; run at least three"
    if not mine.contest or mine.contest != theirs.contest:
        return f"{mine.label} and {theirs.label} did not run in the same rounds"
    return f"in a round of {mine.label} or {theirs.label} {nothing}"


def _named(plain: SharingWay | None, baseline: SharingWay | None) -> list[tuple[SharingWay, str]]:
    named = [] if plain is None else [(plain, "plain streams")]
    if baseline is not None:
        named.append((baseline, f"the best baseline, {baseline.label}"))
    return named


def _best_baseline(ran: Sequence[SharingWay], best: SharingWay) -> SharingWay | None:
    """Besides plain streams and the best."""
    others = [way for way in ran if is_baseline(way.policy) and way.policy != "shared"]
    return next((way for way in others if way is not best), None)


def _gain(chapter: Chapter, best: SharingWay, other: SharingWay, name: str) -> str:
    if best.together is None or other.together is None:
        return ""
    theirs = chapter.value(other.together)
    if theirs <= 0:
        return ""
    value = chapter.value(best.together) / theirs
    ratio = compared(best, other, chapter.value)
    found = ratio or PairedRatio(value=value, low=value, high=value)
    return f"{_more(chapter, found)} than {name}{_certainty(chapter, ratio)}"


def _certainty(chapter: Chapter, ratio: PairedRatio | None) -> str:
    if ratio is None:
        return ""
    if percent(ratio.low) == percent(ratio.high):  # as simulated rounds may be
        return " (the same in every round)"
    return f" ({_interval(chapter, ratio)})"


def _more(chapter: Chapter, ratio: PairedRatio) -> str:
    what = {"throughput": "throughput", "energy": "throughput per energy"}.get(chapter.aim)
    if what is None:
        word = "shorter" if ratio.value >= 1 else "longer"
        return f"a p99 (mean of the models) {percent(abs(_shorter(ratio.value)))} {word}"
    word = "more" if ratio.value >= 1 else "less"
    return f"{percent(abs(ratio.value - 1))} {word} {what}"


def _interval(chapter: Chapter, ratio: PairedRatio) -> str:
    low, high = ratio.low - 1, ratio.high - 1
    if chapter.aim == "tails":
        low, high = _shorter(ratio.low), _shorter(ratio.high)
    return f"95% interval {percent(low)} to {percent(high)}"


def _shorter(ratio: float) -> float:
    """By which part a p99 is shorter: the value of tails is one over their mean."""
    return 1 - 1 / ratio


def _judge_services(chapter: Chapter, ran: Sequence[SharingWay]) -> Verdict:
    scored = [(way, way.together) for way in ran if way.together is not None]
    keeping = [way for way, score in scored if chapter.keeps_all(score)]
    every = "every bound and floor" if any(chapter.floors) else "every bound"
    baseline = _best_baseline(keeping, ran[0]) or _best_baseline(ran, ran[0])
    best = ran[0]
    if not keeping:
        words = f"Not decided: no way keeps {every}. {best.label} comes closest: "
        words += f"{_tails(chapter, best)}{_starved(chapter, best)}."
        return Verdict(words, False, best, baseline)
    rival = baseline if baseline in keeping and not is_baseline(best.policy) else None
    background = _background(chapter, best, rival)
    plain = chapter.way("shared")
    misses = "."
    if plain is not None and plain not in keeping:
        what = "a floor" if _starved(chapter, plain) else "a bound"
        tails = _tails(chapter, plain, interval=False)
        misses = f"; plain streams miss {what}: {tails}{_starved(chapter, plain)}."
    unsure = [index for index in chapter.services if not _surely_kept(chapter, best, index)]
    if unsure:
        words = (
            f"Not decided: {best.label} kept {every} here ({_tails(chapter, best)}), but the "
            f"interval is not below the bound; {background}{misses}"
        )
        return Verdict(words, False, best, baseline)
    second = next((way for way in keeping if way.digest != best.digest), None)
    doubt = None if second is None else _doubt(chapter, best, second)
    if second is not None and doubt is not None:
        words = f"Not decided between {best.label} and {second.label}: both keep {every}, "
        return Verdict(f"{words}{doubt}; {background}{misses}", False, best, baseline)
    words = f"Take {best.label}: it keeps {every} ({_tails(chapter, best)}), and "
    return Verdict(words + background + misses, True, best, baseline)


def _doubt(chapter: Chapter, best: SharingWay, second: SharingWay) -> str | None:
    """The reason why background's gain under ``best`` is not certain; None: the gain is certain."""
    if not any(chapter.weights):
        return "and nothing else tells them apart"
    ratio = compared(best, second, chapter.background)
    if ratio is None:
        why = _unsure(best, second, _NOTHING["slo"])
        return f"and it is not certain which gives background more: {why}"
    if ratio.low <= 1:
        return f"and it is not certain which gives background more ({_interval(chapter, ratio)})"
    return None


def _surely_kept(chapter: Chapter, way: SharingWay, worker: int) -> bool:
    excess, bound = way.excess(chapter.workers[worker]), chapter.bounds_ms[worker]
    if excess is None or bound is None:
        return False
    return excess.alone_ms.p99 * excess.p99_ratio.high <= bound


def _tails(chapter: Chapter, way: SharingWay, *, interval: bool = True) -> str:
    """``bert p99 4.23 ms of at most 5.00 ms, 95% interval 3.90 to 4.61``"""
    parts = []
    for index in chapter.services:
        name, bound = chapter.workers[index], chapter.bounds_ms[index]
        p99 = way.together.p99_ms[index] if way.together else None
        if p99 is None:
            parts.append(f"{name} completed no request, p99 of at most {number(bound)} ms wanted")
            continue
        tail, most = number(p99), number(bound)
        if tail == most and bound is not None:
            tail, most = told_apart(p99, bound)
        words = f"{name} p99 {tail} ms of at most {most} ms"
        if interval and (excess := way.excess(name)) is not None:
            low, high = (
                excess.alone_ms.p99 * side for side in (excess.p99_ratio.low, excess.p99_ratio.high)
            )
            words += f", 95% interval {number(low)} to {number(high)}"
        parts.append(words)
    return "; ".join(parts)


def _starved(chapter: Chapter, way: SharingWay) -> str:
    """``; vgg19 gets 76.6% of its rate alone, at least 90.0% wanted``: missed floors"""
    if way.together is None:
        return ""
    short = floors_over_served(way.together, chapter)
    return "".join(
        f"; {name} gets {percent(rate / alone)} of its rate alone, at least {percent(floor)} wanted"
        for name, over, rate, alone, floor in zip(
            chapter.workers,
            short,
            way.together.rate_rps,
            chapter.alone_rps,
            chapter.floors,
            strict=True,
        )
        if over > 1
    )


def _background(chapter: Chapter, best: SharingWay, other: SharingWay | None) -> str:
    if not sum(chapter.weights) or best.together is None:
        return "there is no background"
    words = f"background gets {percent(chapter.background(best.together))} of its rate alone"
    if other is None or other.together is None:
        return words
    words += (
        f", against {percent(chapter.background(other.together))} under the best baseline that "
        f"keeps them, {other.label}"
    )
    ratio = compared(best, other, chapter.background)
    if ratio is not None:
        words += f" ({number(ratio.value)} times as much, 95% interval {number(ratio.low)} to "
        words += f"{number(ratio.high)})"
    return words
