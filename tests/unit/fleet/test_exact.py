"""The exact solver of a fleet hears of a stop while it solves."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from eclip.errors import StoppedError
from eclip.fleet.place import exact
from eclip.progress import Progress

highspy = pytest.importorskip("highspy")


def test_solver_that_would_take_hours_ends_when_it_is_told_to() -> None:
    """A market split of 50 items by 6 sums: no solver proves this in a test's time."""
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    items = [solver.addBinary() for _ in range(50)]
    for row in np.random.default_rng(0).integers(1, 100, (6, 50)).tolist():
        taken = solver.qsum([weight * item for weight, item in zip(row, items, strict=True)])
        solver.addConstr(taken == sum(row) // 2)
    progress = Progress()
    timer = threading.Timer(0.3, progress.stop)
    timer.start()
    try:
        with pytest.raises(StoppedError, match="nothing is proven"):
            exact._run(solver, progress)
    finally:
        timer.cancel()
