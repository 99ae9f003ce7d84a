"""Footprints as measured: weights exactly, the rest near the model and within what was taken."""

from __future__ import annotations

import gc

import pytest

from eclip.core.calibration import Calibration
from eclip.core.memory import memory_of_plan
from eclip.core.mix import mix_of
from eclip.core.model_key import ModelKey
from eclip.core.topology import Topology
from eclip.cuda.device import CudaDevice
from eclip.files import store
from eclip.models.modelled import model_profile
from eclip.planner.policies import make_plan
from eclip.planner.problem import Problem

pytestmark = pytest.mark.alone

MIB = 1 << 20


@pytest.mark.parametrize("name", ["resnet50", "bert", "vgg19"])
def test_footprint_is_plausible(device: CudaDevice, name: str) -> None:
    import torch

    from eclip.capture.named import build
    from eclip.capture.profiler import measure_profile
    from eclip.capture.torch import capture
    from eclip.cuda.driver import free_memory

    gc.collect()
    torch.cuda.empty_cache()
    free_bytes = free_memory()
    model = ModelKey(name, 8)
    module, inputs = build(model)
    captured = capture(module, inputs, model)
    torch.cuda.empty_cache()
    taken_bytes = free_bytes - free_memory()
    profile = measure_profile(device, captured, energy_seconds=0.0, stress=False)
    measured = profile.footprint
    h200 = store.load_builtin("h200", Topology)
    calibration = store.load_builtin("h200", Calibration)
    modelled = model_profile(model, h200, calibration).footprint
    assert measured is not None
    assert modelled is not None
    tensors = [*module.parameters(), *module.buffers()]
    assert measured.weights_bytes == sum(one.numel() * one.element_size() for one in tensors)
    assert measured.weights_bytes == pytest.approx(modelled.weights_bytes, rel=0.05)
    assert 0.25 <= measured.activations_bytes / modelled.activations_bytes <= 4
    # Executables are of the profiler's and gone by now.
    assert measured.total_bytes - measured.executables_bytes <= 1.2 * taken_bytes
    assert measured.executables_bytes < 256 * MIB
    assert not measured.modelled
    mix = mix_of([model])
    plan = make_plan("shared", Problem(mix, device.topology, (profile,)))
    assert memory_of_plan(plan).total_bytes < device.topology.memory_bytes


def test_topology_has_the_memory_that_the_driver_reports(device: CudaDevice) -> None:
    import torch

    total_bytes = torch.cuda.get_device_properties(device.gpu.index).total_memory
    assert device.topology.memory_bytes == pytest.approx(total_bytes, rel=0.01)
