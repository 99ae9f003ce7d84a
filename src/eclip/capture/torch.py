"""PyTorch modules to captures: a module and example inputs become a graph and its trace.

Torch's builds for ROCm have the same functions under the same names, ``torch.cuda`` included; they
capture HIP graphs.

The module is warmed up, then captured once with ``torch.cuda.graph``. Inputs live in static
buffers, into which ``CapturedModule.load`` copies new ones. The capture keeps its nodes, so that
they can be re-homed to lanes. A module from ``torch.compile`` is compiled by the warm-up.

Libraries choose a kernel for the number of units that they are told. A model named ``albert~66`` is
captured with cuBLASLt told of 66 units: it then starts half as many thread blocks with more work
each, and leaves the other half of the units to other workers.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from eclip.capture import rocm
from eclip.capture.capturing import OwnedGraph, capturing, forget_workspaces
from eclip.capture.compiled import Binaries
from eclip.capture.memory import CaptureMemory
from eclip.core.device import Closing
from eclip.core.model_key import ModelKey
from eclip.core.trace import Kernel, Trace
from eclip.cuda.graphs import CudaGraph
from eclip.errors import DeviceError
from eclip.gpu.executables import Buffer, Capture, Staging
from eclip.gpu.pieces import CapturedGraph

_WARMUPS = 3


@dataclass(frozen=True)
class CapturedModule:
    """A capture with its static buffers. ``outputs`` are overwritten by every replay."""

    capture: Capture
    graph: Any
    inputs: tuple[torch.Tensor, ...]
    outputs: Any
    memory: CaptureMemory | None = None  # None: not captured by eclip

    def load(self, inputs: Sequence[torch.Tensor]) -> None:
        """Copy new inputs into the static buffers; shapes and types are those of the capture."""
        if len(inputs) != len(self.inputs):
            raise DeviceError(
                f"{len(inputs)} inputs given, the model was captured with {len(self.inputs)}"
            )
        for index, (buffer, given) in enumerate(zip(self.inputs, inputs, strict=True)):
            if buffer.shape != given.shape or buffer.dtype != given.dtype:
                raise DeviceError(
                    f"input {index} is {_describe(given)}, the model was captured with "
                    f"{_describe(buffer)}; capture it again for this shape"
                )
            buffer.copy_(given)

    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in pytree.tree_leaves(self.outputs) if isinstance(leaf, torch.Tensor)]


def on_rocm() -> bool:
    """Whether this torch is built for AMD GPUs."""
    return torch.version.hip is not None


class _LastOperation(TorchDispatchMode):
    """Remembers what ran last. (Compiled modules fall back to eager under a dispatch mode.)"""

    def __init__(self) -> None:
        super().__init__()
        self.name = "none"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = str(func)
        return func(*args, **(kwargs or {}))


def capture(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor], model: ModelKey
) -> CapturedModule:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    stream = torch.cuda.Stream()
    units = model.kernels_for
    try:
        static = tuple(given.detach().clone() for given in inputs)
        with torch.inference_mode(), torch.cuda.stream(stream), _kernels_for(units):
            before_bytes = torch.cuda.memory_allocated()
            for _ in range(_WARMUPS):
                module(*static)
            stream.synchronize()
            workspaces_bytes = max(0, torch.cuda.memory_allocated() - before_bytes)
            # As capturing does: memory freed later would hide the pool's size.
            gc.collect()
            forget_workspaces()
            torch.cuda.empty_cache()
            reserved_bytes = torch.cuda.memory_reserved()
            with capturing(graph, stream) as kept:
                outputs = module(*static)
            # A capture takes from a pool of its own and from nowhere else, workspaces included.
            pool_bytes = max(0, torch.cuda.memory_reserved() - reserved_bytes - workspaces_bytes)
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"{model} does not fit into the GPU's memory: {_line(error)}") from None
    except RuntimeError as error:
        culprit = _culprit(module, static)
        raise DeviceError(
            f"{model} cannot be captured: it stopped at {culprit} ({_line(error)})"
        ) from None
    captured, kernels, binaries = _read(graph.raw_cuda_graph())
    trace = Trace(
        model=model,
        kernels=kernels,
        inputs=tuple(map(_describe, static)),
        libraries=libraries(),
    )

    def recapture(lane_stream: Any) -> tuple[int, Closing]:
        with _kernels_for(units):
            try:
                return _capture_again(module, static, outputs, lane_stream)
            except RuntimeError as error:
                reason = f"{model} cannot be captured again on a lane: {_line(error)}"
                raise DeviceError(reason) from None

    keep = (module, graph, static, outputs, kept, binaries)
    again = recapture if captured.atomic else None
    given_back = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    stage = None if all(one.is_contiguous() for one in static) else lambda: _stage(static)
    placed = Capture(
        *(captured, trace, keep, again),
        inputs=[_buffer(tensor) for tensor in static],
        outputs=_row_major(given_back),
        stage=stage,
    )
    memory = CaptureMemory(
        weights_bytes=_storage_bytes([*module.parameters(), *module.buffers()]),
        activations_bytes=_storage_bytes(static) + pool_bytes,
        workspaces_bytes=workspaces_bytes,
    )
    return CapturedModule(placed, graph, static, outputs, memory)


def _read(raw: int) -> tuple[CapturedGraph, tuple[Kernel, ...], Any]:
    """A captured graph, its kernels, and what must live as long as it."""
    if on_rocm():
        return *rocm.read_graph(raw), None
    binaries = Binaries(torch.cuda.current_device())
    captured = CudaGraph(raw, binaries.kernel_of)
    return captured, captured.kernels(), binaries


def _buffer(tensor: torch.Tensor) -> Buffer:
    return Buffer(tensor.data_ptr(), tensor.nbytes)


def _row_major(tensors: Sequence[torch.Tensor]) -> list[Buffer] | None:
    """None where one is in another order."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        return None
    return [_buffer(tensor) for tensor in tensors]


