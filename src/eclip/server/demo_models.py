"""Small NumPy models for the demo and the tests: they give real answers without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]

_PIXELS, _HIDDEN, _CLASSES = 64, 32, 10
_random = np.random.default_rng(18)
_FIRST = _random.standard_normal((_PIXELS, _HIDDEN)).astype(np.float32) / 8
_SECOND = _random.standard_normal((_HIDDEN, _CLASSES)).astype(np.float32) / 6


def classify(inputs: Arrays) -> Arrays:
    """``image`` FP32[64] to ``scores`` FP32[10] and ``label`` INT64[1]: a layer, and another."""
    hidden = np.maximum(inputs["image"] @ _FIRST, 0)
    scores = hidden @ _SECOND
    return {"scores": scores, "label": scores.argmax(axis=1, keepdims=True)}


def add(inputs: Arrays) -> Arrays:
    """``a`` and ``b`` INT32[4] to ``sum`` INT32[4]"""
    return {"sum": inputs["a"] + inputs["b"]}


def shout(inputs: Arrays) -> Arrays:
    """``text`` BYTES[1] to ``text`` BYTES[1], in capital letters."""
    upper = np.array([word.upper() for word in inputs["text"].ravel()], dtype=object)
    return {"text": upper.reshape(inputs["text"].shape)}
