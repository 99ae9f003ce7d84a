"""Where the time to ready goes, by parts."""

from __future__ import annotations

import itertools
import time

import pytest

from eclip.server.device import parts as module
from eclip.server.device.parts import Parts, process_age_s


def test_compiling_is_a_part_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, compiled = itertools.count(0.0, 5.0), iter([0.0, 3.0, 3.0, 3.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(module, "compiling_s", lambda: next(compiled))
    parts = Parts()
    with parts.part("captures"):
        pass
    with parts.part("warming"):
        pass
    parts.add("imports", 0.004)  # too short to be named
    parts.add("captures", 1.0)
    assert parts.take() == {"compiling": 3.0, "captures": 3.0, "warming": 5.0}
    assert parts.take() == {}


def test_a_process_knows_its_age() -> None:
    first = process_age_s()
    assert 0.0 < first <= process_age_s() < 1e6
