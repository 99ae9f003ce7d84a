"""The API on a GPU, question by question as a user asks them: two small models of the zoo, and two
modules from Python. Profiles are measured here, so that any GPU with a calibration will do."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import eclip
from eclip.core.plan import Lanes, Processes, Turns
from eclip.cuda.device import CudaDevice
from eclip.files import store
from eclip.models.library import file_of

torch = pytest.importorskip("torch", reason="tests on a GPU need the Python package torch")

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
MIX = "alexnet:8,squeezenet:8"
SECONDS = 0.3
POLICIES = ["shared", "timeslice", "mps", "masks", "search"]
BRIEF: dict[str, Any] = {"trials": 3, "trial_seconds": 0.1, "processes": 6}
DEEP, WIDE = eclip.ModelKey("deep", 64), eclip.ModelKey("wide", 4)


def policies() -> list[str]:
    """Those that this host can run."""
    has_mps = shutil.which("nvidia-cuda-mps-control") is not None
    return [policy for policy in POLICIES if policy != "mps" or has_mps]


@pytest.fixture(scope="module", autouse=True)
def stopwatch_of_the_module() -> Iterator[None]:
    begun = time.monotonic()
    yield
    print(f"\nall of the API on a GPU: {time.monotonic() - begun:.0f} s")


def modules() -> dict[str, Any]:
    torch.manual_seed(0)
    deep = [part for _ in range(6) for part in (torch.nn.Linear(512, 512), torch.nn.GELU())]
    wide = [torch.nn.Conv2d(8, 64, 3), torch.nn.ReLU(), torch.nn.Conv2d(64, 8, 3)]
    return {
        "deep": (torch.nn.Sequential(*deep).cuda().eval(), [torch.randn(64, 512, device="cuda")]),
        "wide": (torch.nn.Sequential(*wide).cuda().eval(), [torch.randn(4, 8, 64, 64).cuda()]),
    }


@pytest.fixture(scope="module")
def folder(device: CudaDevice, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Profiles of the four models, as `eclip profile -o` keeps them."""
    from eclip.capture.named import build
    from eclip.capture.profiler import measure_profile
    from eclip.capture.torch import capture

    made = tmp_path_factory.mktemp("profiles")
    zoo = eclip.parse_mix(MIX).models
    given = {model: build(model) for model in zoo}
    given |= {key: modules()[key.name] for key in (DEEP, WIDE)}
    for model, (module, inputs) in given.items():
        profile = measure_profile(
            device, capture(module, inputs, model), energy_seconds=0.0, stress=False
        )
        eclip.save(profile, file_of(made, model))
    return made


@pytest.fixture(scope="module")
def case(device: CudaDevice, folder: Path) -> eclip.Case:
    return eclip.case(MIX, device.topology, profiles=folder)


@pytest.fixture(scope="module")
def found(case: eclip.Case) -> eclip.Plan:
    return eclip.search(case, seconds=2, device="cuda", verify=2, refine=3)


def test_plan_and_search(case: eclip.Case, found: eclip.Plan, device: CudaDevice) -> None:
    planned = eclip.plan(case, "search", seconds=1)
    assert (planned.policy, planned.modelled) == ("search", False)
    assert planned.evidence is not None and planned.evidence.modelled
    assert found.policy == "search"
    assert isinstance(found.sharing, Lanes)
    evidence = found.evidence
    assert evidence is not None
    assert evidence.device == device.title and not evidence.modelled
    assert evidence.evaluated > 0
    assert evidence.tried > 0, "the search did not go on on the device"
    assert len(evidence.trials) >= 2
    assert [trial.chosen for trial in evidence.trials].count(True) == 1
    assert all(0 < ratio < 1.3 for trial in evidence.trials for ratio in trial.ratios)


