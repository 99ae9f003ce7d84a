"""Services beside background, as users of the command line meet them."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import Cli, assert_refused
from eclip.cli import screen
from eclip.core.plan import Plan
from eclip.files import store
from eclip.files.comparison import background_of, worst_tail_of

MIX = "bert:1@300rps/1.5x,vgg19:32@background"
SEARCH = ("--policy", "search", "--batches", 0)


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("mix", "more", "said"),
    [
        ("bert:1@300rps/0.5ms,vgg19:32", SEARCH, "one request takes 0.99 ms"),
        ("bert:1@300rps/0.5ms,vgg19:32", ("--policy", "yield"), "one request takes 0.99 ms"),
        ("bert:1@3000rps/1.1x,vgg19:32", SEARCH, "at most 1009/s"),
        ("bert:1@3000rps/9ms,vgg19:32", ("--policy", "shared"), "at most 1009/s"),
        ("bert:1@300rps/1x,vgg19:32", SEARCH, "no plan keeps every promise"),
        ("bert:1@300rps/1x,vgg19:32", (*SEARCH, "--verify", 1), "no plan keeps every promise"),
        ("bert:1/5ms,vgg19:32", SEARCH, "needs the rate"),
        ("bert:1@300rps,vgg19:32", (*SEARCH, "--objective", "slo"), "slo needs a service"),
        ("bert:1@300rps,vgg19:32", ("--policy", "yield"), "yield needs a service"),
        (MIX, (*SEARCH, "--verify", 1, "--refine", 1), "refine searches"),
        (MIX, (*SEARCH, "--fairness", 0.8), "floors stand in the mix"),
        (MIX, (*SEARCH, "--weights", "1,2"), "weights stand in the mix"),
    ],
)
def test_what_cannot_be_promised_is_refused_and_nothing_is_deployed(
    cli: Cli, mix: str, more: tuple[object, ...], said: str
) -> None:
    assert_refused(cli("plan", mix, *more, "-o", "plan.json"), said)
    assert not Path("plan.json").exists()


def test_refusal_has_the_best_that_can_be_had(cli: Cli) -> None:
    refused = cli("plan", "bert:1@300rps/1x,vgg19:32@background", *SEARCH)
    assert "yield, depth 1" in refused.err
    assert "at most 2.87 wanted" in refused.err


def test_yielding_plan_says_what_its_workers_do_and_what_to_expect(cli: Cli) -> None:
    made = cli("plan", "bert:1@300rps/5ms,vgg19:32@background/floor=0.2", "--policy", "yield")
    assert made.code == 0, made.err
    said = words(cli("explain", "plan.json").out)
    for part in (
        "bert, a service: p99 at most 5.00 ms",
        "vgg19, background, at least 20% of its rate alone",
        "yields while bert is busy; 33 stretches of at most 0.31 ms, 2 in flight",
        "one kernel of 0.31 ms exceeds the grain of 150 µs",
        "waits at most about 0.62 ms for background",
    ):
        assert part in said
    data = cli("explain", "plan.json", "--json").data
    longest_ns = max(data["workers"][1]["joints"]["stretch_ns"])
    assert data["expected_excess_ns"] == 2 * longest_ns
    assert data["workers"][0]["promise"]["bound_ns"] == 5_000_000
    assert data["workers"][1]["floor"] == 0.2


def test_search_for_services_is_confirmed_and_shows_its_frontier(cli: Cli) -> None:
    cli.monkeypatch.setattr(screen.out, "width", 200)  # headers on one line
    made = cli("plan", MIX, *SEARCH, "--verify", 1)
    assert made.code == 0, made.err
    plan = store.load("plan.json", Plan)
    evidence = plan.evidence
    assert evidence is not None and evidence.objective == "slo"
    assert evidence.missed == ()
    (chosen,) = (trial for trial in evidence.trials if trial.chosen)
    assert chosen.services[0].requests >= 4000
    assert chosen.ratios[1] > 0.7  # more than what bert leaves
    shown = words(cli("explain", "plan.json").out)
    for part in (
        "1.5x of its p99 alone",
        "yield, depth 1",
        "best static masks",
        "Refused: plain streams: bert: p99",
        "excess p99 ms",
        "Background against tails: the frontier",
        "To repeat the search: --objective slo",
    ):
        assert part in shown
    assert "times the simulated one" not in shown  # what a device gave needs no margin
    assert cli("plan", MIX, *SEARCH, "--verify", 1, "-o", "again.json").code == 0
    assert store.load("again.json", Plan) == plan


def test_run_says_which_bound_is_missed_and_strict_ends_with_3(cli: Cli) -> None:
    assert cli("plan", MIX, "--policy", "shared").code == 0
    ran = cli("run", "plan.json", "--seconds", 0.5, "--strict")
    assert ran.code == 3
    assert "bert misses its bound" in ran.err
    assert cli("plan", MIX, "--policy", "yield").code == 0
    assert cli("run", "plan.json", "--seconds", 0.5, "--strict").code == 0


def test_comparison_shows_tails_against_bounds_and_what_background_does(cli: Cli) -> None:
    cli.monkeypatch.setattr(screen.out, "width", 200)  # headers on one line
    policies = "shared,masks,launches-4-2,yield,move,search"
    done = cli(
        "compare", MIX, "--policies", policies, "--seconds", 1, "--results", "r.jsonl",
        "--set", "batches=0", "--set", "trials=4", "-o", "kept",
    )  # fmt: skip
    assert done.code == 0, done.err
    said = words(done.out)
    assert "most background with every bound and floor kept" in said
    assert "Services and background" in said and "longest pause ms" in said
    (stored,) = store.load_results(Path("r.jsonl")).comparisons
    assert stored.objective == "slo"
    assert stored.bounds_ms[0] is not None and stored.bounds_ms[1] is None
    entries = {entry.policy: entry for entry in stored.entries}
    tails = {name: worst_tail_of(entry.together, stored) for name, entry in entries.items()}
    background = {name: background_of(entry.together, stored) for name, entry in entries.items()}
    assert tails["shared"] > 1 >= tails["search"]
    assert background["search"] > background["yield"]
    (excess,) = entries["yield"].services
    assert 0 < excess.excess_us.p99 < 2 * 313 + 50  # depth times the longest stretch
    assert entries["yield"].plan != entries["shared"].plan
    assert Path("kept/launches-4-2.plan.json").exists()
    drawn = cli("results", "r.jsonl", "--markdown").out
    assert "### Services (modelled" in drawn and "p99 of excess, ms" in drawn
    (row,) = (line for line in drawn.splitlines() if "| yield |" in line)
    assert f"{background['yield']:.1%}" in row


def test_comparison_takes_the_policies_for_services_unless_told(cli: Cli) -> None:
    done = cli("compare", MIX, "--seconds", 0.3, "--set", "batches=0", "--json")
    assert done.code == 0, done.err
    ran = [one["policy"] for one in done.data["policies"]]
    assert ran == [
        "shared", "timeslice", "masks", "launches-16-8", "launches-4-2", "launches-1-1", "yield",
        "move", "search",
    ]  # fmt: skip
    for name in ("priority", "priority-segments", "mps"):
        assert f"{name} is left out" in done.err
