"""``eclip compare`` in rounds, with results that accumulate, and ``eclip results``."""

from __future__ import annotations

import json
import re
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest

import eclip
from commands import Cli, assert_refused, started
from eclip.cli import demo
from eclip.core.device import Window
from eclip.core.load import Load
from eclip.core.measures import LEVELS
from eclip.core.runlog import RunLog
from eclip.errors import DeviceError
from eclip.files import store
from eclip.files.comparison import Comparison
from eclip.reports.results import BEGIN, END
from eclip.sim.device import SimDevice, SimSession
from waiting import PATIENCE_S

SETTINGS = ("--set", "trials=4", "--set", "trial-seconds=0.05", "--set", "batches=0")
QUICK = ("--seconds", 0.1, *SETTINGS)


def test_rounds_are_summed_up_and_added_to_the_results(cli: Cli) -> None:
    command = ("compare", "alexnet:8,vgg19:8", *QUICK, "--repeats", 3, "--results", "r.jsonl")
    outcome = cli(*command, "--json")
    assert outcome.code == 0
    shown = outcome.data["comparison"]
    (stored,) = store.load_results(Path("r.jsonl")).comparisons
    assert (stored.mix, stored.repeats, stored.modelled) == ("alexnet:8,vgg19:8", 3, True)
    assert stored.command.startswith("eclip compare alexnet:8,vgg19:8 --seconds 0.1")
    assert [entry.policy for entry in stored.entries] == [
        entry["policy"] for entry in shown["entries"]
    ]
    assert shown["left_out"] == [
        "priority: simulator of NVIDIA H200 has no priorities",
        "mps: simulator of NVIDIA H200 has no processes",
        "mps-model: simulator of NVIDIA H200 has no processes",
    ]
    for entry in stored.entries:
        assert len(entry.runs) == 3
        mean = statistics.fmean(run.stp for run in entry.runs)
        assert entry.together.stp == pytest.approx(mean, rel=1e-3)
        assert entry.together.seconds == pytest.approx(0.3)
    masks = stored.entry("masks")
    assert masks is not None and masks.setting in [trial.setting for trial in masks.trials]

    printed = cli(*command)
    assert "3 rounds, each in another order" in printed.out
    assert "median" in printed.out and masks.setting in printed.out
    assert len(store.load_results(Path("r.jsonl")).comparisons) == 2


def test_one_round_is_what_it_was(cli: Cli) -> None:
    command = ("compare", "alexnet,vgg19", "--policies", "shared,eclip", "--seconds", 0.2)
    printed = cli(*command)
    assert printed.code == 0
    assert "rounds" not in printed.out and "median" not in printed.out
    assert len(cli(*command, "--json").data["policies"]) == 2


def test_tail_latency_under_a_part_of_the_load(cli: Cli) -> None:
    outcome = cli(
        "compare", "alexnet:8,vgg19:8", "--policies", "shared,model", "--load", 0.6,
        "--set", "requests=500", "--seconds", 0.3, "--repeats", 2, "--results", "r.jsonl",
    )  # fmt: skip
    assert outcome.code == 0
    assert "Poisson at 60% of the closed-loop rates under shared" in outcome.out
    assert "p99 of all runs together" in outcome.out
    (stored,) = store.load_results(Path("r.jsonl")).comparisons
    assert stored.load_part == 0.6
    for entry in stored.entries:
        assert 500 <= sum(entry.together.requests) <= 620
        assert min(entry.together.requests) >= 50
    drawn = cli("results", "r.jsonl", "--markdown")
    assert "### Latency (modelled" in drawn.out


def test_plan_of_a_file_takes_part(cli: Cli) -> None:
    cli("plan", "alexnet,vgg19", "--policy", "model", "-o", "mine.json")
    outcome = cli(
        "compare", "alexnet,vgg19", "--policies", "shared,model", "--plan", "mine.json",
        "--plan", "twin=mine.json", "--seconds", 0.1, "--json", "-o", "out",
    )  # fmt: skip
    entries = {one["policy"]: one for one in outcome.data["comparison"]["entries"]}
    assert list(entries) == ["shared", "model", "mine", "twin"]
    assert entries["mine"]["plan"] == entries["model"]["plan"] != entries["shared"]["plan"]
    assert Path("out/twin.plan.json").exists()
    assert_refused(cli("compare", "alexnet", "--plan", "mine.json"), "mine", "alexnet,vgg19")
    for wrong in ("shared=mine.json", "../x=mine.json", "=mine.json"):
        refused = cli("compare", "alexnet,vgg19", "--plan", wrong)
        assert_refused(refused, "cannot name a plan")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--repeats", "0"),
        ("--load", "0"),
        ("--load", "nowhere.csv"),
        ("--load", "nan"),
        ("--objective", "speed"),
        ("--policies", "shared,mps"),
        ("--results", "missing/r.jsonl"),
        ("--set", "trials=0"),
        ("--set", "trials"),
        ("--set", "trials=many"),
        ("--set", "trials=1.5"),
        ("--set", "reopen=maybe"),
        ("--set", "warmup=nan"),
        ("--set", "magic=1"),
        ("--trials", "4"),
        ("--plan", "nowhere.json"),
    ],
)
def test_wrong_options_are_one_line(cli: Cli, arguments: tuple[str, ...]) -> None:
    assert_refused(cli("compare", "alexnet:8", "--seconds", 0.1, *arguments))


