"""Modelled profiles: they close, behave as hardware does, and stay near what was once measured."""

from __future__ import annotations

import statistics
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.core.calibration import Calibration
from eclip.core.mix import PAPER_MIXES, parse_mix
from eclip.core.model_key import ModelKey
from eclip.core.profile import Profile
from eclip.core.topology import Topology
from eclip.errors import UsageError
from eclip.files import store
from eclip.models.modelled import model_names, model_profile

DEVICES = {
    name: (store.load_builtin(name, Topology), store.load_builtin(name, Calibration))
    for name in store.builtin_names(Topology)
}

PROBED_SIZES = (32, 64, 96, 132)
# Kernels, and µs per request at PROBED_SIZES; batch 8, fp16, CUDA graph. Probe runs on one H200,
# 2026-11-15.
PROBES = {
    "albert": (498, (5220, 3052, 2629, 2167)),
    "bert": (413, (4784, 2755, 2348, 1872)),
    "resnet50": (280, (2553, 1629, 1470, 1192)),
    "densenet201": (1108, (8210, 5655, 5233, 4673)),
    "vgg19": (63, (4003, 2273, 1748, 1332)),
    "alexnet": (28, (463, 339, 276, 260)),
    "shufflenet": (314, (1293, 1008, 928, 890)),
    "mobilenet_v3": (296, (1377, 1094, 1033, 989)),
}

models = st.sampled_from(model_names())
devices = st.sampled_from(sorted(DEVICES))
batches = st.integers(1, 300)


def modelled(model: str, batch: int = 8, device: str = "h200") -> Profile:
    return model_profile(ModelKey(model, batch), *DEVICES[device])


@pytest.mark.parametrize("model", PROBES)
def test_request_time_is_within_half_of_the_probe_on_h200(model: str) -> None:
    profile = model_profile(ModelKey(model, 8), *DEVICES["h200"], PROBED_SIZES)
    probed_us = PROBES[model][1]
    assert [ns / 1000 for ns in profile.request_ns] == pytest.approx(probed_us, rel=0.5)


@pytest.mark.parametrize("model", PROBES)
def test_kernel_count_is_within_15_percent_of_the_probe(model: str) -> None:
    assert len(modelled(model).trace.kernels) == pytest.approx(PROBES[model][0], rel=0.15)


def test_models_that_gain_most_and_least_from_units_are_those_of_the_probe() -> None:
    probed = {model: times[0] / times[-1] for model, (_, times) in PROBES.items()}
    here = {}
    for model in PROBES:
        request_ns = model_profile(ModelKey(model, 8), *DEVICES["h200"], PROBED_SIZES).request_ns
        here[model] = request_ns[0] / request_ns[-1]
    ranks = [sorted(gains, key=gains.__getitem__) for gains in (probed, here)]
    assert set(ranks[0][:3]) == set(ranks[1][:3])
    assert set(ranks[0][-3:]) == set(ranks[1][-3:])


@settings(max_examples=30, deadline=None)
@given(models, batches, devices)
def test_profile_closes(model: str, batch: int, device: str) -> None:
    profile = modelled(model, batch, device)
    busy, gaps = np.array(profile.busy_ns), np.array(profile.gap_ns)
    assert tuple((busy + gaps).sum(axis=0).tolist()) == profile.request_ns


@settings(max_examples=30, deadline=None)
@given(models, batches, devices)
def test_more_units_never_make_a_kernel_slower(model: str, batch: int, device: str) -> None:
    topology, calibration = DEVICES[device]
    profile = model_profile(
        ModelKey(model, batch), topology, calibration, range(1, topology.units + 1)
    )
    assert (np.diff(np.array(profile.busy_ns), axis=1) <= 0).all()


@settings(max_examples=30, deadline=None)
@given(models, batches, batches, devices)
def test_bigger_batch_never_takes_less_time(model: str, a: int, b: int, device: str) -> None:
    small, big = (modelled(model, batch, device) for batch in sorted((a, b)))
    assert all(x <= y for x, y in zip(small.request_ns, big.request_ns, strict=True))


@settings(max_examples=20, deadline=None)
@given(models, batches, devices)
def test_dram_moves_no_more_than_passes_through_l2(model: str, batch: int, device: str) -> None:
    profile = modelled(model, batch, device)
    assert all(d <= l2 for d, l2 in zip(profile.dram_bytes, profile.l2_bytes, strict=True))
    assert sum(profile.dram_bytes) > 0


@settings(max_examples=20, deadline=None)
@given(models, batches)
def test_every_batch_launches_the_same_number_of_kernels(model: str, batch: int) -> None:
    assert len(modelled(model, batch).trace.kernels) == len(modelled(model, 1).trace.kernels)


def test_faster_devices_serve_every_model_faster() -> None:
    for model in model_names():
        times = [modelled(model, 32, device).request_ns[-1] for device in ("h200", "a100", "mi50")]
        assert times == sorted(times), model


def test_size_does_not_depend_on_the_sizes_beside_it() -> None:
    few = model_profile(ModelKey("resnet50", 8), *DEVICES["h200"], (64, 132))
    many = modelled("resnet50")
    assert few.request_ns[0] == many.request_ns[many.sizes.index(64)]


def test_same_arguments_give_equal_profiles() -> None:
    assert modelled("shufflenet") == modelled("shufflenet")


def test_trace_is_the_same_on_every_device() -> None:
    digests = {modelled("vit_b_16", 4, device).trace.digest for device in DEVICES}
    assert len(digests) == 1


def test_profile_is_labelled_and_belongs_to_its_device() -> None:
    profile = modelled("albert")
    topology = DEVICES["h200"][0]
    assert profile.modelled
    assert "not measured" in profile.source
    assert profile.sizes == topology.lane_sizes
    assert profile.fingerprint.traces == {"albert:8": profile.trace.digest}
    assert profile.fingerprint.check(topology.fingerprint, "the profile", "the device") == ()


def test_inputs_can_be_read_by_a_person() -> None:
    assert modelled("resnet50").trace.inputs == ("float16[8,3,224,224]",)
    assert modelled("bert", 2).trace.inputs == ("int64[2,128]",)


def test_every_model_of_the_papers_mixes_is_known() -> None:
    wanted = {model.name for name in PAPER_MIXES for model in parse_mix(name).models}
    assert wanted <= set(model_names())


def test_unknown_model_is_refused_with_the_names() -> None:
    with pytest.raises(UsageError, match=r"unknown model 'resnet51'.*resnet50"):
        modelled("resnet51")


def test_batch_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 1 to 65536, not 0"):
        modelled("bert", 0)


@pytest.mark.parametrize("sizes", [(), (0, 132), (64, 32, 132), (32, 64), (64, 64, 132)])
def test_sizes_must_rise_to_the_whole_device(sizes: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="rise to all 132"):
        model_profile(ModelKey("alexnet", 8), *DEVICES["h200"], sizes)


def test_calibration_without_compute_rates_is_refused() -> None:
    topology, calibration = DEVICES["h200"]
    bare = msgspec.structs.replace(
        calibration, compute=msgspec.structs.replace(calibration.compute, unit_flops=0.0)
    )
    with pytest.raises(UsageError, match="cannot be modelled"):
        model_profile(ModelKey("alexnet", 8), topology, bare)


def test_largest_model_takes_less_than_50_ms() -> None:
    def seconds() -> float:  # of work, whatever else this machine does
        start = time.thread_time()
        modelled("densenet201")
        return time.thread_time() - start

    assert statistics.median(seconds() for _ in range(5)) < 0.05
