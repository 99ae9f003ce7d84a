"""Captures with the kernels that libraries choose for fewer SMs: other kernels, the same model."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan
from eclip.core.topology import Mask
from eclip.cuda.device import CudaDevice
from eclip.errors import DeviceError
from eclip.gpu.session import Execution, GpuSession

if TYPE_CHECKING:
    from eclip.capture.torch import CapturedModule

torch = pytest.importorskip("torch", reason="tests on a GPU need the Python package torch")

MODELS = ("gpt2", "vit_b_16")
UNITS = 66
BATCH = 8
PLANS = 6
SWITCHES = 12
MOST_APART = 0.02  # of the outputs' norm: other tiles add up fp16 products in another order

Opened = Callable[..., AbstractContextManager[GpuSession]]
Route = Callable[..., list[int]]  # the fixtures random_route and legal
Captures = dict[str, "CapturedModule"]  # own, tuned, and own once more


@pytest.fixture(scope="module", params=MODELS)
def captures(request: pytest.FixtureRequest, device: CudaDevice) -> Iterator[tuple[Any, Captures]]:
    """A module with its inputs, and its captures in the order they were made."""
    from eclip.capture import named as models
    from eclip.capture.torch import capture

    name = request.param
    module, inputs = models.build(ModelKey(name, BATCH, UNITS))
    own = ModelKey(name, BATCH)
    keys = {"own": own, "tuned": own.with_kernels_for(UNITS), "again": own}
    made = {which: capture(module, inputs, key) for which, key in keys.items()}
    for one in made.values():
        one.graph.instantiate()
    yield (module, inputs), made
    torch.cuda.synchronize()
    made.clear()
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def nothing_set_aside() -> Iterator[None]:
    """Every test leaves the libraries with all SMs."""
    assert set_aside() is None
    yield
    found = set_aside()
    torch._C._set_sm_carveout_experimental(None)
    assert found is None


def set_aside() -> int | None:
    """SMs that libraries are told to leave to others."""
    found: int | None = torch._C._get_sm_carveout_experimental()
    return found


def sms() -> int:
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def outputs_of(captured: CapturedModule, launch: Callable[[], object]) -> list[Any]:
    with torch.inference_mode():
        for tensor in captured.tensors():
            tensor.zero_()
    torch.cuda.synchronize()  # lanes do not wait for torch's stream
    launch()
    torch.cuda.synchronize()
    with torch.inference_mode():
        return [tensor.clone() for tensor in captured.tensors()]


def watched(fails: bool = False) -> tuple[Any, list[int | None]]:
    """A module, and what libraries were told whenever it ran; one that fails cannot be captured."""
    module = torch.nn.Linear(64, 64).cuda().eval()
    seen: list[int | None] = []

    def look(*_: Any) -> None:
        seen.append(set_aside())

    def wait(_: Any, __: Any, made: Any) -> None:
        made.sum().item()

    module.register_forward_pre_hook(look)
    if fails:
        module.register_forward_hook(wait)
    return module, seen


def test_capture_for_fewer_sms_has_other_kernels_and_the_next_has_the_own_again(
    captures: tuple[Any, Captures],
) -> None:
    _, made = captures
    own, tuned, again = (one.capture.trace for one in made.values())
    assert tuned.model == ModelKey(own.model.name, BATCH, UNITS)
    assert tuned.digest != own.digest
    assert {kernel.name for kernel in tuned.kernels} != {kernel.name for kernel in own.kernels}
    assert (again.model, again.digest) == (own.model, own.digest)


def test_outputs_are_those_of_the_module_run_eagerly(captures: tuple[Any, Captures]) -> None:
    from torch.utils import _pytree as pytree

    (module, inputs), made = captures
    with torch.inference_mode():
        leaves = pytree.tree_leaves(module(*inputs))
    wanted = [leaf.float() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for which, captured in made.items():
        found = outputs_of(captured, captured.graph.replay)
        for mine, theirs in zip(found, wanted, strict=True):
            assert torch.isfinite(mine).all()
            assert (mine != mine.flatten()[0]).any()
            apart = float((mine.float() - theirs).norm() / theirs.norm())
            assert apart < MOST_APART, f"{which}: {apart:.4f}"


@pytest.mark.parametrize("execution", [Execution.WHOLE, Execution.SEGMENTS])
def test_plans_give_the_outputs_of_the_captures_own_replay_bit_by_bit(
    execution: Execution,
    captures: tuple[Any, Captures],
    device: CudaDevice,
    plan_of: Callable[..., Plan],
    random_route: Route,
    legal: Route,
    opened: Opened,
) -> None:
    _, made = captures
    captured = made["tuned"]
    source = captured.capture
    wanted = outputs_of(captured, captured.graph.replay)
    random = np.random.default_rng([66, *str(source.trace.model).encode()])
    slices = len(device.topology.slice_units)
    for trial in range(PLANS):
        sizes = random.integers(1, slices + 1, 3)
        masks = [Mask(random.choice(slices, size, replace=False).tolist()) for size in sizes]
        switches = round(SWITCHES * trial / (PLANS - 1))
        route = random_route(random, len(source.trace.kernels), switches, len(masks))
        masks.append(device.topology.full)  # holds every kernel, used only by those that need it
        plan = plan_of(
            device.topology, [source.trace], [masks], [legal(device, source, masks, route)]
        )
        with opened(device, plan, [source], execution) as session:
            found = outputs_of(captured, functools.partial(session.request, 0))
        same = [torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True)]
        assert all(same), f"plan {trial}, {switches} switches, {execution.value}: {same}"


@pytest.mark.parametrize("more", [0, 1, 1000])
def test_kernels_for_all_sms_or_more_are_refused_with_the_number(
    more: int, device: CudaDevice
) -> None:
    from eclip.capture.torch import capture

    units = sms() + more
    module, seen = watched()
    with pytest.raises(DeviceError, match=rf"for {units} of {sms()} SMs"):
        capture(module, [torch.randn(8, 64, device="cuda")], ModelKey("linear", 8, units))
    assert seen == []


def test_libraries_are_told_during_warm_up_and_capture_only(device: CudaDevice) -> None:
    from eclip.capture.torch import capture

    module, seen = watched()
    given = [torch.randn(8, 64, device="cuda")]
    capture(module, given, ModelKey("linear", 8, UNITS))
    assert set(seen) == {sms() - UNITS}
    seen.clear()
    capture(module, given, ModelKey("linear", 8))
    assert set(seen) == {None}


def test_what_libraries_were_told_before_holds_again_even_after_a_capture_that_failed(
    device: CudaDevice,
) -> None:
    from eclip.capture.torch import capture

    given = [torch.randn(8, 64, device="cuda")]
    for before in (None, 12):
        torch._C._set_sm_carveout_experimental(before)
        try:
            capture(watched()[0], given, ModelKey("linear", 8, UNITS))
            assert set_aside() == before
            with pytest.raises(DeviceError, match="cannot be captured"):
                capture(watched(fails=True)[0], given, ModelKey("linear", 8, UNITS))
            assert set_aside() == before
        finally:
            torch._C._set_sm_carveout_experimental(None)