def test_load_needs_workers_without_rates(cli: Cli) -> None:
    assert_refused(cli("compare", "alexnet@100rps", "--load", 0.5), "the load 0.5")


def test_files_that_hold_no_results_are_refused_before_anything_runs(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("thesis.txt").write_text("years of work")
    opened: list[Any] = []
    real = SimDevice.open

    def noting(*arguments: Any, **options: Any) -> Any:
        opened.append(arguments)
        return real(*arguments, **options)

    monkeypatch.setattr(SimDevice, "open", noting)
    command = ("compare", "alexnet", "--policies", "shared", "--seconds", 0.1)
    assert_refused(cli(*command, "--results", "thesis.txt"), "thesis.txt line 1")
    assert opened == []
    assert cli(*command, "--results", "new.jsonl").code == 0
    assert opened  # so it would have been seen
    assert Path("thesis.txt").read_text() == "years of work"
    assert_refused(cli("results", "thesis.txt"), "thesis.txt line 1")
    new = Path("new.jsonl").read_bytes()
    Path("cut.jsonl").write_bytes(new + new[:-20])
    drawn = cli("report", "cut.jsonl")
    assert drawn.code == 0
    assert "cut.jsonl line 2 is not an eclip file, or is damaged" in drawn.err
    Path("empty.jsonl").write_text("")
    assert_refused(cli("results", "empty.jsonl"), "no comparisons")
    assert_refused(cli("results", "nowhere.jsonl"), "nowhere.jsonl")


def test_results_are_drawn_into_a_document(cli: Cli) -> None:
    cli("compare", "alexnet", "--policies", "shared", "--seconds", 0.1, "--results", "r.jsonl")
    document = Path("page.md")
    document.write_text(f"# Mine\n\n{BEGIN}\n{END}\n\nThe end.\n")
    assert cli("results", "r.jsonl", "--into", "page.md").code == 0
    text = document.read_text()
    assert text.startswith("# Mine\n") and text.endswith("The end.\n")
    assert "| alexnet | shared |" in text
    assert cli("results", "r.jsonl", "--markdown").out.strip() in text
    assert cli("results", "r.jsonl", "--json").data[0]["mix"] == "alexnet"
    assert "shared" in cli("results", "r.jsonl").out
    assert "shared" in cli("inspect", "r.jsonl").out  # one line is an artefact like any other
    document.write_text("no marks here")
    assert_refused(cli("results", "r.jsonl", "--into", "page.md"), "page.md")
    assert document.read_text() == "no marks here"


def test_interrupt_between_rounds_keeps_what_was_measured(tmp_path: Path, cli: Cli) -> None:
    command = (
        "compare", "alexnet:8", "--policies", "shared,model", "--seconds", 0.2,
        "--repeats", 1000000, "--results", "r.jsonl", "--json",
    )  # fmt: skip
    place, mark = "eclip.sim.device:SimSession.run", tmp_path / "mark"
    with started(*command, folder=tmp_path, mark=mark, place=place, times=20) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert err.strip().splitlines()[-1].startswith("eclip: stopped early; ")
    (stored,) = store.load_results(tmp_path / "r.jsonl").comparisons
    done = [len(entry.runs) for entry in stored.entries]
    assert min(done) >= 1 and max(done) - min(done) <= 1 and stored.repeats == 1000000
    assert json.loads(out)["comparison"]["mix"] == "alexnet:8"


def test_device_that_dies_in_the_middle_is_a_failure_that_keeps_what_was_measured(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ran = SimSession.run, 0

    def dying(self: SimSession, load: Load, window: Window) -> RunLog:
        nonlocal ran
        ran += window.seconds == 0.3
        if ran == 4:
            raise DeviceError("the GPU fell off the bus")
        return run(self, load, window)

    monkeypatch.setattr(SimSession, "run", dying)
    outcome = cli(
        "compare", "alexnet:8,vgg19:8", "--policies", "shared,model", "--seconds", 0.3,
        "--repeats", 3, "--results", "r.jsonl", "--json",
    )  # fmt: skip
    assert outcome.code == 1
    last = outcome.err.splitlines()[-1]
    assert last.startswith("eclip: the comparison ended early: ")
    assert "fell off the bus; 3 of 6 runs were measured; kept in r.jsonl" in last
    (stored,) = store.load_results(Path("r.jsonl")).comparisons
    assert [len(entry.runs) for entry in stored.entries] == [1, 2]


def test_artefacts_hold_what_a_report_has_to_draw(cli: Cli) -> None:
    outcome = cli(
        "compare", "alexnet:1@300rps/5ms,vgg19:8@background", "--policies", "masks,yield,search",
        "--seconds", 0.3, "--set", "batches=1", "--set", "trials=2", "-o", "out",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    kept = store.load(Path("out/comparison.json"), Comparison)
    for entry in kept.entries:
        for curve, p99 in zip(entry.latencies_ms, entry.together.p99_ms, strict=True):
            assert len(curve) == len(LEVELS) and list(curve) == sorted(curve)
            assert curve[LEVELS.index(0.99)] == pytest.approx(p99, rel=1e-4)
        (excess,) = entry.services
        assert excess.excess_us.curve[LEVELS.index(0.5)] == pytest.approx(
            excess.excess_us.p50, rel=1e-3
        )
    (masks, yielding, search) = kept.entries
    assert all(trial.background and trial.worst_tail for trial in masks.trials)
    assert yielding.together.yields[1] > 0 == yielding.together.yields[0]
    log = store.load(Path("out/search.run.json"), RunLog)
    assert log.made is not None and log.made.command.startswith("eclip compare alexnet:1@300rps")
    assert (log.made.date, log.made.eclip) == (kept.date, kept.eclip)
    assert log.plan.evidence is not None and search.policy == "search"
    simulated = log.plan.evidence.simulated
    assert 1 < len(simulated) <= log.plan.evidence.evaluated
    assert all(0 <= background <= 1.2 and tail > 0 for background, tail in simulated)


@pytest.mark.parametrize("topology", ["mi50", "mi300x", "a100"])
def test_the_demo_has_a_service_that_every_device_can_keep(topology: str) -> None:
    mix = eclip.parse_mix(demo._usual_services(topology))
    service, background = mix.workers
    assert service.rate_rps and service.bound and service.bound.ms
    assert service.rate_rps * service.bound.ms / 1e3 == pytest.approx(1.5, rel=0.05)
    assert background.background is not None
    plan = eclip.plan(eclip.case(mix, topology), "yield")  # a service that is too fast is refused
    assert plan.gives_way


def test_demo_can_be_repeated_and_names_files_that_are_there(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eclip.cli.demo._SECONDS", (0.1, 0.1))
    monkeypatch.setattr("eclip.cli.demo._BATCHES", (0, 0))
    services = "alexnet:1@200rps/9ms,vgg19:8@background"
    command = ("demo", "--mix", "alexnet:8,vgg19:8", "--services", services)
    outcome, again = cli(*command), cli(*command)
    assert (outcome.code, again.code) == (0, 0), again.err
    assert outcome.out == again.out
    assert "(modelled: " in outcome.out
    assert len(re.findall(r"^(Take|Not decided)", outcome.out, re.MULTILINE)) == 2
    plan = re.search(r"eclip explain (\S+)", outcome.out)
    assert plan is not None and Path(plan[1]).exists()
    assert "eclip-demo/report.html" in outcome.out and Path("eclip-demo/report.html").exists()
    assert not [path for path in Path("eclip-demo").rglob("*") if path.name.endswith(".tmp")]


def test_shared_that_serves_nothing_is_no_baseline_and_no_traceback(cli: Cli) -> None:
    outcome = cli(
        "compare", "vgg19:64", "--policies", "shared,model", "--seconds", 0.001, "--repeats", 2,
        "--set", "warmup=0",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert "shared" in outcome.out


def test_json_for_scripts_names_models_as_a_mix_does(cli: Cli) -> None:
    compared = cli("compare", "alexnet:8,vgg19:8", "--policies", "model", *QUICK, "-o", "kept",
                   "--json").data  # fmt: skip
    assert compared["comparison"]["models"] == ["alexnet:8", "vgg19:8"]
    assert [worker["model"] for worker in compared["policies"][0]["workers"]] == [
        "alexnet:8",
        "vgg19:8",
    ]
    explained = cli("explain", "kept/model.plan.json", "--json").data
    assert [worker["model"] for worker in explained["workers"]] == ["alexnet:8", "vgg19:8"]
    assert explained["sharing"] == {"type": "lanes"}
    # A file is shown as it is stored.
    shown = cli("inspect", "kept/model.plan.json", "--json").data
    assert {"name": "alexnet", "batch": 8} in [worker["model"] for worker in find(shown, "workers")]


def find(data: Any, key: str) -> list[Any]:
    """The list of this name, at the top of a file or in its body."""
    found: list[Any] = data.get(key) or data["body"][key]
    return found