def test_save_load_run_and_report(case: eclip.Case, found: eclip.Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    eclip.save(found, file)
    assert eclip.load(file, eclip.Plan) == found
    log = eclip.run(file, device="cuda", seconds=SECONDS, case=case)
    assert log.plan == found
    assert not log.modelled
    assert set(log.requests.worker) == {0, 1}
    assert len(log.alone_rps) == 2 and min(log.alone_rps) > 0
    assert log.offered == (None, None)
    assert log.kernels.own_run and set(log.kernels.worker) == {0, 1}
    assert 0.5 < eclip.measure(log).stp < 2.2
    eclip.save(log, tmp_path / "run.json")
    assert eclip.load(tmp_path / "run.json", eclip.RunLog) == log
    page, trace = tmp_path / "report.html", tmp_path / "trace.json.gz"
    assert eclip.report([tmp_path / "run.json"], page, trace=trace, case=case) == page
    assert "<html" in page.read_text()[:1000]
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


@pytest.mark.parametrize("policy", ["timeslice", "mps"])
def test_a_plan_of_processes_is_run_like_any_other(case: eclip.Case, policy: str) -> None:
    if policy not in policies():
        pytest.skip("this host has no nvidia-cuda-mps-control")
    log = eclip.run(eclip.plan(case, policy), device="cuda", seconds=SECONDS, case=case)
    assert log.plan.policy == policy
    assert set(log.requests.worker) == {0, 1}
    assert log.kernels.worker == ()


def test_arrivals_of_a_file(case: eclip.Case, tmp_path: Path) -> None:
    arrivals = tmp_path / "arrivals.csv"
    rows = [f"{0.005 * index},{name}" for index in range(40) for name in ("alexnet", "squeezenet")]
    arrivals.write_text("\n".join(["time_s,worker", *rows]))
    plan = eclip.plan(case, "shared")
    log = eclip.run(plan, "cuda", seconds=SECONDS, arrivals=arrivals, case=case)
    assert log.offered == (40, 40)
    assert log.unfinished == (0, 0)


def test_compare(case: eclip.Case, found: eclip.Plan, device: CudaDevice, tmp_path: Path) -> None:
    named = policies()
    outcome = eclip.compare(
        case,
        named,
        device="cuda",
        seconds=SECONDS,
        plans={"mine": found},
        options=eclip.CompareOptions(trace_ms=5.0, search_seconds=1.0, **BRIEF),
    )
    assert list(outcome.plans) == [*named, "mine"]
    ways = {policy: type(plan.sharing) for policy, plan in outcome.plans.items()}
    wanted = {"timeslice": Turns, "mps": Processes}
    assert ways == {policy: wanted.get(policy, Lanes) for policy in ways}
    for policy, log in outcome.logs.items():
        assert not log.modelled
        assert set(log.requests.worker) == {0, 1}, policy
        assert log.alone_rps == outcome.comparison.alone_rps
        assert bool(log.kernels.worker) == isinstance(log.plan.sharing, Lanes)
        assert 0.3 < outcome.measures[policy].stp < 2.2, policy
    comparison = outcome.comparison
    assert comparison.driver == device.driver
    assert comparison.device == device.title
    assert not comparison.modelled
    assert comparison.left_out == ()
    assert outcome.runs_left == 0
    assert outcome.best in outcome.plans
    settings = {entry.policy: entry.setting for entry in comparison.entries}
    assert settings["masks"]
    assert "mps" not in named or settings["mps"].startswith("mps ")
    outcome.save(tmp_path / "kept")
    for policy, plan in outcome.plans.items():
        assert eclip.load(tmp_path / "kept" / f"{policy}.plan.json", eclip.Plan) == plan
        kept = eclip.load(tmp_path / "kept" / f"{policy}.run.json", eclip.RunLog)
        assert kept == outcome.logs[policy]
    page = eclip.report(outcome, tmp_path / "report.html")
    assert all(policy in page.read_text() for policy in outcome.plans)


def check_outputs(gpu: Any, given: dict[str, Any]) -> None:
    """All models at once, from a thread each."""
    wrong: list[str] = []

    def use(name: str) -> None:
        module, (example,) = given[name]
        torch.cuda.set_device(example.device)
        for _ in range(10):
            x = torch.randn_like(example)
            with torch.inference_mode():
                wanted = module(x)
            # Other algorithms may be chosen in a capture: close, not equal.
            if not torch.allclose(gpu[name](x), wanted, rtol=1e-2, atol=1e-2):
                wrong.append(name)

    threads = [threading.Thread(target=use, args=(name,)) for name in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_colocate_by_profiles_of_a_folder_and_by_a_plan(
    folder: Path, device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what is given nothing is measured."""
    from eclip.contest import colocate as room

    def measure_nothing(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a model was profiled although its profile is there")

    monkeypatch.setattr(room, "measure_profile", measure_nothing)
    given = modules()
    with eclip.colocate(given, policy="search", seconds=1, profiles=folder) as gpu:
        assert gpu.plan.policy == "search"
        assert gpu.plan.models == (DEEP, WIDE)
        check_outputs(gpu, given)
        eclip.save(gpu.plan, tmp_path / "plan.json")
        plan = gpu.plan
    with eclip.colocate(given, plan=tmp_path / "plan.json") as gpu:
        assert gpu.plan == plan
        check_outputs(gpu, given)
    with pytest.raises(eclip.MismatchError, match=r"the models given are wide:4, deep:64"):
        eclip.colocate(dict(reversed(given.items())), plan=plan)


def test_colocate_measures_what_it_has_no_profile_of(device: CudaDevice) -> None:
    given = modules()
    with eclip.colocate(given, policy="shared") as gpu:
        assert not gpu.plan.modelled
        check_outputs(gpu, given)


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eclip", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_the_command_compares_on_the_device_of_this_name(
    folder: Path, device: CudaDevice, tmp_path: Path
) -> None:
    topology, results = tmp_path / "topology.json", tmp_path / "results.jsonl"
    eclip.save(device.topology, topology)
    named = ["shared", "timeslice", "search"]
    options = [f"{name.replace('_', '-')}={value}" for name, value in BRIEF.items()]
    done = command(
        *("compare", MIX, "--device", "cuda", "--policies", ",".join(named)),
        *("--seconds", SECONDS, "--topology", topology, "--profiles", folder),
        *("--search-seconds", 1, *(word for option in options for word in ("--set", option))),
        *("--results", results, "-o", tmp_path / "kept", "--report", tmp_path / "report.html"),
        "--json",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    data = json.loads(done.stdout)
    assert data["device"] == device.title
    assert not data["modelled"]
    assert [one["policy"] for one in data["policies"]] == named
    assert data["best"] in named
    (kept,) = store.load_results(results).comparisons
    assert kept.driver == device.driver
    assert kept.command.startswith("eclip compare")
    assert (tmp_path / "report.html").is_file()
    assert (tmp_path / "kept" / "search.plan.json").is_file()


def test_a_gpu_that_is_not_there_is_refused_in_one_line(folder: Path) -> None:
    done = command("compare", MIX, "--device", "cuda:99", "--profiles", folder)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "there is no GPU 99" in done.stderr
    assert "Traceback" not in done.stderr
