"""libeclip under random programs on the stand-in device, compared with sequential runs."""

from __future__ import annotations

import pytest

from native_build import Native


def assert_same(native: Native, program: str, *arguments: object, preload: bool = False) -> None:
    done = native.run(program, *arguments, preload=preload)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer of this compiler does not know this kernel's address layout")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "no difference" in done.stdout
    for said in ("running unplanned", "without a cap"):  # then nothing was tried
        assert said not in done.stderr


# What a run of programs is like besides its seed: 25,000 of them, 2,500 for each.
MODES = {
    "workers by stream": (),
    "workers by thread": ("--by-thread", 1),
    "recorded": ("--record", 1),
    "recorded by thread": ("--record", 1, "--by-thread", 1),
    "three at once by stream": ("--threads", 3),
    "three at once by thread": ("--threads", 3, "--by-thread", 1),
    "three recorded at once": ("--threads", 3, "--record", 1),
    "three recorded at once by thread": ("--threads", 3, "--record", 1, "--by-thread", 1),
    "capped": ("--cap", 1),
    "three capped at once": ("--threads", 3, "--cap", 1),
}
modes = pytest.mark.parametrize("mode", MODES)


@modes
def test_preloaded(native: Native, mode: str) -> None:
    seed = 1 + list(MODES).index(mode)
    arguments = ("--seed", seed, "--programs", 2500, *MODES[mode])
    assert_same(native, "plain/fuzz", *arguments, preload=True)


@pytest.mark.parametrize("flavour", ["asan", "tsan"])
@modes
def test_linked_in_under_a_sanitizer(native: Native, flavour: str, mode: str) -> None:
    seed = 11 + list(MODES).index(mode)
    assert_same(native, f"{flavour}/fuzz", "--seed", seed, "--programs", 400, *MODES[mode])


@pytest.mark.long
@modes
def test_many_programs_preloaded(native: Native, mode: str) -> None:
    seed = 100 + list(MODES).index(mode)
    arguments = ("--seed", seed, "--programs", 62_500, *MODES[mode])
    assert_same(native, "plain/fuzz", *arguments, preload=True)


@pytest.mark.long
@pytest.mark.parametrize("flavour", ["asan", "tsan"])
@modes
def test_many_programs_under_a_sanitizer(native: Native, flavour: str, mode: str) -> None:
    seed = 200 + list(MODES).index(mode)
    assert_same(native, f"{flavour}/fuzz", "--seed", seed, "--programs", 12_500, *MODES[mode])


@pytest.mark.parametrize("threads", [1, 3])
def test_the_programs_are_right_without_libeclip(native: Native, threads: int) -> None:
    assert_same(native, "plain/fuzz", "--seed", 20, "--programs", 1000, "--threads", threads)


@pytest.mark.parametrize("lost", ["home_lane", "lane_lane", "lane_home"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_lost_barrier_is_caught_within_a_hundred_programs(
    native: Native, lost: str, seed: int
) -> None:
    kept = native.run("drop/fuzz", "--seed", seed, "--programs", 100)
    assert kept.returncode == 0
    done = native.run("drop/fuzz", "--seed", seed, "--programs", 100, DROP=lost)
    assert done.returncode == 1
    assert "differs" in done.stdout
