"""The search for services: what candidates make workers do, and which of them it finds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import eclip
from eclip.contest.confirm.plans import check_kept, make_plan, simulated_promises
from eclip.core.mix import parse_mix
from eclip.core.plan import P99_GAIN, Plan, Promise, Slack
from eclip.core.topology import Mask
from eclip.errors import StoppedError, UsageError
from eclip.planner.evaluate import SimEvaluator
from eclip.planner.joints import JointRules, far_mask
from eclip.planner.policies import PolicyOptions
from eclip.planner.problem import Problem
from eclip.planner.search.decision import (
    PLAIN,
    STATIC,
    UNGUARDED,
    decide_in_doubt,
    shortlist_rules,
)
from eclip.planner.search.giving import (
    FoundProposals,
    is_guarded,
    is_strict,
    search_rules,
)
from eclip.planner.search.objective import Objective, Score
from eclip.planner.search.proposals import STAYS, Proposal, Proposer, in_words, strict_of
from eclip.planner.tiers import expected_excess_ns
from eclip.progress import Progress
from heard import Heard
from simulations import H200, case_of, flat_profile, scaling_profile

US = 1000
SERVICE = scaling_profile("s", [50 * US] * 20)
OTHER = flat_profile("t", [100 * US] * 5, H200, blocks=66)
JOB = scaling_profile("b", [100 * US] * 20)
PROMISE = Promise(bound_ns=4_000_000, request_ns=1_000_000, some_ns=0, none_ns=0)
MIX = parse_mix("s:1@300rps/4ms,b:1@background")
PROBLEM = Problem(MIX, H200, (SERVICE, JOB))
SLO = Objective("slo").for_mix(MIX, {0: PROMISE})


ROOM = far_mask(H200, 64)
YIELD = JointRules()
PATIENT = JointRules(Slack.NONE)
MOVE = JointRules(None, Slack.PLENTY, ROOM)
MOVE_YIELD = JointRules(Slack.NONE, Slack.PLENTY, ROOM)
STEPWISE = JointRules(Slack.NONE, Slack.SOME, ROOM)
MASKED = replace(STAYS, lane=ROOM)


def plan_of(rules: JointRules, none: float = 1.0, some: float = 2.0) -> Plan:
    return Proposer(PROBLEM, {0: PROMISE}).plan(Proposal((STAYS, rules), none, some))


def rules_in(plan: Plan) -> list[tuple[Slack, Mask | None]]:
    joints = plan.workers[1].joints
    assert joints is not None
    return [
        (one.slack, None if one.lane is None else plan.lanes[one.lane].mask) for one in joints.rules
    ]


def levels_in(plan: Plan) -> list[Slack]:
    return [slack for slack, _ in rules_in(plan)]


def test_rules_go_from_the_most_urgent_level_on() -> None:
    wanted = {
        YIELD: [(Slack.PLENTY, None)],
        PATIENT: [(Slack.NONE, None)],
        MOVE: [(Slack.PLENTY, ROOM)],
        MOVE_YIELD: [(Slack.NONE, None), (Slack.PLENTY, ROOM)],
        STEPWISE: [(Slack.NONE, None), (Slack.SOME, ROOM)],
    }
    assert {rules: rules_in(plan_of(rules)) for rules in wanted} == wanted
    assert not plan_of(MASKED).gives_way


def test_slack_is_used_up_before_what_is_in_flight_could_be_too_late() -> None:
    for depth in (1, 2):
        promise = plan_of(replace(STEPWISE, depth=depth), 0.5, 2.0).workers[0].promise
        assert promise is not None
        assert promise.none_ns == depth * 100 * US + 500 * US
        assert promise.some_ns == promise.none_ns + 2_000 * US
        assert promise.bound_ns == PROMISE.bound_ns


def test_only_who_yields_to_the_busy_bounds_what_they_wait() -> None:
    assert expected_excess_ns(plan_of(YIELD)) == 200 * US
    for rules in (PATIENT, MOVE, MOVE_YIELD, MASKED):
        assert expected_excess_ns(plan_of(rules)) is None


def test_static_masks_leave_the_rest_to_services() -> None:
    proposer = Proposer(PROBLEM, {0: PROMISE})
    plan = proposer.plan(proposer.apart(64))
    assert not plan.gives_way
    assert [plan.units(lane) for lane in range(2)] == [68, 64]
    assert not plan.lanes[0].mask & plan.lanes[1].mask


def test_what_rules_do_not_ask_for_makes_no_other_candidate() -> None:
    one = Proposal((STAYS, replace(YIELD, lane=ROOM)), 0.5, 4.0)
    other = Proposal((STAYS, replace(YIELD, lane=far_mask(H200, 32))), 2.0, 1.0)
    assert one.plainly == other.plainly
    asks = Proposal((STAYS, MOVE_YIELD), 0.5)
    assert asks.plainly != Proposal((STAYS, MOVE_YIELD), 2.0).plainly


def likes(rules: JointRules, *, late: float = 2.0) -> object:
    """An evaluation that gives most to background which does this; plain streams are late."""

    def evaluate(plans: Sequence[Plan]) -> list[Score]:
        scores = []
        for plan in plans:
            match = plan.gives_way and levels_in(plan) == levels_in(plan_of(rules))
            tail = 3.0 if plan.gives_way else 4.0 * late
            scores.append(Score((0.3, 0.8 if match else 0.6), 300.0, (tail, 9.0)))
        return scores

    return evaluate


def found_by(evaluate: object, batches: int = 2, seed: int = 0) -> FoundProposals:
    return search_rules(
        PROBLEM,
        {0: PROMISE},
        evaluate,  # type: ignore[arg-type]
        SLO,
        seconds=99.0,
        batches=batches,
        seed=seed,
    )


@pytest.mark.parametrize("rules", [YIELD, PATIENT, STEPWISE])
def test_search_finds_what_evaluation_likes(rules: JointRules) -> None:
    best = found_by(likes(rules)).candidates[0]
    assert levels_in(best.plan) == levels_in(plan_of(rules))


def test_search_repeats_itself_and_looks_elsewhere_with_another_seed() -> None:
    first, again, other = (found_by(likes(PATIENT), 3, seed) for seed in (1, 1, 2))
    tried = [{one.proposal for one in found.candidates} for found in (first, again, other)]
    assert first.candidates == again.candidates
    assert tried[0] != tried[2]
    assert first.batches == 3


def test_search_that_is_stopped_has_what_it_tried() -> None:
    progress = Progress()
    progress.stop()
    found = search_rules(
        PROBLEM,
        {0: PROMISE},
        likes(YIELD),  # type: ignore[arg-type]
        SLO,
        seconds=99.0,
        progress=progress,
    )
    assert found.batches == 0
    assert found.candidates and found.evaluated == len(found.candidates)


def evaluation(
    background: dict[tuple[int, int], float], tails: dict[tuple[int, int], float]
) -> object:
    """Of what only yields, by grain in µs and depth; all else gives 0.9 and keeps 4 ms easily."""

    def evaluate(plans: Sequence[Plan]) -> list[Score]:
        scores = []
        for plan in plans:
            key = (0, 0)
            joints = plan.workers[1].joints
            if joints is not None and is_strict(plan):
                key = (joints.longest_ns // US, joints.depth)
            scores.append(Score((0.3, background.get(key, 0.9)), 300.0, (tails.get(key, 2.0), 9.0)))
        return scores

    return evaluate


def guarded_depths(found: FoundProposals) -> set[tuple[int, int]]:
    """Of candidates that count: the longest stretch in µs and the depth of background."""
    every = [one.plan.workers[1].joints for one in found.candidates if one.guarded]
    return {(joints.longest_ns // US, joints.depth) for joints in every if joints is not None}


def test_candidates_without_joints_cannot_be_strict_and_do_not_count() -> None:
    def evaluate(plans: Sequence[Plan]) -> list[Score]:
        return [Score((0.3, 0.6 if plan.gives_way else 0.9), 300.0, (3.0, 9.0)) for plan in plans]

    found = found_by(evaluate)
    assert all(one.guarded == one.plan.gives_way for one in found.candidates)
    # Masks give background more, within the bound: but nothing would hold it when it is late.
    assert found.candidates[0].plan.gives_way


def test_candidates_count_where_strict_is_as_good_as_yield() -> None:
    """Yielding is with stretches of 100 µs, and of 300 µs with a grain of as much."""
    usual = {(100, 2): 0.60, (100, 1): 0.50, (300, 2): 0.61, (300, 1): 0.55}
    easy = found_by(evaluation(usual, {}))
    assert guarded_depths(easy) == {(100, 2), (300, 2)}  # a depth of 1 costs background too much
    tight = found_by(evaluation(usual, {(100, 2): 3.6, (300, 2): 3.9}))
    assert guarded_depths(tight) == {(100, 2)}  # of 4 ms: longer stretches make longer tails


def test_strict_is_the_same_plan_with_its_rules_replaced_by_yield() -> None:
    proposer = Proposer(PROBLEM, {0: PROMISE})
    for rules in (PATIENT, MOVE, MOVE_YIELD, STEPWISE):
        proposal = Proposal((STAYS, replace(rules, grain_ns=300_000, depth=1)), 0.5)
        strict = strict_of(proposal, proposer.background)
        assert strict is not None
        mine, other = (proposer.plan(one).workers[1].joints for one in (proposal, strict))
        assert mine is not None and other is not None
        assert (mine.at, mine.depth) == (other.at, other.depth)
        assert is_strict(proposer.plan(strict)) and is_guarded(proposer.plan(proposal))
        assert not is_strict(proposer.plan(proposal))
    for rules in (STAYS, MASKED):
        assert strict_of(Proposal((STAYS, rules)), proposer.background) is None


def decided(found: FoundProposals, *elsewhere: object, here: object) -> Plan:
    class Doubting:
        def __call__(self, plans: object, active: object = None) -> list[Score]:
            raise AssertionError("the search is over")

        def doubts(self) -> list[object]:
            return [here, *elsewhere]

    evaluate: Any = Doubting()
    return decide_in_doubt(found, PROBLEM, {0: PROMISE}, evaluate, SLO, 0)


def giving(shared: float, strict: float, late: float = 2.0) -> object:
    """Plans that share give background this, and this tail; those that only yield keep bounds."""

    def evaluate(plans: Sequence[Plan]) -> list[Score]:
        return [
            Score((0.3, strict), 300.0, (2.0, 9.0))
            if is_strict(plan) or not plan.gives_way
            else Score((0.3, shared), 300.0, (late, 9.0))
            for plan in plans
        ]

    return evaluate


def test_plan_that_gains_nothing_over_strict_is_never_taken() -> None:
    found = found_by(likes(PATIENT))
    gains, gains_not = giving(0.7, 0.6), giving(0.603, 0.6)
    assert not is_strict(decided(found, gains, here=gains))
    assert is_strict(decided(found, gains, here=gains_not))  # with other arrivals
    assert not is_strict(decided(found, gains_not, here=gains))
    assert is_strict(decided(found, giving(0.59, 0.6), here=gains))  # it loses elsewhere
    assert is_strict(decided(found, giving(0.7, 0.6, late=4.1), here=gains))  # and is late there


def test_services_have_accounts_in_plans_of_a_search_only() -> None:
    promise = plan_of(MOVE_YIELD).workers[0].promise
    assert promise is not None and promise.gain == P99_GAIN
    case = case_of([SERVICE, JOB], mix=MIX)
    for policy in ("yield", "move", "shared"):
        other = make_plan(case, policy, PolicyOptions()).workers[0].promise
        assert other is not None and other.gain == 0


def test_several_services_are_tried_in_turn_and_side_by_side() -> None:
    mix = parse_mix("s:1@100rps/9ms,t:1@100rps/9ms,b:1@background")
    problem, promises = Problem(mix, H200, (SERVICE, OTHER, JOB)), {0: PROMISE, 1: PROMISE}

    def first(services: JointRules | None) -> list[tuple[str, ...]]:
        starts = Proposer(problem, promises, services).starts()[:4]
        return [tuple(does(rules) for rules in one.each) for one in starts]

    def does(rules: JointRules) -> str:
        return "stays" if not rules.joints else "goes on" if not rules.by_slack else "yields"

    in_turn, beside = ("yields",) * 3, ("stays", "stays", "yields")
    assert first(None) == [in_turn, in_turn, beside, beside]
    told = first(JointRules(yields=None))  # what services do is not for the search to choose
    assert told[:2] == [("goes on", "goes on", "yields")] * 2 and beside not in told


def test_shortlist_always_has_the_baselines() -> None:
    found = found_by(likes(PATIENT))
    entries = shortlist_rules(found, PROBLEM, {0: PROMISE}, 2)
    labels = [entry.label for entry in entries]
    assert labels[:4] == [PLAIN, STATIC, "yield, depth 2", "yield, depth 1"]
    assert any(label.startswith("yields when slack is below") for label in labels[4:])
    assert all(entry.plan.workers[0].promise is not None for entry in entries)


def test_finalists_use_less_and_less_of_the_bounds_and_one_more() -> None:
    def evaluate(plans: Sequence[Plan]) -> list[Score]:
        """The longer the slack that is left, the shorter the tail and the less for background."""
        scores = []
        for plan in plans:
            promise = plan.workers[0].promise
            assert promise is not None
            tail = max(0.5, 1.2 - promise.none_ns / 4e6) if plan.gives_way else 9.0
            scores.append(Score((0.3, 0.5 * tail), 300.0, (4.0 * tail, 9.0)))
        return scores

    found = found_by(evaluate, batches=4)
    tails = [one.tail for one in found.finalists(4)]
    assert 0.9 < tails[0] <= 1.0 and tails[1] <= 0.9 and tails[2] <= 0.8
    assert 1.0 < tails[3] <= 1.15
    assert len(found.finalists(1)) == 1


def test_frontier_has_nothing_that_another_beats() -> None:
    found = found_by(likes(PATIENT))
    plain, *frontier = found.tradeoffs
    assert plain.label == "plain streams"
    pairs = [(one.background, one.worst_tail) for one in frontier]
    assert pairs == [(0.8, 0.75)]


def words_of(*each: JointRules) -> str:
    proposal = Proposal(each, 0.5)
    return in_words(proposal, Proposer(PROBLEM, {0: PROMISE}).plan(proposal))


def test_words_say_what_background_does() -> None:
    none, grain = "slack is below 0.5 requests", "150 µs, depth 2"
    said = {
        YIELD: f"yields, {grain}",
        PATIENT: f"yields when {none}, else goes on, {grain}",
        MOVE: f"moves to 64 SMs, {grain}",
        MOVE_YIELD: f"yields when {none}, else moves to 64 SMs, {grain}",
        STEPWISE: f"yields when {none}, moves to 64 SMs when there is some, else goes on, {grain}",
    }
    assert {rules: words_of(STAYS, rules) for rules in said} == said
    assert words_of(MASKED, replace(STAYS, lane=far_mask(H200, 48))) == "64+48 SMs"


def test_services_alone_take_turns_by_slack_or_not() -> None:
    mix = parse_mix("s:1@100rps/9ms,t:1@100rps/9ms")
    case = case_of([SERVICE, OTHER], mix=mix)
    plan = make_plan(case, "search", PolicyOptions(objective=Objective("slo"), batches=50))
    assert plan.evidence is not None and plan.evidence.missed == ()
    assert plan.evidence.evaluated < 50  # there is little to choose


# --- By simulation ------------------------------------------------------------------------------


def planned(bound: str, background: str = "background") -> Plan:
    mix = parse_mix(f"s:1@300rps/{bound},b:1@{background}")
    case = case_of([SERVICE, JOB], mix=mix)
    options = PolicyOptions(objective=Objective("slo"), batches=1)
    return make_plan(case, "search", options)


def chosen(plan: Plan) -> tuple[float, float]:
    assert plan.evidence is not None
    (trial,) = (trial for trial in plan.evidence.trials if trial.chosen)
    assert trial.p99_ms[0] is not None
    return trial.ratios[1], trial.p99_ms[0]


def test_tighter_bounds_are_kept_for_less_background() -> None:
    gave = []
    for bound in ("1.2x", "2.5x"):
        plan = planned(bound)
        background, p99_ms = chosen(plan)
        promise = plan.workers[0].promise
        assert promise is not None and p99_ms <= promise.bound_ns / 1e6
        assert check_kept(plan) is plan
        gave.append(background)
    assert 0.95 * (1 - 0.3) < gave[0] < gave[1]


def test_bound_that_no_plan_keeps_is_refused_with_the_best_that_can() -> None:
    plan = planned("1x")
    _, p99_ms = chosen(plan)
    with pytest.raises(UsageError, match=f"p99 {p99_ms:.2f} ms, at most") as refused:
        check_kept(plan)
    assert "\n" not in str(refused.value)


def test_search_that_was_stopped_has_not_shown_that_no_plan_keeps_a_bound() -> None:
    mix = parse_mix("s:1@300rps/1x,b:1@background")
    progress = Progress()
    progress.stop()
    with pytest.raises(StoppedError, match="stopped before a plan was found that keeps every"):
        eclip.plan(case_of([SERVICE, JOB], mix=mix), "search", progress=progress)


def test_floor_that_cannot_be_kept_is_refused_too() -> None:
    with pytest.raises(UsageError, match=r"at least 95\.0% wanted"):
        check_kept(planned("1.2x", "background/floor=0.95"))


def test_alone_and_candidates_have_the_same_arrivals_and_enough_of_them() -> None:
    mix = parse_mix("s:1@20rps/2x,b:1@background")
    case = case_of([SERVICE, JOB], mix=mix)
    evaluator = SimEvaluator.of(case)
    assert evaluator.seconds * 20 >= 500
    first, again = (simulated_promises(case, evaluator) for _ in range(2))
    assert first == again
    (alone,) = (one.bound_ns / 2e6 for one in first.values())
    assert math.isclose(alone, 1.5, rel_tol=0.1)  # one in fifty meets another, half done on average


def test_stop_while_searching_still_decides() -> None:
    progress = Heard(stop_at=0.0)
    mix = parse_mix("s:1@300rps/3x,b:1@background")
    options = PolicyOptions(objective=Objective("slo"), batches=400, progress=progress)
    plan = make_plan(case_of([SERVICE, JOB], mix=mix), "search", options)
    assert plan.evidence is not None and plan.evidence.batches < 400


def test_lanes_alone_protect_services_where_no_joint_comes_in_time() -> None:
    def late_with_joints(plans: Sequence[Plan]) -> list[Score]:
        tails = [9.0 if plan.gives_way or not plan.confines(1) else 3.0 for plan in plans]
        return [Score((0.3, 0.5), 300.0, (tail, 9.0)) for tail in tails]

    plan = decided(found_by(late_with_joints), late_with_joints, here=late_with_joints)
    assert not plan.gives_way and UNGUARDED in plan.why
