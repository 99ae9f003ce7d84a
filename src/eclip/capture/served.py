"""A model in a process of its own: built, captured, and served from one stream.

This is what ``ProcessSets`` runs in its children.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from eclip.capture.named import build
from eclip.capture.torch import capture
from eclip.core.model_key import ModelKey
from eclip.cuda.driver import Gpu
from eclip.cuda.processes.alone import ServedCapture, open_capture
from eclip.cuda.processes.child import Attached

_WARMUPS = 5


@contextlib.contextmanager
def open_model(model: ModelKey, attached: Attached | None = None) -> Iterator[ServedCapture]:
    """The model on the one GPU that this process sees; ``seated`` in a set that gives way."""
    with contextlib.closing(Gpu(0, connections=None)) as gpu:
        module, inputs = build(model)
        made = capture(module, inputs, model).capture
        with open_capture(gpu, made, attached, _WARMUPS) as served:
            yield served