def _stage(static: Sequence[torch.Tensor]) -> Staging:
    """Row-major memory beside inputs in another order, such as channels last, and the copies."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    stream = torch.cuda.Stream()
    staged = [
        one if one.is_contiguous() else torch.empty_like(one, memory_format=torch.contiguous_format)
        for one in static
    ]
    with torch.inference_mode(), torch.cuda.stream(stream), capturing(graph, stream) as kept:
        for own, given in zip(static, staged, strict=True):
            if own is not given:
                own.copy_(given)
    owner = OwnedGraph(graph, (staged, kept))
    return Staging([_buffer(tensor) for tensor in staged], graph.raw_cuda_graph(), owner)


def _storage_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """The bytes of tensors on the GPU; shared storage counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.is_cuda]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _capture_again(
    module: torch.nn.Module, static: Sequence[torch.Tensor], outputs: Any, lane_stream: Any
) -> tuple[int, Closing]:
    """A second capture of the module, on a lane's stream, with the same inputs and outputs."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    stream = torch.cuda.ExternalStream(int(lane_stream))
    wanted = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    with torch.inference_mode(), torch.cuda.stream(stream):
        module(*static)  # libraries choose and allocate for a stream they have not seen
        stream.synchronize()
        with capturing(graph, stream) as kept:
            again = pytree.tree_leaves(module(*static))
            made = [leaf for leaf in again if isinstance(leaf, torch.Tensor)]
            for target, source in zip(wanted, made, strict=True):
                target.copy_(source)
    return graph.raw_cuda_graph(), OwnedGraph(graph, (made, kept))


@contextlib.contextmanager
def _kernels_for(units: int) -> Iterator[None]:
    """Make libraries choose kernels for ``units``; 0: for all units."""
    if units == 0:
        yield
        return
    if on_rocm():
        raise DeviceError(
            f"torch for ROCm cannot choose kernels for {units} units; leave ~{units} out"
        )
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    if units >= device.multi_processor_count:
        raise DeviceError(
            f"kernels cannot be chosen for {units} of {device.multi_processor_count} SMs; give a "
            f"smaller number after ~, or none"
        )
    try:  # an experimental part of torch
        set_carveout = torch._C._set_sm_carveout_experimental
        before = torch._C._get_sm_carveout_experimental()
    except AttributeError:
        raise DeviceError(
            f"torch {torch.__version__} cannot choose kernels for {units} SMs; leave ~{units} out"
        ) from None
    set_carveout(device.multi_processor_count - units)
    try:
        yield
    finally:
        set_carveout(before)


def libraries() -> dict[str, str]:
    if on_rocm():
        return {
            "torch": str(torch.__version__),
            "hip": str(torch.version.hip),
            "miopen": str(torch.backends.cudnn.version()),
        }
    return {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
    }


def _culprit(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> str:
    """The operation that waits for the GPU, which a capture cannot do."""
    last = _LastOperation()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode(), last:
            module(*inputs)
    except RuntimeError:
        return last.name
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "an operation that only fails inside a capture"


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"
