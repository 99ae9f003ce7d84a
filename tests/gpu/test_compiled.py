"""Triton kernels, launched by Triton and by Inductor, run on a plan's lanes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan
from eclip.core.topology import Mask
from eclip.cuda.device import CudaDevice
from eclip.gpu.session import Execution, GpuSession

torch = pytest.importorskip("torch", reason="tests on a GPU need the Python package torch")
pytest.importorskip("triton", reason="compiled modules need the Python package triton")

MASKS = [Mask(range(3)), Mask(range(5, 10))]
SEEN = "eclip_sighting"

Opened = Callable[..., AbstractContextManager[GpuSession]]


@pytest.fixture(scope="module")
def sighting(device: CudaDevice) -> Any:
    path = Path(__file__).with_name("triton_kernels.py")
    spec = importlib.util.spec_from_file_location("triton_kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module.Sighting().cuda().eval()


@pytest.mark.parametrize("execution", [Execution.WHOLE, Execution.SEGMENTS])
@pytest.mark.parametrize("way", ["eager", "compiled", "compiled before"])
def test_triton_kernels_give_their_outputs_on_the_lanes_of_a_plan(
    way: str,
    execution: Execution,
    device: CudaDevice,
    sighting: Any,
    plan_of: Callable[..., Plan],
    legal: Callable[..., list[int]],
    opened: Opened,
    sms_of: Callable[[Mask], frozenset[int]],
) -> None:
    from eclip.capture.torch import capture

    given = torch.randn(512, 256, device="cuda")
    module = sighting
    if way != "eager":
        torch._dynamo.reset()
        module = torch.compile(sighting)
    if way == "compiled before":
        with torch.inference_mode():
            module(given)
    captured = capture(module, [given], ModelKey("sighting", 512))
    captured.graph.instantiate()
    captured.graph.replay()
    torch.cuda.synchronize()
    wanted, _ = (tensor.clone() for tensor in captured.tensors())
    with torch.inference_mode():
        torch.testing.assert_close(wanted, sighting(given)[0], rtol=1e-3, atol=1e-4)
    kernels = captured.capture.trace.kernels
    (marked,) = (index for index, kernel in enumerate(kernels) if SEEN in kernel.name)
    if way != "eager":
        assert sum("triton" in kernel.name for kernel in kernels) >= 2, "Inductor fused nothing"
    masks = [*MASKS, device.topology.full]  # the last for what fits no other
    for lane, mask in enumerate(MASKS):
        route = [(index - marked + lane) % 2 for index in range(len(kernels))]
        source = captured.capture
        plan = plan_of(
            device.topology, [source.trace], [masks], [legal(device, source, masks, route)]
        )
        with torch.inference_mode():
            for tensor in captured.tensors():
                tensor.zero_()
        torch.cuda.synchronize()
        with opened(device, plan, [source], execution) as session:
            session.request(0)
        output, seen = captured.tensors()
        assert torch.equal(output, wanted)
        assert frozenset(seen.unique().tolist()) == sms_of(mask)
