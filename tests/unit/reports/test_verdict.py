"""The verdict: which way is best, for services too, and what it does to every model."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from comparisons import comparison, entry, score
from eclip.core.model_key import ModelKey
from eclip.files.comparison import best_policy
from eclip.files.excess import Excess, PairedRatio, Spread
from eclip.reports import per_model
from eclip.reports.chapters import Chapter
from eclip.reports.verdict import compared, judge
from logs import make_log
from report_pages import Reader, best, chapter, render

ALBERT = ModelKey("albert", 8)


def rounds(policy: str, stps: list[float], **given: Any) -> Any:
    scores = [score(stp) for stp in stps]
    together = score(float(np.mean(stps)))
    return entry(policy, *scores, together=together, **given)


def test_a_clear_gain_is_taken_with_its_interval() -> None:
    found = chapter(
        comparison(
            [
                rounds("shared", [1.0, 1.01, 0.99]),
                rounds("masks", [1.2, 1.21, 1.19]),
                rounds("search", [1.31, 1.32, 1.29]),
            ]
        )
    )
    verdict = judge(found)
    assert verdict.decided and verdict.take is best(found)
    assert verdict.sentence.startswith("Take search: 30.7% more throughput than plain streams (95%")
    assert "the best baseline, masks (95% interval " in verdict.sentence
    assert verdict.baseline is not None and verdict.baseline.policy == "masks"


def test_an_interval_without_width_is_said_in_words() -> None:
    found = chapter(comparison([rounds("shared", [1.0] * 3), rounds("search", [1.3] * 3)]))
    assert "than plain streams (the same in every round)" in judge(found).sentence


def test_who_gets_much_less_than_under_plain_streams_is_named() -> None:
    fair = [score(1.0, rate_rps=(100.0, 200.0))] * 3
    other = [score(one, rate_rps=(150.0, 100.0)) for one in (1.3, 1.31, 1.32)]
    found = chapter(comparison([entry("shared", *fair), entry("search", *other)]))
    name = found.workers[1]
    assert judge(found).sentence.endswith(
        f"Against plain streams {name} serves 100/s instead of 200/s."
    )


def test_a_gain_within_its_interval_is_not_decided() -> None:
    found = chapter(
        comparison([rounds("masks", [1.2, 1.3, 1.1]), rounds("search", [1.25, 1.15, 1.3])])
    )
    verdict = judge(found)
    assert not verdict.decided
    assert verdict.sentence.startswith("Not decided between search and masks: ")


def test_too_few_rounds_decide_nothing() -> None:
    one = judge(chapter(comparison({"shared": 1.0, "search": 2.0})))
    assert not one.decided
    assert "1 round cannot tell a gain from chance" in one.sentence
    assert "100.0% more throughput than plain streams" in one.sentence
    assert "the only way that ran" in judge(chapter(make_log("eclip"))).sentence


def test_the_reason_for_no_decision_is_the_true_one() -> None:
    silent = [score(1.0, p99_ms=(None, 4.0)) for _ in range(3)]
    late = [entry("shared", *silent), rounds("search", [1.1, 1.2, 1.3])]
    words = judge(chapter(comparison(late, load_part=0.5))).sentence
    assert "in a round of search or shared a model completed no request" in words
    ended_early = [entry("shared", score(1.0)), rounds("search", [1.1, 1.2, 1.3])]
    assert "1 round cannot tell" in judge(chapter(comparison(ended_early))).sentence
    days = [
        comparison([rounds(policy, [stp] * 3)], date=f"2026-11-1{day}T10:00:00+00:00")
        for day, (policy, stp) in enumerate({"shared": 1.0, "search": 1.2}.items())
    ]
    assert "did not run in the same rounds" in judge(chapter(*days)).sentence


@pytest.mark.parametrize(
    ("aim", "taken"),
    [("throughput", "search"), ("energy", "masks"), ("latency", "shared"), ("slo", "yield")],
)
def test_every_aim_has_one_best_for_the_page_and_the_tables(aim: str, taken: str) -> None:
    ways = [
        entry("shared", score(1.0, power=100.0, p99_ms=(2.0, 0.1))),
        entry("search", score(2.0, power=200.0, p99_ms=(6.0, 4.0))),
        entry("masks", score(1.5, power=50.0, p99_ms=(None, 3.0))),
        entry("yield", score(1.2, power=100.0, p99_ms=(4.0, 4.0))),
    ]
    stored = comparison(ways, objective=aim, bounds_ms=(5.0, None), weights=(0.0, 1.0))
    found = chapter(stored)
    assert best_policy(stored) == best(found).policy == taken


def test_equal_plans_decide_nothing() -> None:
    same = [rounds(policy, [1.0] * 3, plan="same") for policy in ("masks", "search")]
    assert "the same plan" in judge(chapter(comparison(same))).sentence


def test_who_runs_the_plan_of_the_best_is_named() -> None:
    ways = [
        rounds("shared", [1.2, 1.2, 1.2], plan="same"),
        rounds("search", [1.2, 1.2, 1.2], plan="same"),
        rounds("masks", [1.0, 1.0, 1.0]),
    ]
    words = judge(chapter(comparison(ways))).sentence
    assert words.startswith("Take shared: ") and words.endswith(
        " search runs the same plan as shared."
    )


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    held = 0
    for _ in range(300):
        pairs = [
            rounds(policy, (truth * random.lognormal(0, 0.02, 4)).tolist())
            for policy, truth in (("shared", 1.0), ("search", 1.1))
        ]
        found = chapter(comparison(pairs, repeats=4))
        ways = {way.policy: way for way in found.ways}
        ratio = compared(ways["search"], ways["shared"], found.value)
        assert ratio is not None
        held += ratio.low <= 1.1 <= ratio.high
    assert 0.92 <= held / 300 <= 0.98


def excess(p99_ms: float, low: float, high: float) -> Excess:
    spread = Spread(p50=1.0, p99=2.0, longest=3.0, p999=None, curve=tuple(map(float, range(12))))
    ratio = PairedRatio(value=p99_ms / 2, low=low, high=high)
    return Excess(
        name="a", requests=1000, left_out=0, shared_ms=spread, alone_ms=spread, excess_us=spread,
        p50_ratio=ratio, p99_ratio=ratio, busy=0.3, bound_ms=5.0, goodput_rps=1.0, kept=True,
    )  # fmt: skip


def serving(policy: str, p99_ms: float, background: float, **given: Any) -> Any:
    scores = [
        score(
            1.0,
            p99_ms=(p99_ms, 4.0),
            rate_rps=(10.0, 200 * background * jitter),
            requests=(10, round(200 * background * jitter)),
        )
        for jitter in (1.0, 1.01, 0.99)
    ]
    return entry(policy, *scores, services=(excess(p99_ms, p99_ms / 2.2, p99_ms / 1.8),), **given)


def services(*entries: Any, floor: float = 0.0) -> Chapter:
    promised: dict[str, Any] = {"bounds_ms": (5.0, None), "weights": (0.0, 1.0)}
    return chapter(comparison(entries, objective="slo", floors=(0.0, floor), **promised))


def test_services_take_what_keeps_every_bound_with_the_most_background() -> None:
    found = services(
        serving("shared", 500.0, 0.97), serving("masks", 4.0, 0.4), serving("yield", 4.2, 0.8)
    )
    verdict = judge(found)
    assert verdict.decided
    assert [way.policy for way in found.ways] == ["yield", "masks", "shared"]
    for words in (
        "Take yield: it keeps every bound (a p99 4.20 ms of at most 5.00 ms, 95% interval ",
        "background gets 80.0% of its rate alone, against 40.0% under the best baseline",
        "plain streams miss a bound: a p99 500 ms",
    ):
        assert words in verdict.sentence


def test_a_bound_inside_the_interval_is_not_surely_kept() -> None:
    verdict = judge(services(serving("shared", 500.0, 0.97), serving("yield", 4.9, 0.8)))
    assert not verdict.decided and "interval is not below the bound" in verdict.sentence


def test_where_nobody_keeps_the_bounds_the_closest_is_named() -> None:
    verdict = judge(services(serving("shared", 500.0, 0.97), serving("yield", 6.0, 0.8)))
    assert not verdict.decided
    assert "no way keeps every bound. yield comes closest: a p99 6.00 ms" in verdict.sentence


def test_who_is_below_a_floor_is_not_taken() -> None:
    ways = serving("shared", 500.0, 0.97), serving("masks", 4.0, 0.4), serving("yield", 4.2, 0.8)
    assert (
        "Take yield: it keeps every bound and floor" in judge(services(*ways, floor=0.75)).sentence
    )
    verdict = judge(services(*ways, floor=0.9))
    assert not verdict.decided
    assert verdict.sentence == (
        "Not decided: no way keeps every bound and floor. yield comes closest: a p99 4.20 ms of at "
        "most 5.00 ms, 95% interval 3.82 to 4.67; b gets 80.0% of its rate alone, at least 90.0% "
        "wanted."
    )
    starved = services(serving("shared", 4.5, 0.4), serving("yield", 4.2, 0.8), floor=0.75)
    assert "plain streams miss a floor: a p99 4.50 ms" in judge(starved).sentence


def test_background_of_too_few_rounds_is_not_called_equal() -> None:
    masks, giving = serving("masks", 4.0, 0.4), serving("yield", 4.2, 0.8)
    short = msgspec.structs.replace(masks, runs=masks.runs[:2])
    verdict = judge(services(short, giving))
    assert not verdict.decided
    assert (
        "Not decided between yield and masks: both keep every bound, and it is not certain which "
        "gives background more: 2 rounds cannot tell a gain from chance"
    ) in verdict.sentence
    close = judge(services(serving("masks", 4.0, 0.8), serving("yield", 4.2, 0.8)))
    assert "not certain which gives background more (95% interval " in close.sentence


def test_without_background_two_that_keep_the_bounds_are_not_told_apart() -> None:
    ways = [serving("masks", 4.0, 0.4), serving("yield", 4.2, 0.8)]
    found = chapter(comparison(ways, objective="slo", bounds_ms=(5.0, 5.0), weights=(0.0, 0.0)))
    doubled = (excess(4.0, 1.9, 2.1), msgspec.structs.replace(excess(4.0, 1.9, 2.1), name="b"))
    found = dataclasses.replace(
        found, ways=tuple(dataclasses.replace(way, services=doubled) for way in found.ways)
    )
    assert "both keep every bound, and nothing else tells them apart" in judge(found).sentence


def test_a_service_that_completed_nothing_is_said_to_have_no_p99() -> None:
    ways = [
        entry(policy, score(1.0, p99_ms=(None, 4.0), rate_rps=(0.0, 100.0)))
        for policy in ("shared", "yield")
    ]
    sentence = judge(services(*ways)).sentence
    assert "a completed no request, p99 of at most 5.00 ms wanted." in sentence


def test_services_are_drawn_with_bounds_excess_and_the_frontier() -> None:
    html = render(
        comparison(
            [serving("shared", 500.0, 0.97), serving("yield", 4.2, 0.8)],
            objective="slo",
            bounds_ms=(5.0, None),
            weights=(0.0, 1.0),
        )
    )
    text = Reader(html).text
    for words in (
        "Bounds kept",
        "bound 5.00 ms",
        "Excess : what sharing adds to a request",
        "Tail latency against background work",
        "0.840× kept",
        "100× missed",
    ):
        assert words in text, words
    assert html.count('class="bound"') > 2


def test_every_model_has_a_sentence_on_what_the_best_way_does_to_it() -> None:
    ways = [entry("shared", score(1.0)), entry("search", score(2.0, p99_ms=(1.5, 2.5)))]
    text = Reader(render(comparison(ways))).text
    assert (
        "With search its p99 is 1.50 ms and it serves 200/s (200% of alone); with plain streams "
        "3.00 ms and 100/s (100% of alone)."
    ) in text
    assert "its p99 is 2.50 ms and it serves 400/s" in text
    assert "alone it serves 100 requests/s, one in 10.0 ms" in text


def test_of_a_service_the_same_arrivals_alone_are_told() -> None:
    found = services(serving("shared", 9.0, 0.9), serving("search", 4.0, 0.7))
    first, second = per_model.cards(found, judge(found))
    assert "these arrivals with p50 1.00 ms and p99 2.00 ms" in first.words
    assert "arrivals" not in second.words


def test_the_excess_of_a_queue_that_grows_is_not_told_as_a_time() -> None:
    growing = score(1.0, offered_rps=(300.0, None), rate_rps=(100.0, 10.0), seconds=10.0)
    ways = [
        entry("shared", growing, services=(excess(9.0, 4.0, 5.0),)),
        serving("search", 4.0, 0.7),
    ]
    found = services(*ways)
    rows = {row.label: row for row in per_model.cards(found, judge(found))[0].rows}
    assert rows["shared"].excess_words == "a queue that grows"
    assert "×" in rows["search"].ratio


def test_a_worker_that_is_offered_more_than_it_serves_is_called_overloaded() -> None:
    def offered(rate_rps: float) -> str:
        one = score(1.0, offered_rps=(rate_rps, None), seconds=10.0)
        stored = comparison([entry("shared", one), entry("search", score(2.0))])
        return Reader(render(stored)).text

    assert "100 overloaded" in offered(300.0)
    assert "overloaded" not in offered(100.0)
