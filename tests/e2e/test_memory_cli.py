"""Memory as its users meet it: shown where it is asked for, refused where it does not suffice."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from commands import Cli, assert_refused
from eclip.core.plan import Plan
from eclip.core.topology import Topology
from eclip.files import store


@pytest.mark.parametrize("policy", ["eclip", "shared", "timeslice", "model", "kernel", "search"])
def test_batch_that_the_gpu_does_not_hold_is_refused_by_every_policy(cli: Cli, policy: str) -> None:
    outcome = cli("plan", "resnet50:65000", "--policy", policy)
    assert_refused(
        outcome,
        "eclip: resnet50:65000 needs 334.9 GiB of memory and NVIDIA H200 has 140.4: "
        "resnet50 334.3 (weights 0.0, activations 334.1, workspaces 0.1, executables 0.0), "
        "contexts 0.5, lanes 0.1; use smaller batches or fewer workers",
    )
    assert not Path("plan.json").exists()


def test_workers_that_only_fit_one_by_one_are_refused(cli: Cli) -> None:
    assert cli("plan", "vgg19:1024").code == 0
    assert_refused(
        cli("plan", "32xvgg19:1024"),
        "eclip: 32xvgg19:1024 needs 413.1 GiB of memory and NVIDIA H200 has 140.4: "
        "vgg19.1 12.9 (weights 0.3, activations 12.6, workspaces 0.1, executables 0.0), "
        "vgg19.2 12.9, vgg19.3 12.9, 29 more 373.8, contexts 0.5, lanes 0.1; "
        "use smaller batches or fewer workers",
    )


def test_comparison_of_a_mix_that_does_not_fit_is_refused(cli: Cli) -> None:
    outcome = cli("compare", "4xvgg19:1024", "--topology", "mi50", "--seconds", 0.1)
    assert_refused(outcome, "AMD Radeon Instinct MI50 has 16.0", "fewer workers")


def test_plan_is_not_run_on_a_device_with_less_memory(cli: Cli) -> None:
    assert cli("plan", "8xvgg19:1024", "--policy", "shared").code == 0
    plan = store.load(Path("plan.json"), Plan)
    small = msgspec.structs.replace(store.load_builtin("h200", Topology), memory_bytes=80 << 30)
    store.save(msgspec.structs.replace(plan, topology=small), Path("small.json"))
    assert_refused(cli("run", "small.json"), "the plan needs 103.", "has 80.0")
    assert not Path("run.json").exists()


def test_inspect_shows_the_memory_of_a_topology_and_a_profile(cli: Cli) -> None:
    shown = cli("topology", "h200").out
    assert "140.4 GiB; a context takes 530 MiB, a lane 4 MiB" in shown
    pack = Path(store.__file__).parents[1] / "data" / "profiles" / "h200"
    shown = " ".join(cli("inspect", pack / "albert-8.json.gz").out.split())
    assert "MiB: weights 22, activations" in shown
    assert cli("inspect", pack / "albert-8.json.gz", "--json").data["footprint"]["weights_bytes"]


def test_file_of_an_older_eclip_is_refused_with_how_to_make_it_anew(cli: Cli) -> None:
    assert cli("plan", "alexnet:8").code == 0
    path = Path("plan.json")
    path.write_text(path.read_text().replace('"version":2', '"version":1', 1))
    assert_refused(cli("run", path), "make the file again: eclip plan MIX -o FILE")
