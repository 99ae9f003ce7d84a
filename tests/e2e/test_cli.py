"""The command line as its users meet it: the main paths, and every way to get it wrong."""

from __future__ import annotations

import gzip
import html
import importlib.util
import itertools
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from commands import Cli, assert_refused, started
from eclip.core.calibration import Calibration
from eclip.core.runlog import RunLog
from eclip.files import store
from eclip.files.observations import Observations
from eclip.tune import fit
from waiting import PATIENCE_S

# The main paths


@pytest.mark.parametrize(
    ("number", "topology"),
    [
        pytest.param(number, topology, marks=[pytest.mark.long] if (number + place) % 2 else [])
        for place, topology in enumerate(["h200", "mi50"])
        for number in range(1, 8)
    ],
)
def test_paper_mixes_compare_under_all_policies(cli: Cli, number: int, topology: str) -> None:
    outcome = cli(
        "compare", f"paper/{number}", "--policies", "all", "--topology", topology,
        "--seconds", 0.5, "--set", "trials=4", "--set", "batches=0", "--json",
    )  # fmt: skip
    assert outcome.code == 0
    assert outcome.data["modelled"] is True
    by_policy = {one["policy"]: one for one in outcome.data["policies"]}
    assert list(by_policy) == [
        *("shared", "timeslice", "model", "masks", "kernel", "eclip", "search")
    ]
    for one in by_policy.values():
        assert one["stp"] > 0
        assert 0 < one["fairness"] <= 1
        assert one["joules_per_request"] > 0
        for worker in one["workers"]:
            assert worker["rate_rps"] > 0
            assert worker["p99_ms"] >= worker["p50_ms"] > 0
    assert by_policy["kernel"]["switches_per_request"] > by_policy["eclip"]["switches_per_request"]
    assert all(w["switches_per_request"] <= 14 for w in by_policy["eclip"]["workers"])
    table = outcome.data["table_i"]
    assert set(table["paper"]) == {"KW-IOCTL", "KW-prealloc", "ECLIP"}
    assert table["ours"] == {
        name: by_policy[name]["switches_per_request"] for name in ("kernel", "eclip")
    }


def test_plan_explain_run_inspect_report(cli: Cli) -> None:
    assert cli("plan", "paper/4", "--policy", "eclip", "-o", "plan.json").code == 0
    explained = cli("explain", "plan.json")
    assert "resnet152" in explained.out
    assert "proven optimum" in explained.out
    assert "modelled" not in explained.out  # the H200's profiles are measured
    cli("plan", "paper/4", "--topology", "mi50", "-o", "modelled.json")
    assert "modelled" in cli("explain", "modelled.json").out
    assert cli("run", "plan.json", "--seconds", 0.3, "-o", "run.json").code == 0
    for file in ("plan.json", "run.json"):
        assert cli("inspect", file).code == 0
        assert cli("inspect", file, "--json").data
    done = cli("report", "run.json", "-o", "report.html", "--trace", "trace.json.gz")
    assert done.code == 0
    assert "eclip report" in Path("report.html").read_text()
    assert json.loads(gzip.decompress(Path("trace.json.gz").read_bytes()))["traceEvents"]


def test_demo_compares_all_that_can_be_simulated_and_keeps_it(cli: Cli) -> None:
    outcome = cli("demo", "-o", "out", "--json")
    assert outcome.code == 0
    first, second = outcome.data["parts"]
    for policy in ("priority", "mps"):  # what the simulator cannot run is named
        assert f"{policy} is left out: simulator of NVIDIA H200" in outcome.err
    for part in (first, second):
        assert part["modelled"] is True
        assert "95% interval" in part["verdict"]
        assert {"shared", "timeslice", "masks", "search"} <= {
            one["policy"] for one in part["policies"]
        }
    assert first["verdict"].startswith("Take search: ")
    # `move` keeps the bound here by a margin that is smaller than its interval.
    assert second["verdict"].startswith("Not decided: move kept every bound here")
    assert (first["load"], second["mix"]) == (
        "closed loop",
        "bert:1@300rps/5ms,vgg19:32@background",
    )
    assert {
        "closed-loop/comparison.json",
        "closed-loop/search.plan.json",
        "closed-loop/masks.run.json",
        "services/search.run.json",
    } <= {str(path.relative_to("out")) for path in Path("out").rglob("*.*")}
    page = Path("out/report.html").read_text()
    assert len(page.encode()) < 1_500_000
    # What was kept draws the same chapters.
    kept = sorted(Path("out").glob("*/comparison.json")) + sorted(Path("out").glob("*/*.run.json"))
    assert cli("report", *kept, "-o", "again.html").code == 0
    again = Path("again.html").read_text()
    for part, text in itertools.product((first, second), (page, again)):
        assert part["verdict"] in html.unescape(re.sub(r"</?span[^>]*>", "", text))
    assert again.count('role="tab"') == page.count('role="tab"') == 16


