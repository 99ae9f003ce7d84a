"""libeclip for HIP, preloaded: single cases and random programs on a stand-in for libamdhip64.

The random programs are those of test_random_programs.py, under HIP's names.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from native_build import Native

CASES = (
    "every_launch_goes_to_its_lane",
    "launches_in_a_threads_default_stream",
    "a_linear_graph_goes_to_its_lane",
    "a_graph_with_branches_stays_at_home",
    "an_unknown_call_ends_planning",
    "symbols_are_found_by_their_versions",
    "work_that_waits_for_the_host_stays_off_lanes",
    "graphs_that_wait_for_the_host_count_too",
    "events_of_a_launch_are_where_it_ran",
    "a_lanes_refusal_is_no_error_of_the_program",
    "another_device_runs_unplanned",
)
# What libeclip says in a case, if anything.
SAYS = {
    "an_unknown_call_ends_planning": (
        "the program calls hipLeapAsync, which libeclip does not know; running unplanned from "
        "here on"
    ),
    "a_lanes_refusal_is_no_error_of_the_program": (
        "a kernel of worker 0 is refused on its lane and runs on the whole device"
    ),
    "another_device_runs_unplanned": (
        "the kernel driver does not tell of this GPU; see docs/amd.md; running unplanned from "
        "here on"
    ),
}


def test_every_case_is_listed(native: Native) -> None:
    assert native.run("hip/hip_cases", "--list").stdout.split() == list(CASES)


@pytest.mark.parametrize("case", CASES)
def test_case(native: Native, case: str) -> None:
    alone = native.run("hip/hip_cases", case)
    assert (alone.returncode, alone.stdout, alone.stderr) == (0, "", "")
    done = native.run("hip/hip_cases", case, preload=native.hip_library)
    assert done.returncode == 0, done.stdout + done.stderr
    said = f"eclip: {SAYS[case]}\n" if case in SAYS else ""
    assert done.stderr == said


# 5,000 programs.
MODES = {
    "workers by stream": (),
    "workers by thread": ("--by-thread", 1),
    "recorded": ("--record", 1),
    "three at once": ("--threads", 3),
    "three recorded at once by thread": ("--threads", 3, "--record", 1, "--by-thread", 1),
}


@pytest.mark.parametrize("mode", MODES)
def test_random_programs(native: Native, mode: str) -> None:
    seed = 1 + list(MODES).index(mode)
    words = ("--seed", seed, "--programs", 1000, *MODES[mode])
    done = native.run("hip/fuzz", *words, preload=native.hip_library)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "no difference" in done.stdout
    assert "running unplanned" not in done.stderr  # or nothing was tried


@pytest.mark.parametrize("tier", ["service", "background"])
def test_a_program_without_a_plan_has_a_seat_on_its_gpus_board(
    native: Native, tmp_path: Path, tier: str
) -> None:
    words = ("--seed", 6, "--programs", 40, "--unplanned", 1)
    variables = {"ECLIP_TIER": tier, "ECLIP_BOARD": str(tmp_path)}
    done = native.run("hip/fuzz", *words, preload=native.hip_library, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name.startswith("eclip-board-") for path in tmp_path.iterdir()] == [True]


def test_the_programs_are_right_without_libeclip(native: Native) -> None:
    done = native.run("hip/fuzz", "--seed", 20, "--programs", 1000)
    assert done.returncode == 0, done.stdout
    assert "eclip" not in done.stderr


@pytest.mark.parametrize("lost", ["home_lane", "lane_lane", "lane_home"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_lost_barrier_is_caught_within_a_hundred_programs(
    native: Native, lost: str, seed: int
) -> None:
    words = ("--seed", seed, "--programs", 100)
    lossy = native.folder / "drop" / "libeclip_hip.so"
    assert native.run("hip/fuzz", *words, preload=lossy).returncode == 0
    done = native.run("hip/fuzz", *words, preload=lossy, DROP=lost)
    assert done.returncode == 1
    assert "differs" in done.stdout
