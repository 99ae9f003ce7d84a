"""Planted faults find their place: a source that has changed takes its mutants along."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


def test_every_mutant_has_exactly_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "native" / "testing"))
    mutate = importlib.import_module("mutate")
    for mutant in mutate.MUTANTS:
        begin, end = mutate.place(mutant)
        assert begin < end, mutant.name
