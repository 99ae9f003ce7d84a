"""Waiting for the device: a loop sleeps while a driver that spins would only use up its turn."""

from __future__ import annotations

import numpy as np
import pytest

from eclip.devices.gpu.steps import LAUNCH, Ints, whole_request
from eclip.devices.gpu.worker_loop import WorkerLoop
from eclip.devices.requests import END, START
from native_build import Native
from spinning_gpu import SpinningGpu

MS = 1_000_000


@pytest.fixture(scope="module")
def gpu(native: Native, tmp_path_factory: pytest.TempPathFactory) -> SpinningGpu:
    """``native``: where it can be built, there is a compiler."""
    return SpinningGpu(tmp_path_factory.mktemp("driver"))


def took_ns(gpu: SpinningGpu, requests: int) -> Ints:
    rows = WorkerLoop(gpu, whole_request((LAUNCH, 1, 1))).drive(most_requests=requests)
    return rows[:, END] - rows[:, START]


def test_a_loop_sleeps_through_most_of_a_wait(gpu: SpinningGpu) -> None:
    gpu.take(2 * MS)
    found_ns = took_ns(gpu, 100)
    assert found_ns.min() >= 2 * MS  # none ends before the device has
    assert np.percentile(found_ns, 25) < 2.5 * MS  # of a busy machine's, too
    assert gpu.spun_ns < 0.6 * 100 * 2 * MS


def test_short_waits_are_spun_through(gpu: SpinningGpu) -> None:
    """To wake up would take longer than there is to sleep."""
    gpu.take(MS // 10)
    assert took_ns(gpu, 200).min() < 0.15 * MS


def test_a_device_that_gets_faster_is_slept_past_a_few_times_only(gpu: SpinningGpu) -> None:
    gpu.take(MS, slow=50, slow_ns=6 * MS)
    found_ns = took_ns(gpu, 100)
    assert found_ns[:50].min() >= 6 * MS
    assert np.percentile(found_ns[60:], 25) < 1.5 * MS
