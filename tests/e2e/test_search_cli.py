"""``eclip plan --policy search`` as its users meet it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commands import Cli, Outcome, assert_refused, started
from eclip.core.plan import Plan
from eclip.errors import UsageError
from eclip.files import store
from eclip.files.observations import Observations, ObservedRun
from eclip.planner.case import find_earlier, make_case
from waiting import PATIENCE_S

MIX = "vgg19:8,squeezenet:8"


def eclip(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eclip", *arguments],
        cwd=folder,
        env=os.environ | {"COLUMNS": "160"},  # of what a table is cut to
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def search(folder: Path, *more: str, out: str = "plan.json") -> subprocess.CompletedProcess[str]:
    return eclip(folder, "plan", MIX, "--policy", "search", "--batches", "2", "-o", out, *more)


def test_search_says_why_it_won_and_can_be_repeated(tmp_path: Path) -> None:
    first = search(tmp_path, "--seed", "3")
    assert first.returncode == 0, first.stderr
    for words in ("against plain streams", "best static masks", "frontier", "--seed 3 --batches 2"):
        assert words in first.stdout
    search(tmp_path, "--seed", "3", out="again.json")
    assert store.load(tmp_path / "again.json", Plan) == store.load(tmp_path / "plan.json", Plan)
    shown = eclip(tmp_path, "explain", "plan.json", "--json")
    data = json.loads(shown.stdout)
    assert data["evidence"]["trials_modelled"] is True
    assert data["variants"] == [[0, 1], [0], [1]]
    ran = eclip(tmp_path, "run", "plan.json", "--seconds", "0.2", "-o", "run.json", "--json")
    assert ran.returncode == 0, ran.stderr


def test_worker_that_nobody_asks_anything_does_not_stop_a_search(tmp_path: Path) -> None:
    mix = "alexnet:8@1000rps,squeezenet:8@0.01rps"
    arguments = ("--policy", "search", "--batches", "1", "--verify", "2")
    done = eclip(tmp_path, "plan", mix, *arguments, "-o", "plan.json")
    assert done.returncode == 0, done.stderr
    shown = eclip(tmp_path, "explain", "plan.json")
    assert shown.returncode == 0, shown.stderr
    assert "search 1" in shown.stdout  # a plan that was found has run, too


def test_verify_tries_baselines_and_finalists_and_keeps_the_best(tmp_path: Path) -> None:
    done = search(tmp_path, "--verify", "2", "--objective", "energy")
    assert done.returncode == 0, done.stderr
    evidence = store.load(tmp_path / "plan.json", Plan).evidence
    assert evidence is not None
    assert evidence.objective == "energy"
    labels = [trial.label for trial in evidence.trials]
    assert labels[:2] == ["plain streams", "best static masks"]
    finalists = [label for label in labels if label.startswith("search")]
    assert 1 <= len(finalists) <= 2
    assert set(labels[2:]) <= {*finalists, "plain streams, kernels for fewer units"}
    assert [trial.chosen for trial in evidence.trials].count(True) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--objective", "speed"], "throughput"),
        (["--weights", "1,x"], "--weights '1,x'"),
        (["--weights", "1,1,1"], "3 weights given for a mix of 2 workers"),
        (["--objective", "latency"], "throughput, energy, slo"),
        (["--objective", "slo"], "the objective slo needs a service"),
        (["--objective", "slo", "--weights", "1,2"], "weights stand in the mix"),
        (["--fairness", "2"], "0 to 1"),
        (["--batches", "-1"], "at least 0"),
        (["--verify", "2", "--device", "abacus"], "sim"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    cli: Cli, tmp_path: Path, arguments: list[str], words: str
) -> None:
    command = ("plan", MIX, "--policy", "search", "--batches", 2, "-o", "plan.json")
    assert_refused(cli(*command, *arguments), words)
    assert not (tmp_path / "plan.json").exists()


def test_verify_without_search_is_refused(cli: Cli) -> None:
    assert_refused(cli("plan", MIX, "--verify", 3), "--policy search")


HUNT = ("plan", MIX, "--policy", "search", "--seconds", "600", "-o", "plan.json")
BATCH = "eclip.planner.search.candidates:Hunt.try_all"


def test_interrupted_search_keeps_the_best_plan_until_then(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    mark = tmp_path_factory.mktemp("mark") / "tried"
    with started(*HUNT, folder=tmp_path, mark=mark, place=BATCH, times=3) as child:
        os.killpg(child.pid, signal.SIGINT)
        _, errors = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 130
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == ("eclip: stopped early; plan.json has the best plan so far")
    assert store.load(tmp_path / "plan.json", Plan).evidence is not None
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_search_that_is_killed_leaves_the_plan_that_was_there(tmp_path: Path) -> None:
    search(tmp_path)
    before = (tmp_path / "plan.json").read_bytes()
    mark = tmp_path / "mark"
    with started(*HUNT, folder=tmp_path, mark=mark, place=BATCH, times=3) as child:
        child.kill()
        assert child.wait(PATIENCE_S) == -signal.SIGKILL
    assert (tmp_path / "plan.json").read_bytes() == before


def compare(cli: Cli, mix: str, *more: str) -> Outcome:
    settings = ("trials=2", "trial-seconds=0.1", "trace-ms=0", "batches=2")
    rounds = ("--seconds", "0.1", *(word for one in settings for word in ("--set", one)))
    searching = ("--policies", "shared,search", "--verify", "1")
    return cli("compare", mix, *rounds, *searching, *more)


def test_search_goes_on_from_an_earlier_one_and_says_what_it_cannot_go_on_from(
    cli: Cli, tmp_path: Path
) -> None:
    first = compare(cli, MIX, "--refine", "1", "-o", "first")
    assert first.code == 0, first.err
    refine = ("--refine", "0.1")
    earlier = ("--set", "earlier=first/observations.json.gz")
    second = compare(cli, MIX, *refine, *earlier, "-o", "second")
    assert second.code == 0, second.err
    before, after = (
        store.load(tmp_path / folder / "observations.json.gz", Observations)
        for folder in ("first", "second")
    )
    assert "modelled" in cli("inspect", "first/observations.json.gz").out
    begun = {run.homes for run in after.runs}
    best = max(before.runs, key=lambda run: sum(fair_shares(run)))
    assert best.homes in begun
    with pytest.raises(UsageError, match=r"first.observations\.json\.gz was simulated"):
        find_earlier(tmp_path / "first/observations.json.gz", make_case(MIX), modelled=False)
    (tmp_path / "broken.json.gz").write_bytes(b"no gzip")
    for mix, more, words in (
        (MIX, earlier, "give refine, too"),
        ("albert:8,alexnet:8", (*refine, *earlier), f"alexnet:8 to go on from, only of {MIX}"),
        (MIX, (*refine, "--set", "earlier=none.json.gz"), "none.json.gz"),
        (MIX, (*refine, "--set", "earlier=broken.json.gz"), "broken.json.gz"),
        (MIX, (*refine, "--set", "earlier=second/search.plan.json"), "search.plan.json"),
    ):  # fmt: skip
        assert_refused(compare(cli, mix, *more), words)


def fair_shares(run: ObservedRun) -> list[float]:
    """What every worker got, or nothing if that was not shared fairly."""
    shares = [rate / own for rate, own in zip(run.rates_rps, run.alone_rps, strict=True)]
    return shares if min(shares) > 0.75 * max(shares) else [0.0]
