"""Synthetic profiles: reproducible, and of the classes they promise."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.core.model_key import ModelKey
from eclip.core.topology import Topology
from eclip.errors import UsageError
from eclip.files import store
from eclip.models.synthetic import synthetic_profile

H200 = store.load_builtin("h200", Topology)
SIXTEEN_SIZES = (*range(8, 128, 8), 132)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    kernels=st.integers(1, 300),
    device=st.sampled_from(store.builtin_names(Topology)),
)
def test_more_units_never_make_a_kernel_slower(seed: int, kernels: int, device: str) -> None:
    profile = synthetic_profile(seed, kernels, store.load_builtin(device, Topology))
    assert len(profile.trace.kernels) == kernels
    assert (np.diff(np.array(profile.busy_ns), axis=1) <= 0).all()
    assert all(d <= l2 for d, l2 in zip(profile.dram_bytes, profile.l2_bytes, strict=True))


def test_same_seed_gives_an_equal_profile() -> None:
    assert synthetic_profile(7, 100, H200) == synthetic_profile(7, 100, H200)


def test_other_seeds_give_other_profiles() -> None:
    assert synthetic_profile(7, 100, H200).busy_ns != synthetic_profile(8, 100, H200).busy_ns


def test_classes_scale_as_their_names_say() -> None:
    profile = synthetic_profile(0, 400, H200)
    busy = np.array(profile.busy_ns, dtype=np.float64)
    slowdown = busy[:, 0] / busy[:, -1]
    names = np.array([kernel.name.split("_")[0] for kernel in profile.trace.kernels])
    assert set(names) == {"scaling", "saturating", "flat", "memory"}
    assert (slowdown[names == "flat"] == 1).all()
    assert slowdown[names == "scaling"].mean() > slowdown[names == "saturating"].mean() > 1.5
    saturated = H200.lane_sizes.index(64)
    assert (busy[names == "memory", saturated] == busy[names == "memory", -1]).all()
    intensity = np.array(profile.dram_bytes) / busy[:, -1]
    assert intensity[names == "memory"].min() > intensity[names != "memory"].max()


def test_name_batch_and_sizes_are_the_callers() -> None:
    profile = synthetic_profile(1, 5, H200, name="toy", batch=4, sizes=SIXTEEN_SIZES)
    assert profile.model == ModelKey("toy", 4)
    assert profile.sizes == SIXTEEN_SIZES
    assert profile.fingerprint.traces == {"toy:4": profile.trace.digest}


def test_profile_without_kernels_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one kernel"):
        synthetic_profile(0, 0, H200)


def test_sizes_must_rise_to_the_whole_device() -> None:
    with pytest.raises(UsageError, match="rise to all 132"):
        synthetic_profile(0, 5, H200, sizes=(32, 64))


def test_2000_kernels_at_16_sizes_take_less_than_a_quarter_second() -> None:
    def seconds() -> float:  # of work, whatever else this machine does
        start = time.thread_time()
        synthetic_profile(0, 2000, H200, sizes=SIXTEEN_SIZES)
        return time.thread_time() - start

    assert min(seconds() for _ in range(3)) < 0.25
