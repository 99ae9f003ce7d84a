"""Rows of served requests, as the driving loop gives them, made up from their times alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eclip.core.requests import COLUMNS, Ints


def served_rows(times: Sequence[Sequence[int]]) -> Ints:
    """From (arrival, start, end): no barriers, nobody gave way."""
    rows = np.zeros((len(times), COLUMNS), dtype=np.int64)
    rows[:, :3] = np.array(times, dtype=np.int64).reshape(-1, 3)
    return rows
