"""Several PyTorch models on one GPU from a few lines of Python.

    with eclip.colocate({"bert": (model, inputs), …}, policy="eclip") as gpu:
        output = gpu["bert"](x)

Every model is captured and profiled, the mix is planned, and calls run on the plan's lanes. A
worker serves one call at a time; workers may be called from different threads at once.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils import _pytree as pytree

from eclip.artefacts.mix import mix_of
from eclip.artefacts.plan import Plan
from eclip.devices.base import Closing
from eclip.devices.cuda.device import CudaDevice, CudaSession
from eclip.errors import UsageError, unknown_name
from eclip.frontends.profiler import measure_profile
from eclip.frontends.torch import CapturedModule, capture
from eclip.planning.policies import make_plan
from eclip.planning.problem import Problem
from eclip.runtime.program import lower

Model = tuple[torch.nn.Module, Sequence[torch.Tensor]]


class Colocation(Closing):
    """The models on their lanes; ``plan`` says which."""

    def __init__(self, models: Mapping[str, Model], policy: str = "eclip", gpu: int = 0) -> None:
        if not models:
            raise UsageError("colocate needs at least one model")
        self._stack = ExitStack()
        device = CudaDevice(gpu)
        self._stack.callback(device.close)
        torch.cuda.set_device(gpu)
        try:
            captured = {
                name: capture(module, inputs, name, _batch(inputs))
                for name, (module, inputs) in models.items()
            }
            profiles = tuple(
                measure_profile(device, one, energy_seconds=0.0, stress=False)
                for one in captured.values()
            )
            mix = mix_of((profile.trace.model, profile.trace.batch) for profile in profiles)
            self.plan: Plan = make_plan(policy, Problem(mix, device.topology, profiles))
            program = lower(self.plan, [profile.trace for profile in profiles])
            captures = [one.capture for one in captured.values()]
            session = self._stack.enter_context(device.open(program, captures))
        except BaseException:
            self._stack.close()
            raise
        self._workers = {
            name: Worker(session, index, one) for index, (name, one) in enumerate(captured.items())
        }

    def __getitem__(self, name: str) -> Worker:
        if name not in self._workers:
            raise unknown_name("model", name, self._workers)
        return self._workers[name]

    def close(self) -> None:
        self._stack.close()


class Worker:
    """One model; calling it runs a request and returns its outputs, the caller's to keep."""

    def __init__(self, session: CudaSession, index: int, captured: CapturedModule) -> None:
        self._session = session
        self._index = index
        self._captured = captured
        self._lock = threading.Lock()

    def __call__(self, *inputs: torch.Tensor) -> Any:
        with self._lock, torch.inference_mode():
            self._captured.load(inputs)
            torch.cuda.current_stream().synchronize()
            self._session.request(self._index)
            return pytree.tree_map_only(torch.Tensor, torch.clone, self._captured.outputs)


def _batch(inputs: Sequence[torch.Tensor]) -> int:
    if not inputs or inputs[0].dim() == 0:
        raise UsageError("a model needs example inputs whose first dimension is the batch")
    return int(inputs[0].shape[0])
