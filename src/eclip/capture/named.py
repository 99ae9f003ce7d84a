"""Models by name: a model of the zoo, a factory of the user's, or a file.

``albert`` is the zoo's; ``package.module:factory`` is a function that takes the batch size and
gives a module and its example inputs, both on the GPU. ``models/files.py`` maps names to files. A
``~`` and a number of units choose the kernels of a capture, not the module.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from eclip.capture import torch_zoo
from eclip.capture.torch import capture
from eclip.core.model_key import ModelKey
from eclip.core.profile import Profile
from eclip.errors import DeviceError, MismatchError, UsageError
from eclip.gpu.executables import Capture
from eclip.models.files import FileModel, find_file


def build(model: ModelKey) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    name, batch = model.name, model.batch
    if (found := find_file(name)) is not None:
        return _load(found, batch)
    if ":" not in name:
        return torch_zoo.build(name, batch)
    path, _, function = name.partition(":")
    try:
        factory: Any = getattr(importlib.import_module(path), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"cannot find the factory {name}: {error}") from None
    made = factory(batch)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
        raise UsageError(f"{name}({batch}) must return a module and a tuple of its inputs")
    module, inputs = made
    return module, tuple(inputs)


def _load(model: FileModel, batch: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    try:
        if model.file.endswith(".ts"):
            module = torch.jit.load(model.file, map_location="cuda").eval()
        else:
            from torch.export.passes import move_to_device_pass  # only files need it

            exported = torch.export.load(model.file)
            module = move_to_device_pass(exported, "cuda").module()
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        line = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"cannot load {model.file}: {line}; save it again with this torch"
        ) from None
    inputs = []
    for kind, row in model.inputs:
        shape = (batch, *row) if model.batched else row
        given = torch.zeros(shape, dtype=getattr(torch, kind), device="cuda")
        inputs.append(torch.randn_like(given) if given.is_floating_point() else given)
    return module, tuple(inputs)


def capture_worker(profile: Profile, gpu: int) -> Capture:
    """A capture with buffers of its own; its kernels must be the profiled ones."""
    if not torch.cuda.is_available():
        raise DeviceError(
            f"torch {torch.__version__} finds no GPU here; install its build for this GPU "
            f"(ROCm for AMD, CUDA for NVIDIA)"
        )
    torch.cuda.set_device(gpu)
    module, inputs = build(profile.model)
    made = capture(module, inputs, profile.model).capture
    if made.trace.digest != profile.trace.digest:
        raise MismatchError(
            f"{profile.model} launches other kernels here than in its profile "
            f"({'modelled' if profile.modelled else profile.source}); measure it on this host: "
            f"eclip profile {profile.model} -o profiles, then give that folder as profiles"
        )
    return made