def test_compare_is_reproducible_and_the_seed_matters(cli: Cli) -> None:
    command = ("compare", "2xalexnet:8@500rps", "--policies", "shared", "--seconds", 0.5, "--json")
    first, again, other = cli(*command), cli(*command), cli(*command, "--seed", 1)
    # All but the second at which it ended.
    dates = [str(one.data["comparison"]["date"]) for one in (first, again)]
    assert first.out.replace(dates[0], "") == again.out.replace(dates[1], "")
    assert first.data["policies"] != other.data["policies"]


def test_arrivals_from_a_csv_are_all_served(cli: Cli) -> None:
    Path("arrivals.csv").write_text("time_s,worker\n0.01,alexnet\n0.02,vgg19\n0.05,alexnet\n")
    outcome = cli(
        "compare", "alexnet,vgg19", "--policies", "model", "--load", "arrivals.csv",
        "--seconds", 0.2, "--json",
    )  # fmt: skip
    assert [worker["requests"] for worker in outcome.data["policies"][0]["workers"]] == [2, 1]


def test_a_model_of_ones_own_is_planned_from_its_profile(cli: Cli) -> None:
    from eclip.core.topology import Topology
    from eclip.files import store
    from eclip.models.library import file_of
    from eclip.models.synthetic import synthetic_profile

    h200 = store.load_builtin("h200", Topology)
    mine = synthetic_profile(1, 30, h200, "my.package:factory", 4)
    Path("mine").mkdir()
    store.save(mine, file_of(Path("mine"), mine.model))
    outcome = cli(
        "compare", "bert:8,my.package:factory:4@50rps", "--policies", "eclip",
        "--profiles", "mine", "--seconds", 0.2, "--json",
    )  # fmt: skip
    assert outcome.code == 0
    names = [worker["model"] for worker in outcome.data["policies"][0]["workers"]]
    assert names == ["bert:8", "my.package:factory:4"]


def test_calibrate_fits_stored_runs_without_a_gpu(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = store.load_builtin("h200", Observations)
    mixes = ("paper/7", "gpt2:8,vit_b_16:8")  # the cheapest to simulate
    few = [run for run in whole.runs if run.mix in mixes][::4]
    store.save(msgspec.structs.replace(whole, runs=tuple(few)), Path("few.json"))
    monkeypatch.setattr(fit, "_STEPS", (4,))
    outcome = cli("calibrate", "--from", "few.json", "-o", "mine.json", "--json")
    assert outcome.code == 0
    errors = outcome.data["errors"]
    assert {f"not fitted: {mix}" for mix in mixes} < set(errors)
    fitted = errors["all: the calibration written"]
    assert fitted["runs"] == len(few)
    assert fitted["rate"] < 0.1
    assert fitted["power"] < 0.1
    mine = store.load(Path("mine.json"), Calibration)
    assert outcome.data["interference"] == msgspec.structs.asdict(mine.interference)
    assert f"{len(few)} runs of 2 mixes" in mine.source
    assert mine.fingerprint.driver == whole.fingerprint.driver
    compared = cli("compare", "alexnet", "--calibration", "mine.json", "--seconds", 0.1, "--json")
    assert compared.code == 0
    assert "Runs" in cli("inspect", "few.json").out
    assert "crowding" in cli("inspect", "mine.json").out
    again = cli("calibrate", "--from", "few.json", "--calibration", "mine.json", "-o", "mine.json")
    assert "not fitted" in again.out
    # Fitted once more, the source does not tell of the former fit.
    assert len(store.load(Path("mine.json"), Calibration).source) == len(mine.source)
    assert_refused(cli("run", "few.json"), "observations", "plan")


def test_topologies_are_listed_and_shown(cli: Cli) -> None:
    listed = cli("topology", "--json").data
    assert {one["name"] for one in listed} == {"a100", "h100", "h200", "mi50", "mi300x"}
    assert all(one["source"] for one in listed)
    assert cli("topology", "mi50", "--json").data["slice_units"] == [15, 15, 15, 15]
    assert "132 SMs" in cli("topology", "h200").out


def test_more_lanes_than_hardware_queues_are_warned_of(cli: Cli) -> None:
    outcome = cli("compare", "9xalexnet", "--policies", "shared", "--topology", "mi50",
                  "--seconds", 0.1, "--json")  # fmt: skip
    assert outcome.code == 0
    assert "hardware queues" in outcome.err
    assert outcome.data["warnings"]


# Without a GPU

no_cuda = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is not None, reason="cuda-bindings are installed here"
)


