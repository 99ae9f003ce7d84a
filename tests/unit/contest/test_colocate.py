"""A colocation that cannot be made leaves no device open; torch is a stand-in here."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

import eclip
import eclip.devices
from eclip.core.device import SourceKind
from eclip.errors import ArtefactError, UsageError
from eclip.planner.policies import PolicyOptions
from eclip.sim.device import SimDevice
from simulations import CALIBRATIONS, H200, flat_profile

HEAVY = (
    *("torch", "torch.utils", "torch.utils._pytree"),
    *("eclip.capture.torch", "eclip.capture.profiler"),
)


class Watched(SimDevice):
    """Counts how often it is closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``eclip.contest.colocate`` on a host without torch."""
    for name in HEAVY:
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.delitem(sys.modules, "eclip.contest.colocate", raising=False)
    made = importlib.import_module("eclip.contest.colocate")
    monkeypatch.setitem(sys.modules, "eclip.contest.colocate", made)
    return made


@pytest.fixture
def device() -> Watched:
    return Watched(H200, CALIBRATIONS["h200"])


@pytest.mark.parametrize("models", [{}, {"m": (None, [])}], ids=["no model", "a simulator"])
def test_refused_colocation_closes_its_device(
    room: ModuleType, device: Watched, models: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="colocate"):
        room.Colocation(models, device, policy="eclip", options=PolicyOptions())
    assert device.closed == 1


def test_colocation_whose_first_call_fails_closes_its_device(
    room: ModuleType, device: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "source_kind", lambda sharing: SourceKind.CAPTURE)
    monkeypatch.setattr(room.torch.cuda, "set_device", MagicMock(side_effect=RuntimeError("none")))
    with pytest.raises(RuntimeError, match="none"):
        room.Colocation({"m": (None, [])}, device, policy="eclip", options=PolicyOptions())
    assert device.closed == 1


@pytest.mark.parametrize(("objective", "kind"), [(None, "slo"), ("throughput", "throughput")])
def test_tiers_are_searched_for_unless_asked_otherwise(
    room: ModuleType,
    device: Watched,
    monkeypatch: pytest.MonkeyPatch,
    objective: str | None,
    kind: str,
) -> None:
    profiles = [flat_profile(name, [100_000] * 10, H200) for name in ("s", "b")]
    captured = [SimpleNamespace(capture=SimpleNamespace(trace=one.trace)) for one in profiles]
    found = {one.model: one for one in profiles}
    monkeypatch.setattr(room, "find_measured", lambda trace, *_: found[trace.model])
    monkeypatch.setattr(eclip.devices, "open_device", lambda name: device)
    colocation = MagicMock()
    monkeypatch.setattr(room, "Colocation", colocation)
    eclip.colocate({}, "search", objective=objective)
    options = dataclasses.replace(colocation.call_args.kwargs["options"], batches=0)
    tiers = {"s": "100rps/5ms", "b": "background"}
    plan = room._plan(device, captured, "search", options, [], tiers)
    assert plan.evidence.objective == kind


def test_plan_file_is_read_before_a_device_is_opened(
    room: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = MagicMock()
    monkeypatch.setattr(eclip.devices, "open_device", opened)
    with pytest.raises(ArtefactError, match="missing"):
        eclip.colocate({}, plan=tmp_path / "missing.json")
    opened.assert_not_called()
