"""``eclip record`` and ``eclip exec`` around an unmodified program on the stand-in device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from commands import started
from eclip.core.mix import mix_of
from eclip.core.plan import (
    Assignment,
    Group,
    Joints,
    Lane,
    Plan,
    PlannedWorker,
    Variant,
    fingerprint_of,
)
from eclip.core.profile import Profile
from eclip.core.topology import Mask, Topology
from eclip.files import store
from native_build import Native
from waiting import PATIENCE_S

REQUESTS = 40
KERNELS = 24  # of the probe's request
FULL = 0xFFFF
# Three lanes a worker, the last of all slices; workers on overlapping masks.
MASKS = (("0-3", "0-7", "0-15"), ("8-15", "4-11", "0-15"))
GROUPS = 12


def eclip(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eclip", *map(str, arguments)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def make_plan(profiles: list[Profile], topology: Topology) -> Plan:
    """Twelve groups of two kernels for each worker, around its three lanes."""
    mix = mix_of(profile.model for profile in profiles)
    lanes = [Lane(owner, Mask.parse(mask)) for owner, masks in enumerate(MASKS) for mask in masks]
    return Plan(
        mix=mix,
        policy="kernel",
        topology=topology,
        fingerprint=fingerprint_of(topology, profiles),
        modelled=False,
        workers=tuple(
            PlannedWorker(name=worker.name, model=worker.model, kernels=KERNELS, why="a test")
            for worker in mix.workers
        ),
        lanes=tuple(lanes),
        variants=(
            Variant(
                active=(0, 1),
                assignments=tuple(
                    Assignment(
                        worker,
                        tuple(
                            Group(3 * worker + index % 3, KERNELS // GROUPS, 1)
                            for index in range(GROUPS)
                        ),
                    )
                    for worker in range(2)
                ),
            ),
        ),
        why="a test",
    )


@pytest.fixture(scope="module")
def planned(
    native: Native, h200: Topology, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A plan for the probe's two workers and the profiles behind it, recorded from the probe."""
    folder = tmp_path_factory.mktemp("planned")
    probe = native.folder / "plain" / "probe"
    done = eclip(
        *("record", "--sizes", "64,132", "--as", "first:1", "--as", "second:1"),
        *("-o", folder / "profiles", "--", probe, "serve", "--workers", 2, "--requests", 6),
    )
    assert done.returncode == 0, done.stderr
    profiles = [
        store.load(folder / "profiles" / f"{name}-1.json.gz", Profile)
        for name in ("first", "second")
    ]
    plan = folder / "plan.json"
    store.save(make_plan(profiles, h200), plan)
    return plan, folder / "profiles"


def run_planned(
    planned: tuple[Path, Path], native: Native, *arguments: object, **variables: str
) -> subprocess.CompletedProcess[str]:
    plan, profiles = planned
    probe = native.folder / "plain" / "probe"
    workers = ("--workers", "thread") if "--by-thread" in arguments else ()
    words = [word for word in arguments if word != "--by-thread"]
    return eclip(
        *("exec", "--plan", plan, "--profiles", profiles, "--json", *workers, "--", probe, *words),
        **variables,
    )


