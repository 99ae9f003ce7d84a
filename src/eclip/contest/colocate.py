"""Several PyTorch models on one GPU from a few lines of Python.

Every model is captured, and profiled unless a profile or a plan is given; the mix is planned, and
calls run on the plan's lanes. A worker serves one call at a time; workers may be called from
different threads at once. Importing this room imports torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from eclip.capture.profiler import measure_profile
from eclip.capture.torch import CapturedModule, capture
from eclip.contest.confirm.plans import make_kept_plan, policy_options
from eclip.core.device import Closing, Device, SourceKind
from eclip.core.mix import mix_of, with_tiers
from eclip.core.model_key import ModelKey
from eclip.core.plan import Lanes, Plan
from eclip.core.profile import Profile
from eclip.core.program import lower
from eclip.errors import MismatchError, UsageError, unknown_name
from eclip.models.library import find_measured
from eclip.planner.case import Case, find_calibration
from eclip.planner.policies import PolicyOptions

Model = tuple[torch.nn.Module, Sequence[torch.Tensor]]


class Colocation(Closing):
    """The models on their lanes; ``plan`` says which."""

    def __init__(
        self,
        models: Mapping[str, Model],
        device: Device,
        *,
        policy: str,
        options: PolicyOptions,
        plan: Plan | None = None,
        profiles: Iterable[str | Path] = (),
        tiers: Mapping[str, str] | None = None,
    ) -> None:
        self._stack = ExitStack()
        self._stack.callback(device.close)
        try:
            if not models:
                raise UsageError("colocate needs at least one model")
            if device.source_kind(Lanes()) is not SourceKind.CAPTURE:
                raise UsageError(f"colocate runs PyTorch models, which {device.title} cannot")
            torch.cuda.set_device(device.index)
            captured = {
                name: capture(module, inputs, ModelKey(name, _batch(inputs)))
                for name, (module, inputs) in models.items()
            }
            modules = list(captured.values())
            if plan is None:
                folders = [Path(path) for path in profiles]
                plan = _plan(device, modules, policy, options, folders, tiers or {})
            elif tiers:
                raise UsageError("a plan has its tiers; give either the plan or the tiers")
            self.plan: Plan = _checked(plan, modules)
            program = lower(self.plan, [module.capture.trace for module in modules])
            session = device.open(program, [module.capture for module in modules])
            self._stack.enter_context(session)
        except BaseException:
            self._stack.close()
            raise
        self._workers = {
            name: Worker(session, index, module)
            for index, (name, module) in enumerate(captured.items())
        }

    def __getitem__(self, name: str) -> Worker:
        if name not in self._workers:
            raise unknown_name("model", name, self._workers)
        return self._workers[name]

    def __repr__(self) -> str:
        return f"Colocation({', '.join(self._workers)}: {self.plan!r})"

    def close(self) -> None:
        self._stack.close()


class Worker:
    """One model. A call runs a request and returns a copy of its outputs."""

    def __init__(self, session: Any, index: int, captured: CapturedModule) -> None:
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


def _plan(
    device: Any,  # a GPU
    captured: Sequence[CapturedModule],
    policy: str,
    options: PolicyOptions,
    folders: Sequence[Path],
    tiers: Mapping[str, str],
) -> Plan:
    """The policy's plan. Profiles come from the folders; those missing there are measured now."""
    energy_s = 1.0 if options.objective.kind == "energy" else 0.0
    calibration = find_calibration(None, device.topology)
    profiles: list[Profile] = []
    for module in captured:
        profile = find_measured(module.capture.trace, device.topology, folders)
        if profile is None:
            profile = measure_profile(device, module, energy_seconds=energy_s, stress=False)
        profiles.append(profile)
    mix = with_tiers(mix_of(profile.model for profile in profiles), tiers)
    case = Case(mix, device.topology, calibration, tuple(profiles), usual_kernels=True)
    return make_kept_plan(case, policy, policy_options(mix=mix, base=options))


def _checked(plan: Plan, captured: Sequence[CapturedModule]) -> Plan:
    if not isinstance(plan.sharing, Lanes):
        raise UsageError(
            f"{plan.policy} needs a process for each model, and colocate runs all models in one; "
            f"choose another policy"
        )
    models = [module.capture.trace.model for module in captured]
    if list(plan.models) != models:
        raise MismatchError(
            f"the plan is for {', '.join(map(str, plan.models))}, the models given are "
            f"{', '.join(map(str, models))}"
        )
    return plan


def _batch(inputs: Sequence[torch.Tensor]) -> int:
    if not inputs or inputs[0].dim() == 0:
        raise UsageError("a model needs example inputs whose first dimension is the batch")
    return int(inputs[0].shape[0])
