"""What only an AMD GPU can show: that a lane's kernels keep to its shader engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hip_chains
from eclip.core.topology import Mask
from eclip.hip.device import HipDevice
from eclip.hip.lanes import MaskedStreams

pytestmark = pytest.mark.skipif(hip_chains.missing() is not None, reason=hip_chains.missing() or "")


@pytest.fixture
def device() -> Iterator[HipDevice]:
    with HipDevice() as made:
        yield made


def test_a_lane_of_one_slice_runs_in_one_shader_engine(device: HipDevice) -> None:
    build = device.gpu.build
    if not build.compute.startswith("gfx9") or build.dies > 1:
        pytest.skip(f"how {build.compute} tells the shader engine of a block is not known here")
    kernels, streams = hip_chains.Kernels(device.gpu), MaskedStreams(device.gpu)
    blocks = 8 * device.topology.units
    seen = [
        kernels.engines(streams.take(Mask([slice_])), blocks) for slice_ in range(build.engines)
    ]
    assert [len(engines) for engines in seen] == [1] * build.engines
    assert set.union(*seen) == set(range(build.engines))
    assert kernels.engines(streams.take(device.topology.full), blocks) == set(range(build.engines))
