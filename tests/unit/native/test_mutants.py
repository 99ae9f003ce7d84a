"""Planted faults find their place: a source that has changed takes its mutants along."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

TESTING = Path(__file__).parents[3] / "native" / "testing"


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TESTING))
    return importlib.import_module("mutate")


def test_every_mutant_has_exactly_one_place(mutate: Any) -> None:
    for mutant in mutate.MUTANTS:
        begin, end = mutate.place(mutant)
        assert begin < end, mutant.name


def test_every_mutant_has_a_verdict_or_a_reason_why_nothing_catches_it(mutate: Any) -> None:
    verdicts: dict[str, str | None] = {}
    for line in (TESTING / "mutants.jsonl").read_text().splitlines():
        verdicts.update(json.loads(line))
    assert verdicts.keys() == {mutant.name for mutant in mutate.MUTANTS}
    for mutant in mutate.MUTANTS:
        assert (verdicts[mutant.name] is None) == bool(mutant.reason), mutant.name