def expected_masks(worker: int) -> list[str]:
    bits = [sum(1 << index for index in Mask.parse(mask)) for mask in MASKS[worker]]
    return [f"{bits[group % 3]:x}" for group in range(GROUPS) for _ in range(KERNELS // GROUPS)]


def split_output(text: str) -> tuple[list[str], dict[str, int]]:
    """The probe's lines and the counters of its process."""
    lines, _, rest = text.partition("{")
    (counts,) = json.loads("{" + rest)["processes"].values()
    return lines.splitlines(), counts


def test_record_writes_profiles_of_what_was_launched(planned: tuple[Path, Path]) -> None:
    profile = store.load(planned[1] / "first-1.json.gz", Profile)
    assert profile.sizes == (64, 132)
    assert len(profile.trace.kernels) == KERNELS
    # The probe waits for the device after each request: a request begins there.
    assert [kernel.name for kernel in profile.trace.kernels[:3]] == ["conv", "gemm", "norm"]
    assert profile.trace.kernels[0].grid == (1, 1, 1)
    assert not profile.modelled


@pytest.mark.parametrize("words", [(), ("--child", 1), ("--event", 1)])
def test_a_program_that_launches_only_graphs_is_recorded_like_its_launches(
    planned: tuple[Path, Path], native: Native, tmp_path: Path, words: tuple[object, ...]
) -> None:
    probe = native.folder / "plain" / "probe"
    serving = (probe, "serve", "--workers", 2, "--requests", 6, "--graph", 1, *words)
    done = eclip(
        *("record", "--sizes", "64,132", "--as", "first:1", "--as", "second:1"),
        *("-o", tmp_path, "--", *serving),
    )
    assert done.returncode == 0, done.stderr
    for name in ("first-1.json.gz", "second-1.json.gz"):
        recorded = store.load(tmp_path / name, Profile)
        launched = store.load(planned[1] / name, Profile)
        assert recorded.trace.kernels == launched.trace.kernels
        assert min(map(min, recorded.busy_ns)) > 0
    plain = native.run("plain/probe", *serving[1:])
    assert plain.stdout.splitlines()[0].split()[0] in done.stdout  # the command's own output


def test_a_plan_of_recorded_graphs_places_them(
    native: Native, h200: Topology, tmp_path: Path
) -> None:
    probe = native.folder / "plain" / "probe"
    serving = (probe, "serve", "--workers", 2, "--requests", 6, "--graph", 1)
    models = ("--as", "first:1", "--as", "second:1")
    done = eclip("record", "--sizes", "64,132", *models, "-o", tmp_path, "--", *serving)
    assert done.returncode == 0, done.stderr
    made = eclip(
        *("plan", "first:1,second:1", "--profiles", tmp_path, "--policy", "kernel"),
        *("-o", tmp_path / "plan.json"),
    )
    assert made.returncode == 0, made.stderr
    profiles = [store.load(tmp_path / f"{name}-1.json.gz", Profile) for name in ("first", "second")]
    store.save(make_plan(profiles, h200), tmp_path / "mine.json")
    placed = run_planned((tmp_path / "mine.json", tmp_path), native, *serving[1:])
    assert placed.returncode == 0, placed.stderr
    for worker, line in enumerate(split_output(placed.stdout)[0]):
        assert line.split()[1:] == expected_masks(worker)


@pytest.mark.parametrize("words", [(), ("--together", 1), ("--by-thread",), ("--mark", 1)])
def test_kernels_run_on_the_plans_slices(
    planned: tuple[Path, Path], native: Native, words: tuple[object, ...]
) -> None:
    plain = native.run("plain/probe", "serve", "--workers", 2, "--requests", REQUESTS)
    arguments = ("serve", "--workers", 2, "--requests", REQUESTS, *words)
    done = run_planned(planned, native, *arguments)
    assert done.returncode == 0, done.stderr
    lines, counts = split_output(done.stdout)
    for worker, (line, unplanned) in enumerate(zip(lines, plain.stdout.splitlines(), strict=True)):
        result, *masks = line.split()
        assert result == unplanned.split()[0]
        assert masks == expected_masks(worker)
    assert counts["launches"] == 2 * REQUESTS * KERNELS
    assert counts["planned"] >= 0.95 * counts["launches"]
    assert counts["barriers"] + counts["skipped"] <= 2 * REQUESTS * GROUPS


def test_captured_graphs_run_on_the_plans_slices(
    planned: tuple[Path, Path], native: Native
) -> None:
    arguments = ("serve", "--workers", 2, "--requests", REQUESTS, "--graph", 1)
    done = run_planned(planned, native, *arguments)
    assert done.returncode == 0, done.stderr
    lines, counts = split_output(done.stdout)
    for worker, line in enumerate(lines):
        assert line.split()[1:] == expected_masks(worker)
    assert counts["graphs"] == 2
    assert counts["graph_planned"] == counts["graph_kernels"] == 2 * KERNELS
    assert counts["graph_launches"] == 2 * REQUESTS


def test_kernels_of_child_graphs_run_on_the_plans_slices(
    planned: tuple[Path, Path], native: Native
) -> None:
    arguments = ("serve", "--workers", 2, "--requests", 4, "--graph", 1, "--child", 1)
    plain = native.run("plain/probe", *arguments)
    done = run_planned(planned, native, *arguments)
    assert done.returncode == 0, done.stderr
    lines, counts = split_output(done.stdout)
    for worker, (line, unplanned) in enumerate(zip(lines, plain.stdout.splitlines(), strict=True)):
        assert line.split()[0] == unplanned.split()[0]
        assert line.split()[1:] == expected_masks(worker)
    assert counts["graph_planned"] == counts["graph_kernels"] == 2 * KERNELS


@pytest.mark.parametrize("child", [0, 1])
def test_a_graph_of_background_is_cut_at_the_plans_joints(
    planned: tuple[Path, Path], native: Native, tmp_path: Path, child: int
) -> None:
    plan = store.load(planned[0], Plan)
    joints = Joints(at=(5, 6, 18), depth=1, rules=(), stretch_ns=(1, 1, 1, 1))
    workers = (msgspec.structs.replace(plan.workers[0], joints=joints), plan.workers[1])
    store.save(msgspec.structs.replace(plan, workers=workers), tmp_path / "plan.json")
    # After two launches a graph may be cut elsewhere, by what its kernels took: on a busy machine.
    arguments = ("serve", "--workers", 2, "--requests", 2, "--graph", 1, "--child", child)
    plain = native.run("plain/probe", *arguments)
    probe = native.folder / "plain" / "probe"
    done = eclip(
        *("exec", "--plan", tmp_path / "plan.json", "--profiles", planned[1], "--background"),
        *("--json", "--", probe, *arguments),
        ECLIP_BOARD=str(tmp_path / "board"),
    )
    assert done.returncode == 0, done.stderr
    lines, counts = split_output(done.stdout)
    for worker, (line, unplanned) in enumerate(zip(lines, plain.stdout.splitlines(), strict=True)):
        assert line.split()[0] == unplanned.split()[0]
        assert line.split()[1:] == expected_masks(worker)
    # The other worker's graph takes less than a grain, unless the machine is very busy.
    assert counts["cut_graphs"] >= 1
    assert counts["graph_parts"] >= 2 * 4


def test_a_graph_with_kernels_that_no_trace_has_is_still_its_workers(
    planned: tuple[Path, Path], native: Native
) -> None:
    """Libraries choose other kernels while they are captured; transformers adds masks."""
    arguments = ("serve", "--workers", 2, "--requests", 4, "--graph", 1, "--foreign", 2)
    plain = native.run("plain/probe", *arguments)
    done = run_planned(planned, native, *arguments)
    assert done.returncode == 0, done.stderr
    lines, counts = split_output(done.stdout)
    for worker, (line, unplanned) in enumerate(zip(lines, plain.stdout.splitlines(), strict=True)):
        assert line.split()[0] == unplanned.split()[0]
        assert line.split()[1:] == expected_masks(worker)
    assert counts["graphs"] == 2
    assert counts["graph_kernels"] == 2 * 3 * KERNELS
    assert counts["graph_planned"] == 2 * KERNELS
    assert counts["graph_launches"] == 2 * 4


def test_a_graph_that_is_nobodys_is_left_alone_and_said(
    planned: tuple[Path, Path], native: Native
) -> None:
    arguments = ("serve", "--requests", 4, "--graph", 1, "--block", 64)
    done = run_planned(planned, native, *arguments)
    assert done.returncode == 0, done.stderr
    lines, counts = split_output(done.stdout)
    assert set(lines[0].split()[1:]) == {f"{FULL:x}"}
    assert (counts["graphs"], counts["graph_launches"], counts["foreign_graphs"]) == (0, 0, 1)
    (said,) = done.stderr.splitlines()
    assert "a graph of 24 kernels" in said
    assert "whole device" in said


@pytest.mark.parametrize("graph", [0, 1])
def test_a_request_takes_the_variant_of_who_is_active_when_it_begins(
    planned: tuple[Path, Path], native: Native, tmp_path: Path, graph: int
) -> None:
    plan = store.load(planned[0], Plan)
    alone = [Lane(worker, Mask.parse(mask)) for worker, mask in enumerate(("0-12", "3-15"))]
    lanes = (*plan.lanes, *alone)
    variants = [
        Variant((worker,), (Assignment(worker, (Group(len(plan.lanes) + worker, KERNELS, 1),)),))
        for worker in range(2)
    ]
    changed = msgspec.structs.replace(plan, lanes=lanes, variants=(*plan.variants, *variants))
    store.save(changed, tmp_path / "plan.json")
    arguments = ("overlap", "--graph", graph)
    done = run_planned((tmp_path / "plan.json", planned[1]), native, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    first, second, second_alone, first_alone = (
        line.split() for line in split_output(done.stdout)[0]
    )
    only = [f"{sum(1 << index for index in lane.mask):x}" for lane in alone]
    assert first == first_alone == [only[0]] * KERNELS
    assert second == expected_masks(1)
    assert second_alone == [only[1]] * KERNELS


def test_a_priority_that_streams_do_not_have_is_said_to_be_lowered(
    planned: tuple[Path, Path], native: Native, tmp_path: Path
) -> None:
    plan = store.load(planned[0], Plan)
    lanes = [msgspec.structs.replace(lane, priority=1) for lane in plan.lanes]
    lanes[0] = msgspec.structs.replace(lanes[0], priority=9)
    store.save(msgspec.structs.replace(plan, lanes=tuple(lanes)), tmp_path / "plan.json")
    done = run_planned((tmp_path / "plan.json", planned[1]), native, "serve")
    assert done.returncode == 0, done.stderr
    (lowered,) = done.stderr.splitlines()
    assert "asks for priority 9, but streams here have 6" in lowered


def test_a_missing_driver_function_costs_only_what_needs_it(
    planned: tuple[Path, Path], native: Native
) -> None:
    partial = str(native.folder / "partial")
    arguments = ("serve", "--workers", 2, "--requests", 4)
    done = run_planned(planned, native, *arguments, "--graph", 1, LD_LIBRARY_PATH=partial)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines()[:2]:
        assert set(line.split()[1:]) == {f"{FULL:x}"}
    (said,) = done.stderr.splitlines()
    assert "cannot re-home graphs" in said
    done = run_planned(planned, native, *arguments, LD_LIBRARY_PATH=partial)
    assert done.stderr == ""
    for worker, line in enumerate(split_output(done.stdout)[0]):
        assert line.split()[1:] == expected_masks(worker)


def test_stats_are_printed_as_a_table(planned: tuple[Path, Path], native: Native) -> None:
    plan, profiles = planned
    probe = native.folder / "plain" / "probe"
    done = eclip("exec", "--plan", plan, "--profiles", profiles, "--stats", "--", probe, "serve")
    assert done.returncode == 0
    assert "launches" in done.stdout
    assert "240 (100%)" in done.stdout


def test_disable_turns_everything_off(planned: tuple[Path, Path], native: Native) -> None:
    done = run_planned(planned, native, "serve", ECLIP_DISABLE="1")
    assert done.returncode == 0
    masks = done.stdout.splitlines()[0].split()[1:]
    assert masks == [f"{FULL:x}"] * KERNELS
    assert '"processes": {}' in done.stdout


def test_the_commands_exit_code_is_ours(planned: tuple[Path, Path], native: Native) -> None:
    assert run_planned(planned, native, "nonsense").returncode == 2


def test_a_signal_goes_on_to_the_command(
    planned: tuple[Path, Path], native: Native, tmp_path: Path
) -> None:
    plan, profiles = planned
    probe = native.folder / "plain" / "probe"
    words = ("exec", "--plan", plan, "--profiles", profiles, "--", probe, "serve")
    serving = ("--requests", 10_000_000, "--delay-us", 1000)
    with started(
        *(*words, *serving),
        folder=tmp_path,
        mark=tmp_path / "mark",
        place="subprocess:Popen.wait",  # the command was started, and signals are handled
    ) as child:
        child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in errors


def test_a_python_program_may_mark_its_requests(planned: tuple[Path, Path]) -> None:
    plan, profiles = planned
    script = (
        "import ctypes, eclip; eclip.request(1); eclip.request(); "
        "print(hasattr(ctypes.CDLL(None), 'eclip_request'))"
    )
    words = ("--plan", plan, "--profiles", profiles, "--", sys.executable, "-c", script)
    done = eclip("exec", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"
    outside = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert outside.stdout == "False\n"


def test_a_command_whose_kernels_are_not_the_plans_is_told(
    planned: tuple[Path, Path], native: Native
) -> None:
    plan, profiles = planned
    probe = native.folder / "plain" / "probe"
    words = ("exec", "--plan", plan, "--profiles", profiles, "--")
    none = eclip(*words, "true")
    assert none.returncode == 0
    assert none.stderr.startswith("warning: nothing was placed: libeclip saw no kernel launch")
    other = eclip(*words, probe, "serve", "--requests", 4, "--block", 64)
    assert other.returncode == 0
    assert other.stderr.startswith("warning: nothing was placed: libeclip saw ")
    assert len(none.stderr.splitlines()) == len(other.stderr.splitlines()) == 1
    assert eclip(*words, probe, "serve", "--requests", 4).stderr == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            (),
            "say what the command is: --service, --background, --sms N, ",
        ),
        (("--service", "--background"), "a command is a service or background, not both"),
        (("--background", "--bound", "5ms"), "--bound needs --service"),
        (("--service", "--floor", "0.2"), "--floor needs --background"),
        (("--service", "--bound", "fast"), "cannot read the bound 'fast'; write 5ms, or 1.1x"),
        (("--service", "--bound", "5"), "cannot read the bound '5'; write 5ms, or 1.1x"),
        (("--service", "--bound", "0.9x"), "cannot be kept: at least 1"),
        (("--service", "--bound", "0ms"), "above 0"),
        (("--service", "--bound", "90000s"), "a day at most"),
        (("--background", "--floor", "1.5"), "from 0 to less than 1, not 1.5"),
        (("--background", "--stats"), "eclip top"),
    ],
)
def test_tiers_that_make_no_sense_are_refused(words: tuple[str, ...], said: str) -> None:
    done = eclip("exec", *words, "--", "true")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("words", "tier", "bound_ms"),
    [
        (("--service", "--bound", "5ms"), "service", 5.0),
        (("--service", "--bound", "1.1x"), "service", None),
        (("--service", "--bound", "2s"), "service", 2000.0),
        (("--background", "--floor", "0.2"), "background", None),
    ],
)
def test_a_command_with_a_tier_is_seen_on_the_board(
    native: Native, tmp_path: Path, words: tuple[str, ...], tier: str, bound_ms: float | None
) -> None:
    """By its path from another folder: the command is free to change its own."""
    probe = native.folder / "plain" / "probe"
    with subprocess.Popen(
        [sys.executable, "-m", "eclip", "exec", *words, "--", probe, "join"],
        env={**os.environ, "ECLIP_BOARD": "board"},
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert int(child.stdout.readline()) > 0
        seen = json.loads(eclip("top", "--json", "--board", tmp_path / "board").stdout)
        child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 0
    (worker,) = seen[0]["workers"]
    assert (worker["name"], worker["tier"], worker["bound_ms"]) == ("probe", tier, bound_ms)
    gone = json.loads(eclip("top", "--json", "--board", tmp_path / "board").stdout)
    assert gone[0]["workers"] == []


def test_a_command_with_a_tier_prints_what_it_prints_alone(native: Native, tmp_path: Path) -> None:
    probe = native.folder / "plain" / "probe"
    alone = native.run("plain/probe", "serve", "--workers", 2)
    board = str(tmp_path / "board")
    for tier in ("--service", "--background"):
        done = eclip("exec", tier, "--", probe, "serve", "--workers", 2, ECLIP_BOARD=board)
        assert (done.returncode, done.stdout, done.stderr) == (0, alone.stdout, "")


def test_a_plan_may_be_given_together_with_a_tier(
    planned: tuple[Path, Path], native: Native, tmp_path: Path
) -> None:
    plan, profiles = planned
    probe = native.folder / "plain" / "probe"
    done = eclip(
        *("exec", "--plan", plan, "--profiles", profiles, "--background", "--json", "--"),
        *(probe, "serve", "--workers", 2, "--requests", REQUESTS),
        ECLIP_BOARD=str(tmp_path / "board"),
    )
    assert done.returncode == 0, done.stderr
    lines, counts = split_output(done.stdout)
    for worker, line in enumerate(lines):
        assert line.split()[1:] == expected_masks(worker)
    assert counts["planned"] >= 0.95 * counts["launches"]


# --- What eclip exec needs -----------------------------------------------------------------------

# Packages that other commands need, and that a container with an engine may lack.
_WITHOUT = """
import sys
for name in ("numba", "llvmlite", "torch", "cuda", "cupti", "pynvml", "highspy", "ray", "jinja2",
             "starlette", "uvicorn", "grpc", "google", "httptools", "uvloop", "prometheus_client"):
    sys.modules[name] = None
sys.argv = ["eclip", *sys.argv[1:]]
from eclip.__main__ import main
main()
"""


@pytest.mark.parametrize(
    "options",
    [["--background"], ["--service", "--bound", "5ms"], ["--replicas", "1", "--restarts", "0"]],
)
def test_exec_without_a_plan_needs_no_compiler_no_driver_package_and_no_server(
    native: Native, options: list[str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, "exec", *options, "--", "sh", "-c", "exit 7"],
        env={**os.environ, "ECLIP_BOARD": str(tmp_path / "board")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "")
    assert "Traceback" not in done.stderr
