"""Inputs of compactions on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np


def data(length: int, seed: int, inputs: int = 50_000, at_end: bool = False) -> Any:
    """So many elements that are not zero, anywhere or all at the end, others zero or minus zero."""
    import torch

    random = np.random.default_rng(seed)
    values = np.zeros(inputs, dtype=np.float32)
    where = (
        np.arange(inputs - length, inputs)
        if at_end
        else random.choice(inputs, length, replace=False)
    )
    values[where] = random.integers(1, 100, length)
    values[random.random(inputs) < 0.1] *= -1  # minus zero is zero too
    return torch.from_numpy(values).cuda()
