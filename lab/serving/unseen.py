"""A model that no profile ships of, for lab/serving/ready.py on a GPU."""

from __future__ import annotations

from typing import Any

_WIDTH, _ROWS, _LAYERS = 1024, 128, 24


def net(batch: int) -> tuple[Any, tuple[Any, ...]]:
    """A factory as a configuration names it: products of matrices with activations between."""
    import torch

    layers: list[Any] = []
    with torch.device("cuda"):
        for _ in range(_LAYERS):
            layers += [torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.GELU()]
        rows = torch.randn(batch, _ROWS, _WIDTH, dtype=torch.float16)
    return torch.nn.Sequential(*layers).half().eval(), (rows,)
