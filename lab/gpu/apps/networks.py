"""Models of other libraries with random weights, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch

IMAGE, TOKENS, WORDS = 224, 128, 30_000


def network(name: str) -> Any:
    torch.manual_seed(0)
    if name == "bert":
        import transformers

        return transformers.BertModel(transformers.BertConfig()).cuda()
    import torchvision

    return getattr(torchvision.models, name)(weights=None).cuda()


def example(name: str, batch: int) -> Any:
    if name == "bert":
        return torch.randint(0, WORDS, (batch, TOKENS), device="cuda")
    return torch.randn(batch, 3, IMAGE, IMAGE, device="cuda")


def outcome(found: Any) -> Any:
    """The tensor that a caller wants."""
    return found if isinstance(found, torch.Tensor) else found.last_hidden_state
