"""CPU functions that tests serve: slow, broken and wrong ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]

SLOW_S = 0.03


def slow(inputs: Arrays) -> Arrays:
    if inputs["a"].any():  # not while it is warmed
        time.sleep(SLOW_S)
    return {"sum": inputs["a"] + inputs["b"]}


def broken(inputs: Arrays) -> Arrays:
    """Fails for one value only, so that it can be loaded."""
    if (inputs["a"] == 13).any():
        raise ValueError("13 brings\nbad luck")
    return {"sum": inputs["a"] + inputs["b"]}


def wrong(inputs: Arrays) -> Arrays:
    return {"sum": (inputs["a"] + inputs["b"]).astype(np.float32)}


def hang(inputs: Arrays) -> Arrays:
    """Never answers for one value."""
    if (inputs["a"] == 13).any():
        threading.Event().wait()
    return {"sum": inputs["a"] + inputs["b"]}
