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
    assert "running unplanned" not in done.stderr  # or nothing was tried


@pytest.mark.parametrize("seed", range(1, 6))
def test_preloaded(native: Native, seed: int) -> None:
    assert_same(native, "plain/fuzz", "--seed", seed, "--programs", 2000, preload=True)


def test_preloaded_under_threads_that_share_the_device(native: Native) -> None:
    arguments = ("--programs", 2000, "--threads", 3, "--by-thread", 1)
    assert_same(native, "plain/fuzz", "--seed", 7, *arguments, preload=True)


@pytest.mark.parametrize("flavour", ["asan", "tsan"])
@pytest.mark.parametrize("threads", [1, 3])
def test_linked_in_under_a_sanitizer(native: Native, flavour: str, threads: int) -> None:
    arguments = ("--programs", 800, "--threads", threads, "--by-thread", threads // 3)
    assert_same(native, f"{flavour}/fuzz", "--seed", 10 + threads, *arguments)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_programs_preloaded(native: Native, seed: int) -> None:
    arguments = ("--programs", 20_000, "--threads", 1 + seed % 3, "--by-thread", int(seed % 3 > 1))
    assert_same(native, "plain/fuzz", "--seed", seed, *arguments, preload=True)


@pytest.mark.long
@pytest.mark.parametrize("flavour", ["asan", "tsan"])
@pytest.mark.parametrize("seed", range(200, 206))
def test_many_programs_under_a_sanitizer(native: Native, flavour: str, seed: int) -> None:
    arguments = ("--programs", 8000, "--threads", 1 + seed % 3, "--by-thread", int(seed % 3 > 1))
    assert_same(native, f"{flavour}/fuzz", "--seed", seed, *arguments)


def test_the_programs_are_right_without_libeclip(native: Native) -> None:
    assert_same(native, "plain/fuzz", "--seed", 20, "--programs", 1000)


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
