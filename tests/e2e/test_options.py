"""Options as their users meet them: strictness, shares, devices and rare settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import Cli, assert_refused
from eclip.core.plan import Plan, Processes, Turns
from eclip.core.runlog import RunLog
from eclip.files import store

TOO_MUCH = "alexnet:8@100000rps"


# --- Strict -----------------------------------------------------------------------------------


def test_strict_exits_with_3_where_a_worker_is_overloaded(cli: Cli) -> None:
    command = ("compare", TOO_MUCH, "--policies", "shared", "--seconds", 0.1)
    lenient, strict = cli(*command), cli(*command, "--strict")
    assert (lenient.code, strict.code) == (0, 3)
    for outcome in (lenient, strict):
        assert "alexnet: offered" in outcome.out and "overloaded, its queue grew" in outcome.out
        assert outcome.err.splitlines()[-1].endswith("miss a bound or floor: shared")
        assert "Traceback" not in outcome.err
    assert cli("plan", TOO_MUCH, "--policy", "shared", "--strict").code == 0  # nothing has run
    assert cli("run", "plan.json", "--seconds", 0.1).code == 0
    assert cli("run", "plan.json", "--seconds", 0.1, "--strict").code == 3


def test_strict_exits_with_0_where_all_is_well(cli: Cli) -> None:
    command = ("compare", "alexnet:8", "--policies", "shared", "--seconds", 0.1, "--strict")
    assert cli(*command).code == 0


def test_strict_exits_with_3_where_a_search_misses_a_bound(cli: Cli) -> None:
    mix = "alexnet:8@200rps/0.5ms,vgg19:8"
    search = ("plan", mix, "--policy", "search", "--batches", 0, "--objective", "throughput")
    outcome = cli(*search, "--strict")
    assert outcome.code == 3
    assert "alexnet misses its bound" in outcome.err and "at most 0.50 ms" in outcome.err
    assert store.load("plan.json", Plan).evidence is not None  # the plan is kept all the same
    assert cli(*search).code == 0


# --- Plans ------------------------------------------------------------------------------------


def test_plans_say_how_workers_share_the_device(cli: Cli) -> None:
    mix = "alexnet:8,vgg19:8"
    for arguments, sharing in (
        (("--policy", "timeslice"), Turns()),
        (("--policy", "mps", "--shares", "60,30"), Processes((60, 30))),
        (("--policy", "mps", "--shares", "50"), Processes((50, 50))),
    ):
        assert cli("plan", mix, *arguments).code == 0
        assert store.load("plan.json", Plan).sharing == sharing
    assert cli("plan", mix, "--policy", "mps-model").code == 0
    assert isinstance(store.load("plan.json", Plan).sharing, Processes)


@pytest.mark.parametrize("shares", ["0", "101", "50,", "a", "33.3", "nan", "1,2,3"])
def test_shares_that_mean_nothing_are_refused(cli: Cli, shares: str) -> None:
    refused = cli("plan", "alexnet:8,vgg19:8", "--policy", "mps", f"--shares={shares}")
    assert_refused(refused)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--objective", "energy"),
        ("--weights", "1,1"),
        ("--fairness", "0.8"),
        ("--verify", "1"),
        ("--refine", "1"),
        ("--earlier", "o.json.gz"),
        ("--seconds", "20"),
        ("--batches", "2"),
        ("--seed", "1"),
        ("--usual-kernels", None),
    ],
)
def test_what_only_a_search_knows_is_refused_elsewhere(
    cli: Cli, option: str, value: str | None
) -> None:
    refused = cli("plan", "alexnet:8,vgg19:8", option, *([] if value is None else [value]))
    assert_refused(refused, f"{option} needs --policy search")
    assert not Path("plan.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--shares", "60"), "--shares needs --policy mps"),
        (("--tolerance", "0.05"), "--tolerance needs --policy model or kernel or mps-model"),
        (("--policy", "model", "--switch-max", "14"), "--switch-max needs --policy eclip"),
        (("--policy", "search", "--earlier", "o.json.gz"), "--earlier needs --refine"),
        (("--device", "cuda"), "--device needs --verify"),
        (
            ("--policy", "search", "--objective", "energy", "--weights", "2,1"),
            "weights go with the objective throughput",
        ),
    ],
)
def test_option_that_would_be_ignored_is_refused(
    cli: Cli, arguments: tuple[str, ...], words: str
) -> None:
    assert_refused(cli("plan", "alexnet:8,vgg19:8", *arguments), words)
    assert not Path("plan.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compare", "alexnet:8", "--policies", "shared", "--verify", 1), "the policy search"),
        (("compare", "alexnet:8", "--load", 0.5, "--verify", 1, "--refine", 1), "full load"),
        (("calibrate", "--from", "h200", "--runs", 3), "--runs is for measuring"),
        (("calibrate", "--topology", "h200"), "--topology needs --from"),
        (("results", "r.jsonl", "--json", "--into", "page.md"), "--into"),
        (("results", "r.jsonl", "--json", "--markdown"), "--markdown"),
        (("bench", "solver", "--gpu", 0), "bench device"),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    cli: Cli, arguments: tuple[object, ...], words: str
) -> None:
    assert_refused(cli(*arguments), words)


# --- Runs -------------------------------------------------------------------------------------


def test_trace_is_cut_to_a_short_run_unless_it_is_asked_for(cli: Cli) -> None:
    assert cli("plan", "alexnet:8").code == 0
    assert cli("run", "plan.json", "--seconds", 0.01).code == 0
    assert store.load("run.json", RunLog).kernels.window_ns == 10_000_000
    assert_refused(cli("run", "plan.json", "--seconds", 0.01, "--trace-ms", 11), "trace less")
    assert cli("run", "plan.json", "--seconds", 0.01, "--trace-ms", 5).code == 0
    assert store.load("run.json", RunLog).kernels.window_ns == 5_000_000


@pytest.mark.parametrize("device", ["sim:1", "cuda:", "cuda:x", "cuda:-1", "CUDA", "", "cuda:1:1"])
def test_device_that_is_none_is_refused(cli: Cli, device: str) -> None:
    assert cli("plan", "alexnet:8").code == 0
    assert_refused(cli("run", "plan.json", f"--device={device}"))


# --- Rare settings ----------------------------------------------------------------------------


def test_settings_reach_the_comparison(cli: Cli) -> None:
    outcome = cli(
        "compare", "alexnet:8,vgg19:8", "--policies", "masks", "--seconds", 0.1, "-o", "kept",
        "--set", "trials=3", "--set", "trial-seconds=0.05", "--set", "trace-ms=2", "--json",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    (entry,) = outcome.data["comparison"]["entries"]
    assert len(entry["trials"]) == 3
    assert store.load("kept/masks.run.json", RunLog).kernels.window_ns == 2_000_000


def test_wrong_setting_lists_the_right_ones(cli: Cli) -> None:
    refused = cli("compare", "alexnet:8", "--set", "trails=3")
    assert_refused(refused, "'trails'; did you mean trials?", "warmup", "usual-kernels")
    for own in ("seed=1", "verify=2", "command=x", "search-seconds=1"):  # have options, or none
        assert_refused(cli("compare", "alexnet:8", "--set", own), own.partition("=")[0], "trials")
