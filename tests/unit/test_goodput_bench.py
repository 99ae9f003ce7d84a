"""The bench of goodput: the sweep finds the load that is served, whatever it is."""

from __future__ import annotations

from typing import Any, cast

import pytest
from bench.serving.goodput import MOST_OF_BOUND, Front, print_rows, services_of, sweep


class Steady:
    """Serves all up to a load, then ever fewer."""

    def __init__(self, most: float) -> None:
        self._most = most

    def run(self, load: float, seconds: float, seed: int) -> dict[str, Any]:
        return {"load": load, "attained": min(1.0, self._most / load), "generator_late_ms": 0.0}


@pytest.mark.parametrize("most", [0.1, 0.9, 2.3, 5.0])
def test_sweep_finds_the_load_that_is_served(most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.serving.goodput.SETTLE_S", 0.0)
    goodput, runs = sweep(cast(Front, Steady(most)), 1.0)
    assert most * 0.8 <= goodput <= most / 0.99
    assert len(runs) <= 11


def test_services_share_the_device_evenly_and_their_batches_fit_their_bounds() -> None:
    services = services_of("six", 5.0)
    assert sum(one.rate_rps(1.0) * one.rest_ms for one in services) == pytest.approx(1e3)
    for one in services:
        assert one.batches[0] == 1
        assert one.bound_ms == pytest.approx(5 * one.rest_ms)
    assert MOST_OF_BOUND < 1
    assert any(8 in one.batches for one in services)


def test_table_has_a_ratio_and_marks_a_late_generator(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"mix": "six", "bound": 5.0, "way": way, "goodput": goodput, "runs": [late]}
        for way, goodput, late in (
            ("eclip", 3.0, {"generator_late_ms": 0.1}),
            ("streams", 2.0, {"generator_late_ms": 9.0}),
        )
    ]
    print_rows(rows)
    assert "1.50  generator late" in capsys.readouterr().out