@no_cuda
def test_doctor_says_what_is_missing_and_how_to_get_it(cli: Cli) -> None:
    outcome = cli("doctor", "--json")
    assert outcome.code == 1
    missing = {one["what"]: one["remedy"] for one in outcome.data if one["state"] == "missing"}
    assert missing["package cuda.bindings"] == "pip install cuda-bindings"
    assert missing["package pynvml"] == "pip install nvidia-ml-py"
    assert "driver and GPU" in missing
    shown = " ".join(cli("doctor").out.split())
    assert "pip install cuda-bindings nvidia-ml-py 'cupti-python>=13.0,<13.1'" in shown
    assert "eclip[cuda]" not in shown  # it is on no registry


@no_cuda
@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", "alexnet", "--device", "cuda"),
        ("demo", "--device", "cuda"),
        ("bench", "device"),
        ("profile", "alexnet:8"),
        ("calibrate",),
    ],
)
def test_a_missing_gpu_is_one_line(cli: Cli, arguments: tuple[str, ...]) -> None:
    outcome = cli(*arguments)
    assert outcome.code == 1
    assert "Traceback" not in outcome.err
    assert [line for line in outcome.err.splitlines() if line.strip()][-1].startswith("eclip: ")


# Every way to get it wrong


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        (("compare", "albrt:8"), "albert"),
        (("compare", "paper/9"), "paper/1"),
        (("compare", "albert", "--policies", "eclips"), "timeslice"),
        (("plan", "albert", "--policy", "magic"), "timeslice"),
        (("plan", "albert", "--topology", "h300"), "h200"),
        (("compare", "albert", "--device", "tpu"), "sim"),
        (("topology", "h300"), "h200"),
        (("bench", "everything"), "simulator"),
        (("calibrate", "--device", "sim"), "cuda"),
    ],
)
def test_a_wrong_name_lists_the_right_ones(
    cli: Cli, arguments: tuple[str, ...], right: str
) -> None:
    assert_refused(cli(*arguments), "choose one of", right)


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        (("compare", "albrt:8"), "albert"),
        (("compare", "albert", "--policies", "eclips"), "eclip"),
        (("plan", "albert", "--policy", "Serach"), "search"),
        (("plan", "albert", "--policy", "search", "--objective", "enrgy"), "energy"),
        (("plan", "albert", "--topology", "h20"), "h200"),
        (("compare", "albert", "--device", "cudo"), "cuda"),
        (("compare", "albert", "--set", "trace_ms=3"), "trace-ms"),
        (("comparr", "albert"), "compare"),
        (("compare", "albert", "--secons", "3"), "--seconds"),
    ],
)
def test_mistyped_name_is_met_with_the_right_one(
    cli: Cli, arguments: tuple[str, ...], right: str
) -> None:
    refused = cli(*arguments)
    assert_refused(refused)
    assert re.search(rf"did you mean '?{right}'?\?", refused.err, re.IGNORECASE), refused.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", ""),
        ("compare", "albert:0"),
        ("compare", "99xalbert"),
        ("compare", "albert@0rps"),
        ("compare", "albert", "--seconds", "0"),
        ("compare", "albert", "--seconds", "nan"),
        ("compare", "albert", "--seconds", "1e12"),
        ("compare", "albert", "--set", "trace-ms=-1"),
        ("compare", "albert@1000000000rps", "--seconds", "3600"),
        ("compare", "albert", "--policies", "shared,shared"),
        ("plan", "albert", "--switch-max", "-1"),
        ("plan", "albert", "--tolerance", "-0.1"),
        ("plan", "albert", "--profiles", "nowhere"),
        ("plan", "albert", "--topology", "nowhere.json"),
        ("compare", "albert", "--load", "nowhere.csv"),
        ("report", "nowhere.json"),
        ("calibrate", "--from", "nowhere.json"),
        ("calibrate", "--from", "h200", "--topology", "mi50"),
        ("calibrate", "--mixes", "albert:0"),
        ("profile", "albert"),
        ("profile", "albert:zero"),
        ("profile", "albert:0"),
    ],
)
def test_bad_values_are_one_line(cli: Cli, arguments: tuple[str, ...]) -> None:
    assert_refused(cli(*arguments))


