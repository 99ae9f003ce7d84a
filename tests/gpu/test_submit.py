"""Submitted requests: every slot gets the outputs of its own inputs, wherever its memory is."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from eclip.core.device import Completion, Slot
from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan
from eclip.core.topology import Mask
from eclip.cuda.device import CudaDevice
from eclip.gpu.session import Execution, GpuSession
from waiting import until

if TYPE_CHECKING:
    from eclip.capture.torch import CapturedModule

torch = pytest.importorskip("torch", reason="tests/gpu needs the Python package torch")

MODELS = ("alexnet", "bert")
SLOTS = 4
ROUNDS = 20

PlanOf = Callable[..., Plan]
Opened = Callable[..., AbstractContextManager[GpuSession]]


def inputs_of_slots(model: CapturedModule) -> list[list[Any]]:
    """Other inputs for every slot, as valid as those of the capture."""
    return [
        [torch.roll(given, slot + 1, dims=-1) for given in model.inputs] for slot in range(SLOTS)
    ]


def outputs_of(model: CapturedModule, inputs: Sequence[Any]) -> list[bytes]:
    with torch.inference_mode():
        model.load(inputs)
        torch.cuda.synchronize()
        model.graph.replay()
        torch.cuda.synchronize()
        return [tensor.cpu().numpy().tobytes() for tensor in model.tensors()]


@contextlib.contextmanager
def shared_slots(models: Sequence[CapturedModule]) -> Iterator[list[list[Slot]]]:
    """All in one mapping, as between two processes, one right after another."""
    sizes = [
        [[given.nbytes for given in part] for part in (model.inputs, model.tensors())]
        for model in models
    ]
    total = SLOTS * sum(itertools.chain(*(itertools.chain(*of_model) for of_model in sizes)))
    mapping = SharedMemory(create=True, size=total)
    try:
        assert mapping.buf is not None
        words = np.frombuffer(mapping.buf, dtype=np.uint8)  # which keeps the mapping
        at = 0

        def take(size: int) -> Any:
            nonlocal at
            at += size
            return words[at - size : at]

        yield [
            [Slot(*(tuple(take(size) for size in part) for part in of_model)) for _ in range(SLOTS)]
            for of_model in sizes
        ]
    finally:
        mapping.unlink()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("execution", [Execution.WHOLE, Execution.SEGMENTS])
def test_slots_have_the_outputs_of_their_inputs(
    device: CudaDevice, plan_of: PlanOf, opened: Opened, execution: Execution, shared: bool
) -> None:
    from eclip.capture import named as zoo
    from eclip.capture.torch import capture

    keys = [ModelKey(name, 1) for name in MODELS]
    models = [capture(*zoo.build(key), key) for key in keys]
    for model in models:
        model.graph.instantiate()
    inputs = [inputs_of_slots(model) for model in models]  # before any of them is loaded
    wanted = [
        [outputs_of(model, tensors) for tensors in of_slots]
        for model, of_slots in zip(models, inputs, strict=True)
    ]
    slices = len(device.topology.slice_units)
    masks = [[Mask(range(slices // 2)), device.topology.full]] * len(models)
    traces = [model.capture.trace for model in models]
    lanes = [[kernel // 8 % 2 for kernel in range(len(trace.kernels))] for trace in traces]
    plan = plan_of(device.topology, traces, masks, lanes)
    done: list[Completion] = []
    with contextlib.ExitStack() as stack:
        given: Any = stack.enter_context(shared_slots(models)) if shared else SLOTS
        sources = [model.capture for model in models]
        session = stack.enter_context(opened(device, plan, sources, execution))
        session.serve(given)
        for worker, of_slots in enumerate(inputs):
            for memory, tensors in zip(session.slots(worker), of_slots, strict=True):
                for buffer, tensor in zip(memory.inputs, tensors, strict=True):
                    buffer[:] = np.frombuffer(tensor.cpu().numpy().tobytes(), dtype=np.uint8)
        for _ in range(ROUNDS):
            for slot, worker in itertools.product(range(SLOTS), range(len(models))):
                for buffer in session.slots(worker)[slot].outputs:
                    buffer[:] = 0
                session.submit(worker, slot)
            before = len(done)

            def all_ended(before: int = before) -> bool:
                done.extend(session.poll(0.01))
                return len(done) == before + SLOTS * len(models)

            assert until(all_ended, pause_s=0.0)
            for worker, outputs in enumerate(wanted):
                for slot in range(SLOTS):
                    found = session.slots(worker)[slot].outputs
                    assert [buffer.tobytes() for buffer in found] == outputs[slot]
        del found
    assert {one.error for one in done} == {None}
    torch.cuda.synchronize()
