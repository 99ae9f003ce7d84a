"""Triton kernels of compiled modules, made fit for any lane.

Triton and Inductor load a kernel's binary into the context at hand, so that a captured graph holds
a function of that one context, which cannot be moved to a lane. The same binary loaded as a library
gives a kernel that belongs to no context. Where a function comes from is looked up among the
launchers that live in this process: Triton's keep the binary, Inductor's name its file in the
cache. A capture must keep its ``Binaries`` for as long as its graphs are used.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eclip.cuda.driver import call, cu

_TRITON = "triton.compiler.compiler"
# Inductor's launchers that do without Triton's; the file's name depends on the version of torch.
_STATIC = (
    "torch._inductor.runtime.static_triton_launcher",
    "torch._inductor.runtime.static_cuda_launcher",
)


@dataclass(frozen=True)
class Binary:
    name: str
    cubin: bytes


class Binaries:
    """Kernels of no context for functions of one; owns the libraries they are in."""

    def __init__(self, gpu: int) -> None:
        self._gpu = gpu
        self._known: dict[int, Binary] | None = None
        self._kernels: dict[int, Any] = {}

    def kernel_of(self, function: Any) -> Any | None:
        """The kernel that does what this function does, or None if its binary is not found."""
        handle = int(function)
        if handle not in self._kernels:
            if self._known is None:  # a look at every object of the process: once, and only now
                self._known = dict(_loaded_binaries(self._gpu))
            if handle not in self._known:
                return None
            self._kernels[handle] = self._load(function, self._known[handle])
        return self._kernels[handle]

    def _load(self, function: Any, binary: Binary) -> Any:
        library = call(cu.cuLibraryLoadData, binary.cubin, [], [], 0, [], [], 0)
        # Not at exit: the driver is gone by then, and the library with it.
        weakref.finalize(self, call, cu.cuLibraryUnload, library).atexit = False
        kernel = call(cu.cuLibraryGetKernel, library, binary.name.encode())
        # More dynamic shared memory than the default must be asked for again.
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        shared_bytes = call(cu.cuFuncGetAttribute, attribute, function)
        device = call(cu.cuDeviceGet, self._gpu)
        call(cu.cuKernelSetAttribute, attribute, shared_bytes, kernel, device)
        return kernel


def _loaded_binaries(gpu: int) -> Iterator[tuple[int, Binary]]:
    """Every function that a live launcher has loaded, with its binary."""
    triton_kind = getattr(sys.modules.get(_TRITON), "CompiledKernel", None)
    static_kinds = {
        kind
        for module in _STATIC
        if module in sys.modules
        for kind in vars(sys.modules[module]).values()
        if isinstance(kind, type) and kind.__name__.startswith("StaticallyLaunched")
    }
    for one in gc.get_objects():
        kind = type(one)
        if kind is triton_kind:
            if one.function and "cubin" in one.asm:
                yield int(one.function), Binary(one.metadata.name, one.asm["cubin"])
        elif kind in static_kinds and one.function:
            path = _static_cubin(one, gpu)
            if path.is_file():
                yield int(one.function), Binary(one.name, path.read_bytes())


def _static_cubin(launcher: Any, gpu: int) -> Path:
    """Where Inductor took a launcher's binary from; the launcher forgets it after loading."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

    folder = Path(triton_cache_dir(gpu))
    return folder / str(triton_hash_to_path_key(launcher.hash)) / f"{launcher.name}.cubin"
