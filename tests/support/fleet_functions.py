"""A model that writes down what it ran, so that whoever asks sees what ran twice."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]
JOURNAL = "ECLIP_TEST_JOURNAL"  # the file's name, in the environment


def double(inputs: Arrays) -> Arrays:
    """``number`` INT64[1] to ``twice`` INT64[1]"""
    numbers = inputs["number"]
    with open(os.environ[JOURNAL], "a") as journal:  # noqa: PTH123
        journal.write("".join(f"{number}\n" for number in numbers.ravel()))
    return {"twice": 2 * numbers}


def double_again(inputs: Arrays) -> Arrays:
    """The same as another model, for a rolling change."""
    return double(inputs)