@pytest.mark.parametrize("command", ["inspect", "explain", "run", "report"])
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\x00\xff\x1f\x8b", b'{"format":"eclip/plan","version":99,"body":{}}', b"[1, 2]"],
)
def test_a_damaged_or_foreign_file_is_named(cli: Cli, command: str, content: bytes) -> None:
    Path("some.json").write_bytes(content)
    assert_refused(cli(command, "some.json"), "some.json")


def test_a_file_of_the_wrong_kind_is_named(cli: Cli) -> None:
    from eclip.core.topology import Topology
    from eclip.files import store

    store.save(store.load_builtin("h200", Topology), Path("h200.json"))
    assert_refused(cli("report", "h200.json"), "h200.json", "run")


def test_a_plan_for_other_kernels_is_refused(cli: Cli) -> None:
    from eclip.core.topology import Topology
    from eclip.files import store
    from eclip.models.synthetic import synthetic_profile

    cli("plan", "alexnet:8", "-o", "plan.json")
    other = synthetic_profile(1, 50, store.load_builtin("h200", Topology), "alexnet", 8)
    Path("mine").mkdir()
    store.save(other, Path("mine/alexnet-8.json.gz"))
    assert_refused(cli("run", "plan.json", "--profiles", "mine"), "alexnet", "plan again")


def test_a_foreign_file_is_never_overwritten(cli: Cli) -> None:
    Path("thesis.txt").write_text("years of work")
    assert_refused(cli("plan", "alexnet", "-o", "thesis.txt"), "thesis.txt")
    cli("plan", "alexnet", "-o", "plan.json")
    assert_refused(cli("run", "plan.json", "--seconds", 0.1, "-o", "plan.json"), "plan.json")
    cli("run", "plan.json", "--seconds", 0.1, "-o", "run.json")
    assert_refused(cli("report", "run.json", "-o", "thesis.txt"), "thesis.txt")
    assert Path("thesis.txt").read_text() == "years of work"


def test_a_folder_that_cannot_be_written_is_named(cli: Cli) -> None:
    assert_refused(cli("plan", "alexnet", "-o", "missing/plan.json"), "missing/plan.json")
    Path("file").write_text("")
    assert_refused(cli("compare", "alexnet", "--seconds", 0.1, "-o", "file/deeper"), "file/deeper")


def test_an_interrupt_leaves_one_line_and_no_part_of_a_file(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, cli: Cli
) -> None:
    cli("plan", "alexnet", "-o", "plan.json")
    mark = tmp_path_factory.mktemp("mark") / "runs"
    command = ("run", "plan.json", "--seconds", 80000, "-o", "run.json")
    place = "eclip.sim.device:SimSession.run"
    with started(*command, folder=tmp_path, mark=mark, place=place, times=2) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "Traceback" not in out + err
    last = err.strip().splitlines()[-1]
    assert last.startswith("eclip: stopped")
    # Where it was stopped before anything was measured there is no file, otherwise a whole one.
    kept = [] if last.startswith("eclip: stopped before") else ["run.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", *kept]
    for name in kept:
        assert store.load(tmp_path / name, RunLog).duration_ns < 80_000 * 10**9


def test_two_writers_of_one_file_leave_it_whole(tmp_path: Path, cli: Cli) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-m", "eclip", "plan", mix, "-o", "plan.json"],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
        )
        for mix in ("paper/7", "paper/5")
    ]
    assert [writer.wait(timeout=PATIENCE_S) for writer in writers] == [0, 0]
    assert cli("inspect", "plan.json", "--json").data["mix"]["name"] in ("paper/7", "paper/5")
