"""What the two programs beside this share: models, and a kernel that says on which SMs it runs.

Nothing here knows of eclip: these are the unmodified programs that ``eclip exec`` is tested on.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from cuda.bindings import driver as cu
from cuda.bindings import nvrtc

BATCH = 8
IMAGE, TOKENS = 224, 128
MODELS = ("resnet50", "bert")
ROWS = 16  # places in the models that tell where they run
SMS = 256  # a row's room for SM ids
BLOCKS = 600  # of the telling kernel, and its row on top: the grid names the place

_SOURCE = b"""
extern "C" __global__ void where_am_i(unsigned* counts, unsigned long long cycles)
{
    unsigned sm;
    asm("mov.u32 %0, %%smid;" : "=r"(sm));
    long long start = clock64();
    while (clock64() - start < cycles) {}
    if (threadIdx.x == 0) atomicAdd(counts + sm, 1u);
}
"""


def _check(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"a CUDA call failed: {status}")
    return values[0] if values else None


class Where:
    """Counts blocks by SM, a row for each place."""

    def __init__(self) -> None:
        major, minor = torch.cuda.get_device_capability()
        program = _check(nvrtc.nvrtcCreateProgram(_SOURCE, b"where.cu", 0, [], []))
        target = f"--gpu-architecture=sm_{major}{minor}".encode()
        _check(nvrtc.nvrtcCompileProgram(program, 1, [target]))
        image = b" " * int(_check(nvrtc.nvrtcGetCUBINSize(program)))
        _check(nvrtc.nvrtcGetCUBIN(program, image))
        self._library = _check(cu.cuLibraryLoadData(image, [], [], 0, [], [], 0))
        self._kernel = _check(cu.cuLibraryGetKernel(self._library, b"where_am_i"))
        self.counts = torch.zeros(ROWS, SMS, dtype=torch.int32, device="cuda")

    def launch(self, row: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        data = self.counts.data_ptr() + 4 * SMS * row
        arguments = ((data, 20_000), (ctypes.c_void_p, ctypes.c_ulonglong))
        function = cu.CUfunction(int(self._kernel))
        _check(cu.cuLaunchKernel(function, BLOCKS + row, 1, 1, 32, 1, 1, 0, stream, arguments, 0))


class Model:
    """A model, its stream, and the rows of its places."""

    def __init__(self, name: str, where: Where) -> None:
        torch.manual_seed(MODELS.index(name))
        self.name = name
        self.stream = torch.cuda.Stream()
        if name == "resnet50":
            import torchvision

            module = torchvision.models.resnet50(weights=None)
            layers = [module.layer1, module.layer2, module.layer3, module.layer4]
            first = 0
            self.inputs = torch.randn(BATCH, 3, IMAGE, IMAGE, dtype=torch.float16, device="cuda")
            self.more: dict[str, torch.Tensor] = {}
        else:
            import transformers

            module = transformers.BertModel(transformers.BertConfig())
            layers = list(module.encoder.layer)
            first = 4
            self.inputs = torch.randint(0, 30_000, (BATCH, TOKENS), device="cuda")
            # Left to itself the library makes a mask only while it is captured, and its attention
            # is then another: with one given, a request launches the same kernels either way.
            size = (BATCH, 1, TOKENS, TOKENS)
            self.more = {"attention_mask": torch.ones(size, dtype=torch.bool, device="cuda")}
        self.module = module.eval().half().cuda()
        for row, layer in enumerate(layers, first):
            layer.register_forward_hook(self._tell(where, row))

    def _tell(self, where: Where, row: int) -> Any:
        def hook(*_: Any) -> None:
            where.launch(row)

        return hook

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.module(inputs, **self.more)
        result: torch.Tensor = found if isinstance(found, torch.Tensor) else found[0]
        return result
